"""The cost of the matrix products in a method's own update, in closed form, for plans."""

import math
from collections.abc import Sequence
from typing import NamedTuple

NEWTON_SCHULZ_STEPS = 5  # in torch's Muon and pytorch-optimizer's Scion
QR_OPERATIONS = 7
"""Operations of a new basis, per cube of the side's length m: a Householder QR with its Q takes
about 7 m^3."""
TWO_QR_OPERATIONS = 17
"""The same for BasisRotation on a GPU: 2 for the product with the covariance, 31/12 for each of
five passes of CholeskyQR, and 5/4 for each of two products between them."""


class Products(NamedTuple):
    """Floating-point operations of one update, on average; a multiply-add is two."""

    rotations: float = 0.0
    """Rotations of the gradient into the eigenbasis, and of the update out of it."""
    covariances: float = 0.0
    refreshes: float = 0.0
    """A refresh of the bases, divided by the updates between two refreshes."""
    others: float = 0.0
    """Such as Newton-Schulz iterations."""

    @property
    def total(self) -> float:
        return sum(self)

    def plus(self, more: "Products") -> "Products":
        """The sum, kind by kind."""
        return Products(*(own + other for own, other in zip(self, more, strict=True)))


def rotation_products(
    shape: Sequence[int],  # (*lead, m, n)
    sides: Sequence[int],
    *,
    covariance_interval: float,
    refresh_interval: float,
    refresh_operations: int = QR_OPERATIONS,
) -> Products:
    """The products of a method that keeps U and V up to date by power iterations.

    Args:
        shape: the shape of a parameter, which is a matrix or a stack of matrices.
        sides: the lengths of the sides that are rotated: m for U, n for V.
        covariance_interval: updates between two gradients that enter the covariances.
        refresh_interval: updates between two refreshes.
        refresh_operations: the operations of a new basis, per cube of the side's length.
    """
    *lead, m, n = shape
    count = math.prod(lead)
    # U^T G V takes 2 m n (m + n) operations; a side that is not rotated adds nothing. The products
    # G G^T and G^T G take as many.
    product = 2 * m * n * sum(sides)
    # The gradient is rotated into the basis, and the update out of it.
    rotations = 2 * product
    # The momentum is rotated out of the old basis and into the new one. Each side gets a new basis.
    refresh = 2 * product + refresh_operations * sum(side**3 for side in sides)
    return Products(
        count * rotations, count * product / covariance_interval, count * refresh / refresh_interval
    )


def newton_schulz_products(shape: Sequence[int]) -> Products:
    """The Newton-Schulz iteration of a parameter (*lead, m, n): five steps of 4 m^2 n + 2 m^3
    operations each, with m <= n."""
    *lead, rows, columns = shape
    m, n = sorted((rows, columns))
    step = 4 * m**2 * n + 2 * m**3
    return Products(others=math.prod(lead) * NEWTON_SCHULZ_STEPS * step)
