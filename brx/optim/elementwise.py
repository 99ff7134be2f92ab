"""AdamW for the parameters that are not rotated: embeddings, head, vectors, and matrices too large on both sides."""

from __future__ import annotations

import math
from itertools import groupby

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from brx.optim.matrix_batch import Member
from brx.optim.options import Group
from brx.optim.parameter_state import arithmetic
from brx.optim.sharded import local


def update_elementwise(members: list[Member], bad: Tensor | None) -> None:
    """One step of AdamW; of sharded parameters, of the part that lies here."""
    for _, of_one_call in groupby(members, lambda m: (id(m.group), m.parameter.dtype, m.parameter.device)):
        alike = list(of_one_call)
        parameters = [local(member.parameter) for member in alike]
        dtype = arithmetic(parameters[0])
        # Half-precision weights are rounded once, after the update. The kernel goes through memory from end to end.
        weights = [parameter.to(dtype).contiguous() for parameter in parameters]
        gradients = [local(member.gradient).to(dtype).contiguous() for member in alike if member.gradient is not None]
        momenta, seconds = ([local(member.state[name]) for member in alike] for name in ("exp_avg", "exp_avg_sq"))
        steps = [member.state["step"] for member in alike]
        fused_adamw(weights, gradients, momenta, seconds, steps, alike[0].options, bad)
        for parameter, weight in zip(parameters, weights, strict=True):
            if weight is not parameter:
                parameter.copy_(weight)


def fused_adamw(
    weights: list[Tensor],
    gradients: list[Tensor],
    momenta: list[Tensor],
    second_moments: list[Tensor],
    steps: list[Tensor],
    options: Group,
    bad: Tensor | None,
) -> None:
    """torch's kernel, which counts the step, too; if the flag `bad` is set, it changes nothing."""
    beta1, beta2 = options["betas"]
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
