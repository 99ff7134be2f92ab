"""Converts the state of other known optimizers into `BasisRotation`'s."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from .dtensor import whole
from .options import Group
from .parameter_state import Side, arithmetic, as_matrices, state_shapes

Moments = tuple[float, Tensor, Tensor]  # number of updates, momentum, second moment


def state_from(
    other: Optimizer,
    parameter: Tensor,
    options: Group,  # the parameter's options in this optimizer
    description: str,  # names the parameter in messages
) -> dict[str, Any]:
    """Another optimizer's state of a parameter, whole, under the names of `BasisRotation`'s state.

    Raises ValueError if the optimizer is not in `KNOWN`, if its state has no such moments, or if it
    has bases of other sides than the options need.
    """
    own = other.state[parameter]
    group = _group_of(parameter, other)
    read = KNOWN.get(_full_name(other))
    if any(name.endswith("_basis") for name in own):
        raise ValueError(f"{description}: is a BasisRotation's already; use load_state_dict")
    if read is None:
        raise ValueError(
            f"{description}: the state of {_full_name(other)} is not known here (known: "
            f"{', '.join(KNOWN)})"
        )
    _check_moments(own, group, options, description)
    num_updates, momentum, second_moment = read(own, group, parameter)
    shapes = state_shapes(parameter, options)
    bases = _bases(own)
    _check_bases(bases, shapes, parameter, options, description)
    momentum = _rotated(momentum, bases)
    if any(name.endswith("_basis") for name in shapes):
        momentum = _as_kept(momentum, options, shapes["exp_avg"])
        second_moment = _as_kept(second_moment, options, shapes["exp_avg_sq"])
    device = parameter.device  # the program may have set another default
    # Zeros, unless there is something to take over.
    state: dict[str, Any] = {
        name: torch.zeros(shape, device=device) for name, shape in shapes.items()
    }
    # In float32: a default dtype of half precision could not count the updates.
    state["step"] = torch.tensor(num_updates, dtype=torch.float32, device=device)
    state["exp_avg"] = momentum
    state["exp_avg_sq"] = second_moment
    for index, side in enumerate(("left", "right")):
        basis, covariance = f"{side}_basis", f"{side}_covariance"
        if basis in shapes:
            identity = torch.eye(shapes[basis][-1], device=device).expand(shapes[basis])
            state[basis] = bases.get(side, identity)
        if covariance in shapes and bases:
            state[covariance] = own["GG"][index]
    return state


def _group_of(parameter: Tensor, optimizer: Optimizer) -> Group:
    """The optimizer's group that a parameter is in."""
    for group in optimizer.param_groups:
        # Not `in`, which would compare the tensors' values.
        if any(member is parameter for member in group["params"]):
            return group
    raise AssertionError("an optimizer with a state of the parameter has it in a group")


def has_bases(other: Optimizer, parameter: Tensor) -> bool:
    """Whether another optimizer's state of a parameter comes with bases."""
    return bool(_bases(other.state.get(parameter, {})))


def _bases(own: dict[str, Any]) -> dict[str, Tensor]:
    """SOAP's bases by side; it has an empty list for a side that it does not rotate."""
    bases = {}
    for side, basis in zip(("left", "right"), own.get("Q") or (), strict=False):
        if len(basis):
            bases[side] = basis
    return bases


def _check_moments(
    own: dict[str, Any], group: dict[str, Any], options: Group, description: str
) -> None:
    """ValueError if the moments of a state mean something else than `BasisRotation`'s."""
    if "exp_avg" not in own or "exp_avg_sq" not in own:
        raise ValueError(
            f"{description}: its state has {', '.join(own)}, but exp_avg and exp_avg_sq are needed"
        )
    if options["as_published"]:
        raise ValueError(
            f"{description}: as_published starts in its own way, and takes nothing over"
        )
    if group.get("amsgrad") or group.get("ams_bound"):
        raise ValueError(f"{description}: AMSGrad's largest second moment cannot be taken over")
    if bool(group.get("maximize")) != options["maximize"]:
        raise ValueError(f"{description}: only one of the two optimizers maximizes")


def _check_bases(
    bases: dict[str, Tensor],
    shapes: dict[str, tuple[int, ...]],
    parameter: Tensor,
    options: Group,
    description: str,
) -> None:
    wanted: list[Side] = [side for side in ("left", "right") if f"{side}_basis" in shapes]
    is_plain = parameter.ndim == 2 and not options["split"]
    if bases and (sorted(bases) != wanted or not is_plain):
        raise ValueError(
            f"{description}: bases of {', '.join(bases)} are no state of "
            f"{', '.join(wanted) or 'AdamW'}"
        )


def _rotated(momentum: Tensor, bases: dict[str, Tensor]) -> Tensor:
    """SOAP's momentum, which it keeps in the original space, in its bases. AdamW has none."""
    if "left" in bases:
        momentum = bases["left"].to(momentum).mT @ momentum
    if "right" in bases:
        momentum = momentum @ bases["right"].to(momentum)
    return momentum


def _as_kept(moment: Tensor, options: Group, shape: tuple[int, ...]) -> Tensor:
    return as_matrices(moment[None], options)[0].reshape(shape)


def _moments(own: dict[str, Any], parameter: Tensor) -> tuple[Tensor, Tensor]:
    dtype = arithmetic(parameter)
    momentum = whole(own["exp_avg"]).detach().to(dtype)
    second_moment = whole(own["exp_avg_sq"]).detach().to(dtype)
    return momentum, second_moment


def _read_adam(own: dict[str, Any], group: Group, parameter: Tensor) -> Moments:
    return float(own["step"]), *_moments(own, parameter)


def _read_soap(own: dict[str, Any], group: Group, parameter: Tensor) -> Moments:
    # Its first step updates nothing.
    return float(group["step"] - 1), *_moments(own, parameter)


def _read_stable_adamw(own: dict[str, Any], group: Group, parameter: Tensor) -> Moments:
    """Its averages have already been divided by 1 - beta^t, which Adam does in each step."""
    num_updates = group["step"]
    beta1, beta2 = group["betas"]
    momentum, second_moment = _moments(own, parameter)
    return (
        float(num_updates),
        momentum * (1 - beta1**num_updates),
        second_moment * (1 - beta2**num_updates),
    )


KNOWN: dict[str, Callable[[dict[str, Any], Group, Tensor], Moments]] = {
    "torch.optim.AdamW": _read_adam,
    "torch.optim.Adam": _read_adam,
    "torch.optim.NAdam": _read_adam,
    "torch.optim.RAdam": _read_adam,
    "pytorch_optimizer.SOAP": _read_soap,
    "pytorch_optimizer.StableAdamW": _read_stable_adamw,
}


def _full_name(optimizer: Optimizer) -> str:
    """The public name of a class: `torch.optim.AdamW` for torch.optim.adamw.AdamW."""
    kind = type(optimizer)
    for package in ("torch.optim", "pytorch_optimizer"):
        if kind.__module__.startswith(f"{package}."):
            return f"{package}.{kind.__qualname__}"
    return f"{kind.__module__}.{kind.__qualname__}"
