"""Eigenbasis estimation: the mathematics of algorithm 2 for a batch of matrices, without any
optimizer around it.

Every function takes a batch (b, m, n) and treats its matrices independently. The basis of the rows
of a factor F is an orthogonal matrix Q (m, m) whose columns approximate the eigenvectors of F F^T,
the first basis's by falling eigenvalue; the basis of the columns is that of F^T. Bases and products
are kept column by column in memory (as the transpose of a contiguous tensor), as LAPACK and
cuSOLVER want them, so that a refresh transposes nothing."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

# How many roundings of the arithmetic, relative to the largest eigenvalue, an eigenvalue must
# exceed to count. Averages of a thousand gradients carry some ten roundings (eps / sqrt(3) * sqrt(1
# / (1 - beta2^2)) of an entry), products of matrices a few more. What lies below is noise, and
# noise must not choose a direction.
NOISE_ROUNDINGS = 64
# What the power iteration adds to an eigenvalue, as a share of that eigenvalue itself. Where a new
# direction of energy appears in a subspace that had none, all columns of that subspace are sent to
# this one direction; what is left of each after orthonormalisation would be rounding. The share
# keeps each near where it was.
SELF_SHIFT = 0.1
# Elements of the covariances that a GPU decomposes together, whose solvers take batches: 512 MiB in
# float64, and as much again for the vectors. LAPACK takes one at a time.
DECOMPOSED_AT_ONCE = 2**26
# Passes of CholeskyQR, the first with a shift.
CHOLESKY_PASSES = 3
# Eigenvalues that differ by no more than this share of their mean count as equal when eigenvectors
# are computed. Rounding moves them by some 1e-7, and turns their vectors by that over their
# distance.
TIE = 1e-5
# The share of the largest value from which on the first one is taken instead: far from any simple
# fraction.
LEADING = (5**0.5 - 1) / 2


class Refreshed(NamedTuple):
    """What became of a batch of bases."""

    basis: Tensor  # (b, m, m); the old one where the decomposition failed
    valid: Tensor  # (b,): where the decomposition did not fail


def power_iteration(
    product: Tensor,  # C Q (b, m, m), overwritten
    basis: Tensor,  # Q (b, m, m)
) -> Refreshed:
    """`Power` of algorithm 2: one power iteration from the current basis, orthonormalised.

    Where the covariance does not decide, the basis does: a column q with eigenvalue q^T C q = l
    becomes a C q + ((1 - a) floor + SELF_SHIFT l) q before orthonormalisation, with a = l^2 / (l^2
    + floor^2). So a direction without energy stays where it was, up to what the others take from
    it.

    Columns are not sorted by eigenvalue: each keeps its place, and with it its second moment. In
    the orthonormalisation a column gives way to those before it. If the eigenvalues chose the
    order, rounding would choose it where two of them cross, and turn both columns by any angle. The
    iteration itself brings the largest eigenvalues to the front."""
    # The Rayleigh quotients q^T C q come from the product that the iteration needs anyway.
    eigenvalues = (basis * product).sum(dim=-2).clamp(min=0)  # (b, m)
    largest = eigenvalues.amax(dim=-1, keepdim=True)
    floor = resolution(basis.dtype) * largest
    # From 0 below the floor to 1 above it; 0 where the covariance is zero, whose basis stays.
    # Gradients' fourth powers would leave fp32's range: in units of a power of two, which rounds
    # nothing.
    unit = largest.frexp().exponent
    squared, squared_floor = eigenvalues.ldexp(-unit).square(), floor.ldexp(-unit).square()
    decided = torch.where(floor > 0, squared / (squared + squared_floor), 0.0)
    stays = torch.where(floor > 0, (1 - decided) * floor + SELF_SHIFT * eigenvalues, 1.0)
    columns = product.mul_(decided[:, None, :]).addcmul_(basis, stays[:, None, :])
    orthonormal = orthonormalize(columns)
    valid = orthonormal.sum(dim=(1, 2)).isfinite()  # of entries up to 1: only NaN can make it so
    return Refreshed(torch.where(valid[:, None, None], orthonormal, basis), valid)


def factor_product(factor: Tensor, basis: Tensor) -> Tensor:
    """F F^T Q for a factor (b, m, n) and a basis (b, m, m), in the cheaper of the two orders."""
    rows, columns = factor.shape[-2:]
    if columns < rows:
        return ((basis.mT @ factor) @ factor.mT).mT
    return covariance_product(factor @ factor.mT, basis)


def covariance_product(covariance: Tensor, basis: Tensor) -> Tensor:
    """C Q for symmetric C and a basis Q, both (b, m, m)."""
    return (basis.mT @ covariance).mT


def orthonormalize(
    matrices: Tensor,  # (b, m, m)
) -> Tensor:
    """The orthogonal factor of the QR decomposition whose R has a positive diagonal (and so is
    unique); NaN where it cannot be had."""
    # LAPACK's Householder is the faster on a CPU; on a GPU everything is products, and the host
    # waits for nothing.
    return _cholesky_qr(matrices) if matrices.device.type == "cuda" else _householder_qr(matrices)


def _householder_qr(matrices: Tensor) -> Tensor:
    # LAPACK is slow on columns that lie a power of two apart in memory, as widths of models do:
    # rows of zeros help.
    padded = pad(matrices.mT, (0, 8)).mT
    scales = padded.new_empty(len(padded), padded.shape[-1])
    # In place, as what follows: these matrices outgrow the caches.
    torch.geqrf(padded, out=(padded, scales))
    diagonal = padded.diagonal(dim1=-2, dim2=-1)
    signs = torch.ones_like(diagonal).copysign(diagonal)  # never 0
    torch.linalg.householder_product(padded, scales, out=padded)
    return padded[:, : matrices.shape[-2]].mul_(signs[:, None, :])


def _cholesky_qr(matrices: Tensor) -> Tensor:
    """CholeskyQR, three times, of columns scaled to length 1; NaN where it is not orthogonal.

    A pass takes X to X L^-T with X^T X = L L^T, and loses orthogonality by the rounding error times
    the square of the condition number (arXiv:1401.5171, section 2): of 128 and 512 columns that
    number is up to 2e4 (benchmarks/orthonormal.py), too much for a first pass in float32. A shift
    of X^T X makes the first pass possible and its result well-conditioned (arXiv:1809.11085), the
    second makes that nearly orthogonal, the third orthogonal to rounding.
    """
    columns = matrices / torch.linalg.vector_norm(matrices, dim=-2, keepdim=True)
    is_right = torch.ones(len(matrices), dtype=torch.bool, device=matrices.device)
    for number in range(CHOLESKY_PASSES):
        gram = columns.mT @ columns
        if number == 0:
            shift = 10 * gram.shape[-1] * torch.finfo(gram.dtype).eps
            gram.diagonal(dim1=-2, dim2=-1).add_(shift)
        if number == CHOLESKY_PASSES - 1:  # its own result is orthogonal if this is about so
            off_identity = gram.square().sum(dim=(1, 2)) - gram.shape[-1]
            is_right &= off_identity < 0.1
        lower, info = torch.linalg.cholesky_ex(gram)
        is_right &= info == 0
        columns = torch.linalg.solve_triangular(lower, columns.mT, upper=False).mT
    result: Tensor = columns.masked_fill_(~is_right[:, None, None], torch.nan)
    return result


def resolution(dtype: torch.dtype) -> float:
    """The smallest share of a largest value that is told from rounding."""
    return NOISE_ROUNDINGS * torch.finfo(dtype).eps


def exact_factor_eigenbasis(
    factor: Tensor,  # (b, m, n)
    on_done: Callable[[int], None] = lambda num: None,
) -> Refreshed:
    """Exact eigenvectors of F F^T, whose eigenvalues are squares of F's singular values; as
    `exact_eigenbasis`."""
    smallest = max(resolution(factor.dtype) ** 2, resolution(torch.float64))
    return exact_eigenbasis(factor.double() @ factor.mT.double(), smallest, on_done)


def exact_eigenbasis(
    covariance: Tensor,  # (b, m, m)
    smallest: float | None = None,
    on_done: Callable[[int], None] = lambda num: None,
) -> Refreshed:
    """Exact eigenvectors, largest eigenvalue first.

    An eigenspace whose eigenvalues rounding cannot tell apart gets the projections of some axes,
    orthonormalised in turn: those depend on the space alone, whatever vectors of it the
    decomposition returns. So does the space without energy; for a zero matrix that is the identity.
    Of a single eigenvector this decides the sign. In float64, as it happens once.

    Args:
        smallest: the share of the largest eigenvalue below which one has no energy; None: what
            rounding leaves.
        on_done: called with a number of matrices when so many more are done: 10,752 columns take
            seconds each.
    """
    num_matrices, size = covariance.shape[:2]
    smallest = resolution(covariance.dtype) if smallest is None else smallest
    identity = torch.eye(size, dtype=covariance.dtype, device=covariance.device)
    bases = identity.repeat(num_matrices, 1, 1)
    valid = torch.ones(num_matrices, dtype=torch.bool, device=covariance.device)
    is_on_gpu = covariance.device.type == "cuda"
    together = max(1, DECOMPOSED_AT_ONCE // (size * size)) if is_on_gpu else 1
    for start in range(0, num_matrices, together):
        decompositions = _decompositions(covariance[start : start + together].double())
        for index, decomposition in enumerate(decompositions, start):
            if decomposition is None:
                valid[index] = False
                continue
            eigenvalues, vectors = decomposition
            projections = _projected_axes(eigenvalues, vectors, smallest)
            bases[index] = _householder_qr(projections[None])[0]
        on_done(len(decompositions))
    return Refreshed(bases, valid)


def _decompositions(
    covariance: Tensor,  # (b, m, m), in float64
) -> list[tuple[Tensor, Tensor] | None]:
    """Eigenvalues (m,), largest first, and eigenvectors (m, m) of each; None where none are
    found."""
    try:
        values, vectors = torch.linalg.eigh(covariance)
    except RuntimeError:  # torch.linalg.LinAlgError is one
        if len(covariance) > 1:  # one that fails must not take the others with it
            return [_decompositions(matrix[None])[0] for matrix in covariance]
        return [_from_singular_vectors(covariance[0])]
    return list(zip(values.flip(-1), vectors.flip(-1), strict=True))


def _from_singular_vectors(covariance: Tensor) -> tuple[Tensor, Tensor] | None:
    """The same of one covariance (m, m), from another algorithm: LAPACK's eigh fails now and then
    where many rows are zero."""
    try:
        vectors, values, _ = torch.linalg.svd(covariance)
    except RuntimeError:
        return None
    return values, vectors


def _projected_axes(
    eigenvalues: Tensor,  # (m,), largest first
    vectors: Tensor,  # (m, m), the eigenvectors in its columns
    smallest: float,
) -> Tensor:
    """For each eigenspace (neighbouring columns with like eigenvalues) as many axes, projected into
    it."""
    decided = eigenvalues > smallest * eigenvalues[0]
    apart = -eigenvalues.diff() > TIE * eigenvalues.clamp(min=0).mean()
    starts = torch.where(decided[1:], apart, decided[:-1]).nonzero().flatten() + 1
    leading = (vectors.abs() > LEADING * vectors.abs().amax(dim=0)).int().argmax(dim=0)
    projected = vectors * vectors.gather(0, leading[None])  # right for spaces of one dimension
    bounds = [0, *starts.tolist(), len(eigenvalues)]
    for start, stop in pairwise(bounds):
        if stop - start > 1:
            space = vectors[:, start:stop]
            axes = _axes_of_space(vectors, start, stop)
            projected[:, start:stop] = space @ space[axes].mT
    return projected


def _axes_of_space(vectors: Tensor, start: int, stop: int) -> list[int]:
    """The axes that are projected into the space of the columns from `start` to `stop`."""
    size = len(vectors)
    if 2 * (stop - start) <= size:
        return _leading_axes(vectors[:, start:stop])
    # Cheaper: the axes that the other columns' space leaves.
    others = _leading_axes(torch.cat([vectors[:, :start], vectors[:, stop:]], dim=1))
    return sorted(set(range(size)) - set(others))


def _leading_axes(
    space: Tensor,  # (m, k)
) -> list[int]:
    """As many axes as the space has dimensions, whose projections into it are far from dependent.

    In turn the first axis with about as much left as any, outside the span of those before it: a
    choice that ties, which rounding would decide, do not change.
    """
    rest, axes = space.clone(), []
    for _ in range(space.shape[1]):
        lengths = rest.norm(dim=1)
        axis = int((lengths > LEADING * lengths.max()).int().argmax())
        direction = rest[axis] / lengths[axis]
        rest -= torch.outer(rest @ direction, direction)
        axes.append(axis)
    return axes
