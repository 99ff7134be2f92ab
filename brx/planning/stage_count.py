"""How many pipeline stages a model needs at least (the paper's appendix on the number of stages).

Assumed there: mixed precision with AdamW, activations recomputed from each block's start, stashed
weights kept on the CPU, no parallelism but the pipeline's, and no memory for embedding and head.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import pandas as pd

GB = 10**9
# Half-precision weight and gradient (2 + 2); master weight and both moments in full precision (4 +
# 4 + 4).
BYTES_PER_PARAMETER = 16


class ModelShape(NamedTuple):
    """A Transformer: embedding dimension h, attention heads a, parameters per block W, blocks L."""

    name: str
    hidden: int
    heads: int
    params_per_block: float
    blocks: int


def stage_count_table(
    models: Sequence[ModelShape],
    memories: Sequence[float],
    sequence_length: int = 4096,
    batch_size: int = 1,
) -> pd.DataFrame:
    """A row per model, a column per device with its memory in units of 1e9 bytes; texts."""
    rows = []
    for model in models:
        per_block = model.params_per_block
        short = f"{per_block / 1e9:.4g}B" if per_block >= 1e9 else f"{per_block / 1e6:.4g}M"
        shape = {"h": str(model.hidden), "a": str(model.heads), "W": short, "L": str(model.blocks)}
        counts = {
            f"{memory:g} GB": stage_count(model, GB * memory, sequence_length, batch_size)
            for memory in memories
        }
        rows.append({"model": model.name, **shape, **counts})
    return pd.DataFrame(rows)


def block_memory(model: ModelShape, sequence_length: int, batch_size: int) -> float:
    """M_block = 16 W + 34 s b h + 5 b a s^2 in bytes: parameters with optimizer state, and
    activations.

    Korthikanti et al. (arXiv:2205.05198) give the activations of a block; b is the number of
    examples in a micro-batch."""
    parameters = BYTES_PER_PARAMETER * model.params_per_block
    linear = 34 * sequence_length * batch_size * model.hidden
    attention = 5 * batch_size * model.heads * sequence_length**2
    return parameters + linear + attention


def stage_count(
    model: ModelShape, device_bytes: float, sequence_length: int = 4096, batch_size: int = 1
) -> str:
    """P = ceil(L / N) where N blocks fit on a device; where none does, `>= 2 L`, two devices for
    each."""
    fitting = math.floor(device_bytes / block_memory(model, sequence_length, batch_size))
    return f">= {2 * model.blocks}" if fitting == 0 else str(math.ceil(model.blocks / fitting))
