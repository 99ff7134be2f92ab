"""The optimizer's decision for each parameter, as rows and as a printed table."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

from torch import Tensor
from torch.nn.parameter import is_lazy

from .options import Group
from .parameter_state import Side, matrix_shape, rotated_sides, state_shapes

COUNTERS = ("step", "num_failed_refreshes")
COLUMNS = ("parameter", "shape", "update", "state", "why")


class ParameterSummary(NamedTuple):
    """The decision for one parameter.

    Attributes:
        shape: the parameter's shape; () for a lazy module's, which has none yet.
        matrices: the parameter's shape as a stack of matrices (*lead, m, n).
        sides: the rotated sides; none for AdamW.
        num_state: elements of its moments, bases and covariances; 0 if it is frozen.
        why: the reason, in words.
    """

    name: str
    shape: tuple[int, ...]
    matrices: tuple[int, ...]
    sides: tuple[Side, ...]
    num_state: int
    why: str


class Summary(list[ParameterSummary]):
    """One row per parameter; printed as a table."""

    @classmethod
    def of(cls, named: Iterable[tuple[str, Tensor, Group]]) -> Summary:
        """A summary of parameters with their names and options."""
        return cls(_row(name, parameter, options) for name, parameter, options in named)

    def __str__(self) -> str:
        rows = [COLUMNS, *(_cells(row) for row in self)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        num_rotated = sum(1 for row in self if row.sides)
        num_state = sum(row.num_state for row in self)
        num_weights = sum(math.prod(row.shape) for row in self if row.shape or row.num_state)
        lines.append(
            f"{num_rotated} of {len(self)} parameters rotated; {num_state:,} numbers of state for "
            f"{num_weights:,} weights"
        )
        return "\n".join(lines)


def _row(name: str, parameter: Tensor, options: Group) -> ParameterSummary:
    if is_lazy(parameter):
        return ParameterSummary(name, (), (), (), 0, "lazy: decided when its shape is known")
    shape = tuple(parameter.shape)
    sides, reasons = rotated_sides(parameter, options)
    shapes = state_shapes(parameter, options)
    num_state = sum(math.prod(shapes[kept]) for kept in shapes if kept not in COUNTERS)
    why = options.get("why", "matrix" if options["rotate"] else "rotate=False")
    if reasons == "a vector" and why in ("matrix", "vector"):
        why, reasons = "vector", ""
    matrices = matrix_shape(parameter, options) if sides else shape
    if not parameter.requires_grad:
        num_state = 0
    words = ", ".join(filter(None, [why, reasons]))
    return ParameterSummary(name, shape, matrices, sides, num_state, words)


def _cells(row: ParameterSummary) -> tuple[str, ...]:
    update = "elementwise (AdamW)"
    if row.sides:
        parts = "" if row.matrices == row.shape else " x ".join(map(str, row.matrices)) + ", "
        update = f"{parts}rotated: {' and '.join(row.sides)}"
    return row.name, str(row.shape), update, f"{row.num_state:,}", row.why
