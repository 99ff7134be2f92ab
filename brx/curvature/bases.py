"""The rotated coordinates of basis rotation: W = U W~ V^T for each rotated matrix, the identity for all else.

With w = Q w~, the Hessian in the rotated coordinates is Q^T H Q: multiply by Q, then by H, then by Q^T.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from brx.curvature.hessian import Vectors
from brx.model.stage import is_block_matrix
from brx.optim.eigenbasis import exact_eigenbasis


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
        """U A V^T."""
        product = rotated if self.left is None else self.left @ rotated
        return product if self.right is None else product @ self.right.mT

    def from_weights(self, matrix: Tensor) -> Tensor:
        """U^T A V."""
        product = matrix if self.left is None else self.left.mT @ matrix
        return product if self.right is None else product @ self.right


Bases = dict[str, Basis]
"""By parameter name; a parameter that is absent is not rotated."""


def to_weights(bases: Bases, vectors: Vectors) -> Vectors:
    """Q z."""
    return {name: bases[name].to_weights(value) if name in bases else value for name, value in vectors.items()}


def from_weights(bases: Bases, vectors: Vectors) -> Vectors:
    """Q^T z."""
    return {name: bases[name].from_weights(value) if name in bases else value for name, value in vectors.items()}


def read_basis(state: Mapping[str, Any], dtype: torch.dtype) -> Basis | None:
    """U and V from what `BasisRotation` keeps for a parameter; None if that is not basis rotation's state."""
    left, right = state.get("left_basis"), state.get("right_basis")
    if left is None and right is None:
        return None
    return Basis(*(None if side is None else side.to(dtype) for side in (left, right)))


def estimate_bases(parameters: Vectors, gradients: Iterable[Vectors]) -> Bases:
    """Basis rotation's bases (source 2nd, bilateral) at fixed weights: exact, of the mean of these gradients' G G^T."""
    names = [name for name in parameters if is_block_matrix(name)]
    rows = {name: parameters[name].new_zeros(()) for name in names}
    columns = dict(rows)
    num_gradients = 0
    for gradient in gradients:
        num_gradients += 1
        for name in names:
            rows[name] = rows[name] + gradient[name] @ gradient[name].mT
            columns[name] = columns[name] + gradient[name].mT @ gradient[name]
    return {name: Basis(_exact(rows[name] / num_gradients), _exact(columns[name] / num_gradients)) for name in names}


def _exact(covariance: Tensor) -> Tensor:
    """Eigenvectors of a covariance (*, m, m)."""
    return exact_eigenbasis(covariance.reshape(-1, *covariance.shape[-2:])).basis.view_as(covariance)
