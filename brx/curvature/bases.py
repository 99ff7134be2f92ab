"""The rotated coordinates of basis rotation: W = U W~ V^T for each rotated matrix, the identity for all else.

With w = Q w~, the Hessian in the rotated coordinates is Q^T H Q: multiply by Q, then by H, then by Q^T.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from brx.curvature.hessian import Vectors
from brx.model.stage import is_block_matrix
from brx.optim.eigenbasis import exact_eigenbasis, exact_factor_eigenbasis

Source = Literal["2nd", "1st"]
Geometry = Literal["bilateral", "unilateral"]


@dataclass(frozen=True)
class Basis:
    """Orthogonal bases of a matrix (m, n), or of each matrix of a stack (*, m, n); None for the identity."""

    left: Tensor | None  # U (*, m, m)
    right: Tensor | None  # V (*, n, n)

    def to_weights(self, rotated: Tensor) -> Tensor:
        """From rotated coordinates (m, n) to those of the weights: U A V^T."""
        product = rotated if self.left is None else self.left @ rotated
        return product if self.right is None else product @ self.right.mT

    def from_weights(self, matrix: Tensor) -> Tensor:
        """From the weights' coordinates (m, n) to rotated ones: U^T A V."""
        product = matrix if self.left is None else self.left.mT @ matrix
        return product if self.right is None else product @ self.right


Bases = dict[str, Basis]
"""By parameter name; a parameter that is absent is not rotated."""


def to_weights(bases: Bases, vectors: Vectors) -> Vectors:
    """Rotated vectors in the weights' coordinates: Q z, parameter by parameter."""
    return {name: bases[name].to_weights(value) if name in bases else value for name, value in vectors.items()}


def from_weights(bases: Bases, vectors: Vectors) -> Vectors:
    """Vectors in rotated coordinates: Q^T z, parameter by parameter."""
    return {name: bases[name].from_weights(value) if name in bases else value for name, value in vectors.items()}


def read_basis(state: Mapping[str, Any], dtype: torch.dtype) -> Basis | None:
    """U and V from what `BasisRotation` keeps for a parameter; None if that is not basis rotation's state."""
    left, right = state.get("left_basis"), state.get("right_basis")
    if left is None and right is None:
        return None
    return Basis(*(None if side is None else side.to(dtype) for side in (left, right)))


def estimate_bases(
    parameters: Vectors, gradients: Iterable[Vectors], source: Source = "2nd", geometry: Geometry = "bilateral"
) -> Bases:
    """A strategy's exact bases at fixed weights: eigenvectors of what theorem 3.1 has, with means for expectations.

    From gradients G, each of another batch: `2nd` takes E[G G^T] and E[G^T G], `1st` the products of E[G] with its
    transpose; `unilateral` rotates the smaller side alone, as the optimizer does.
    """
    sums: dict[str, list[Tensor]] = {}
    for gradient in gradients:
        for name in filter(is_block_matrix, parameters):
            G = gradient[name]  # (*, m, n)
            terms = [G, G.mT] if source == "1st" else [G @ G.mT, G.mT @ G]
            known = sums.setdefault(name, [torch.zeros_like(term) for term in terms])
            for total, term in zip(known, terms, strict=True):
                total += term
    # Eigenvectors do not see that these are sums in place of means.
    exact = exact_factor_eigenbasis if source == "1st" else exact_eigenbasis
    bases = {}
    for name, totals in sums.items():
        left, right = (exact(one.reshape(-1, *one.shape[-2:])).basis.to(one) for one in totals)
        m, n = parameters[name].shape[-2:]
        left, right = left.view(*totals[0].shape[:-2], m, m), right.view(*totals[0].shape[:-2], n, n)
        rotates_rows, rotates_columns = (geometry == "bilateral" or side for side in (m < n, m >= n))
        bases[name] = Basis(left if rotates_rows else None, right if rotates_columns else None)
    return bases
