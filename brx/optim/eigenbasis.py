"""Eigenbasis estimation: the mathematics of algorithm 2 for a batch of matrices, without any
optimizer.

Every function takes a batch (b, m, n) and treats its matrices independently. The basis of a factor
F is an orthogonal matrix Q (m, m) whose columns approximate the eigenvectors of F F^T. In the first
basis they are ordered by falling eigenvalue. Bases and products are stored by columns (as the
transpose of a contiguous tensor), as LAPACK and cuSOLVER need them, so that a refresh transposes
nothing."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

# An eigenvalue counts only if it exceeds this many roundings (eps) of the largest eigenvalue.
# Averages of a thousand gradients carry some ten roundings (eps / sqrt(3) * sqrt(1 / (1 - beta2^2))
# of an entry), products of matrices a few more. What lies below is noise, and noise must not choose
# a direction.
NOISE_ROUNDINGS = 64
# The power iteration adds to each C q this share of its length, in the direction of q. Without it,
# a new direction of energy in a subspace that had none would turn all columns of the subspace into
# itself, and what orthonormalisation leaves of them would be rounding. With it, each column stays
# near where it was.
SELF_SHIFT = 0.1
# A column gives way to the direction of another one, wherever the two stand, if the other one's
# eigenvalue is more than this many times as large.
FAR_LARGER = 2
# Elements of the covariances that a GPU decomposes together, since its solvers take batches: 512
# MiB in float64, and as much again for the vectors. LAPACK takes one at a time.
DECOMPOSED_AT_ONCE = 2**26
# Rows of zeros below the matrices that LAPACK decomposes.
PADDING = 8
# The number of column blocks into which a product is split if only one triangle of it is needed, or
# if one of its factors is triangular.
NUM_BLOCKS = 4
# Eigenvalues that differ by at most this share of their mean count as equal when eigenvectors are
# computed. Rounding moves eigenvalues by some 1e-7, and turns eigenvectors by that over the
# distance of their eigenvalues.
TIE = 1e-5
# In place of the largest of some values, the first one with at least this share of it is taken: so
# rounding does not decide between values that tie. The share is far from any simple fraction, so
# that values do not tie with the threshold either.
LEADING = (5**0.5 - 1) / 2


class Refreshed(NamedTuple):
    """The new bases of a batch."""

    basis: Tensor  # (b, m, m); the old one where the decomposition failed
    valid: Tensor  # (b,): where the decomposition did not fail


def power_iteration(
    product: Tensor,  # C Q (b, m, m), overwritten
    basis: Tensor,  # Q (b, m, m)
) -> Refreshed:
    """`Power` of algorithm 2: one power iteration from the current basis, orthonormalised.

    Where the covariance does not decide, the basis does: a column q with eigenvalue q^T C q = l
    becomes a C q + ((1 - a) floor + SELF_SHIFT |C q|) q before orthonormalisation, with a = l^2 /
    (l^2 + floor^2). So a direction without energy stays where it was, up to what the others take
    from it.

    Each column keeps its place, and with it its second moment, whatever its eigenvalue.
    """
    # The Rayleigh quotients q^T C q come from the product that the iteration needs anyway.
    eigenvalues = (basis * product).sum(dim=-2).clamp_(min=0)  # (b, m)
    # The squares below are fourth powers of gradients, which would leave fp32's range. So all is
    # divided by a power of two, which rounds nothing. Its exponent is limited, because beyond 2^126
    # such a power would itself be infinite.
    unit = eigenvalues.amax(dim=-1, keepdim=True).frexp().exponent.clamp_(-126, 126)  # (b, 1)
    scale = torch.ones_like(eigenvalues[:, :1]).ldexp_(-unit)  # (b, 1)
    eigenvalues.mul_(scale)
    product.mul_(scale[:, :, None])
    floor = resolution(basis.dtype) * eigenvalues.amax(dim=-1, keepdim=True)
    # a: from 0 below the floor to 1 above it. Where the covariance is zero, it is 0, and the basis
    # stays.
    squared, squared_floor = eigenvalues.square(), floor.square()
    decided = torch.where(floor > 0, squared / (squared + squared_floor), 0.0)
    lengths = torch.linalg.vector_norm(product, dim=-2)  # (b, m)
    stays = torch.where(floor > 0, (1 - decided) * floor + SELF_SHIFT * lengths, 1.0)
    columns = product.mul_(decided[:, None, :]).addcmul_(basis, stays[:, None, :])
    sizes = torch.where(floor > 0, eigenvalues + floor, 1.0)
    orthonormal = _orthonormalize_without_order(columns, sizes)
    # Entries are at most 1, so that only a NaN makes their sum not finite.
    valid = orthonormal.sum(dim=(1, 2)).isfinite()
    return Refreshed(torch.where(valid[:, None, None], orthonormal, basis), valid)


def _orthonormalize_without_order(
    columns: Tensor,  # (b, m, m)
    sizes: Tensor,  # z (b, m), positive: the columns' eigenvalues
) -> Tensor:
    """Orthonormal columns (b, m, m), each near its own, that depend smoothly on columns and sizes.

    In QR, a column gives way to the columns before it. Neither of two simple orders will do:

    - In the order in which columns stand, a column with little energy would not give way to the
      large ones after it. A leak of a large direction into it would grow at each refresh by the
      quotient of the two eigenvalues.
    - In the order of eigenvalues, rounding would decide which of two columns gives way where their
      eigenvalues cross, and might turn both by any angle.

    So this does both. QR by size finds the new directions, and each column loses what it has along
    directions that are more than `FAR_LARGER` times as large. QR in the order in which columns
    stand does the rest. At a crossing the two directions are treated alike, so it does not matter
    which of them came first.
    """
    order = sizes.argsort(dim=-1, descending=True, stable=True)
    by_size, falling = select_columns(columns, order), sizes.gather(-1, order)
    places = order.argsort(dim=-1)
    # LAPACK's Householder is the faster on a CPU; on a GPU everything is products, and the host
    # waits for nothing.
    is_on_gpu = columns.device.type == "cuda"
    orthonormalize = _reduced_by_cholesky if is_on_gpu else _reduced_by_householder
    return orthonormalize(by_size, falling, places)


def _reduced_by_householder(
    columns: Tensor,  # C (b, m, m), by falling size
    sizes: Tensor,  # (b, m), falling
    places: Tensor,  # (b, m): for each place, the index of the column that stands there
) -> Tensor:
    """The orthonormal factor (b, m, m) of D R' with its columns back in their places.

    C = D R is the QR decomposition, and R' is the part of R that is kept (`_kept`). D is never
    written out: LAPACK multiplies by its reflections.
    """
    reflections = _padded(columns)
    scales = _decompose(reflections)
    triangle = reflections.mT[:, :, : columns.shape[-1]].tril().mT  # R
    kept = select_columns(_kept(triangle, sizes), places)
    reduced = torch.ormqr(reflections, scales, _padded(kept))
    return _factor_of_padded(reduced)


def _reduced_by_cholesky(
    columns: Tensor,  # C (b, m, m), by falling size
    sizes: Tensor,  # (b, m), falling
    places: Tensor,  # (b, m)
) -> Tensor:
    """The same as `_reduced_by_householder`, by CholeskyQR; NaN where it is not orthogonal."""
    # `_reduced` is a function of its own so that its matrices, which can take gigabytes on a GPU,
    # are freed before the last factor.
    return _cholesky_qr(select_columns(_reduced(columns, sizes), places))


def _reduced(
    columns: Tensor,  # C = D R (b, m, m), by falling size
    sizes: Tensor,  # (b, m), falling
) -> Tensor:
    """D R' (b, m, m), by CholeskyQR.

    D may be orthogonal to less than rounding: the factor of D R' is orthogonal anyway.
    """
    directions = _nearly_orthonormal(columns)  # D
    triangle = _lower_product(columns, directions).mT  # R = D^T C
    return _product_with_upper(directions, _kept(triangle, sizes))


def _kept(
    triangle: Tensor,  # R (b, m, m), overwritten: what each column has along each direction
    sizes: Tensor,  # z (b, m), falling
) -> Tensor:
    """R' (b, m, m), what each column keeps along each direction: of R_ij the share
    (FAR_LARGER z_j / z_i)^2, at most 1."""
    shares = FAR_LARGER * sizes[:, :, None] / sizes[:, None, :]  # (b, j, i)
    triangle.mT.mul_(shares.clamp_(max=1).square_())
    return triangle


def factor_product(factor: Tensor, basis: Tensor) -> Tensor:
    """F F^T Q for a factor (b, m, n) and a basis (b, m, m), in the cheaper of the two orders."""
    rows, columns = factor.shape[-2:]
    if columns < rows:
        return ((basis.mT @ factor) @ factor.mT).mT
    return covariance_product(factor @ factor.mT, basis)


def covariance_product(covariance: Tensor, basis: Tensor) -> Tensor:
    """C Q for symmetric C and a basis Q, both (b, m, m)."""
    return (basis.mT @ covariance).mT


def _householder_qr(
    matrices: Tensor,  # (b, m, m)
) -> Tensor:
    """The orthogonal factor of the QR decomposition whose R has a positive diagonal, and so is
    unique."""
    return _factor_of_padded(_padded(matrices))


def _padded(
    matrices: Tensor,  # (b, m, m)
) -> Tensor:
    """The matrices above rows of zeros (b, m + PADDING, m), stored by columns."""
    # LAPACK is slow if columns lie a power of two apart in memory, and models' widths often are
    # powers of two.
    b, m, _ = matrices.shape
    padded = matrices.new_empty(b, m, m + PADDING).mT
    padded[:, :m] = matrices
    padded[:, m:] = 0
    return padded


def _decompose(
    padded: Tensor,  # (b, m + PADDING, m), overwritten: R above the diagonal, reflections below
) -> Tensor:
    """LAPACK's QR decomposition in place; returns the scales (b, m) of the reflections."""
    scales = padded.new_empty(len(padded), padded.shape[-1])
    torch.geqrf(padded, out=(padded, scales))
    return scales


