"""Same-shaped weight matrices as one batch: their optimizer state is one stack, each parameter's state a view of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Literal, TypeVar

import torch
from torch import Tensor

from brx.optim.options import Group, StepOptions
from brx.optim.products import Precision, product
from brx.optim.sharded import Shards

Side = Literal["left", "right"]
State = dict[str, Tensor]
"""What the optimizer keeps for a parameter, by name."""

Key = TypeVar("Key", bound=Hashable)


@dataclass(eq=False)
class Member:
    """One parameter, as the optimizer works with it."""

    parameter: Tensor
    group: Group
    state: State  # the tensors of the optimizer's `state` for it, as long as nobody replaces them
    layout: tuple[object, ...]  # the group's options of that name when the batches were made
    kind: tuple[object, ...]  # shape, dtype and device at that time
    options: StepOptions  # of this step
    phase: int = 0  # where refreshes fall within their interval, if staggered
    num_updates: int = 0  # on the host, so that no step has to ask the device
    shards: Shards | None = None  # None for a whole one
    gradient: Tensor | None = None  # of this step, whole; None where another rank updates the matrix
    update: Tensor | None = None  # of a sharded matrix, whole, before it goes to where the shards are
    is_rotated: bool = field(init=False)

    def __post_init__(self) -> None:
        self.is_rotated = is_rotated(self.parameter, self.group)

    @property
    def is_stacked(self) -> bool:
        """Whether this rank updates it as part of a batch."""
        return self.is_rotated and (self.shards is None or self.shards.is_owner)

    @property
    def state_shapes(self) -> dict[str, tuple[int, ...]]:
        """What this rank keeps for it, by name."""
        shapes = state_shapes(self.parameter, self.group)
        if self.shards is None or self.shards.is_owner:
            return shapes
        # Another rank keeps it; here are empty tensors by the same names, since tools for checkpoints ask for names.
        return {name: shape if name == "step" else (0,) for name, shape in shapes.items()}


@dataclass
class MatrixBatch:
    """Parameters of one shape whose matrices go through the algorithm together.

    A parameter is a stack of matrices (*lead, m, n), or with the option `flatten` one matrix of its first dimension
    and all others together. The leading dimensions (experts) count as further matrices: b = len(members) * prod(lead).
    """

    members: list[Member]
    state: State  # one tensor per name: (len(members), *lead, ., .) of matrices, (len(members),) of counters
    seen_version: int = 0  # of `state["step"]` when the host's counts last agreed with it
    bad: Tensor | None = None  # on a GPU: a flag () for a gradient that is not finite; the step changes nothing then
    sides: tuple[Side, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.sides = tuple(side for side in ("left", "right") if f"{side}_basis" in self.state)

    def __getitem__(self, run: slice) -> MatrixBatch:
        """Some neighbouring members; their state is a view of this batch's."""
        if run == slice(0, len(self.members)):
            return self
        return MatrixBatch(self.members[run], {name: stack[run] for name, stack in self.state.items()}, bad=self.bad)

    @property
    def options(self) -> Group:
        """The options that all members share in this step."""
        return self.members[0].options.group

    @property
    def device(self) -> torch.device:
        """Of the parameters."""
        return self.members[0].parameter.device

    def runs(self, key: Callable[[Member], Key]) -> Iterator[tuple[Key, slice]]:
        """Neighbouring members with the same key, which stay one batch."""
        keys = list(map(key, self.members))
        if keys.count(keys[0]) == len(keys):  # most often
            yield keys[0], slice(0, len(keys))
            return
        start = 0
        for value, equal in groupby(keys):
            stop = start + sum(1 for _ in equal)
            yield value, slice(start, stop)
            start = stop

    def matrices(self, name: str) -> Tensor:
        """The state `name` as (b, ., .)."""
        return self.state[name].flatten(0, -3)

    def gradients(self) -> Tensor:
        """The gradients as (b, m, n), in the precision of the arithmetic; negative ones where the loss is to grow."""
        gradients = torch.stack([member.gradient for member in self.members if member.gradient is not None])
        gradients = split_into_matrices(gradients, self.options)
        matrices = gradients.reshape(self.state["exp_avg"].shape).flatten(0, -3).to(self.state["exp_avg"].dtype)
        if self.bad is not None:
            matrices.masked_fill_(self.bad, 0)
        return matrices.neg_() if self.options["maximize"] else matrices

    def update_weights(self, updates: Tensor) -> None:
        """W <- (1 - lr weight_decay) W + update, for updates (b, m, n); sharded weights get theirs later."""
        if self.options["split"]:
            updates = updates.view(self.state["exp_avg"].shape)
            updates = updates.movedim(-3, -2) if self.options["split"][1] == -1 else updates
        by_member = updates.reshape(len(self.members), *self.members[0].parameter.shape).unbind()
        if self.members[0].shards is not None:
            for member, update in zip(self.members, by_member, strict=True):
                member.update = update
            return
        parameters = [member.parameter for member in self.members]
        # Half-precision weights are rounded once, after the sum.
        is_half = parameters[0].dtype != updates.dtype
        weights = [parameter.to(updates.dtype) for parameter in parameters] if is_half else parameters
        for decay, run in self.runs(lambda member: member.options.decay):
            # A tensor, since a number would be made into one for every weight.
            torch._foreach_mul_(weights[run], self.unless_bad(decay, 1.0))
        torch._foreach_add_(weights, by_member)
        if is_half:
            torch._foreach_copy_(parameters, weights)

    def unless_bad(self, value: float, otherwise: float) -> Tensor:
        """A number of the arithmetic's precision, and another one in a step that is to change nothing."""
        number = torch.tensor(value, dtype=self.state["exp_avg"].dtype)
        return number if self.bad is None else torch.where(self.bad, otherwise, number)

    def take_counts(self) -> None:
        """Take the numbers of updates from the state, if somebody else has written into it."""
        if self.state["step"]._version != self.seen_version:
            for member, step in zip(self.members, self.state["step"].tolist(), strict=True):
                member.num_updates = int(step)
            self.seen_version = self.state["step"]._version


