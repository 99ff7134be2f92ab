"""What basis rotation keeps in memory beyond Adam's moments (appendix "Memory Overhead Analysis")."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

Source = Literal["2nd", "1st"]
Geometry = Literal["bilateral", "unilateral"]

STRATEGIES: tuple[tuple[Source, Geometry], ...] = (
    ("2nd", "bilateral"),
    ("2nd", "unilateral"),
    ("1st", "bilateral"),
    ("1st", "unilateral"),
)


def rotated_sides(rows: int, columns: int, geometry: str) -> tuple[int, ...]:
    """The sides of an (m, n) matrix that are rotated: both, or the smaller one."""
    return (rows, columns) if geometry == "bilateral" else (min(rows, columns),)


def basis_elements(shape: Sequence[int], geometry: str) -> int:
    """Elements of U and V for a matrix (m, n), or of all of a stack (*lead, m, n): m^2 + n^2, or min(m, n)^2."""
    *lead, rows, columns = shape
    return math.prod(lead) * sum(side**2 for side in rotated_sides(rows, columns, geometry))


def covariance_elements(shape: Sequence[int], source: str, geometry: str) -> int:
    """Elements of L and R: as many as those of the bases for source "2nd"; "1st" takes the momentum instead."""
    return basis_elements(shape, geometry) if source == "2nd" else 0


def overhead_elements(shape: Sequence[int], source: str, geometry: str) -> int:
    """Elements beyond Adam's two moments."""
    return basis_elements(shape, geometry) + covariance_elements(shape, source, geometry)
