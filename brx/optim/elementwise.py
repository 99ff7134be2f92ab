"""The elementwise part of a step: AdamW, the damping of rounding noise, and the limit of a step.

Between its matrix products a step reads and writes every entry. By default GPUs run the same code
as CPUs: torch's fused AdamW does most of this. With the option `compiled`, a GPU runs
`rotated_update` and `add_updates` instead, which `torch.compile` turns into one pass each
(`Kernels`).

So the arithmetic of the rotated space stands in two places: here in `rotated_update`, and around
`fused_adamw` in `BasisRotation._rotated_adam` (basis_rotation.py). A change to one belongs in the
other."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from .dtensor import local
from .options import Group
from .parameter_state import arithmetic
from .step_member import State, StepMember

NOISE_FLOOR = 1000
"""The step of an entry in the rotated space is zero if its gradient is at most this many roundings
of the root mean square of its row, column and matrix."""
MOMENTUM_FLOOR = 16
"""The step is zero, too, if the entry's momentum is this many times smaller than that floor."""


def update_elementwise(
    members: Sequence[StepMember],  # all in one group, dtype and device; each has a gradient
    lr: float | Tensor,
    bad: Tensor | None,
) -> None:
    """One step of AdamW, for this rank's part of sharded parameters. With the flag `bad` it changes
    nothing."""
    parameters = [local(member.parameter) for member in members]
    dtype = arithmetic(parameters[0])
    # Half-precision weights are rounded once, after the update. The kernel needs tensors without
    # gaps.
    weights = [parameter.to(dtype).contiguous() for parameter in parameters]
    gradients = []
    for member in members:
        if member.gradient is not None:
            gradients.append(local(member.gradient).to(dtype).contiguous())
    fused_adamw(weights, gradients, [m.state for m in members], lr, members[0].options, bad)
    for parameter, weight in zip(parameters, weights, strict=True):
        if weight is not parameter:
            parameter.copy_(weight)


def fused_adamw(
    weights: list[Tensor],
    gradients: list[Tensor],
    states: list[State],
    lr: float | Tensor,
    options: Group,
    bad: Tensor | None,
) -> None:
    """One AdamW step with torch's kernel, which also counts it. With the flag `bad` it changes
    nothing."""
    beta1, beta2 = options["betas"]
    adamw(
        weights,
        gradients,
        [local(state["exp_avg"]) for state in states],
        [local(state["exp_avg_sq"]) for state in states],
        [],  # AMSGrad's largest second moments
        [local(state["step"]) for state in states],
        fused=True,
        found_inf=None if bad is None else bad.float(),
        amsgrad=False,
        beta1=beta1,
        beta2=beta2,
        lr=lr,
        weight_decay=options["weight_decay"],
        eps=_usable_eps(options["eps"], weights[0].dtype),
        maximize=options["maximize"],
    )


def _usable_eps(eps: float, dtype: torch.dtype) -> float:
    # Squares of smaller gradients are zero, and zero over zero would be NaN.
    return max(eps, math.sqrt(torch.finfo(dtype).tiny))


def rotated_update(
    gradient: Tensor,  # U^T G V: (b, m, n), or (members, *lead, m, n) as the moments
    momentum: Tensor,  # U^T M V, as the gradient; updated in place
    second_moment: Tensor,  # v, the same
    steps: Tensor,  # updates before this one: (), or (members, 1, .., 1)
    lr: float | Tensor,
    bad: Tensor | None,  # a flag () with which nothing is to change
    beta1: float,
    beta2: float,
    eps: float,
    rounding: float,  # relative rounding of the rotations' factors, for the noise floor
) -> Tensor:
    """Update the moments, and return -lr m^ / (sqrt(v^) + eps) in the gradient's shape, with
    rounding noise damped (`above_noise`).

    In plain operations, for `torch.compile`; the contract is `RotatedUpdate`. Without `compiled`,
    `BasisRotation._rotated_adam` computes the same with torch's fused kernel, but for rounding.
    """
    is_good = 1.0 if bad is None else (~bad).to(gradient.dtype)
    count = steps.to(gradient.dtype) + 1
    momentum.add_((gradient - momentum) * ((1 - beta1) * is_good))
    second_moment.add_((gradient.square() - second_moment) * ((1 - beta2) * is_good))
    correction1 = 1 - beta1**count
    correction2 = 1 - beta2**count
    denominator = (second_moment / correction2).sqrt() + _usable_eps(eps, gradient.dtype)
    update = momentum / (correction1 * denominator) * (-lr * is_good)
    mean_square = momentum.square() * (correction2 / correction1**2)
    return update * above_noise(second_moment, rounding, mean_square)


def add_updates(
    weights: Sequence[Tensor],  # in the dtype of the arithmetic; changed in place
    updates: Sequence[Tensor],  # in the original space, as the weights
    decay: Tensor,  # ()
    limit: float | Tensor,  # the largest change of an entry
) -> None:
    """W <- decay W + update, with the entries of the update limited.

    In plain operations, for `torch.compile`; the contract is `AddUpdates`. Without `compiled`,
    `MatrixBatch.update_weights` computes the same.
    """
    for weight, update in zip(weights, updates, strict=True):
        weight.mul_(decay).add_(limited(update.clone(), limit))


def limited(
    updates: Tensor,  # overwritten
    limit: float | Tensor,  # a number, or a tensor () on the device; infinite for none
) -> Tensor:
    """The updates, with every entry clamped to the limit."""
    if isinstance(limit, Tensor):
        return updates.clamp_(-limit, limit)
    return updates.clamp_(-limit, limit) if limit < math.inf else updates