def rotate_in(batch: MatrixBatch, matrices: Tensor, precision: Precision = "highest") -> Tensor:
    """U^T A V for A (b, m, n)."""
    if "right_basis" in batch.state:
        matrices = product(matrices, batch.matrices("right_basis"), precision)
    if "left_basis" in batch.state:
        matrices = product(batch.matrices("left_basis").mT, matrices, precision)
    return matrices


def rotate_out(batch: MatrixBatch, matrices: Tensor, precision: Precision = "highest") -> Tensor:
    """U A V^T for A (b, m, n)."""
    if "right_basis" in batch.state:
        matrices = product(matrices, batch.matrices("right_basis").mT, precision)
    if "left_basis" in batch.state:
        matrices = product(batch.matrices("left_basis"), matrices, precision)
    return matrices


def matrix_shape(parameter: Tensor, group: Group) -> tuple[int, ...]:
    """The parameter as matrices (*lead, m, n); a vector as it is."""
    shape = list(parameter.shape)
    if group["flatten"] and len(shape) > 2:
        return shape[0], math.prod(shape[1:])
    if group["split"] and len(shape) >= 2:
        parts, dim = group["split"]
        shape[dim] //= parts
        shape.insert(-2, parts)
    return tuple(shape)


def split_into_matrices(tensors: Tensor, group: Group) -> Tensor:
    """Tensors (.., m, n) as (.., parts, m, n / parts), or (.., parts, m / parts, n), where the group splits them."""
    if not group["split"]:
        return tensors
    parts, dim = group["split"]
    tensors = tensors.unflatten(dim, (parts, -1))  # type: ignore[no-untyped-call]  # (.., m, parts, n), or as wanted
    return tensors.movedim(-2, -3) if dim == -1 else tensors


def rotated_sides(parameter: Tensor, group: Group) -> tuple[tuple[Side, ...], str]:
    """The sides of a parameter's matrices that are rotated, and why the others are not.

    Both or the smaller one; none that is longer than `max_dim` or `max_aspect` times the other. A matrix of one row or
    column is a vector.
    """
    shape = matrix_shape(parameter, group)
    if not group["rotate"]:
        return (), ""
    if len(shape) < 2 or min(shape[-2:]) <= 1:
        return (), "a vector"
    rows, columns = shape[-2:]
    sides: list[Side] = []
    reasons = []
    for side, size, other in (("left", rows, columns), ("right", columns, rows)):
        if group["geometry"] == "unilateral" and (side == "left") != (rows < columns):
            reasons.append(f"{side}: unilateral")
        elif group["max_dim"] is not None and size > group["max_dim"]:
            reasons.append(f"{side}: {size} > max_dim")
        elif group["max_aspect"] is not None and size > group["max_aspect"] * other:
            reasons.append(f"{side}: {size} > {group['max_aspect']} x {other} (max_aspect)")
        else:
            sides.append(side)  # type: ignore[arg-type]
    return tuple(sides), ", ".join(reasons)


def is_rotated(parameter: Tensor, group: Group) -> bool:
    """Whether any side of it is."""
    return bool(rotated_sides(parameter, group)[0])


def arithmetic(parameter: Tensor) -> torch.dtype:
    """The precision of state and arithmetic: float64 for float64 parameters, float32 for all others."""
    return torch.float64 if parameter.dtype == torch.float64 else torch.float32


def state_shapes(parameter: Tensor, group: Group) -> dict[str, tuple[int, ...]]:
    """What is kept for a parameter, by name; of a split one the moments, too, are those of its parts."""
    sides, _ = rotated_sides(parameter, group)
    shape = tuple(parameter.shape)
    if not sides:
        return {"step": (), "exp_avg": shape, "exp_avg_sq": shape}
    *lead, rows, columns = matrix_shape(parameter, group)
    if group["split"]:
        shape = *lead, rows, columns
    shapes = {"step": (), "exp_avg": shape, "exp_avg_sq": shape, "num_failed_refreshes": tuple(lead)}
    for side in sides:
        size = rows if side == "left" else columns
        shapes[f"{side}_basis"] = (*lead, size, size)
        if group["source"] == "2nd":
            shapes[f"{side}_covariance"] = (*lead, size, size)
    return shapes


def state_dtype(name: str, parameter: Tensor) -> torch.dtype:
    """Dtype of a state tensor."""
    return {"step": torch.float32, "num_failed_refreshes": torch.int64}.get(name, arithmetic(parameter))


def stack_states(members: Sequence[Member]) -> State:
    """Stack what there is of the members' states, blank where there is nothing, and make each a view of the stacks."""
    parameter, group = members[0].parameter, members[0].group
    matrices = matrix_shape(parameter, group)
    stacks = {}
    for name, shape in state_shapes(parameter, group).items():
        stacked_shape = (len(members), *(matrices if name.startswith("exp_avg") else shape))
        stack = torch.zeros(stacked_shape, dtype=state_dtype(name, parameter), device=parameter.device)
        if name.endswith("_basis"):  # the identity; column by column: see brx.optim.eigenbasis
            stack = stack.mT
            stack.diagonal(dim1=-2, dim2=-1).fill_(1)
        for member, part in zip(members, stack.unbind(), strict=True):
            view = part.view(shape)
            if name in member.state:
                view.copy_(member.state[name])
            member.state[name] = view
        stacks[name] = stack
    return stacks
