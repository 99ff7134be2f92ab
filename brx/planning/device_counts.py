"""The smallest number of devices on which a configuration fits, for several sizes of memory. It is
counted as `brx plan` does."""

from collections.abc import Sequence

import pandas as pd

from brx.config.schema import RunConfig
from brx.errors import counted
from brx.model.sizes import count_parameters
from brx.planning.margin import MARGIN
from brx.planning.placement import smallest_num_ranks
from brx.planning.plan import planned_device_type
from brx.planning.stage_count import GB


def device_count_table(name: str, config: RunConfig, memories: Sequence[float]) -> pd.DataFrame:
    """A table of one row: the model, and for each memory (in units of 1e9 bytes) the smallest
    number of devices. All cells are texts."""
    device_type = planned_device_type(config)
    num_parameters, _ = count_parameters(config.model, config.data.vocabulary_size)
    row = {"model": name, "parameters": f"{num_parameters / 1e9:.4g}B"}
    row |= {"P": str(config.pipeline.stages), "method": config.optimizer.method}
    for memory in memories:
        smallest = smallest_num_ranks(config, device_type, GB * memory)
        row[f"{memory:g} GB"] = "does not fit" if smallest is None else str(smallest)
    return pd.DataFrame([row])


def device_count_notes(config: RunConfig) -> list[str]:
    """The assumptions of `device_count_table`."""
    activations = "recomputed" if config.pipeline.recompute else "kept"
    tokens = counted(config.model.sequence_length, "token")
    examples = f"{counted(config.training.batch_size, 'example')} of {tokens}"
    return [
        f"devices as brx plan counts them, with {MARGIN:.0%} of each to spare: rings on the "
        f"{config.pipeline.rings}, activations {activations}, {examples} per micro-batch, "
        f"{config.runtime.precision}"
    ]
