"""Weight matrices of one shape as a batch. Their optimizer state is one stack, and each parameter's
state is a view of it."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from .dtensor import is_sharded
from .elementwise import AddUpdates, limited
from .options import Group
from .parameter_state import Side, as_matrices, matrix_shape, state_dtype, state_shapes
from .reduced_precision import Precision, product
from .step_member import State, StepMember

Key = TypeVar("Key", bound=Hashable)

# Bytes of weights in a full batch: a core's cache on the CPU, enough to fill the device elsewhere.
BATCH_BYTES = {"cpu": 2**20, "cuda": 2**28}


@dataclass
class MatrixBatch:
    """Parameters of one shape whose matrices go through the algorithm together.

    A parameter is a stack of matrices (*lead, m, n), mostly with no `lead`; a mixture's experts and
    the parts of a fused projection are its leading dimensions. So there are b = len(members) *
    prod(lead) matrices.

    Attributes:
        state: one tensor per name: (len(members), *lead, ., .) of matrices, (len(members),) of
            counters.
        bad: on a GPU, a flag () on the device. If it is set, a gradient is bad and the step changes
            nothing.
    """

    members: list[StepMember]
    state: State
    bad: Tensor | None = None

    def __post_init__(self) -> None:
        sides: tuple[Side, Side] = ("left", "right")
        self.sides: list[Side] = [side for side in sides if f"{side}_basis" in self.state]
        # The version of `step` with which the host's counts of updates last agreed.
        self.seen_version = self.state["step"]._version

    @property
    def options(self) -> Group:
        """The members' options, which they share in a step."""
        return self.members[0].options

    def __getitem__(self, run: slice) -> MatrixBatch:
        """A run of neighbouring members, whose state is a view of this batch's."""
        if run.start == 0 and run.stop == len(self.members):
            return self
        state = {name: stack[run] for name, stack in self.state.items()}
        return MatrixBatch(self.members[run], state, self.bad)

    def runs(self, key: Callable[[StepMember], Key]) -> Iterator[tuple[Key, slice]]:
        """Runs of neighbouring members with the same key."""
        start = 0
        for value, equal in groupby(self.members, key):
            stop = start + sum(1 for _ in equal)
            yield value, slice(start, stop)
            start = stop

    def counts(self) -> Tensor:
        """The members' counts of updates (members, 1, ..., 1), with as many dimensions as the
        moments; a view."""
        ones = [1] * (self.state["exp_avg"].ndim - 1)
        return self.state["step"].view(-1, *ones)

    def matrices(self, name: str) -> Tensor:
        """One of the states, of all matrices (b, ., .); a view."""
        return self.state[name].flatten(0, -3)

    def part(
        self,
        matrices: Tensor,  # (b, m, n)
        run: slice,
    ) -> Tensor:
        """The matrices of a run of members."""
        return matrices.view_as(self.state["exp_avg"])[run].flatten(0, -3)

    def gradients(self) -> Tensor:
        """The gradients (b, m, n), in the precision of the arithmetic; negated if the loss is
        maximized."""
        momentum = self.state["exp_avg"]
        each = [member.gradient for member in self.members if member.gradient is not None]
        # (members, *lead, m, n)
        stacked = as_matrices(torch.stack(each), self.options)
        matrices = stacked.reshape(momentum.shape).flatten(0, -3).to(momentum.dtype)
        if self.bad is not None:  # known on the device alone: NaN must not enter the state
            matrices.masked_fill_(self.bad, 0)
        return matrices.neg_() if self.options["maximize"] else matrices

    def update_weights(
        self,
        updates: Tensor,  # (b, m, n), overwritten
        decay: Tensor,  # (): 1 - lr weight_decay
        limit: float | Tensor = math.inf,
        add_updates: AddUpdates | None = None,
    ) -> None:
        """W <- (1 - lr weight_decay) W + update; sharded weights get theirs later.

        Args:
            limit: the largest change of an entry by the update.
            add_updates: a compiled function that does it; sharded weights do without.
        """
        has_shards = self.members[0].shards is not None
        if has_shards or add_updates is None:
            updates = limited(updates, limit)
        by_member = self._like_parameters(updates)
        if has_shards:
            for member, update in zip(self.members, by_member, strict=True):
                member.update = update
            return
        parameters = [member.parameter for member in self.members]
        # Half-precision weights are rounded once, after the sum.
        is_half = parameters[0].dtype != updates.dtype
        weights = parameters
        if is_half:
            weights = [parameter.to(updates.dtype) for parameter in parameters]
        if self.bad is not None:
            decay = decay.masked_fill(self.bad, 1.0)
        if add_updates is not None:
            # torch.compile takes a parameter's sizes as fixed, and would compile for each shape.
            open_sized = [weight.detach() for weight in weights]
            add_updates(open_sized, by_member, decay, limit)
        else:
            torch._foreach_mul_(weights, decay)
            torch._foreach_add_(weights, by_member)
        if is_half:
            torch._foreach_copy_(parameters, weights)

    def _like_parameters(self, updates: Tensor) -> tuple[Tensor, ...]:
        """Matrices (b, m, n) in the shape of the parameters that they come from."""
        split = self.options["split"]
        if split:
            updates = updates.view_as(self.state["exp_avg"])  # (members, parts, m, n)
            _, dim = split
            if dim == -1:  # the parts of each row next to each other again
                updates = updates.movedim(-3, -2)
        return updates.reshape(len(self.members), *self.members[0].parameter.shape).unbind()

    def take_counts(self) -> None:
        """Read the members' counts of updates again, if anyone else has written them."""
        if self.state["step"]._version != self.seen_version:
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