def _factor_of_padded(
    padded: Tensor,  # (b, m + PADDING, m), overwritten
) -> Tensor:
    """As `_householder_qr`, for a matrix that is padded already."""
    scales = _decompose(padded)
    diagonal = padded.diagonal(dim1=-2, dim2=-1)
    signs = torch.ones_like(diagonal).copysign(diagonal)  # never 0
    # In place: these matrices outgrow the caches.
    torch.linalg.householder_product(padded, scales, out=padded)
    return padded[:, : padded.shape[-1]].mul_(signs[:, None, :])


def _cholesky_qr(
    matrices: Tensor,  # (b, m, m)
) -> Tensor:
    """The orthogonal factor by three passes of CholeskyQR; NaN where it is not orthogonal."""
    columns = _nearly_orthonormal(matrices)
    gram = _lower_product(columns, columns)
    # If the Gram matrix is close to the identity, this pass is orthogonal to rounding. Its squared
    # Frobenius norm comes from the lower triangle; the identity's is m.
    diagonal = gram.diagonal(dim1=-2, dim2=-1)
    squares = 2 * gram.tril().square().sum(dim=(1, 2)) - diagonal.square().sum(dim=-1)
    is_close = squares - gram.shape[-1] < 0.1  # not so for NaN
    result: Tensor = _cholesky_pass(columns, gram).masked_fill_(~is_close[:, None, None], torch.nan)
    return result


