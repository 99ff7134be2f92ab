"""The options of a parameter group: which there are, and which values they take."""

from __future__ import annotations

import math
from collections.abc import Callable
from numbers import Real
from operator import itemgetter
from typing import Any

from torch import Tensor

Group = dict[str, Any]  # a torch parameter group; or the options of one of its parameters

CHOICES = {
    "source": ("2nd", "1st"),
    "geometry": ("bilateral", "unilateral"),
    "covariance": ("step", "refresh", "interval"),
    "rotation_precision": ("auto", "highest", "tf32", "bf16"),
    "covariance_precision": ("auto", "highest", "tf32"),
}
PRECISIONS = ("rotation_precision", "covariance_precision")
WITHOUT_A_CHOICE = ("auto", "highest")  # of a precision: what can stand where it has no meaning
NUMBERS = ("lr", "eps", "weight_decay")
FLAGS = ("staggered", "maximize", "rotate", "as_published")
NONE_MEANS = {
    "frequency": "never again",
    "max_dim": "no limit",
    "max_aspect": "no limit",
    "max_kernel_state": "no limit",
}

# The options that decide which state a parameter has.
FORM = (
    "source",
    "geometry",
    "rotate",
    "flatten",
    "split",
    "max_dim",
    "max_aspect",
    "max_kernel_state",
    "as_published",
)
# The value of an option that an older file lacks, where it is not today's default.
OLDER_DEFAULTS = {"max_kernel_state": None}

# Options of torch's AdamW that change its numbers, and do not exist here. torch lets a group have
# any key, so they would count for nothing.
NOT_SUPPORTED = ("amsgrad", "differentiable")

# The options that parameters must share to be updated together.
shared_options = itemgetter(
    "lr", "weight_decay", "betas", "eps", "maximize", "as_published", *CHOICES
)


def form_options(options: Group) -> tuple[object, ...]:
    """The values of `FORM`, hashable."""
    values = []
    for name in FORM:
        value = options[name]
        # A pair is a list if it comes from a JSON file.
        values.append(tuple(value) if isinstance(value, list) else value)
    return tuple(values)


def step_options(group: Group) -> Group:
    """A copy of a group with numbers where it holds tensors of one element.

    Raises ValueError for a value out of range: a training loop may have changed it.
    """
    check_options(group)
    beta1, beta2 = group["betas"]
    options = {**group, "betas": (float(beta1), float(beta2))}
    for name in NUMBERS:
        options[name] = float(group[name])
    return options


def check_options(group: Group) -> None:
    """Raise ValueError, naming the option, unless all options of a group can be used together."""
    for name in NOT_SUPPORTED:
        if group.get(name):
            raise ValueError(f"Invalid {name}={group[name]!r}: BasisRotation has no such option")
    for name, (accepts, wanted) in RULES.items():
        if name not in group:
            raise ValueError(f"a parameter group has no {name}: add groups with add_param_group")
        if not accepts(group[name]):
            raise ValueError(f"Invalid {name}={group[name]!r}: must be {wanted}")
    has_reduced_covariances = group["covariance_precision"] not in WITHOUT_A_CHOICE
    if group["source"] == "1st" and has_reduced_covariances:
        raise ValueError(
            f"Invalid covariance_precision={group['covariance_precision']!r}: source '1st' keeps no"
            " covariances"
        )
    if not group["as_published"]:
        return
    if group["covariance"] != "step":
        raise ValueError(
            f"Invalid covariance={group['covariance']!r}: as_published has every gradient's (step)"
        )
    has_reduced_rotations = group["rotation_precision"] not in WITHOUT_A_CHOICE
    has_other_start = group["first_refresh"] != 2
    if has_reduced_rotations or has_reduced_covariances or has_other_start:
        raise ValueError(
            "as_published has its own rotation_precision, covariance_precision and first_refresh:"
            " leave them out"
        )


def _is_number(value: Any, smallest: float, limit: float = math.inf) -> bool:
    """Whether it is a real number in [smallest, limit), or a tensor of one such number."""
    if isinstance(value, Tensor):
        is_one = value.numel() == 1 and not value.is_complex()
    else:
        is_one = isinstance(value, Real) and not isinstance(value, bool)
    return is_one and smallest <= float(value) < limit


def _is_pair(value: Any) -> bool:
    return isinstance(value, tuple | list) and len(value) == 2


def _are_betas(value: Any) -> bool:
    return _is_pair(value) and all(_is_number(beta, 0, 1) for beta in value)


def _is_split(value: Any) -> bool:
    return _is_pair(value) and isinstance(value[0], int) and value[0] >= 1 and value[1] in (-2, -1)


def _rules() -> dict[str, tuple[Callable[[Any], bool], str]]:
    """For each option: a check of its value, and the words for the values that pass."""
    rules: dict[str, tuple[Callable[[Any], bool], str]] = {
        "betas": (_are_betas, "two numbers in [0, 1)"),
        "rest_factor": (lambda value: _is_number(value, 0), "a number >= 0"),
        "first_refresh": (lambda value: type(value) is int and value >= 2, "a whole number >= 2"),
        "flatten": (
            lambda value: value is None or isinstance(value, bool),
            "True, False, or None to tell convolution kernels by their shape",
        ),
        "split": (
            lambda value: value is None or _is_split(value),
            "(parts, -2 for rows or -1 for columns), or None",
        ),
    }
    for name in NUMBERS:
        rules[name] = (lambda value: _is_number(value, 0), "a number >= 0")
    for name, values in CHOICES.items():
        rules[name] = (values.__contains__, f"one of {', '.join(map(repr, values))}")
    for name in FLAGS:
        rules[name] = (lambda value: isinstance(value, bool), "True or False")
    for name, meaning in NONE_MEANS.items():
        rules[name] = (
            lambda value: value is None or _is_number(value, 1),
            f"a number >= 1, or None for {meaning}",
        )
    return rules


RULES = _rules()