def squared_mean(batch: MatrixBatch) -> Tensor:
    """m^2 (1 - beta2^t) / (1 - beta1^t)^2 (members, *lead, m, n), for comparison with v.

    It is the square of the mean gradient, with the bias that v has.
    """
    beta1, beta2 = batch.options["betas"]
    momentum = batch.state["exp_avg"]
    # The count is 0 where a bad gradient has kept the first update from counting.
    t = batch.counts().to(momentum.dtype).clamp(min=1)
    ratio = (1 - beta2**t) / (1 - beta1**t).square()
    return momentum.square().mul_(ratio)


def seen_from(side: Side, matrices: Tensor) -> Tensor:
    """The matrices with a side's dimension first; a view."""
    return matrices if side == "left" else matrices.mT


def unless_bad(factor: float, dtype: torch.dtype, bad: Tensor | None) -> Tensor:
    """A factor (), which becomes 1 in a step that must change nothing."""
    if bad is None:
        return torch.tensor(factor, dtype=dtype, device="cpu")
    # Filled on the device: copying a number to a GPU would make the host wait.
    return torch.full((), factor, dtype=dtype, device=bad.device).masked_fill_(bad, 1.0)


class BatchLayout:
    """The parameters that have had a gradient. Those that this rank rotates are in batches.

    A new layout is made whenever the optimizer's `state` or `param_groups` have changed.

    Args:
        members: with the state that they have; missing tensors are added.
        state: the optimizer's state, which gets the members' tensors.
    """

    def __init__(
        self, members: Sequence[StepMember], state: Mapping[Tensor, dict[str, Any]]
    ) -> None:
        self.members = {member.parameter: member for member in members}
        self.batches: list[MatrixBatch] = []
        for alike in _by_form(members):
            if alike[0].is_stacked:
                self.batches.append(MatrixBatch(alike, _stacked_states(alike)))
            else:
                (alone,) = alike
                shapes = alone.state_shapes
                alone.state = {name: _own_state(name, shapes[name], alone) for name in shapes}
            for member in alike:  # at once: it frees the old tensors
                state[member.parameter].update(member.state)

    def fits(
        self,
        parameter: Tensor,
        group: Mapping[str, Any],
        form: tuple[object, ...],
        state: Mapping[str, Any] | None,
    ) -> bool:
        """Whether a parameter, its group, form and state are the same as when the layout was
        made."""
        member = self.members.get(parameter)
        if member is None or state is None:
            return False
        if member.group is not group or member.form != form:
            return False
        # The same tensors, not equal ones.
        return all(state.get(name) is tensor for name, tensor in member.state.items())