def _nearly_orthonormal(
    matrices: Tensor,  # (b, m, m)
) -> Tensor:
    """The orthogonal factor by two passes: orthogonal to rounding where columns are far from
    dependent.

    A pass loses orthogonality by the rounding error times the square of the condition number
    (arXiv:1401.5171, section 2), whatever the columns' lengths. A shift of X^T X makes the first
    pass possible, and its result well-conditioned (arXiv:1809.11085). The second makes that nearly
    orthogonal, and a third would make it orthogonal. benchmarks/orthonormal.py has the condition
    numbers of a training.
    """
    columns = matrices / torch.linalg.vector_norm(matrices, dim=-2, keepdim=True)
    gram = _lower_product(columns, columns)
    shift = 10 * gram.shape[-1] * torch.finfo(gram.dtype).eps
    gram.diagonal(dim1=-2, dim2=-1).add_(shift)
    columns = _cholesky_pass(columns, gram)
    return _cholesky_pass(columns, _lower_product(columns, columns))


def _cholesky_pass(
    columns: Tensor,  # X (b, m, m)
    gram: Tensor,  # X^T X (b, m, m), perhaps with a shift; only its lower triangle is read
) -> Tensor:
    """X L^-T with X^T X = L L^T; NaN where there is no such L."""
    lower, info = torch.linalg.cholesky_ex(gram)
    columns = torch.linalg.solve_triangular(lower, columns.mT, upper=False).mT
    result: Tensor = columns.masked_fill_((info != 0)[:, None, None], torch.nan)
    return result


def _lower_product(
    left: Tensor,  # (b, m, m)
    right: Tensor,  # (b, m, m)
) -> Tensor:
    """The lower triangle of left^T right (b, m, m), with 5/8 of the operations. Entries above it
    have no meaning."""
    blocks = []
    for start, stop in _blocks(right.shape[-1]):
        below = left[:, :, start:].mT @ right[:, :, start:stop]
        blocks.append(pad(below, (0, 0, start, 0)))
    return torch.cat(blocks, dim=-1)


def _product_with_upper(
    left: Tensor,  # (b, m, m)
    upper: Tensor,  # (b, m, m), triangular
) -> Tensor:
    """left upper (b, m, m), with 5/8 of the operations."""
    blocks = []
    for start, stop in _blocks(upper.shape[-1]):
        blocks.append(left[:, :, :stop] @ upper[:, :stop, start:stop])
    return torch.cat(blocks, dim=-1)


