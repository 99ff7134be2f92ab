"""The elementwise part of a step: AdamW, what keeps rounding noise from taking full steps, and the
limit of a step.

Between its matrix products a step reads and writes every entry. On the CPU torch's fused kernel
does most of it; on a GPU `torch.compile` can make one pass of `rotated_update` and one of
`add_updates` (`Kernels`)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from .dtensor import local
from .member import Member, State
from .options import Group
from .parameter_state import arithmetic

NOISE_FLOOR = 1000
"""Up to how many roundings, relative to the root mean square of its row, column and matrix, an
entry of a rotated gradient does not move."""
MOMENTUM_FLOOR = 16
"""How many times smaller than such an entry its momentum must be to count as noise."""


def update_elementwise(
    members: Sequence[Member],  # all in one group, dtype and device; each has a gradient
    lr: float | Tensor,
    bad: Tensor | None,
) -> None:
    """One step of AdamW; of sharded parameters, for the part that lies here. With the flag `bad` it
    changes nothing."""
    parameters = [local(member.parameter) for member in members]
    dtype = arithmetic(parameters[0])
    # Half-precision weights are rounded once, after the update. The kernel goes through memory from
    # end to end.
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
    """One AdamW step with torch's kernel, which counts it, too; if the flag `bad` is set, it
    changes nothing."""
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
    # Below this, squares of gradients are zero, and a zero over a zero would be NaN.
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
    """The moments' recursions, and -lr m^ / (sqrt(v^) + eps) without rounding noise, of the
    gradient's shape.

    In plain operations, for `torch.compile`; `steps` is not counted on.
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
    """W <- decay W + update, entries of the update limited; in plain operations, for
    `torch.compile`."""
    for weight, update in zip(weights, updates, strict=True):
        weight.mul_(decay).add_(limited(update.clone(), limit))


def limited(
    updates: Tensor,  # overwritten
    limit: float | Tensor,  # or () on the device; infinite for none
) -> Tensor:
    """Updates with no entry larger than the limit."""
    if isinstance(limit, Tensor):
        return updates.clamp_(-limit, limit)
    return updates.clamp_(-limit, limit) if limit < math.inf else updates


@dataclass(frozen=True)
class Kernels:
    """The functions of a step, compiled or as they are."""

    rotated_update: Callable[..., Tensor]
    add_updates: Callable[..., None]


@cache
def compiled_kernels(**options: Any) -> Kernels:
    """`rotated_update` and `add_updates` as one kernel each, except for sums over rows and columns.
    The first call takes seconds."""
    # With sizes left open, so that a model of many shapes does not compile for each.
    options = {"dynamic": True, **options}
    return Kernels(torch.compile(rotated_update, **options), torch.compile(add_updates, **options))


def above_noise(
    second_moment: Tensor,  # v (*, m, n)
    rounding: float = 0.0,
    mean_square: Tensor | None = None,  # the square of the mean (*, m, n), in the units of v
) -> Tensor:
    """A factor (*, m, n) from 0, for entries of rotated gradients that are rounding noise, to 1.

    Adam would scale noise to full steps. An entry does not move where v is no more than the noise
    floor, where its whole row or column has no more energy than rounding of the basis leaves in one
    that should be zero, or where the momentum is no more than noise: v may be large there from
    other gradients.

    Args:
        rounding: of the rotations' factors (`products.factor_rounding`). It leaves 0.3 of itself in
            such a row or column; 2 are added to the floor.
        mean_square: m^2 (1 - beta2^t) / (1 - beta1^t)^2; None: far above noise.
    """
    of_row = second_moment.mean(dim=-1, keepdim=True)  # (*, m, 1)
    of_column = second_moment.mean(dim=-2, keepdim=True)  # (*, 1, n)
    m, n, number = of_row.shape[-2], of_column.shape[-1], torch.finfo(second_moment.dtype)
    share = (NOISE_FLOOR * number.eps) ** 2 + (2 * rounding) ** 2
    tilt = of_row.mean(dim=-2, keepdim=True) * share + number.tiny  # (*, 1, 1)
    floor = noise_floor(of_row, of_column, rounding)
    of_mean = None
    if mean_square is not None:
        of_mean = (floor / mean_square).mul_(1 / MOMENTUM_FLOOR**2)
    # In place: as few arrays of the matrices' size as can be, as their memory would cost the CPU
    # more than the arithmetic.
    damping = _fourth_power(floor.div_(second_moment)).add_(1)
    damping.add_(_fourth_power(m * tilt / of_row))
    damping.add_(_fourth_power(n * tilt / of_column))
    if of_mean is not None:
        damping.add_(of_mean.clamp_(min=1e-10).square_())
    return damping.reciprocal_()


def _fourth_power(ratio: Tensor) -> Tensor:
    """In place, of ratios that one is added to: what is below 1e-5 counts as that, as subnormal
    numbers are slow."""
    return ratio.clamp_(min=1e-5).square_().square_()


def noise_floor(
    of_row: Tensor,  # (*, m, 1): the mean squares of the rows
    of_column: Tensor,  # (*, 1, n): the mean squares of the columns
    rounding: float = 0.0,  # as in `above_noise`
) -> Tensor:
    """The square of what counts as rounding noise in each entry of a rotated gradient (*, m, n).

    Measured (`benchmarks/first_steps`), sums leave 0.2 to 0.4 eps (m + n)^(1/4) of the mean
    squares' root, and the factors' rounding 0.4 to 0.6 of itself, not 2. The floor is so much
    higher because an entry's step is as uncertain as its noise is large beside it.
    """
    m, n, number = of_row.shape[-2], of_column.shape[-1], torch.finfo(of_row.dtype)
    mean_squares = (of_row + of_column).add_(of_row.mean(dim=-2, keepdim=True))
    share = math.sqrt(m + n) * (NOISE_FLOOR * number.eps) ** 2 + (2 * rounding) ** 2
    return mean_squares.mul_(share).add_(number.tiny)
