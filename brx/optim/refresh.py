"""A refresh of a batch's bases: covariances, algorithm 2, and the moments in the new bases."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .eigenbasis import (
    Refreshed,
    covariance_product,
    exact_eigenbasis,
    exact_factor_eigenbasis,
    factor_product,
    power_iteration,
    resolution,
)
from .matrix_batch import MatrixBatch, rotate, seen_from, squared_mean, unless_bad
from .parameter_state import Side
from .reduced_precision import add_product


def accumulate_covariances(
    batch: MatrixBatch,
    gradient: Tensor,  # (b, m, n)
    num_updates: int,  # for how many updates the gradient counts
) -> None:
    """L <- beta2^n L + (1 - beta2^n) G G^T, and R likewise with G^T G; n is `num_updates`.

    In TF32 only G is rounded: the result is the exact covariance of a gradient nearby. If G has a
    null space, the rounding puts energy into it, up to 2^-22 of the whole (2^-20 if a GPU cuts bits
    off). The noise floor of `resolution` is higher, unless thirty eigenvalues are as large as the
    largest.
    """
    beta2 = batch.options["betas"][1] ** num_updates
    decay = beta2
    decay_unless_bad = None
    if batch.bad is not None:  # only the device knows its value; a bad gradient is zero here
        decay_unless_bad = unless_bad(beta2, gradient.dtype, batch.bad)
        decay = 1.0
    for side in batch.sides:
        factor = seen_from(side, gradient)
        covariance = batch.matrices(f"{side}_covariance")
        if decay_unless_bad is not None:
            covariance.mul_(decay_unless_bad)
        add_product(
            covariance,
            factor,
            factor.mT,
            decay=decay,
            weight=1 - beta2,
            precision=batch.options["covariance_precision"],
        )


def estimate_eigenbasis(
    batch: MatrixBatch,  # of matrices that are all due
    gradient: Tensor,  # (b, m, n)
    exact: bool,  # whether it is the first basis
    on_done: Callable[[int], None] = lambda num: None,  # called as exact bases are done
) -> None:
    """Algorithm 2: renew the bases of a batch, and bring its moments into them."""
    before = None if batch.bad is None else _copies(batch)
    # M = U (U^T M V) V^T, in the old bases.
    momentum = rotate(batch, batch.matrices("exp_avg"), back=True)
    failures = batch.state["num_failed_refreshes"]
    for side in batch.sides:
        refreshed = _refreshed(batch, side, momentum, gradient, on_done if exact else None)
        batch.matrices(f"{side}_basis").copy_(refreshed.basis)
        failures += (~refreshed.valid).view_as(failures)
    if exact:
        share_out_second_moment(batch)
    batch.matrices("exp_avg").copy_(rotate(batch, momentum))
    raise_second_moment(batch)
    if before is not None:
        _put_back_if_bad(batch, before)


def _refreshed(
    batch: MatrixBatch,
    side: Side,
    momentum: Tensor,  # M before this update, in the original space (b, m, n)
    gradient: Tensor,  # (b, m, n)
    on_exact: Callable[[int], None] | None,  # None for a power iteration
) -> Refreshed:
    """The new basis of one side, from the covariance or from the momentum."""
    basis = batch.matrices(f"{side}_basis")
    if batch.options["source"] == "2nd":
        covariance = batch.matrices(f"{side}_covariance")
        if on_exact is not None:
            return exact_eigenbasis(covariance, on_done=on_exact)
        return power_iteration(covariance_product(covariance, basis), basis)
    # `momentum` is M before this update. The factor is M after it (algorithm 1, line 4).
    factor = seen_from(side, momentum.lerp(gradient, 1 - batch.options["betas"][0]))
    if on_exact is not None:
        return exact_factor_eigenbasis(factor, on_exact)
    return power_iteration(factor_product(factor, basis), basis)


def share_out_second_moment(batch: MatrixBatch) -> None:
    """v_ij <- (share of row i) (share of column j) sum(v), in the first basis.

    Before, v holds second moments along the axes of W. The shares of a rotated side are the
    eigenvalues of its covariance, which are sums of the true second moment over the other side.
    Where a covariance tells no more than rounding, they are the shares of uncorrelated entries.
    """
    second_moment = batch.matrices("exp_avg_sq")
    row_shares = _shares(batch, "left", second_moment.sum(dim=-1))  # (b, m)
    column_shares = _shares(batch, "right", second_moment.sum(dim=-2))  # (b, n)
    total = second_moment.sum(dim=(-2, -1), keepdim=True)
    torch.mul(row_shares[:, :, None] * total, column_shares[:, None, :], out=second_moment)


def _shares(
    batch: MatrixBatch,
    side: Side,
    energies: Tensor,  # (b, m): the sums of v's rows in the old basis, or of its columns
) -> Tensor:
    """The share (b, m) of each column of a side's new basis in the sum of v."""
    if side in batch.sides:
        basis = batch.matrices(f"{side}_basis")
        # If entries are uncorrelated, the energy along column k of the basis U is the sum over i of
        # energies_i U_ik^2.
        energies = (energies[:, None, :] @ basis.square())[:, 0]
        if batch.options["source"] == "2nd":
            covariance = batch.matrices(f"{side}_covariance")
            eigenvalues = (basis * covariance_product(covariance, basis)).sum(dim=-2)
            floor = resolution(eigenvalues.dtype) * eigenvalues.amax(dim=-1, keepdim=True)
            energies = energies.where(eigenvalues <= floor, eigenvalues)
    total = energies.sum(dim=-1, keepdim=True)
    return energies / total.clamp(min=torch.finfo(total.dtype).tiny)


def raise_second_moment(batch: MatrixBatch) -> None:
    """v^ <- max(v^, m^2) in new bases.

    A mean square is never below the square of the mean (Jensen). The momentum has been rotated, but
    the second moment stays with its columns. If a column turns to where it has seen no gradients,
    v is too small for the momentum, and a step could have any size.
    """
    second_moment = batch.state["exp_avg_sq"]
    torch.maximum(second_moment, squared_mean(batch), out=second_moment)


def _copies(batch: MatrixBatch) -> dict[str, Tensor]:
    """Copies of all that a refresh changes."""
    names = ["exp_avg", "exp_avg_sq", "num_failed_refreshes"]
    names += [f"{side}_basis" for side in batch.sides]
    return {name: batch.state[name].clone() for name in names}


def _put_back_if_bad(batch: MatrixBatch, before: dict[str, Tensor]) -> None:
    """Undo a refresh on the device if the flag `bad` is set."""
    assert batch.bad is not None
    for name, value in before.items():
        batch.state[name].copy_(torch.where(batch.bad, value, batch.state[name]))
