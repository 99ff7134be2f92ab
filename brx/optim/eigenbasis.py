"""Eigenbasis estimation: the mathematics of algorithm 2 for a batch of matrices, without any optimizer around it.

Every function takes a batch (b, m, n) and treats its matrices independently. The basis of the rows of a factor F is an
orthogonal matrix Q (m, m) whose columns approximate the eigenvectors of F F^T, largest eigenvalue first; the
basis of the columns is that of F^T.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

RELATIVE_SHIFT = 1e-6
"""What the power iteration adds to every eigenvalue, as a share of the largest one.

It decides what a rank-deficient covariance does: directions without any energy stay where they were instead of
becoming whatever the rounding noise says (which float32 does not tell from an eigenvalue 1e-7 of the largest).
"""


def renew_eigenbasis(product: Tensor, basis: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`Power` of algorithm 2: one power iteration from the current basis, orthonormalised, in order of eigenvalue.

    Args:
        product: C Q, the covariance times the current basis (b, m, m).
        basis: Q (b, m, m).

    Returns:
        The new basis, the places (b, m) that its columns had in the old one, and whether it could be renewed (b,);
        where it could not, the basis and the order are the old ones.
    """
    # The Rayleigh quotients q^T C q come from the product that the iteration needs anyway.
    eigenvalues = (basis * product).sum(dim=-2)
    order = eigenvalues.argsort(dim=-1, descending=True, stable=True)
    largest = eigenvalues.amax(dim=-1)[:, None, None]
    # The scale does not change Q R but keeps tiny gradients from vanishing; a zero covariance leaves the basis as it is.
    scale = torch.where(largest > 0, largest, torch.ones_like(largest))
    iterated = torch.add(product / scale, basis, alpha=RELATIVE_SHIFT)
    renewed = orthonormalize(select_columns(iterated, order))
    valid = renewed.isfinite().flatten(1).all(dim=1)
    unchanged = torch.arange(order.shape[-1], device=order.device)
    return torch.where(valid[:, None, None], renewed, basis), torch.where(valid[:, None], order, unchanged), valid


def covariance_product(factor: Tensor, basis: Tensor) -> Tensor:
    """F F^T Q for a factor (b, m, n) and a basis (b, m, m), in the cheaper of the two orders."""
    rows, columns = factor.shape[-2:]
    if columns < rows:
        return factor @ (factor.mT @ basis)
    return (factor @ factor.mT) @ basis


def orthonormalize(matrices: Tensor) -> Tensor:
    """The orthogonal factor of the QR decomposition whose R has a positive diagonal (and so is unique)."""
    orthogonal, triangular = torch.linalg.qr(matrices)
    signs = torch.where(triangular.diagonal(dim1=-2, dim2=-1) < 0, -1.0, 1.0).to(orthogonal.dtype)
    return orthogonal * signs[:, None, :]


def select_columns(matrices: Tensor, order: Tensor) -> Tensor:
    """The columns of each (m, n) matrix in its own order (b, n)."""
    return matrices.gather(-1, order[:, None, :].expand_as(matrices))


def select_rows(matrices: Tensor, order: Tensor) -> Tensor:
    """The rows of each (m, n) matrix in its own order (b, m)."""
    return matrices.gather(-2, order[:, :, None].expand_as(matrices))


def eigenvectors(covariance: Tensor) -> tuple[Tensor, Tensor]:
    """Exact eigenvectors of symmetric matrices (b, m, m), largest eigenvalue first; the identity for a zero matrix.

    Returns:
        The basis, and whether the decomposition succeeded (b,), the identity standing in where it did not.
    """
    return _exact_basis(covariance, lambda matrix: torch.linalg.eigh(matrix).eigenvectors.flip(-1))


def left_singular_vectors(factor: Tensor) -> tuple[Tensor, Tensor]:
    """Exact eigenvectors of F F^T for factors (b, m, n), from the singular values of F; otherwise as `eigenvectors`."""
    return _exact_basis(factor, lambda matrix: torch.linalg.svd(matrix, full_matrices=True).U)


def _exact_basis(matrices: Tensor, decompose: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    bases, successes = [], []
    for matrix in matrices:
        basis = torch.eye(matrix.shape[-2], dtype=matrix.dtype, device=matrix.device)
        decomposed = _try_decompose(matrix, decompose) if matrix.count_nonzero() else basis
        bases.append(basis if decomposed is None else decomposed)
        successes.append(decomposed is not None)
    return torch.stack(bases), torch.tensor(successes, device=matrices.device)


def _try_decompose(matrix: Tensor, decompose: Callable[[Tensor], Tensor]) -> Tensor | None:
    """The basis, from a second attempt in float64 if the first one fails; None if both do."""
    for dtype in (matrix.dtype, torch.float64):
        try:
            basis = decompose(matrix.to(dtype)).to(matrix.dtype)
        except torch.linalg.LinAlgError:
            continue
        if basis.isfinite().all():
            # LAPACK leaves the signs open: the entry of largest size in a column is made positive.
            peaks = basis.gather(-2, basis.abs().argmax(dim=-2, keepdim=True))
            return basis * torch.where(peaks < 0, -1.0, 1.0).to(basis.dtype)
    return None