def _by_form(members: Sequence[StepMember]) -> Iterator[list[StepMember]]:
    """Lists of members whose states can be stacked, each at most a full batch; members that belong
    to no batch come one by one."""
    alike: dict[object, list[StepMember]] = {}
    for member in members:
        key = (member.shards is None, member.form) if member.is_stacked else member
        alike.setdefault(key, []).append(member)
    for together in alike.values():
        parameter = together[0].parameter
        bytes_per_batch = BATCH_BYTES.get(parameter.device.type, BATCH_BYTES["cuda"])
        capacity = max(1, bytes_per_batch // max(1, parameter.nbytes))
        for start in range(0, len(together), capacity):
            yield together[start : start + capacity]


def _stacked_states(members: Sequence[StepMember]) -> State:
    """Stack the members' states, with zeros (for a basis, the identity) where there is none, and
    make each state a view of its stack."""
    parameter, options = members[0].parameter, members[0].options
    matrices = matrix_shape(parameter, options)
    stacks = {}
    for name, shape in state_shapes(parameter, options).items():
        shape_in_stack = matrices if name.startswith("exp_avg") else shape
        stack = torch.zeros(
            (len(members), *shape_in_stack),
            dtype=state_dtype(name, parameter),
            device=parameter.device,
        )
        if name.endswith("_basis"):  # the identity, stored by columns: see eigenbasis.py
            stack = stack.mT
            stack.diagonal(dim1=-2, dim2=-1).fill_(1)
        for member, part in zip(members, stack.unbind(), strict=True):
            view = part.view(shape)
            if name in member.state:
                view.copy_(member.state[name])
            member.state[name] = view
        stacks[name] = stack
    return stacks


def _own_state(name: str, shape: tuple[int, ...], member: StepMember) -> Tensor:
    """A state of a parameter that is in no stack, sharded as the parameter."""
    parameter, dtype = member.parameter, state_dtype(name, member.parameter)
    if shape and is_sharded(parameter) and member.shards is None:
        tensor = torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
    else:
        tensor = torch.zeros(shape, dtype=dtype, device=parameter.device)
    return tensor.copy_(member.state[name]) if name in member.state else tensor


class HasBatch(Protocol):
    batch: MatrixBatch


Job = TypeVar("Job", bound=HasBatch)


def for_each(work: Callable[[Job], None], jobs: Sequence[Job]) -> None:
    """Call `work` on each job.

    On the CPU, the threads that torch would use for one operation each take a job instead, because
    factorisations of small matrices gain little from a second core.
    """
    num_threads = torch.get_num_threads()
    are_on_cpu = all(job.batch.state["step"].device.type == "cpu" for job in jobs)
    if num_threads == 1 or len(jobs) <= 1 or not are_on_cpu:
        for job in jobs:
            work(job)
        return
    torch.set_num_threads(1)  # the matrix library's setting is shared by all threads
    try:
        # Gradients are on in a new thread.
        list(_pool(num_threads, os.getpid()).map(torch.no_grad()(work), jobs))
    finally:
        torch.set_num_threads(num_threads)


@cache
def _pool(num_threads: int, process: int) -> ThreadPoolExecutor:
    """The threads of a process. A forked one has the pool of its parent, but not its threads."""
    return ThreadPoolExecutor(
        num_threads, "basis-rotation", initializer=lambda: torch.set_num_threads(1)
    )
