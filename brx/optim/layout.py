"""Which parameters go through the algorithm together, and where their state lies in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from operator import is_
from typing import Any

import torch
from torch import Tensor

from brx.optim.matrix_batch import MatrixBatch, Member, stack_states, state_dtype
from brx.optim.options import FORM, Group, StepOptions
from brx.optim.sharded import Shards, is_sharded

BATCH_BYTES = {"cpu": 2**20, "cuda": 2**28}
"""Size of weights at which a batch is full: a core's cache on the CPU, enough to fill the device elsewhere."""


class Layout:
    """The parameters that have had a gradient, in batches.

    The optimizer's `state` and `param_groups` are the truth: `fits` tells whether anybody has replaced what the batches
    (the rotated parameters of this rank) were made from, and then a new layout is made from what is there.
    """

    def __init__(self, members: list[Member], state: Mapping[Tensor, dict[str, Any]]) -> None:
        self.members = {member.parameter: member for member in members}
        self.batches: list[MatrixBatch] = []
        for alike in _by_shape(members):
            batch = MatrixBatch(alike, stack_states(alike))
            batch.seen_version = batch.state["step"]._version
            self.batches.append(batch)
            for member in alike:
                state[member.parameter].update(member.state)
        for member in members:
            if not member.is_stacked:
                member.state = {name: _own_state(name, shape, member) for name, shape in member.state_shapes.items()}
                state[member.parameter].update(member.state)

    def fits(self, parameter: Tensor, group: Group, layout: tuple[Any, ...], state: Mapping[str, Any] | None) -> bool:
        """Whether a parameter, its group and its state are what they were when the layout was made."""
        member = self.members.get(parameter)
        return (
            member is not None
            and state is not None
            and member.group is group
            and member.layout == layout
            and member.kind == _kind(parameter)
            and all(map(is_, map(state.get, member.state), member.state.values()))
        )

    def release(self, kept: set[Tensor], state: Mapping[Tensor, dict[str, Any]]) -> None:
        """Give parameters that leave a copy of their state, which would keep their whole batch in memory."""
        for parameter, member in self.members.items():
            if parameter not in kept and parameter in state:
                own = state[parameter]
                own.update({n: t.clone() for n, t in member.state.items() if own.get(n) is t})


def make_members(
    groups: list[Group],
    options: list[StepOptions],
    state: Mapping[Tensor, dict[str, Any]],
    shards: Callable[[Tensor], Shards],
    describe: Callable[[Tensor], str],
) -> list[Member]:
    """The parameters that have a state or a gradient, in order; a state that does not fit raises ValueError."""
    members = []
    for group, step_options in zip(groups, options, strict=True):
        for index, parameter in enumerate(group["params"]):
            own = state.get(parameter) or {}
            if parameter.grad is None and not own:
                continue
            member = Member(parameter, group, {}, step_options.layout, _kind(parameter), step_options)
            if member.is_rotated and is_sharded(parameter):
                member.shards = shards(parameter)
            if own:
                if member.shards is None or member.shards.is_owner:
                    check_state(own, member.state_shapes, group, describe(parameter))
                member.state = {name: torch.as_tensor(own[name]) for name in member.state_shapes if name in own}
                member.num_updates = int(own["step"])
            if group["staggered"]:
                # Within the group, so that every pipeline stage has refreshes as even as all stages together.
                member.phase = int(index * (group["frequency"] or 0) / len(group["params"]))
            members.append(member)
    return members


def check_state(
    state: Mapping[str, Any], wanted: Mapping[str, tuple[int, ...]], group: Group, description: str
) -> None:
    """Raise ValueError where a parameter's state is not what its group asks for."""
    shapes = {name: tuple(getattr(value, "shape", ())) for name, value in state.items() if name in wanted}
    superfluous = [name for name in state if name.endswith(("_basis", "_covariance")) and name not in wanted]
    if shapes != dict(wanted) or superfluous:
        told = ", ".join(f"{name} {tuple(getattr(value, 'shape', ()))}" for name, value in sorted(state.items()))
        needed = ", ".join(f"{name} {shape}" for name, shape in sorted(wanted.items()))
        options = ", ".join(f"{name}={group[name]!r}" for name in FORM)
        raise ValueError(f"{description}: the state has {told}, but {options} need {needed}")


def _by_shape(members: list[Member]) -> Iterator[list[Member]]:
    alike: dict[Any, list[Member]] = {}
    for member in members:
        if member.is_stacked:
            alike.setdefault((member.shards is None, *_structure(member)), []).append(member)
    for together in alike.values():
        parameter = together[0].parameter
        capacity = max(1, BATCH_BYTES.get(parameter.device.type, 2**28) // parameter.nbytes)
        for start in range(0, len(together), capacity):
            yield together[start : start + capacity]


def _structure(member: Member) -> tuple[Any, ...]:
    group, parameter = member.group, member.parameter
    names = tuple(member.state_shapes.items())
    return (*_kind(parameter), group["flatten"], group["split"], group["source"], names)


def _kind(parameter: Tensor) -> tuple[object, ...]:
    return parameter.shape, parameter.dtype, parameter.device


def _own_state(name: str, shape: tuple[int, ...], member: Member) -> Tensor:
    """A state of a parameter that is in no stack; of a sharded parameter sharded as that is."""
    parameter, dtype = member.parameter, state_dtype(name, member.parameter)
    if shape and is_sharded(parameter) and member.shards is None:
        tensor = torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
    else:
        tensor = torch.zeros(shape, dtype=dtype, device=parameter.device)
    return tensor.copy_(member.state[name]) if name in member.state else tensor
