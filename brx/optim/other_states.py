"""The state of another optimizer as `BasisRotation` would have it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from brx.optim.matrix_batch import arithmetic, split_into_matrices, state_shapes
from brx.optim.options import Group
from brx.optim.sharded import whole


def state_from(other: Optimizer, parameter: Tensor, group: Group, description: str) -> dict[str, Any]:
    """What another optimizer keeps for a parameter, whole, by the names of `BasisRotation`'s state.

    AdamW: its moments, which is the state in bases that are the identity, without covariances. pytorch-optimizer's
    SOAP: moments, bases and covariances; the momentum, which it keeps in the original space, is rotated.

    Raises:
        ValueError: it has no such moments, or bases of other sides than the group's options ask for.
    """
    own, shapes = other.state[parameter], state_shapes(parameter, group)
    if "exp_avg" not in own or "exp_avg_sq" not in own:
        raise ValueError(f"{description}: its state has {', '.join(own)}, but exp_avg and exp_avg_sq are needed")
    bases = {side: q for side, q in zip(("left", "right"), own.get("Q") or (), strict=False) if len(q)}
    wanted = [name.removesuffix("_basis") for name in shapes if name.endswith("_basis")]
    if bases and (sorted(bases) != wanted or "step" in own or parameter.ndim != 2 or group["split"]):
        raise ValueError(f"{description}: bases of {', '.join(bases)} are no state of {', '.join(wanted) or 'AdamW'}")
    momentum, second = (whole(own[name]).detach().to(arithmetic(parameter)) for name in ("exp_avg", "exp_avg_sq"))
    if bases and group["as_published"]:
        raise ValueError(f"{description}: as_published begins with bases of its own; take over AdamW's state")
    if "left" in bases:
        momentum = bases["left"].to(momentum).mT @ momentum
    if "right" in bases:
        momentum = momentum @ bases["right"].to(momentum)
    if wanted:
        momentum, second = (split_into_matrices(moment, group) for moment in (momentum, second))
    of_other = next(g for g in other.param_groups if any(p is parameter for p in g["params"]))
    step = own["step"] if "step" in own else of_other["step"] - 1  # SOAP's first step updates nothing
    state: dict[str, Any] = {"step": torch.as_tensor(float(step)), "exp_avg": momentum, "exp_avg_sq": second}
    for name, shape in shapes.items():
        side, _, what = name.partition("_")
        if what == "basis":
            state[name] = bases.get(side, torch.eye(shape[-1]).expand(shape))
        elif what == "covariance" and bases:
            state[name] = own["GG"][0 if side == "left" else 1]
        elif name not in state:
            state[name] = torch.zeros(shape)
    return state
