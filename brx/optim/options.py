"""The options of a parameter group: what is refused, and what a step computes with."""

from __future__ import annotations

import math
from numbers import Real
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

Group = dict[str, Any]
"""A torch parameter group."""

CHOICES = {
    "source": ("2nd", "1st"),
    "geometry": ("bilateral", "unilateral"),
    "covariance": ("step", "refresh", "interval"),
    "rotation_precision": ("highest", "tf32", "bf16"),
}
FLAGS = ("staggered", "maximize", "rotate", "flatten", "as_published")
NUMBERS = ("lr", "eps", "weight_decay")
LIMITS = {"frequency": "for never again", "max_dim": "for no limit", "max_aspect": "for no limit"}
"""Numbers of at least 1, and what None means in their place."""

SHARED = ("eps", "maximize", "as_published", *CHOICES)
"""What parameters must agree in, beside the betas, to go through an update together."""

FORM = ("source", "geometry", "rotate", "flatten", "split", "max_dim", "max_aspect", "as_published")
"""What decides which state a parameter has."""

LAYOUT = (*FORM, "staggered", "frequency", "first_refresh")
"""What decides that, or when its refreshes fall: a change means new batches."""


class StepOptions(NamedTuple):
    """A group's options in one step."""

    group: Group  # as numbers, even where the group holds tensors
    shared: tuple[Any, ...]  # equal for groups whose parameters can go through an update together
    layout: tuple[Any, ...]  # changes when batches have to be made anew
    lr: float
    decay: float  # what a step multiplies the weights with: 1 - lr weight_decay
    checked: tuple[Any, ...] | None  # all values but the rate, as the group has them; None if they can change in place


_but_lr = itemgetter("betas", "weight_decay", *SHARED, *LAYOUT)


def step_options(group: Group, before: StepOptions | None = None) -> StepOptions:
    """The options of a step, checked as at construction: a training loop may have changed them.

    Most often the learning rate alone differs from `before`, the step before. Raises as `check_options`.
    """
    values, lr = _but_lr(group), group["lr"]
    if before is not None and values == before.checked and type(lr) is float and 0.0 <= lr < math.inf:
        if lr == before.lr:
            return before
        weight_decay = before.group["weight_decay"]
        return before._replace(group={**before.group, "lr": lr}, lr=lr, decay=1 - lr * weight_decay)
    check_options(group)
    beta1, beta2 = group["betas"]
    numbers = {name: float(group[name]) for name in NUMBERS}
    resolved = {**group, **numbers, "betas": (float(beta1), float(beta2))}
    shared = (resolved["betas"], *(resolved[name] for name in SHARED))
    layout = tuple(group[name] for name in LAYOUT)
    decay = 1 - numbers["lr"] * numbers["weight_decay"]
    can_change = not isinstance(group["betas"], tuple) or any(
        isinstance(value, Tensor) for value in (beta1, beta2, group["eps"], group["weight_decay"])
    )
    return StepOptions(resolved, shared, layout, numbers["lr"], decay, None if can_change else values)


def check_options(group: Group) -> None:
    """Raise ValueError with the first option, by name, that no update could be computed with."""
    for name in NUMBERS:
        value = group[name]
        if isinstance(value, Tensor) and value.numel() != 1:
            raise ValueError(f"Tensor {name} must be 1-element, not of shape {tuple(value.shape)}")
        if not _is_number(value) or not 0.0 <= float(value) < math.inf:
            raise ValueError(f"Invalid {name}={value!r}: must be a number >= 0")
    betas = group["betas"]
    if not isinstance(betas, (tuple, list)) or len(betas) != 2 or not all(_is_number(beta) for beta in betas):
        raise ValueError(f"Invalid betas={betas!r}: must be two numbers")
    for index, beta in enumerate(betas):
        if not 0.0 <= float(beta) < 1.0:
            raise ValueError(f"Invalid betas={betas!r}: Invalid beta parameter at index {index}: must be in [0, 1)")
    for name, choices in CHOICES.items():
        if group[name] not in choices:
            raise ValueError(f"Invalid {name}={group[name]!r}: must be one of {', '.join(map(repr, choices))}")
    for name in FLAGS:
        if not isinstance(group[name], bool):
            raise ValueError(f"Invalid {name}={group[name]!r}: must be True or False")
    for name, meaning in LIMITS.items():
        if (value := group[name]) is not None and not (_is_number(value) and 1 <= value < math.inf):
            raise ValueError(f"Invalid {name}={value!r}: must be a number >= 1, or None {meaning}")
    if group["as_published"] and group["covariance"] != "step":
        raise ValueError(f"Invalid covariance={group['covariance']!r}: as_published has every gradient's (step)")
    if (split := group["split"]) is not None:
        is_pair = isinstance(split, (tuple, list)) and len(split) == 2
        if not (is_pair and isinstance(split[0], int) and split[0] >= 1 and split[1] in (-2, -1)):
            raise ValueError(f"Invalid split={split!r}: must be (parts, -2 for rows or -1 for columns), or None")
    first = group["first_refresh"]
    if isinstance(first, bool) or not isinstance(first, int) or first < 2:
        raise ValueError(f"Invalid first_refresh={first!r}: must be a whole number >= 2")


def smallest_eps(dtype: torch.dtype) -> float:
    """What `eps` counts as at least: below it squares of gradients are zero, and a zero over a zero would be NaN."""
    return math.sqrt(torch.finfo(dtype).tiny)


def _is_number(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1 and not value.is_complex()
    return isinstance(value, Real) and not isinstance(value, bool)
