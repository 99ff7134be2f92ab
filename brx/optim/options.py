"""The options of a parameter group: what is refused, and what a step computes with."""

from __future__ import annotations

import math
from collections.abc import Callable
from numbers import Real
from operator import itemgetter
from typing import Any

from torch import Tensor

Group = dict[str, Any]  # a torch parameter group

CHOICES = {
    "source": ("2nd", "1st"),
    "geometry": ("bilateral", "unilateral"),
    "covariance": ("step", "refresh", "interval"),
    "rotation_precision": ("highest", "tf32", "bf16"),
}
NUMBERS = ("lr", "eps", "weight_decay")
FLAGS = ("staggered", "maximize", "rotate", "flatten", "as_published")
NONE_MEANS = {"frequency": "never again", "max_dim": "no limit", "max_aspect": "no limit"}

FORM = ("source", "geometry", "rotate", "flatten", "split", "max_dim", "max_aspect", "as_published")
shared_options = itemgetter("lr", "weight_decay", "betas", "eps", "maximize", "as_published", *CHOICES)
"""What parameters must agree in to go through an update together."""


def form_options(group: Group) -> tuple[object, ...]:
    """What decides which state a parameter has; a pair may be a list, if it comes from a file."""
    return tuple(tuple(group[name]) if isinstance(group[name], list) else group[name] for name in FORM)


def step_options(group: Group) -> Group:
    """A group as numbers, where it may hold tensors; checked, since a training loop may have changed it."""
    check_options(group)
    numbers = {name: float(group[name]) for name in NUMBERS}
    return {**group, **numbers, "betas": tuple(map(float, group["betas"]))}


def check_options(group: Group) -> None:
    """Raise ValueError with the first option, by name, that no update could be computed with."""
    for name, (accepts, wanted) in RULES.items():
        if not accepts(group[name]):
            raise ValueError(f"Invalid {name}={group[name]!r}: must be {wanted}")
    if group["as_published"] and group["covariance"] != "step":
        raise ValueError(f"Invalid covariance={group['covariance']!r}: as_published has every gradient's (step)")


def _is_number(value: Any, smallest: float, limit: float = math.inf) -> bool:
    if isinstance(value, Tensor):
        is_one = value.numel() == 1 and not value.is_complex()
    else:
        is_one = isinstance(value, Real) and not isinstance(value, bool)
    return is_one and smallest <= float(value) < limit


def _is_pair(value: Any) -> bool:
    return isinstance(value, tuple | list) and len(value) == 2


def _is_split(value: Any) -> bool:
    return _is_pair(value) and isinstance(value[0], int) and value[0] >= 1 and value[1] in (-2, -1)


# By option: whether a value will do, and which would.
RULES: dict[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(NUMBERS, (lambda value: _is_number(value, 0), "a number >= 0")),
    "betas": (lambda betas: _is_pair(betas) and all(_is_number(b, 0, 1) for b in betas), "two numbers in [0, 1)"),
    **{name: (values.__contains__, f"one of {', '.join(map(repr, values))}") for name, values in CHOICES.items()},
    **dict.fromkeys(FLAGS, (lambda value: isinstance(value, bool), "True or False")),
    **{
        name: (lambda value: value is None or _is_number(value, 1), f"a number >= 1, or None for {meaning}")
        for name, meaning in NONE_MEANS.items()
    },
    "split": (lambda value: value is None or _is_split(value), "(parts, -2 for rows or -1 for columns), or None"),
    "first_refresh": (lambda value: type(value) is int and value >= 2, "a whole number >= 2"),
}
