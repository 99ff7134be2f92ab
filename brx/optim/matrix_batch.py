"""Same-shaped weight matrices as one batch: their optimizer state is one stack, each parameter's
state a view of it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from itertools import groupby
from operator import is_
from typing import Any, Literal, TypeVar, get_args

import torch
from torch import Tensor

from brx.optim.eigenbasis import select_columns, select_rows
from brx.optim.parameter_state import (
    Group,
    Side,
    form_options,
    is_rotated,
    matrix_shape,
    split_into_matrices,
    state_dtype,
    state_shapes,
)
from brx.optim.products import Precision, product
from brx.optim.sharded import Shards, is_sharded, local

State = dict[str, Tensor]  # what the optimizer keeps for a parameter, by name
Key = TypeVar("Key", bound=Hashable)

# Size of weights at which a batch is full: a core's cache on the CPU, enough to fill the device
#     elsewhere.
BATCH_BYTES = {"cpu": 2**20, "cuda": 2**28}


@dataclass(eq=False)
class Member:
    parameter: Tensor
    group: Group
    place: tuple[int, int] = (0, 1)  # index in the group, and how many it has
    shards: Shards | None = None  # None for a whole one
    state: State = field(
        default_factory=dict
    )  # the tensors of the optimizer's `state` for it, unless replaced there
    num_updates: int = 0  # on the host, so that no step has to ask the device
    options: Group = field(default_factory=dict)  # of this step, as numbers
    gradient: Tensor | None = (
        None  # of this step, whole; None where another rank updates the matrix
    )
    update: Tensor | None = (
        None  # of a sharded matrix, whole, before it goes to where the shards are
    )

    def __post_init__(self) -> None:
        self.form = _form(self.parameter, self.group)
        self.is_rotated = is_rotated(self.parameter, self.group)

    @property
    def is_stacked(self) -> bool:  # this rank updates it as part of a batch
        return self.is_rotated and (self.shards is None or self.shards.is_owner)

    @property
    def is_updated_here(self) -> bool:
        return self.is_stacked if self.is_rotated else local(self.parameter).numel() > 0

    @property
    def state_shapes(self) -> dict[str, tuple[int, ...]]:
        shapes = state_shapes(self.parameter, self.group)
        if self.shards is None or self.shards.is_owner:
            return shapes
        # Another rank keeps it. Tools for checkpoints ask for the same names on all.
        return {name: shape if name == "step" else (0,) for name, shape in shapes.items()}

    @property
    def decay(self) -> float:
        return float(1 - self.options["lr"] * self.options["weight_decay"])

    def is_due(self, update: int | None = None) -> bool:
        """Whether an update (the next) is due for a refresh."""
        update, frequency, (index, num) = (
            update or self.num_updates + 1,
            self.group["frequency"],
            self.place,
        )
        if frequency is None:
            return False
        if self.group[
            "staggered"
        ]:  # within the group, so that every pipeline stage has refreshes as even as all have
            update += int(index * frequency / num)
        # It is a multiple of the frequency, or has passed one since the update before: 9.5 gives 9
        #     and 10 in turn.
        return bool(update // frequency > (update - 1) // frequency)

    def next_refresh(self) -> tuple[Literal["exact", "power", None], int]:
        """How the next update first renews the basis, and for how many updates its gradient enters
        the covariances."""
        update, first = self.num_updates + 1, self.group["first_refresh"]
        if self.group["as_published"]:
            return (
                "power",
                1,
            )  # of its own kind (published.py), which has to see that every gradient is finite
        if update <= first:  # the start is ours: until the first basis every gradient counts
            return "exact" if update == first else None, 1
        is_due = self.is_due()  # algorithm 1, line 5
        if (
            is_due and self.group["covariance"] == "interval"
        ):  # one gradient stands for all since the last refresh
            return "power", update - next(filter(self.is_due, range(update - 1, first, -1)), first)
        # "refresh", as printed: the average remembers frequency / (1 - beta2) updates, with "step"
        # 1 / (1 - beta2).
        return "power" if is_due else None, int(is_due or self.group["covariance"] == "step")


@dataclass
class MatrixBatch:
    """Parameters of one shape whose matrices (*lead, m, n) go through the algorithm together.

    The leading dimensions (experts) count as further matrices: b = len(members) * prod(lead).
    """

    members: list[Member]
    # one tensor per name: (len(members), *lead, ., .) of matrices, (len(members),) of counters
    state: State
    bad: Tensor | None = (
        None  # on a GPU: a flag () for a bad gradient; the step changes nothing then
    )

    def __post_init__(self) -> None:
        self.options = self.members[0].options  # which all members share in a step
        self.sides: list[Side] = [side for side in get_args(Side) if f"{side}_basis" in self.state]
        self.seen_version = self.state[
            "step"
        ]._version  # when the host's counts of updates last agreed with it

    def __getitem__(self, run: slice) -> MatrixBatch:
        """Some neighbouring members; their state is a view of this batch's."""
        return MatrixBatch(
            self.members[run], {name: stack[run] for name, stack in self.state.items()}, self.bad
        )

    def runs(self, key: Callable[[Member], Key]) -> Iterator[tuple[Key, slice]]:
        """Neighbouring members with the same key, which stay one batch."""
        start = 0
        for value, equal in groupby(self.members, key):
            stop = start + sum(1 for _ in equal)
            yield value, slice(start, stop)
            start = stop

    def matrices(self, name: str) -> Tensor:
        return self.state[name].flatten(0, -3)  # (b, ., .)

    def part(self, matrices: Tensor, run: slice) -> Tensor:
        """Those of matrices (b, m, n) that belong to some neighbouring members."""
        return matrices.view_as(self.state["exp_avg"])[run].flatten(0, -3)

    def gradients(self) -> Tensor:
        """The gradients as (b, m, n), in the precision of the arithmetic; negative ones where the
        loss is to grow."""
        gradients = torch.stack(
            [member.gradient for member in self.members if member.gradient is not None]
        )
        gradients = split_into_matrices(gradients, self.options)  # (members, *lead, m, n)
        matrices = (
            gradients.reshape(self.state["exp_avg"].shape)
            .flatten(0, -3)
            .to(self.state["exp_avg"].dtype)
        )
        if self.bad is not None:  # known on the device alone: NaN must not enter the state
            matrices.masked_fill_(self.bad, 0)
        return matrices.neg_() if self.options["maximize"] else matrices

    def update_weights(self, updates: Tensor) -> None:
        """W <- (1 - lr weight_decay) W + update, for updates (b, m, n); sharded weights get theirs
        later."""
        if self.options[
            "split"
        ]:  # (members, parts, m, n); parts of columns go back beside each other, in each row
            updates = updates.view_as(self.state["exp_avg"])
            updates = updates.movedim(-3, -2) if self.options["split"][1] == -1 else updates
        by_member = updates.reshape(len(self.members), *self.members[0].parameter.shape).unbind()
        if self.members[0].shards is not None:
            for member, update in zip(self.members, by_member, strict=True):
                member.update = update
            return
        parameters = [member.parameter for member in self.members]
        is_half = (
            parameters[0].dtype != updates.dtype
        )  # such weights are rounded once, after the sum
        weights = (
            [parameter.to(updates.dtype) for parameter in parameters] if is_half else parameters
        )
        # A tensor, since a number would be made into one for every weight.
        torch._foreach_mul_(weights, unless_bad(self.members[0].decay, updates.dtype, self.bad))
        torch._foreach_add_(weights, by_member)
        if is_half:
            torch._foreach_copy_(parameters, weights)

    def take_counts(self) -> None:
        if self.state["step"]._version != self.seen_version:  # somebody else has written into it
            for member, step in zip(self.members, self.state["step"].tolist(), strict=True):
                member.num_updates = int(step)


