"""An update as the authors take it (github.com/LOG-postech/basis-rotation); docs/methods.md: the
differences."""

import math

import torch
from torch import Tensor

from .eigenbasis import select_columns
from .matrix_batch import MatrixBatch, reorder, rotate, seen_from
from .parameter_state import Side


def published_update(batch: MatrixBatch, gradient: Tensor, is_due: bool) -> Tensor:
    """What to add to the weights (b, m, n), and the state after it; `exp_avg` is in the original
    space."""
    t, lr = batch.members[0].num_updates + 1, batch.options["lr"]
    options, (beta1, beta2) = batch.options, batch.options["betas"]
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
    batch: MatrixBatch, momentum: Tensor, second_moment: Tensor, is_first: bool
) -> None:
    old = {side: batch.matrices(f"{side}_basis").clone() for side in batch.sides}
    for side in batch.sides:
        if batch.options["source"] == "2nd":
            covariance = batch.matrices(f"{side}_covariance")
            if is_first:
                basis = torch.linalg.eigh(covariance).eigenvectors.flip(-1)
            else:
                product = covariance @ old[side]
                order = (old[side] * product).sum(dim=-2).argsort(dim=-1, descending=True)  # (b, m)
                reorder(side, second_moment, order)
                basis = torch.linalg.qr(select_columns(product, order)).Q
        elif is_first:
            left, _, right = torch.linalg.svd(momentum)
            basis = left if side == "left" else right.mT
        else:
            factor = seen_from(side, momentum)
            # One product with the other side's old basis, the identity where that side is not
            # rotated: QR of M then.
            other: Side = "right" if side == "left" else "left"
            product = factor @ old[other] if other in old else factor
            # The order of the other side's columns.
            order = product.square().sum(dim=-2).argsort(dim=-1, descending=True)
            reorder(other, second_moment, order)
            basis = torch.linalg.qr(select_columns(product, order), mode="complete").Q
        batch.matrices(f"{side}_basis").copy_(basis)
