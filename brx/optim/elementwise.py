"""The elementwise part of a step: AdamW, and what keeps rounding noise from taking full steps."""

from __future__ import annotations

import math
from itertools import groupby

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from .dtensor import local
from .member import Member, State
from .options import Group
from .parameter_state import arithmetic

LARGEST_STEP = 1.8
"""How far an update moves an entry at most, in steps of the largest size that AdamW could take
then.

Entries without gradient history all take full steps, which in one entry of the original space can
add up. With the usual betas the limit is 1.8 learning rates at update 2, 2.9 at 50, 13 in the
end."""


def update_elementwise(members: list[Member], bad: Tensor | None) -> None:
    """One step of AdamW; of sharded parameters, of the part that lies here."""
    for _, of_one_call in groupby(
        members, lambda m: (id(m.group), m.parameter.dtype, m.parameter.device)
    ):
        alike = list(of_one_call)
        parameters = [local(member.parameter) for member in alike]
        dtype = arithmetic(parameters[0])
        # Half-precision weights are rounded once, after the update. The kernel goes through memory
        # from end to end.
        weights = [parameter.to(dtype).contiguous() for parameter in parameters]
        gradients = [
            local(member.gradient).to(dtype).contiguous()
            for member in alike
            if member.gradient is not None
        ]
        fused_adamw(weights, gradients, [member.state for member in alike], alike[0].options, bad)
        for parameter, weight in zip(parameters, weights, strict=True):
            if weight is not parameter:
                parameter.copy_(weight)


def fused_adamw(
    weights: list[Tensor],
    gradients: list[Tensor],
    states: list[State],
    options: Group,
    bad: Tensor | None,
) -> None:
    """One AdamW step with torch's kernel, which counts it, too; if the flag `bad` is set, it
    changes nothing."""
    beta1, beta2 = options["betas"]
    momenta, second_moments, steps = (
        [local(of[name]) for of in states] for name in ("exp_avg", "exp_avg_sq", "step")
    )
    # Below this, squares of gradients are zero, and a zero over a zero would be NaN.
    smallest_eps = math.sqrt(torch.finfo(weights[0].dtype).tiny)
    adamw(
        weights,
        gradients,
        momenta,
        second_moments,
        [],  # of AMSGrad
        steps,
        fused=True,
        found_inf=None if bad is None else bad.float(),
        amsgrad=False,
        beta1=beta1,
        beta2=beta2,
        lr=options["lr"],
        weight_decay=options["weight_decay"],
        eps=max(options["eps"], smallest_eps),
        maximize=options["maximize"],
    )


def above_noise(second_moment: Tensor) -> Tensor:
    """A factor (*, m, n) from 0, for entries of rotated gradients that are rounding noise, to 1.

    Adam would scale noise to full steps. Rounding of the basis leaves up to 4 eps of the matrix in
    a whole row or column that should be zero; their floor is 16 eps. What is 4 times below a floor
    moves by 1.5e-5 of its step."""
    of_row, of_column = (second_moment.mean(dim=dim, keepdim=True) for dim in (-1, -2))
    m, n, number = of_row.shape[-2], of_column.shape[-1], torch.finfo(second_moment.dtype)
    tilt = of_row.mean(dim=-2, keepdim=True) * (16 * number.eps) ** 2 + number.tiny
    # In place: one array of the matrices' size, as the memory of a second would cost the CPU more
    #     than the arithmetic.
    damping = _fourth_power(noise_floor(of_row, of_column).div_(second_moment)).add_(1)
    return (
        damping.add_(_fourth_power(m * tilt / of_row))
        .add_(_fourth_power(n * tilt / of_column))
        .reciprocal_()
    )


def _fourth_power(ratio: Tensor) -> Tensor:
    """In place, of ratios that one is added to: what is below 1e-5 counts as that, as subnormal
    numbers are slow."""
    return ratio.clamp_(min=1e-5).square_().square_()


def noise_floor(of_row: Tensor, of_column: Tensor) -> Tensor:
    """The square of what counts as rounding noise in each entry of a rotated gradient (*, m, n),
    from the mean squares of its rows (*, m, 1) and columns (*, 1, n). Measured
    (`benchmarks/first_steps`), rounding leaves 0.2 to 0.4, not 7."""
    m, n, number = of_row.shape[-2], of_column.shape[-1], torch.finfo(of_row.dtype)
    mean_squares = (of_row + of_column).add_(of_row.mean(dim=-2, keepdim=True))
    return mean_squares.mul_(math.sqrt(m + n) * (7 * number.eps) ** 2).add_(number.tiny)


def largest_adam_step(update: int, betas: tuple[float, float]) -> float:
    """The largest |m^| / sqrt(v^) of any gradients up to that update, by Cauchy-Schwarz; inf where
    beta1^2 >= beta2."""
    beta1, beta2 = betas
    if beta1**2 >= beta2:
        return math.inf
    ratio = beta1**2 / beta2
    of_sums = (1 - beta2**update) / (1 - beta2) * ((1 - beta1) / (1 - beta1**update)) ** 2
    return math.sqrt(of_sums * (1 - ratio**update) / (1 - ratio))
