"""Which parameters an optimizer is given: one group per stage, and matrices that come as a stack
one by one."""

import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence

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
    """One parameter group per stage with the parameters that `select` picks by name; stages with
    none are left out.

    Beside its named parameters a group has the keys `stage` and `delay` (tau_updates).
    """
    groups = []
    for stage in stages:
        named = [(name, parameter) for name, parameter in stage.newest.items() if select(name)]
        if named:
            groups.append({"params": named, "stage": stage.index, "delay": stage.delay.tau_updates})
    return groups


def matrix_names(stages: Sequence[StageVersions]) -> frozenset[str]:
    """What the model of these stages calls matrices (`brx.model.stage.Stage`)."""
    names: frozenset[str] = frozenset()
    return names.union(*(_stage(stage).matrices for stage in stages))


def stack_names(stages: Sequence[StageVersions]) -> frozenset[str]:
    """Their parameters whose first dimension counts members (`brx.model.stage.Stage`)."""
    names: frozenset[str] = frozenset()
    return names.union(*(_stage(stage).stacks for stage in stages))


def _stage(stage: StageVersions) -> Stage:
    assert isinstance(stage.module, Stage)
    return stage.module


def member_of(name: str) -> str:
    """The stack that a name of `split_stacks` names a member of; another parameter's own name."""
    return _INDEX_IN_STACK.sub("", name)


StackMembers = list[tuple[Tensor, Tensor, int]]  # stand-in, stack, index in the stack


def split_stacks(groups: list[Group], stacks: Collection[str]) -> StackMembers:
    """Replace the parameters named in `stacks` (X, ...), in place, by stand-ins of their members,
    named `NAME[INDEX]`.

    For optimizers that take matrices one at a time.
    """
    members: StackMembers = []
    for group in groups:
        split: list[tuple[str, Tensor]] = []
        for name, parameter in group["params"]:
            if name not in stacks:
                split.append((name, parameter))
                continue
            # Views share the stack's memory: the optimizer updates the model itself.
            of_stack = [
                (view, parameter, index) for index, view in enumerate(parameter.detach().unbind())
            ]
            split += [(f"{name}[{index}]", view) for view, _, index in of_stack]
            members += of_stack
        group["params"] = split
    return members


def lend_gradients(optimizer: Optimizer, members: StackMembers) -> Optimizer:
    """Let each stand-in have its share of the stack's gradient during a step of the optimizer."""

    def lend(*arguments: object) -> None:
        for view, stack, index in members:
            view.grad = None if stack.grad is None else stack.grad[index]

    def take_back(*arguments: object) -> None:
        for view, _, _ in members:
            view.grad = None

    if members:
        optimizer.register_step_pre_hook(lend)
        optimizer.register_step_post_hook(take_back)
    return optimizer


def step_stages_together(optimizer: Optimizer) -> Optimizer:
    """Let an optimizer that treats its parameters one by one take groups with equal options as one
    group during its step: one operation for all stages in place of one for each."""
    own_groups = optimizer.param_groups

    def merge(*arguments: object) -> None:
        nonlocal own_groups
        own_groups = optimizer.param_groups
        merged: list[tuple[Group, Group]] = []  # options, and the group that has them
        for group in own_groups:
            options = {key: value for key, value in group.items() if key not in NOT_OPTIONS}
            alike = next((together for other, together in merged if other == options), None)
            if alike is None:
                merged.append((options, {**options, "params": list(group["params"])}))
            else:
                alike["params"] += group["params"]
        optimizer.param_groups = [together for _, together in merged]

    def split(*arguments: object) -> None:
        optimizer.param_groups = own_groups

    optimizer.register_step_pre_hook(merge)
    optimizer.register_step_post_hook(split)
    return optimizer


def check_each_parameter_once(
    optimizers: Sequence[Optimizer], stages: Sequence[StageVersions]
) -> None:
    """ValueError unless every parameter is in exactly one of the groups that `stage_groups` made,
    whole and no copy."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    if not all({"stage", "delay", "param_names", "lr"} <= set(group) for group in groups):
        raise ValueError(
            "an optimizer's parameter groups are not those that brx gave, with an lr; hand on all "
            "keys"
        )
    given = [
        pair for group in groups for pair in zip(group["param_names"], group["params"], strict=True)
    ]
    names = [name for name, _ in given]
    newest = {name: parameter for stage in stages for name, parameter in stage.newest.items()}
    twice = [name for name, count in Counter(names).items() if count > 1]
    missing = sorted(set(newest) - set(map(member_of, names)))
    for wrong, how_many in ((twice, "two optimizers"), (missing, "no optimizer")):
        if wrong:
            raise ValueError(
                f"{some(wrong)} given to {how_many}; every parameter belongs to exactly one"
            )
    copied = [
        name for name, parameter in given if parameter.data_ptr() != _named(newest, name).data_ptr()
    ]
    if copied:
        raise ValueError(
            f"{some(copied)} given to an optimizer as a copy; give it the model's own parameters"
        )
    num_given = sum(parameter.numel() for _, parameter in given)
    assert num_given == sum(parameter.numel() for parameter in newest.values()), (
        "a stack is not given whole"
    )


def _named(parameters: Mapping[str, Tensor], name: str) -> Tensor:
    """The parameter, or the member of a stack, that has a name which `split_stacks` gives."""
    index = _INDEX_IN_STACK.search(name)
    if index is None:
        return parameters[name]
    return parameters[name[: index.start()]].detach()[int(index.group(1))]
