"""AdamW for the parameters that are not rotated: embeddings, head, vectors, and matrices too large on both sides."""

from __future__ import annotations

from itertools import groupby

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from brx.optim.matrix_batch import Member, arithmetic
from brx.optim.options import smallest_eps
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
    beta1, beta2 = options["betas"]
    found_inf = bad.get(parameters[0].device)
    adamw(
        params=weights,
        grads=[local(member.gradient).to(dtype).contiguous() for member in members if member.gradient is not None],
        exp_avgs=[local(member.state["exp_avg"]) for member in members],
        exp_avg_sqs=[local(member.state["exp_avg_sq"]) for member in members],
        max_exp_avg_sqs=[],
        state_steps=[member.state["step"] for member in members],
        fused=True,
        found_inf=None if found_inf is None else found_inf.float(),
        amsgrad=False,
        beta1=beta1,
        beta2=beta2,
        lr=options["lr"],
        weight_decay=options["weight_decay"],
        eps=max(options["eps"], smallest_eps(dtype)),
        maximize=options["maximize"],
    )
    for parameter, weight in zip(parameters, weights, strict=True):
        if weight is not parameter:
            parameter.copy_(weight)
