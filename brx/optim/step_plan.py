"""The plan of a step, made on the host: batches of matrices, how their bases are renewed, and which
parameters get AdamW."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import groupby
from threading import Lock

import torch
from torch import Tensor

from .matrix_batch import BatchLayout, MatrixBatch
from .options import PRECISIONS, Group, form_options, shared_options
from .reduced_precision import precision_on
from .roles import Role, has_roles
from .shards import rotation_cost
from .step_member import Due, StepMember
from .step_scalars import StepScalars, StepScalarsPool

# Options that a CUDA graph of a step has fixed, besides betas and eps.
CONSTANTS = ("source", "covariance", "rotation_precision", "covariance_precision", "maximize")


class StepOptions:
    """The options of a group's parameters in one step.

    Args:
        options: the group's options, with numbers in place of tensors.
        roles: the roles of parameters whose model is known.
    """

    def __init__(self, options: Group, roles: dict[Tensor, Role]) -> None:
        self._options = options
        self._roles = {} if has_roles(options) else roles
        self._known: dict[tuple[Role | None, torch.device], tuple[Group, tuple[object, ...]]] = {}

    def of(self, parameter: Tensor) -> Group:
        """A parameter's options, with the precisions of products that its device has."""
        return self._options_and_form(parameter)[0]

    def form(self, parameter: Tensor) -> tuple[object, ...]:
        """Everything that decides which state a parameter has."""
        _, deciding = self._options_and_form(parameter)
        return parameter.shape, parameter.dtype, parameter.device, deciding

    def of_member(self, member: StepMember) -> Group:
        """A parameter's options; `rest_factor` scales the learning rate of one that is not
        rotated."""
        options = self.of(member.parameter)
        factor = self._options["rest_factor"]
        if member.is_rotated or factor == 1.0 or not self._options["rotate"]:
            return options
        return {**options, "lr": options["lr"] * float(factor)}

    def _options_and_form(self, parameter: Tensor) -> tuple[Group, tuple[object, ...]]:
        """A parameter's options, and their part that decides its state."""
        role = self._roles.get(parameter)
        place = role, parameter.device
        if place not in self._known:
            options = self._options if role is None else role.over(self._options)
            on_device = {**options}
            for name in PRECISIONS:
                on_device[name] = precision_on(parameter.device, options[name])
            self._known[place] = on_device, form_options(options)
        return self._known[place]


@dataclass
class Work:
    """What a step does with one batch of matrices.

    Attributes:
        batch: neighbouring members of a batch of the layout that go through the step together.
        place: the number of that batch in the layout, and the first and last member there.
        due: for each run of neighbouring members, what is due for their bases.
    """

    batch: MatrixBatch
    place: tuple[int, int, int]
    scalars: StepScalars
    due: list[tuple[Due, slice]]


@dataclass
class Plan:
    """What a step does, decided on the host.

    Attributes:
        members: all parameters with a gradient.
        work: the batches of rotated parameters.
        rest: the parameters that are not rotated, in groups that one kernel updates.
    """

    members: list[StepMember]
    work: list[Work] = field(default_factory=list)
    rest: list[tuple[list[StepMember], StepScalars]] = field(default_factory=list)

    @property
    def is_refresh(self) -> bool:
        """Whether any basis is renewed."""
        rotated = [member for member in self.members if member.is_rotated]
        return any(member.next_due().refresh is not None for member in rotated)

    @property
    def signature(self) -> object:
        """A hashable description of the step: the device does the same in two steps with equal
        signatures, apart from the scalars that it reads (`StepScalars`)."""
        gradients = []
        for member in self.members:
            assert member.gradient is not None
            gradients.append((id(member), member.gradient.data_ptr()))
        work = []
        for batch_work in self.work:
            all_due = tuple((due, run.start, run.stop) for due, run in batch_work.due)
            options = batch_work.batch.options
            fixed = (options["betas"], options["eps"], *map(options.get, CONSTANTS))
            work.append((batch_work.place, all_due, fixed))
        rest = [(id(scalars), len(together)) for together, scalars in self.rest]
        return tuple(gradients), tuple(work), tuple(rest)

    @property
    def num_first_bases(self) -> int:
        """How many exact bases this step computes on this rank."""
        total = 0
        for work in self.work:
            batch = work.batch
            matrices_per_member = len(batch.matrices("exp_avg")) // len(batch.members)
            for due, run in work.due:
                if due.refresh == "exact":
                    num_matrices = matrices_per_member * (run.stop - run.start)
                    total += len(batch.sides) * num_matrices
        return total


class FirstBases:
    """Counts the exact bases of a step as they are computed, and reports the count.

    Args:
        total: how many bases there are.
        tell: called with the number of bases that are done, and with the total.
    """

    def __init__(self, total: int, tell: Callable[[int, int], None] | None) -> None:
        self._total = total
        self._tell = tell
        self._num_done = 0
        self._lock = Lock()

    def count(self, num: int) -> None:
        """Count further bases that are done."""
        with self._lock:  # on the CPU, threads work on several batches at the same time
            self._num_done += num
            if self._tell is not None:
                self._tell(self._num_done, self._total)


def plan_step(members: list[StepMember], layout: BatchLayout, scalars: StepScalarsPool) -> Plan:
    """Plan a step, and write its scalars to the device.

    Args:
        members: the parameters that have a gradient, with their options in this step.
        layout: has these and all other parameters, in batches.
        scalars: where the device reads rates and limits.
    """
    scalars.begin()
    plan = Plan(members)
    for index, batch in enumerate(layout.batches):
        for key, run in batch.runs(_alike_in_a_step):
            if key is None:
                continue
            part = batch[run]
            due = list(part.runs(StepMember.next_due))
            place = (index, run.start, run.stop)
            plan.work.append(Work(part, place, scalars.of(part.members[0]), due))
    rest = [member for member in members if not member.is_rotated and member.is_updated_here]
    for _, alike in groupby(rest, _one_call):
        together = list(alike)
        plan.rest.append((together, scalars.of(together[0])))
    return plan


def _alike_in_a_step(member: StepMember) -> object:
    """The key of neighbours that go through a step together; None without a gradient."""
    if member.gradient is None:
        return None
    return member.num_updates, shared_options(member.options)


def _one_call(member: StepMember) -> tuple[int, torch.dtype, torch.device]:
    """The key of parameters that one call of torch's kernel can update."""
    return id(member.group), member.parameter.dtype, member.parameter.device


def cost(work: Work) -> int:
    """The multiply-adds that it takes to rotate the batch, for comparing costs."""
    return rotation_cost(work.batch.state["exp_avg"])
