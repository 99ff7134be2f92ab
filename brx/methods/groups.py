"""The parameter groups that optimizers get: one per stage. Optimizers that need it get the matrices
of a stack one by one."""

import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.optim import Optimizer

from brx.errors import some
from brx.model.stage import Stage
from brx.optim.options import Group
from brx.pipeline.versions import StageVersions

_INDEX_IN_STACK = re.compile(r"\[(\d+)\]$")
NOT_OPTIONS = ("params", "param_names", "stage", "delay", "kind")
"""The keys of a group that say which parameters it has; all others are options of the optimizer."""


def stage_groups(
    stages: Sequence[StageVersions], select: Callable[[str], bool] = lambda name: True
) -> list[Group]:
    """One parameter group per stage, without the stages that have no such parameter.

    A group has the keys `params` (pairs of name and parameter), `stage` (its index) and `delay`
    (in updates).

    Args:
        select: whether a parameter of this name belongs to the groups; by default all do.
    """
    groups = []
    for stage in stages:
        named = [(name, parameter) for name, parameter in stage.newest.items() if select(name)]
        if named:
            groups.append({"params": named, "stage": stage.index, "delay": stage.delay.tau_updates})
    return groups


def matrix_names(stages: Sequence[StageVersions]) -> frozenset[str]:
    """The names of the stages' weight matrices (`brx.model.stage.Stage.matrices`)."""
    names: frozenset[str] = frozenset()
    for stage in stages:
        names |= _stage(stage).matrices
    return names


def stack_names(stages: Sequence[StageVersions]) -> frozenset[str]:
    """The names of the stages' parameters whose first dimension counts members, such as experts
    (`brx.model.stage.Stage.stacks`)."""
    names: frozenset[str] = frozenset()
    for stage in stages:
        names |= _stage(stage).stacks
    return names


def _stage(stage: StageVersions) -> Stage:
    assert isinstance(stage.module, Stage)
    return stage.module


def member_of(name: str) -> str:
    """The parameter's name without the index that `split_stacks` adds for a member of a stack."""
    return _INDEX_IN_STACK.sub("", name)


@dataclass(frozen=True)
class StackMember:
    """One matrix of a stack, as a tensor that an optimizer can have as a parameter."""

    view: Tensor  # (m, n); shares the memory of the stack
    stack: Tensor  # (X, m, n)
    index: int  # of the member in the stack


def split_stacks(groups: list[Group], stacks: Collection[str]) -> list[StackMember]:
    """Replace each stack (X, m, n) in the groups by its members (m, n), in place. A member is named
    `NAME[INDEX]`.

    For optimizers that take matrices one at a time. Their `step` needs `lend_gradients`.

    Args:
        groups: the parameter groups that `stage_groups` made.
        stacks: the names of the parameters to be split.

    Returns:
        The members of all stacks.
    """
    members = []
    for group in groups:
        split: list[tuple[str, Tensor]] = []
        for name, parameter in group["params"]:
            if name not in stacks:
                split.append((name, parameter))
                continue
            # Views share the stack's memory: the optimizer updates the model itself.
            for index, view in enumerate(parameter.detach().unbind()):
                split.append((f"{name}[{index}]", view))
                members.append(StackMember(view, parameter, index))
        group["params"] = split
    return members


def lend_gradients(optimizer: Optimizer, members: list[StackMember]) -> Optimizer:
    """Give each member of a stack its part of the stack's gradient during the optimizer's steps."""

    def lend(*arguments: object) -> None:
        for member in members:
            gradient = member.stack.grad
            member.view.grad = None if gradient is None else gradient[member.index]

    def take_back(*arguments: object) -> None:
        for member in members:
            member.view.grad = None

    if members:
        optimizer.register_step_pre_hook(lend)
        optimizer.register_step_post_hook(take_back)
    return optimizer


def step_stages_together(optimizer: Optimizer) -> Optimizer:
    """Merge the groups with equal options during the optimizer's steps, so that a fused step is one
    operation for all stages instead of one per stage.

    Only for optimizers that update each parameter by itself.

    A hook that is registered later sees the merged groups. Such a group has the keys `stage`,
    `delay`, `kind` and `param_names` where all its members have the same value, and lacks them
    otherwise. What the hook writes into a group holds for this step alone."""
    own_groups = optimizer.param_groups

    def merge(*arguments: object) -> None:
        nonlocal own_groups
        own_groups = optimizer.param_groups
        merged: list[tuple[Group, Group]] = []  # options, and the group that has them
        for group in own_groups:
            options = {key: value for key, value in group.items() if key not in NOT_OPTIONS}
            for other_options, together in merged:
                if other_options == options:
                    _merge_into(together, group)
                    break
            else:
                merged.append((options, {**group, "params": list(group["params"])}))
        optimizer.param_groups = [together for _, together in merged]

    def split(*arguments: object) -> None:
        optimizer.param_groups = own_groups

    optimizer.register_step_pre_hook(merge)
    optimizer.register_step_post_hook(split)
    return optimizer


def _merge_into(together: Group, group: Group) -> None:
    """Add the parameters of a group to a merged one with equal options. The merged group loses keys
    of `NOT_OPTIONS` whose values differ."""
    together["params"] += group["params"]
    for key in NOT_OPTIONS:
        if key == "params" or key not in together:
            continue
        if key not in group or group[key] != together[key]:
            del together[key]


def check_each_parameter_once(
    optimizers: Sequence[Optimizer], stages: Sequence[StageVersions]
) -> None:
    """Check that every parameter of the stages belongs to exactly one group of the optimizers.

    Raises:
        ValueError: a group lacks a key that brx gave it, or an lr; a parameter is in no group or in
            two, or an optimizer has a copy of it.
    """
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    given: list[tuple[str, Tensor]] = []
    for group in groups:
        if not {"stage", "delay", "param_names"} <= set(group):
            raise ValueError(
                "an optimizer's parameter groups must be those that brx passed; keep all their keys"
            )
        if "lr" not in group:
            raise ValueError("an optimizer's parameter groups have no lr, which brx schedules")
        given += zip(group["param_names"], group["params"], strict=True)
    newest: dict[str, Tensor] = {}
    for stage in stages:
        newest |= stage.newest
    names = [name for name, _ in given]
    twice = [name for name, count in Counter(names).items() if count > 1]
    missing = sorted(set(newest) - set(map(member_of, names)))
    for wrong, how_many in ((twice, "two optimizers"), (missing, "no optimizer")):
        if wrong:
            raise ValueError(
                f"{some(wrong)} given to {how_many}; every parameter belongs to exactly one"
            )
    copied = []
    for name, parameter in given:
        if parameter.data_ptr() != _named(newest, name).data_ptr():
            copied.append(name)
    if copied:
        raise ValueError(
            f"{some(copied)} given to an optimizer as a copy; pass the model's own parameters"
        )
    num_given = sum(parameter.numel() for _, parameter in given)
    num_elements = sum(parameter.numel() for parameter in newest.values())
    assert num_given == num_elements, "a stack is not given whole"


def _named(parameters: Mapping[str, Tensor], name: str) -> Tensor:
    """The parameter with this name, or the member of a stack to which `split_stacks` gave it."""
    index = _INDEX_IN_STACK.search(name)
    if index is None:
        return parameters[name]
    return parameters[name[: index.start()]].detach()[int(index.group(1))]