def rotate(
    batch: MatrixBatch, matrices: Tensor, precision: Precision = "highest", *, back: bool = False
) -> Tensor:
    """U^T A V for A (b, m, n); `back` gives U A V^T."""
    if "right" in batch.sides:
        right = batch.matrices("right_basis")
        matrices = product(matrices, right.mT if back else right, precision)
    if "left" in batch.sides:
        left = batch.matrices("left_basis")
        matrices = product(left if back else left.mT, matrices, precision)
    return matrices


def reorder(side: Side, matrices: Tensor, order: Tensor) -> None:
    """Put the given side's rows or columns of each (m, n) matrix in its own order (b, m) or (b, n),
    in place."""
    matrices.copy_((select_rows if side == "left" else select_columns)(matrices, order))


def seen_from(side: Side, matrices: Tensor) -> Tensor:
    return matrices if side == "left" else matrices.mT  # that side's dimension first


def unless_bad(factor: float, dtype: torch.dtype, bad: Tensor | None) -> Tensor:
    """A factor, which is 1 in a step that is to change nothing."""
    if bad is None:
        return torch.tensor(factor, dtype=dtype)
    # Filled there: a number that is copied to a GPU makes the host wait.
    return torch.full((), factor, dtype=dtype, device=bad.device).masked_fill_(bad, 1.0)


