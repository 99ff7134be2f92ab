"""Eigenbasis-Estimation (the paper's algorithm 2): bases of covariances, found once exactly and then followed.

All functions take a batch of square matrices (N, n, n). Columns of a basis are ordered by eigenvalue, largest first.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

NotConverged = torch.linalg.LinAlgError  # type: ignore[attr-defined]


def exact_basis(covariance: Tensor) -> tuple[Tensor, int]:
    """Eigenvectors (N, n, n) of symmetric matrices, and how many decompositions failed.

    One that does not converge is tried again in float64; if that fails too, the identity takes its place.
    """
    return _each_retried(lambda matrix: torch.linalg.eigh(matrix).eigenvectors.flip(-1), covariance)


def exact_left_basis(matrix: Tensor) -> tuple[Tensor, int]:
    """Left singular vectors (N, m, m) of matrices (N, m, n), that is eigenvectors of M M^T, and how many failed.

    The decomposition of M itself keeps the small ones, which squaring would drown in rounding.
    """
    return _each_retried(lambda each: torch.linalg.svd(each).U, matrix)


def followed_basis(covariance: Tensor, basis: Tensor) -> tuple[Tensor, Tensor]:
    """One power iteration from the current basis, then QR (arXiv:2405.18144, algorithm 1).

    Args:
        covariance: (N, n, n), symmetric, positive semidefinite.
        basis: Q, (N, n, n), orthonormal.

    Returns:
        The new basis, and the order (N, n) in which the old columns became the new ones: new column j follows old
        column order[j]. A zero covariance keeps its basis.
    """
    product = covariance @ basis
    # Rayleigh quotients q^T C q estimate the eigenvalues; the product is there already.
    eigenvalues = (basis * product).sum(dim=-2)
    order = eigenvalues.argsort(dim=-1, descending=True, stable=True)
    columns = order.unsqueeze(-2)
    followed = torch.linalg.qr(product.take_along_dim(columns, dim=-1)).Q
    is_zero = (eigenvalues.sum(dim=-1) == 0)[:, None, None]
    return torch.where(is_zero, basis.take_along_dim(columns, dim=-1), followed), order


def _each_retried(decompose: Callable[[Tensor], Tensor], matrices: Tensor) -> tuple[Tensor, int]:
    try:
        return decompose(matrices), 0
    except NotConverged:
        pass
    found, num_failed = [], 0
    for matrix in matrices:
        try:
            found.append(decompose(matrix.double()).to(matrix.dtype))
        except NotConverged:
            found.append(torch.eye(len(matrix), dtype=matrix.dtype, device=matrix.device))
            num_failed += 1
    return torch.stack(found), num_failed
