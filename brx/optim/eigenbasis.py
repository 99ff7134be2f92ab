"""Eigenbasis estimation: the mathematics of algorithm 2 for a batch of matrices, without any optimizer around it.

Every function takes a batch (b, m, n) and treats its matrices independently. The basis of the rows of a factor F is an
orthogonal matrix Q (m, m) whose columns approximate the eigenvectors of F F^T, largest eigenvalue first; the
basis of the columns is that of F^T. Bases and products are kept column by column in memory (as the transpose of a
contiguous tensor), as LAPACK and cuSOLVER want them, so that a renewal transposes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

RELATIVE_SHIFT = 1e-6
"""What the power iteration adds to every eigenvalue, as a share of the largest one.

It decides what a rank-deficient covariance does: directions without any energy stay where they were instead of
becoming whatever the rounding noise says (which float32 does not tell from an eigenvalue 1e-7 of the largest).
"""


class Renewal(NamedTuple):
    """What became of a batch of bases.

    Attributes:
        basis: the new ones (b, m, m), or the old one where the decomposition failed.
        order: the places (b, m) that the columns had in the old ones.
        valid: where the decomposition did not fail (b,).
    """

    basis: Tensor
    order: Tensor
    valid: Tensor


def power_iteration(product: Tensor, basis: Tensor) -> Renewal:
    """`Power` of algorithm 2: one power iteration from the current basis, orthonormalised, in order of eigenvalue.

    Args:
        product: C Q, the covariance times the current basis (b, m, m); overwritten.
        basis: Q (b, m, m).
    """
    # The Rayleigh quotients q^T C q come from the product that the iteration needs anyway.
    eigenvalues = (basis * product).sum(dim=-2)
    order = eigenvalues.argsort(dim=-1, descending=True, stable=True)
    largest = eigenvalues.amax(dim=-1)[:, None, None]
    # A zero covariance keeps its basis.
    shift = torch.where(largest > 0, RELATIVE_SHIFT * largest, 1.0)
    renewed = orthonormalize(select_columns(product.addcmul_(basis, shift), order))
    valid = renewed.sum(dim=(1, 2)).isfinite()  # of entries up to 1: only NaN can make it so
    unchanged = torch.arange(order.shape[-1], device=order.device)
    return Renewal(
        torch.where(valid[:, None, None], renewed, basis), torch.where(valid[:, None], order, unchanged), valid
    )


def factor_product(factor: Tensor, basis: Tensor) -> Tensor:
    """F F^T Q for a factor (b, m, n) and a basis (b, m, m), in the cheaper of the two orders."""
    rows, columns = factor.shape[-2:]
    if columns < rows:
        return ((basis.mT @ factor) @ factor.mT).mT
    return covariance_product(factor @ factor.mT, basis)


def covariance_product(covariance: Tensor, basis: Tensor) -> Tensor:
    """C Q for symmetric C and a basis Q, both (b, m, m)."""
    return (basis.mT @ covariance).mT


def orthonormalize(matrices: Tensor) -> Tensor:
    """The orthogonal factor of the QR decomposition whose R has a positive diagonal (and so is unique).

    Each kind of device gets what was measured to be faster there.
    """
    return _cholesky_qr(matrices) if matrices.device.type == "cuda" else _householder_qr(matrices)


def _householder_qr(matrices: Tensor) -> Tensor:
    # LAPACK is slow on columns that lie a power of two apart in memory, as widths of models do: rows of zeros help.
    padded = pad(matrices.mT, (0, 8)).mT
    scales = padded.new_empty(len(padded), padded.shape[-1])
    torch.geqrf(padded, out=(padded, scales))  # in place, as what follows: these matrices outgrow the caches
    signs = _signs(padded.diagonal(dim1=-2, dim2=-1))
    torch.linalg.householder_product(padded, scales, out=padded)
    return padded[:, : matrices.shape[-2]].mul_(signs[:, None, :])


def _cholesky_qr(matrices: Tensor) -> Tensor:
    """CholeskyQR of columns scaled to length 1, in float64; by Householder where that is not orthogonal enough.

    The loss of orthogonality is the rounding error times the square of the condition number (arXiv:1401.5171,
    section 2), which float64 has room for and float32 has not.
    """
    columns = matrices.double()
    columns = columns / torch.linalg.vector_norm(columns, dim=-2, keepdim=True)
    lower, _ = torch.linalg.cholesky_ex(columns.mT @ columns)
    orthogonal: Tensor = torch.linalg.solve_triangular(lower, columns.mT, upper=False).to(matrices.dtype).mT
    identity = torch.eye(matrices.shape[-1], dtype=matrices.dtype, device=matrices.device)
    error = (orthogonal.mT @ orthogonal - identity).abs().amax(dim=(1, 2))
    failed = ~(error < 40 * torch.finfo(matrices.dtype).eps)  # NaN, from a failed factorisation, is not less
    if failed.any():
        orthogonal[failed] = _householder_qr(matrices[failed])
    return orthogonal


def select_columns(matrices: Tensor, order: Tensor) -> Tensor:
    """The columns of each (m, n) matrix in its own order (b, n)."""
    return select_rows(matrices.mT, order).mT


def select_rows(matrices: Tensor, order: Tensor) -> Tensor:
    """The rows of each (m, n) matrix in its own order (b, m)."""
    return matrices[torch.arange(len(order), device=order.device)[:, None], order]


def eigenvectors(covariance: Tensor) -> Renewal:
    """Exact eigenvectors of symmetric matrices (b, m, m), largest eigenvalue first; the identity for a zero matrix."""
    return _exact_basis(covariance, lambda matrix: torch.linalg.eigh(matrix).eigenvectors.flip(-1))


def left_singular_vectors(factor: Tensor) -> Renewal:
    """Exact eigenvectors of F F^T for factors (b, m, n), as singular vectors of F; the identity for a zero matrix."""
    return _exact_basis(
        factor, lambda matrix: torch.linalg.svd(matrix, full_matrices=matrix.shape[0] > matrix.shape[1]).U
    )


def _exact_basis(matrices: Tensor, decompose: Callable[[Tensor], Tensor]) -> Renewal:
    num_matrices, rows = matrices.shape[:2]
    bases = torch.eye(rows, dtype=matrices.dtype, device=matrices.device).repeat(num_matrices, 1, 1)
    valid = torch.ones(num_matrices, dtype=torch.bool, device=matrices.device)
    for place, matrix in enumerate(matrices):
        if matrix.count_nonzero():
            decomposed = _try_decompose(matrix, decompose)
            if decomposed is None:
                valid[place] = False
            else:
                bases[place] = decomposed
    return Renewal(bases, torch.arange(rows, device=matrices.device).expand(num_matrices, rows), valid)


def _try_decompose(matrix: Tensor, decompose: Callable[[Tensor], Tensor]) -> Tensor | None:
    """The basis, from a second attempt in float64 if the first one fails; None if both do."""
    for dtype in (matrix.dtype, torch.float64):
        try:
            basis = decompose(matrix.to(dtype)).to(matrix.dtype)
        except RuntimeError:  # torch.linalg.LinAlgError is one
            continue
        if basis.isfinite().all():
            # LAPACK leaves the signs open: the entry of largest size in a column is made positive.
            peaks = basis.gather(-2, basis.abs().argmax(dim=-2, keepdim=True))
            return basis * _signs(peaks)
    return None


def _signs(values: Tensor) -> Tensor:
    """1 or -1, never 0."""
    return torch.ones_like(values).copysign(values)
