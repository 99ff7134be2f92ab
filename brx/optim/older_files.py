"""Brings the groups of older state dicts into today's form."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from .options import OLDER_DEFAULTS, Group
from .parameter_state import is_rotated

# Older versions moved the parameters of a group that are not matrices into a group of their own,
# which has this mark.
NO_MATRIX = "no matrix to rotate"


def todays_groups(
    saved: Sequence[Group],  # groups of a state dict: their parameters are numbers
    own: Sequence[Group],  # the optimizer's groups
    defaults: dict[str, Any],  # values of options that a group lacks
) -> list[Group]:
    """The saved groups with all options, one for each group of the optimizer.

    A group with matrices and vectors used to become two, the second one marked. Where the numbers
    of parameters show this, the two become one again. Groups that fit nothing stay as they are; the
    caller refuses them.
    """
    rest = [{**defaults, **OLDER_DEFAULTS, **group} for group in saved]
    groups: list[Group] = []
    while rest:
        group = rest.pop(0)
        if rest and rest[0].get("why") == NO_MATRIX and len(groups) < len(own):
            parameters = own[len(groups)]["params"]
            if len(group["params"]) < len(parameters):
                group = _joined(group, rest.pop(0), parameters)
        groups.append(group)
    return groups


def _joined(matrices: Group, others: Group, parameters: Sequence[Tensor]) -> Group:
    """One group of the two, its numbers in the order of the parameters."""
    numbers = []
    matrix_numbers, other_numbers = iter(matrices["params"]), iter(others["params"])
    for parameter in parameters:
        own_numbers = matrix_numbers if is_rotated(parameter, matrices) else other_numbers
        number = next(own_numbers, None)
        if number is not None:
            numbers.append(number)
    joined = {**matrices, "params": numbers}
    if matrices["lr"]:
        joined["rest_factor"] = float(others["lr"]) / float(matrices["lr"])
    return joined