class RotatedUpdate(Protocol):
    """The first kernel of a step: the moments' recursions, and the update in the rotated space.

    - It overwrites `momentum` and `second_moment`, and nothing else. The caller increases `steps`
      afterwards.
    - `bad` is None, or a flag () on the device. The kernel handles it: where it is set, the moments
      stay and the update is zero. The caller has replaced the entries of a bad gradient by 0
      (`MatrixBatch.gradients`), so that no NaN comes in.
    - `lr` is a number, or a tensor () of float32 on the device, in which each step's learning rate
      is written.
    - The host must not wait for the device: no `item`, no branch on a tensor's value.
    - Sharded weights have it too: their owner computes with whole matrices.
    """

    def __call__(
        self,
        gradient: Tensor,
        momentum: Tensor,
        second_moment: Tensor,
        steps: Tensor,
        lr: float | Tensor,
        bad: Tensor | None,
        beta1: float,
        beta2: float,
        eps: float,
        rounding: float,
        /,
    ) -> Tensor:
        """Give the update; the arguments are those of the function `rotated_update`."""


class AddUpdates(Protocol):
    """The last kernel of a step: W <- decay W + update, with the update limited.

    - It overwrites `weights`, and leaves `updates` as they are.
    - It knows no flag `bad`. With a bad gradient, the caller gives a decay of 1 and updates of
      zero.
    - `limit` is a number, or a tensor () on the device in the dtype of the arithmetic.
    - The host must not wait for the device.
    - Sharded weights skip it: their ranks add the updates themselves (`exchange.apply_updates`).
    """

    def __call__(
        self,
        weights: Sequence[Tensor],
        updates: Sequence[Tensor],
        decay: Tensor,
        limit: float | Tensor,
        /,
    ) -> None:
        """Change the weights; the arguments are those of the function `add_updates`."""


@dataclass(frozen=True)
class Kernels:
    """The compiled functions of a step's elementwise part."""

    rotated_update: RotatedUpdate
    add_updates: AddUpdates


@cache
def compiled_kernels(**options: Any) -> Kernels:
    """`rotated_update` and `add_updates`, compiled to one kernel each, except for sums over rows
    and columns. The first call takes seconds."""
    # With sizes left open: otherwise it would compile for each shape of the model.
    options = {"dynamic": True, **options}
    return Kernels(torch.compile(rotated_update, **options), torch.compile(add_updates, **options))


def above_noise(
    second_moment: Tensor,  # v (*, m, n)
    rounding: float = 0.0,
    mean_square: Tensor | None = None,  # the square of the mean (*, m, n), in the units of v
) -> Tensor:
    """The factor (*, m, n) of each entry's step, from 0 for rounding noise to 1.

    Adam would scale noise to full steps. An entry does not move in three cases: v is at most the
    noise floor; its whole row or column has at most the energy that rounding of the basis leaves in
    one that should be zero; or its momentum is at most noise. In the last case v may be large from
    other gradients.

    Args:
        rounding: the rounding of the rotations' factors (`products.factor_rounding`). It leaves 0.3
            of itself in such a row or column, and the floor adds twice its size.
        mean_square: m^2 (1 - beta2^t) / (1 - beta1^t)^2; None: far above noise.
    """
    row_means = second_moment.mean(dim=-1, keepdim=True)  # (*, m, 1)
    column_means = second_moment.mean(dim=-2, keepdim=True)  # (*, 1, n)
    m, n = row_means.shape[-2], column_means.shape[-1]
    finfo = torch.finfo(second_moment.dtype)
    share = (NOISE_FLOOR * finfo.eps) ** 2 + (2 * rounding) ** 2
    # m n tilt is the energy that rounding of the basis may put into one row or column.
    tilt = row_means.mean(dim=-2, keepdim=True) * share + finfo.tiny  # (*, 1, 1)
    floor = noise_floor(row_means, column_means, rounding)
    momentum_ratio = None  # of the floor to the momentum, squared (*, m, n)
    if mean_square is not None:
        momentum_ratio = (floor / mean_square).mul_(1 / MOMENTUM_FLOOR**2)
    # In place, with as few arrays of the matrices' size as possible: on the CPU their memory costs
    # more than the arithmetic.
    damping = _fourth_power(floor.div_(second_moment)).add_(1)
    damping.add_(_fourth_power(m * tilt / row_means))
    damping.add_(_fourth_power(n * tilt / column_means))
    if momentum_ratio is not None:
        damping.add_(momentum_ratio.clamp_(min=1e-10).square_())
    return damping.reciprocal_()


def _fourth_power(ratio: Tensor) -> Tensor:
    """The fourth power, in place, of ratios that are added to 1. Ratios below 1e-5 become 1e-5,
    because subnormal numbers are slow."""
    return ratio.clamp_(min=1e-5).square_().square_()


def noise_floor(
    of_row: Tensor,  # (*, m, 1): the mean squares of the rows
    of_column: Tensor,  # (*, 1, n): the mean squares of the columns
    rounding: float = 0.0,  # as in `above_noise`
) -> Tensor:
    """The square of the noise floor of each entry of a rotated gradient (*, m, n).

    Measured noise (`benchmarks/first_steps`) is 0.2 to 0.4 eps (m + n)^(1/4) times the root of the
    mean squares, and from the factors' rounding 0.4 to 0.6 of it. The floor is far higher, because
    an entry with a thousand times its noise still has a step that rounding changes by a thousandth.
    """
    m, n = of_row.shape[-2], of_column.shape[-1]
    finfo = torch.finfo(of_row.dtype)
    mean_squares = (of_row + of_column).add_(of_row.mean(dim=-2, keepdim=True))
    share = math.sqrt(m + n) * (NOISE_FLOOR * finfo.eps) ** 2 + (2 * rounding) ** 2
    return mean_squares.mul_(share).add_(finfo.tiny)
