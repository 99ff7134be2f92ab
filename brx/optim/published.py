"""The update of the authors' code (github.com/LOG-postech/basis-rotation), for comparison.

docs/methods.md lists the differences."""

import math

import torch
from torch import Tensor

from .eigenbasis import select_columns
from .matrix_batch import MatrixBatch, rotate, seen_from
from .parameter_state import Side


def published_update(
    batch: MatrixBatch,
    gradient: Tensor,  # (b, m, n)
    is_due: bool,  # whether a refresh is due
) -> Tensor:
    """Update the state, and give the change of the weights (b, m, n).

    `exp_avg` is in the original space here.
    """
    t = batch.members[0].num_updates + 1
    options = batch.options
    lr = options["lr"]
    beta1, beta2 = options["betas"]
    momentum, second_moment = batch.matrices("exp_avg"), batch.matrices("exp_avg_sq")
    momentum.lerp_(gradient, 1 - beta1)
    if options["source"] == "2nd":
        for side in batch.sides:
            factor = seen_from(side, gradient)
            batch.matrices(f"{side}_covariance").lerp_(factor @ factor.mT, 1 - beta2)
    # Their test for the first time asks for the left basis, which unilateral rotation of m >= n
    # never has.
    if is_due or t == 1 or "left" not in batch.sides:
        _renew_bases(batch, momentum, second_moment, is_first=t == 1)
    rotated = rotate(batch, gradient)
    second_moment.mul_(beta2).addcmul_(rotated, rotated, value=1 - beta2)
    # eps is added before the bias correction.
    step = rotate(batch, momentum) / (second_moment.sqrt() + options["eps"])
    batch.state["step"] += 1
    return rotate(batch, step, back=True).mul_(-lr * math.sqrt(1 - beta2**t) / (1 - beta1**t))


def _renew_bases(
    batch: MatrixBatch,
    momentum: Tensor,  # M (b, m, n)
    second_moment: Tensor,  # (b, m, n), reordered in place
    is_first: bool,
) -> None:
    old = {side: batch.matrices(f"{side}_basis").clone() for side in batch.sides}
    for side in batch.sides:
        if batch.options["source"] == "2nd":
            basis = _basis_of_covariance(batch, side, old[side], second_moment, is_first)
        elif is_first:
            left, _, right = torch.linalg.svd(momentum)
            basis = left if side == "left" else right.mT
        else:
            basis = _basis_of_momentum(side, momentum, old, second_moment)
        batch.matrices(f"{side}_basis").copy_(basis)


def _basis_of_covariance(
    batch: MatrixBatch,
    side: Side,
    basis: Tensor,  # the old one, U (b, m, m)
    second_moment: Tensor,
    is_first: bool,
) -> Tensor:
    """L's eigenvectors, later QR(L U) with columns by falling eigenvalue."""
    covariance = batch.matrices(f"{side}_covariance")
    if is_first:
        vectors: Tensor = torch.linalg.eigh(covariance).eigenvectors
        return vectors.flip(-1)
    product = covariance @ basis
    order = (basis * product).sum(dim=-2).argsort(dim=-1, descending=True)  # (b, m)
    _reorder(side, second_moment, order)
    renewed: Tensor = torch.linalg.qr(select_columns(product, order)).Q
    return renewed


def _basis_of_momentum(
    side: Side,
    momentum: Tensor,
    old: dict[Side, Tensor],  # the bases of the rotated sides
    second_moment: Tensor,
) -> Tensor:
    """QR(M V), columns by falling length; QR(M) where the other side is not rotated."""
    other: Side = "right" if side == "left" else "left"
    factor = seen_from(side, momentum)
    product = factor @ old[other] if other in old else factor
    # These are the other side's columns, and they reorder its second moments.
    order = product.square().sum(dim=-2).argsort(dim=-1, descending=True)
    _reorder(other, second_moment, order)
    renewed: Tensor = torch.linalg.qr(select_columns(product, order), mode="complete").Q
    return renewed


def _reorder(
    side: Side,
    matrices: Tensor,  # (b, m, n), in place
    order: Tensor,  # (b, m) for the left side's rows, (b, n) for the right side's columns
) -> None:
    if side == "left":
        matrices.copy_(select_columns(matrices.mT, order).mT)
    else:
        matrices.copy_(select_columns(matrices, order))
