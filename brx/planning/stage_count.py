"""The smallest number of pipeline stages that a model needs, by the paper's appendix "Analysis for
the Number of Stages for Pipeline Parallelism"."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import pandas as pd

from brx.errors import UserError

GB = 10**9
BYTES_PER_PARAMETER = 16
"""Half-precision weight and gradient (2 + 2); master weight and both moments in full precision
(4 + 4 + 4)."""


class ModelShape(NamedTuple):
    """The sizes of a Transformer, with the paper's symbols."""

    name: str
    hidden: int
    """h, the embedding dimension."""
    heads: int
    """a, the attention heads."""
    params_per_block: float
    """W, the parameters of one block."""
    blocks: int
    """L, the number of blocks."""


def parse_shape(
    hidden: int | None, heads: int | None, params_per_block: float | None, blocks: int | None
) -> ModelShape | None:
    """A model from options of the command line; None if there are none.

    Raises:
        UserError: some of them are missing.
    """
    given = {
        "--hidden": hidden,
        "--heads": heads,
        "--params-per-block": params_per_block,
        "--blocks": blocks,
    }
    missing = [option for option, value in given.items() if value is None]
    if len(missing) == len(given):
        return None
    if hidden is None or heads is None or params_per_block is None or blocks is None:
        raise UserError(f"a model of your own needs {', '.join(missing)} too")
    return ModelShape("model", hidden, heads, params_per_block, blocks)


def stage_count_table(
    models: Sequence[ModelShape],
    memories: Sequence[float],
    sequence_length: int = 4096,
    batch_size: int = 1,
) -> pd.DataFrame:
    """A table with a row per model and a column per device, whose memory is in units of 1e9 bytes.
    All cells are texts."""
    rows = []
    for model in models:
        row = {
            "model": model.name,
            "h": str(model.hidden),
            "a": str(model.heads),
            "W": _short(model.params_per_block),
            "L": str(model.blocks),
        }
        for memory in memories:
            count = stage_count(model, GB * memory, sequence_length, batch_size)
            row[f"{memory:g} GB"] = count
        rows.append(row)
    return pd.DataFrame(rows)


def _short(count: float) -> str:
    return f"{count / 1e9:.4g}B" if count >= 1e9 else f"{count / 1e6:.4g}M"


def stage_count_notes(sequence_length: int, batch_size: int) -> list[str]:
    """The assumptions of `stage_count_table`."""
    return [
        f"assumed, as in the paper: {BYTES_PER_PARAMETER} bytes per parameter (weight and gradient "
        "in half precision; master weight and both moments in fp32); 34 s b h + 5 a b s^2 bytes of "
        f"activations per block, with s = {sequence_length} tokens and b = {batch_size}; older "
        "weights in host memory; nothing for embedding, head and working memory; all of the device "
        "is filled",
        "brx plan counts the tensors of a configuration instead (fused attention keeps no s^2; "
        "weights in use, buffers and a margin come on top): `brx stages CONFIG` prints its numbers "
        "of devices",
    ]


def block_memory(model: ModelShape, sequence_length: int, batch_size: int) -> float:
    """M_block = 16 W + 34 s b h + 5 b a s^2 in bytes: parameters with optimizer state, and
    activations.

    Korthikanti et al. (arXiv:2205.05198) give the activations of a block; b is the number of
    examples in a micro-batch, s the number of tokens in an example."""
    parameters = BYTES_PER_PARAMETER * model.params_per_block
    linear = 34 * sequence_length * batch_size * model.hidden
    attention = 5 * batch_size * model.heads * sequence_length**2
    return parameters + linear + attention


def stage_count(
    model: ModelShape, device_bytes: float, sequence_length: int = 4096, batch_size: int = 1
) -> str:
    """P = ceil(L / N) as a text, if N blocks fit on a device. If none fits, `>= 2 L`, because each
    block needs at least two devices."""
    fitting = math.floor(device_bytes / block_memory(model, sequence_length, batch_size))
    return f">= {2 * model.blocks}" if fitting == 0 else str(math.ceil(model.blocks / fitting))
