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
    """Orthogonal bases of a matrix (m, n), or of each matrix of a stack (*, m, n).

    Attributes:
        left: U (*, m, m); None for the identity.
        right: V (*, n, n); None for the identity.
    """

    left: Tensor | None
    right: Tensor | None

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

    Args:
        parameters: the weights.
        gradients: G, each of another batch.
        source: `2nd` takes E[G G^T] and E[G^T G], `1st` the products of E[G] with its transpose.
        geometry: `unilateral` rotates the smaller side alone, as the optimizer does.
    """
    names = [name for name in parameters if is_block_matrix(name)]
    sums: dict[str, list[Tensor]] = {}
    num_gradients = 0
    for gradient in gradients:
        num_gradients += 1
        for name in names:
            terms = _terms(gradient[name], source)
            before = sums.get(name)
            sums[name] = terms if before is None else [sum_ + term for sum_, term in zip(before, terms, strict=True)]
    bases = {}
    for name in names:
        rows, columns = (_eigenvectors(sum_ / num_gradients, source) for sum_ in sums[name])
        is_wide = parameters[name].shape[-2] < parameters[name].shape[-1]
        is_both = geometry == "bilateral"
        bases[name] = Basis(rows if is_both or is_wide else None, columns if is_both or not is_wide else None)
    return bases


def _terms(gradient: Tensor, source: Source) -> list[Tensor]:
    """What is averaged for either side: covariances (*, m, m) and (*, n, n), or factors (*, m, n) and (*, n, m)."""
    if source == "1st":
        return [gradient, gradient.mT]
    return [gradient @ gradient.mT, gradient.mT @ gradient]


def _eigenvectors(mean: Tensor, source: Source) -> Tensor:
    """Eigenvectors (*, m, m) of a covariance (*, m, m), or of F F^T for a factor (*, m, n)."""
    exact = exact_factor_eigenbasis if source == "1st" else exact_eigenbasis
    basis = exact(mean.reshape(-1, *mean.shape[-2:])).basis.to(mean)
    return basis.view(*mean.shape[:-1], mean.shape[-2])
