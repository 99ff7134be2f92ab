"""Same-shaped weight matrices as one batch: their optimizer state is one stack, each parameter's state a view of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, TypeVar

import torch
from torch import Tensor

Group = dict[str, Any]
"""A torch parameter group."""

Key = TypeVar("Key")


@dataclass
class Member:
    """One parameter of a batch.

    Attributes:
        parameter: shape (*lead, m, n).
        group: the parameter group that it belongs to.
        phase: where its refreshes fall within their interval (0 unless staggered).
        num_updates: how many it has had; on the host, so that no step has to ask the device.
    """

    parameter: Tensor
    group: Group
    phase: int
    num_updates: int


@dataclass
class MatrixBatch:
    """Parameters of one shape (*lead, m, n) whose matrices go through the algorithm together.

    The leading dimensions of a parameter (experts) count as further matrices: b = len(members) * prod(lead).

    Attributes:
        members: the parameters; their groups agree in all options but the learning rate, the decay and the frequency.
        state: by name, one tensor per kind of state, the members along the first dimension: (len(members), *lead, ., .)
            for matrices, (len(members),) for counters.
    """

    members: list[Member]
    state: dict[str, Tensor]

    def __getitem__(self, run: slice) -> MatrixBatch:
        """Some neighbouring members; their state is a view of this batch's."""
        return MatrixBatch(self.members[run], {name: stack[run] for name, stack in self.state.items()})

    @property
    def options(self) -> Group:
        """The options that all members share."""
        return self.members[0].group

    @property
    def device(self) -> torch.device:
        """Of the parameters."""
        return self.members[0].parameter.device

    def cost(self) -> int:
        """Multiply-adds of one rotation of both sides; the order of sizes is what matters."""
        rows, columns = self.members[0].parameter.shape[-2:]
        return self.state["exp_avg"].numel() * (rows + columns)

    def runs(self, key: Callable[[Member], Key]) -> Iterator[tuple[Key, slice]]:
        """Neighbouring members with the same key, which stay one batch."""
        for value, places in groupby(range(len(self.members)), lambda place: key(self.members[place])):
            run = list(places)
            yield value, slice(run[0], run[-1] + 1)

    def matrices(self, name: str) -> Tensor:
        """The state `name` as (b, ., .)."""
        return self.state[name].flatten(0, -3)

    def gradients(self) -> Tensor:
        """The gradients as (b, m, n), in the precision of the arithmetic."""
        gradients = [member.parameter.grad for member in self.members if member.parameter.grad is not None]
        return torch.stack(gradients).flatten(0, -3).to(self.state["exp_avg"].dtype)

    def update_weights(self, updates: Tensor) -> None:
        """W <- (1 - lr weight_decay) W + update, for updates (b, m, n)."""
        parameters = [member.parameter for member in self.members]
        # Half-precision weights are rounded once, after the sum.
        is_half = parameters[0].dtype != updates.dtype
        weights = [parameter.to(updates.dtype) for parameter in parameters] if is_half else parameters
        for decay, run in self.runs(lambda member: 1 - float(member.group["lr"]) * member.group["weight_decay"]):
            # A tensor, since a number would be made into one for every weight.
            torch._foreach_mul_(weights[run], updates.new_tensor(decay))
        torch._foreach_add_(weights, updates.view_as(self.state["exp_avg"]).unbind())
        if is_half:
            torch._foreach_copy_(parameters, weights)


def stack_states(states: Sequence[dict[str, Tensor]], blank: dict[str, Tensor]) -> dict[str, Tensor]:
    """Stack the members' states and make each of them a view of the stacks.

    Args:
        states: one per member; empty before the first update.
        blank: the state before the first update.
    """
    stacks = {}
    for name, initial in blank.items():
        stack = torch.empty((len(states), *initial.shape), dtype=initial.dtype, device=initial.device)
        if name.endswith("_basis"):  # column by column: see brx.optim.eigenbasis
            stack = stack.mT
        for state, view in zip(states, stack.unbind(), strict=True):
            view.copy_(state.get(name, initial))
            state[name] = view
        stacks[name] = stack
    return stacks
