"""Which parameter a state in a state dict belongs to."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import chain
from typing import Any

from .options import Group


def in_own_order(
    saved: Sequence[Group],  # groups of a state dict: their parameters are numbers, or names
    own: Sequence[Group],  # the optimizer's groups, with as many parameters each
) -> list[Group]:
    """The saved groups, with parameters in the order of the optimizer's and under its names.

    torch goes by position alone. If the saved names are the optimizer's in another order, a
    position would be the wrong parameter, perhaps of the same shape. If they are other names,
    because a wrapper adds to them or layers were renamed, positions count.

    Raises ValueError where names show that a parameter was in another group.
    """
    groups = [dict(group) for group in saved]
    names = [_names(group) for group in groups]
    own_names = [_names(group) for group in own]
    if sorted(chain(*names)) == sorted(chain(*own_names)):
        for number, group in enumerate(groups):
            _reorder(group, names[number], own_names[number])
    for group, own_group in zip(groups, own, strict=True):
        if "param_names" in own_group:
            group["param_names"] = own_group["param_names"]
    return groups


def _names(group: Group) -> list[str]:
    """A group's names; none if it does not have one for each parameter."""
    # torch.distributed.checkpoint has names in place of numbers, and puts them in order.
    if all(isinstance(parameter, str) for parameter in group["params"]):
        return list(group["params"])
    names = group.get("param_names", [])
    return list(names) if len(names) == len(group["params"]) else []


def _reorder(group: Group, names: list[str], own_names: list[str]) -> None:
    """Put a saved group's parameters into the order of `own_names`."""
    moved = sorted(set(own_names) - set(names))
    if moved:
        raise ValueError(f"{moved[0]} was in another group when the state was saved")
    # Without names, or with equal ones from several modules, positions count.
    if len(set(names)) < len(group["params"]):
        return
    by_name = dict(zip(names, group["params"], strict=True))
    group["params"] = [by_name[name] for name in own_names]


def check_entries(states: Mapping[Any, Any], numbers: Collection[Any]) -> None:
    """Raise ValueError if no state belongs to a number that a group has.

    A JSON file makes strings of numbers. Without this check nothing would be loaded.
    """
    for key in states:
        if key in numbers or not str(key).isdigit():  # a program may have state of its own
            return
    if states and numbers:
        raise ValueError(
            f"the saved state has entries like {next(iter(states))!r}, but its groups have "
            f"parameters like {next(iter(numbers))!r}"
        )
