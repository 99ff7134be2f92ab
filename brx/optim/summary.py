"""What an optimizer does with each parameter, as a table: nothing is left to AdamW unseen."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from torch import Tensor

from brx.optim.matrix_batch import Side, matrix_shape, rotated_sides, state_shapes
from brx.optim.options import Group


class ParameterSummary(NamedTuple):
    """What was decided for one parameter: `num_state` numbers of moments, bases and covariances; `why` in words."""

    name: str
    shape: tuple[int, ...]
    matrices: tuple[int, ...]
    sides: tuple[Side, ...]
    num_state: int
    why: str

    @property
    def update(self) -> str:
        """How it is updated, in words."""
        if not self.sides:
            return "elementwise (AdamW)"
        parts = "" if self.matrices == self.shape else " x ".join(map(str, self.matrices)) + ", "
        return f"{parts}rotated: {' and '.join(self.sides)}"


class Summary(list[ParameterSummary]):
    """One row per parameter; printed as a table."""

    def __str__(self) -> str:
        rows = [("parameter", "shape", "update", "state", "why")]
        rows += [(row.name, str(row.shape), row.update, f"{row.num_state:,}", row.why) for row in self]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        num_rotated, state = sum(bool(row.sides) for row in self), sum(row.num_state for row in self)
        weights = sum(math.prod(row.shape) for row in self)
        total = f"{num_rotated} of {len(self)} parameters rotated; {state:,} numbers of state for {weights:,} weights"
        return "\n".join([*lines, total])


def summarize(parameter: Tensor, group: Group, name: str) -> ParameterSummary:
    """The row of one parameter."""
    sides, reasons = rotated_sides(parameter, group)
    shapes: dict[str, Any] = state_shapes(parameter, group)
    num_state = sum(math.prod(shape) for kept, shape in shapes.items() if kept not in ("step", "num_failed_refreshes"))
    why = ", ".join(filter(None, [group.get("why", "matrix" if group["rotate"] else "rotate=False"), reasons]))
    return ParameterSummary(name, tuple(parameter.shape), matrix_shape(parameter, group), sides, num_state, why)
