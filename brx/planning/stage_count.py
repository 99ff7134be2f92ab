"""How many pipeline stages a model needs at least (the paper's appendix on the number of stages).

Assumed there: mixed precision with AdamW, activations recomputed from each block's start, stashed weights kept on the
CPU, no parallelism but the pipeline's, and no memory for embedding and head.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import pandas as pd

from brx.errors import UserError

GB = 10**9
BYTES_PER_PARAMETER = 16
"""Half-precision weight and gradient (2 + 2); master weight and both moments in full precision (4 + 4 + 4)."""


class ModelShape(NamedTuple):
    """A Transformer: embedding dimension h, attention heads a, parameters per block W, blocks L."""

    name: str
    hidden: int
    heads: int
    params_per_block: float
    blocks: int


def stage_count_table(
    models: Sequence[ModelShape], memories: Sequence[float], sequence_length: int = 4096, batch_size: int = 1
) -> pd.DataFrame:
    """A row per model, a column per device with its memory in units of 1e9 bytes; texts.

    Raises:
        UserError: a size is not positive.
    """
    rows = []
    for model in models:
        shape = {"h": str(model.hidden), "a": str(model.heads), "W": _short(model.params_per_block)}
        counts = {f"{memory:g} GB": stage_count(model, GB * memory, sequence_length, batch_size) for memory in memories}
        rows.append({"model": model.name, **shape, "L": str(model.blocks), **counts})
    return pd.DataFrame(rows)


def _short(number: float) -> str:
    """A number of parameters as 67M or 3.19B."""
    for size, letter in ((1e9, "B"), (1e6, "M")):
        if number >= size:
            return f"{number / size:.4g}{letter}"
    return f"{number:.0f}"


def block_memory(model: ModelShape, sequence_length: int, batch_size: int) -> float:
    """M_block = 16 W + 34 s b h + 5 b a s^2 in bytes: parameters with optimizer state, and activations.

    The activations of a block are those of Korthikanti et al. (arXiv:2205.05198); b are the examples of a micro-batch.
    """
    parameters = BYTES_PER_PARAMETER * model.params_per_block
    linear = 34 * sequence_length * batch_size * model.hidden
    attention = 5 * batch_size * model.heads * sequence_length**2
    return parameters + linear + attention


def stage_count(model: ModelShape, device_bytes: float, sequence_length: int = 4096, batch_size: int = 1) -> str:
    """P = ceil(L / N) where N blocks fit on a device; where none does, `>= 2 L`, two devices for each.

    Raises:
        UserError: a size is not positive.
    """
    sizes = {
        "--hidden": model.hidden,
        "--heads": model.heads,
        "--params-per-block": model.params_per_block,
        "--blocks": model.blocks,
        "--memory": device_bytes,
        "--sequence-length": sequence_length,
        "--batch-size": batch_size,
    }
    for name, size in sizes.items():
        if not (size > 0 and math.isfinite(size)):
            raise UserError(f"{name} must be more than 0, got {size:g}")
    fitting = math.floor(device_bytes / block_memory(model, sequence_length, batch_size))
    return f">= {2 * model.blocks}" if fitting == 0 else str(math.ceil(model.blocks / fitting))