class Layout:
    """The parameters that have had a gradient, those that this rank rotates in batches.

    Where the optimizer's `state` and `param_groups` are no longer what it was made from, a new one
    is made."""

    def __init__(self, members: Sequence[Member], state: Mapping[Tensor, dict[str, Any]]) -> None:
        self.members = {member.parameter: member for member in members}
        self.batches: list[MatrixBatch] = []
        for alike in _by_form(members):
            if alike[0].is_stacked:
                self.batches.append(MatrixBatch(alike, _stacked_states(alike)))
            else:
                (alone,) = alike
                alone.state = {
                    name: _own_state(name, shape, alone)
                    for name, shape in alone.state_shapes.items()
                }
            for member in alike:  # at once, so that the old tensors go as the new ones come
                state[member.parameter].update(member.state)

    def fits(self, parameter: Tensor, group: Group, state: Mapping[str, Any] | None) -> bool:
        """Whether a parameter, its group and its state are what they were when the layout was
        made."""
        member = self.members.get(parameter)
        if (
            member is None
            or state is None
            or member.group is not group
            or member.form != _form(parameter, group)
        ):
            return False
        return all(
            map(is_, map(state.get, member.state), member.state.values())
        )  # the very tensors


def _form(parameter: Tensor, group: Group) -> tuple[object, ...]:
    return parameter.shape, parameter.dtype, parameter.device, *form_options(group)


def _by_form(members: Sequence[Member]) -> Iterator[list[Member]]:
    """Members whose states can be stacked, as many as fill a batch; and one by one those that are
    in none."""
    alike: dict[Any, list[Member]] = {}
    for member in members:
        key = (
            (member.shards is None, *member.form) if member.is_stacked else member
        )  # itself: alone
        alike.setdefault(key, []).append(member)
    for together in alike.values():
        parameter = together[0].parameter
        capacity = max(1, BATCH_BYTES.get(parameter.device.type, 2**28) // max(1, parameter.nbytes))
        for start in range(0, len(together), capacity):
            yield together[start : start + capacity]


def _stacked_states(members: Sequence[Member]) -> State:
    """Stack what there is of the members' states, blank where there is nothing, and make each a
    view of the stacks."""
    parameter, group = members[0].parameter, members[0].group
    matrices = matrix_shape(parameter, group)
    stacks = {}
    for name, shape in state_shapes(parameter, group).items():
        stacked_shape = (len(members), *(matrices if name.startswith("exp_avg") else shape))
        stack = torch.zeros(
            stacked_shape, dtype=state_dtype(name, parameter), device=parameter.device
        )
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


def _own_state(name: str, shape: tuple[int, ...], member: Member) -> Tensor:
    """A state of a parameter that is in no stack; of a sharded parameter sharded as that is."""
    parameter, dtype = member.parameter, state_dtype(name, member.parameter)
    if shape and is_sharded(parameter) and member.shards is None:
        tensor = torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
    else:
        tensor = torch.zeros(shape, dtype=dtype, device=parameter.device)
    return tensor.copy_(member.state[name]) if name in member.state else tensor


def for_each(work: Callable[[MatrixBatch], None], batches: Sequence[MatrixBatch]) -> None:
    """Call `work` on each batch; on the CPU on as many threads as torch uses for one operation, a
    batch on each."""
    num_threads = (
        torch.get_num_threads()
    )  # factorisations of small matrices would gain little from a second core
    if (
        num_threads == 1
        or len(batches) <= 1
        or any(batch.state["step"].device.type != "cpu" for batch in batches)
    ):
        for batch in batches:
            work(batch)
        return
    torch.set_num_threads(1)  # the matrix library's setting is shared by all threads
    try:
        list(
            _pool(num_threads).map(torch.no_grad()(work), batches)
        )  # gradients are on in a new thread
    finally:
        torch.set_num_threads(num_threads)


@cache
def _pool(num_threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(
        num_threads, "brx-optim", initializer=lambda: torch.set_num_threads(1)
    )