def _blocks(size: int) -> list[tuple[int, int]]:
    """The bounds of `NUM_BLOCKS` blocks of columns, or of as many as there are columns."""
    bounds = [size * number // NUM_BLOCKS for number in range(NUM_BLOCKS + 1)]
    return [(start, stop) for start, stop in pairwise(bounds) if start < stop]


def select_columns(
    matrices: Tensor,  # (b, m, n)
    order: Tensor,  # (b, n)
) -> Tensor:
    """The columns (b, m, n) of each matrix, in the order that `order` gives for this matrix."""
    batch = torch.arange(len(order), device=order.device)[:, None]
    return matrices.mT[batch, order].mT


def resolution(dtype: torch.dtype) -> float:
    """The smallest share of the largest value that is more than rounding."""
    return NOISE_ROUNDINGS * torch.finfo(dtype).eps


def exact_factor_eigenbasis(
    factor: Tensor,  # (b, m, n)
    on_done: Callable[[int], None] = lambda num: None,
) -> Refreshed:
    """Exact eigenvectors of F F^T, as in `exact_eigenbasis`; the eigenvalues are the squares of F's
    singular values."""
    smallest = max(resolution(factor.dtype) ** 2, resolution(torch.float64))
    return exact_eigenbasis(factor.double() @ factor.mT.double(), smallest, on_done)


def exact_eigenbasis(
    covariance: Tensor,  # (b, m, m)
    smallest: float | None = None,
    on_done: Callable[[int], None] = lambda num: None,
) -> Refreshed:
    """Exact eigenvectors, largest eigenvalue first.

    Where rounding cannot distinguish eigenvalues, their common eigenspace gets the projections of
    some axes, orthonormalised one after the other. These depend on the space alone, not on the
    vectors that the decomposition returns. The space without energy is treated in the same way, so
    that a zero matrix gets the identity. The projection of an axis also decides the sign of a
    single eigenvector. Computed in float64.

    Args:
        smallest: eigenvalues up to this share of the largest have no energy; None: the share that
            rounding leaves.
        on_done: called with the number of further matrices that are done; one of 10,752 columns
            takes seconds.
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
    """Eigenvalues (m,), largest first, and eigenvectors (m, m) of each matrix; None where LAPACK
    finds none."""
    try:
        values, vectors = torch.linalg.eigh(covariance)
    except RuntimeError:  # torch.linalg.LinAlgError is one
        if len(covariance) > 1:  # one failure must not affect the others
            return [_decompositions(matrix[None])[0] for matrix in covariance]
        return [_from_singular_vectors(covariance[0])]
    return list(zip(values.flip(-1), vectors.flip(-1), strict=True))


def _from_singular_vectors(covariance: Tensor) -> tuple[Tensor, Tensor] | None:
    """The same for one covariance (m, m), by another algorithm: LAPACK's eigh sometimes fails if
    many rows are zero."""
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
    """For each eigenspace (neighbouring columns with about equal eigenvalues), as many axes as it
    has dimensions, projected into it."""
    decided = eigenvalues > smallest * eigenvalues[0]
    apart = -eigenvalues.diff() > TIE * eigenvalues.clamp(min=0).mean()
    # A space begins at a column with energy that is apart from the one before, and at the first
    # column without energy.
    starts = torch.where(decided[1:], apart, decided[:-1]).nonzero().flatten() + 1
    # For each eigenvector, an axis e along which it is long; see `LEADING`.
    leading = (vectors.abs() > LEADING * vectors.abs().amax(dim=0)).int().argmax(dim=0)
    # For spaces of one dimension: q q^T e, which does not depend on the sign of q.
    projected = vectors * vectors.gather(0, leading[None])
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
    # Cheaper: the axes that the complement does not take.
    others = _leading_axes(torch.cat([vectors[:, :start], vectors[:, stop:]], dim=1))
    return sorted(set(range(size)) - set(others))


def _leading_axes(
    space: Tensor,  # (m, k)
) -> list[int]:
    """As many axes as the space has dimensions, with projections that are far from dependent.

    They are chosen one by one. Each is the first axis whose projection has about the largest part
    left outside the span of the projections chosen before. So rounding does not decide between axes
    that tie.
    """
    rest, axes = space.clone(), []
    for _ in range(space.shape[1]):
        lengths = rest.norm(dim=1)
        axis = int((lengths > LEADING * lengths.max()).int().argmax())
        direction = rest[axis] / lengths[axis]
        rest -= torch.outer(rest @ direction, direction)
        axes.append(axis)
    return axes
