"""What each strategy of basis rotation keeps beyond Adam's moments, as a table of texts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from decimal import ROUND_HALF_UP, Decimal

import pandas as pd

from brx.model.sizes import FP32
from brx.planning.optimizer_memory import STRATEGIES, overhead_elements

UNITS = {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10}


def overhead_texts(
    shapes: Mapping[tuple[int, int], int], names: Mapping[tuple[int, int], str]
) -> tuple[str, pd.DataFrame]:
    """The overhead of every strategy, in fp32 whatever the weights are: title, and a row per strategy, texts.

    Args:
        shapes: how many matrices there are of each shape (m, n).
        names: of some shapes, for the headings.
    """
    largest = max(FP32 * overhead_elements(shape, *STRATEGIES[0]) for shape in shapes)
    unit, unit_bytes = next(((unit, size) for unit, size in UNITS.items() if largest >= size / 20), ("bytes", 1))
    are_several = any(count > 1 for count in shapes.values())
    columns = ["source", "geometry", "rotation", "covariances"]
    for (m, n), count in shapes.items():
        name = f"{names[m, n]} " if (m, n) in names else ""
        columns.append(f"{name}{m}x{n}" + (f" ({count} of them)" if count > 1 else ""))
    columns += [f"all, {unit}"] if are_several else []
    columns.append("share of Adam's moments")
    rows = []
    for source, geometry in STRATEGIES:
        formula = "m^2 + n^2" if geometry == "bilateral" else "min(m, n)^2"
        by_shape = {shape: FP32 * overhead_elements(shape, source, geometry) for shape in shapes}
        total = sum(by_shape[shape] * count for shape, count in shapes.items())
        moments = 2 * FP32 * sum(math.prod(shape) * count for shape, count in shapes.items())
        sizes = [_two_decimals(size, unit_bytes) for size in [*by_shape.values(), *([total] if are_several else [])]]
        rows.append([source, geometry, formula, formula if source == "2nd" else "--", *sizes, f"{total / moments:.1%}"])
    return f"Memory beyond Adam's moments, {unit} per matrix (fp32)", pd.DataFrame(rows, columns=columns)


def _two_decimals(num_bytes: int, unit_bytes: int) -> str:
    """Halves rounded up, as in the paper's table (0.125 is 0.13)."""
    return str((Decimal(num_bytes) / Decimal(unit_bytes)).quantize(Decimal("0.01"), ROUND_HALF_UP))
