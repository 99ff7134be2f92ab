"""AdamW for the parameters that are not rotated: embeddings, head, vectors, and matrices too large on both sides."""

from __future__ import annotations

from itertools import groupby

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from brx.optim.matrix_batch import Member, arithmetic
from brx.optim.options import Group, smallest_eps
from brx.optim.sharded import local


def update_elementwise(members: list[Member], bad: dict[torch.device, Tensor]) -> None:
    """One step of AdamW; of sharded parameters, of the part that lies here.

    `bad`: by device, a flag () that makes the step change nothing; empty where gradients are known to be finite.
    """
    here = [member for member in members if local(member.parameter).numel()]
    for _, alike in groupby(here, _what_one_call_shares):
        _adamw(list(alike), bad)  # which counts on the device
    for member in here:
        member.num_updates += 1
    count_updates([member for member in members if not local(member.parameter).numel()], bad)


def count_updates(members: list[Member], bad: dict[torch.device, Tensor]) -> None:
    """Count an update of parameters of which nothing lies here, or which another rank updates."""
    for member in members:
        flag = bad.get(member.parameter.device)
        member.state["step"] += 1 if flag is None else ~flag
        member.num_updates += 1


def _what_one_call_shares(member: Member) -> tuple[object, ...]:
    return id(member.group), member.parameter.dtype, member.parameter.device


def _adamw(members: list[Member], bad: dict[torch.device, Tensor]) -> None:
    parameters = [local(member.parameter) for member in members]
    dtype, options = arithmetic(parameters[0]), members[0].options.group
    # Half-precision weights are rounded once, after the update. The kernel goes through memory from end to end.
    weights = [parameter.to(dtype).contiguous() for parameter in parameters]
    gradients = [local(member.gradient).to(dtype).contiguous() for member in members if member.gradient is not None]
    momenta, seconds = ([local(member.state[name]) for member in members] for name in ("exp_avg", "exp_avg_sq"))
    steps = [member.state["step"] for member in members]
    fused_adamw(weights, gradients, momenta, seconds, steps, options, bad.get(parameters[0].device))
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
        beta1=options["betas"][0],
        beta2=options["betas"][1],
        lr=options["lr"],
        weight_decay=options["weight_decay"],
        eps=max(options["eps"], smallest_eps(weights[0].dtype)),
        maximize=options["maximize"],
    )
