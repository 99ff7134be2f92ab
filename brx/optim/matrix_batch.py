"""Same-shaped weight matrices as one batch: their optimizer state is one stack, each parameter's state a view of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

Group = dict[str, Any]
"""A torch parameter group."""


@dataclass
class MatrixBatch:
    """Parameters of one shape (*lead, m, n) whose matrices go through the algorithm together.

    The leading dimensions of a parameter (experts) count as further matrices: b = len(params) * prod(lead).

    Attributes:
        params: the parameters.
        groups: the parameter group of each.
        offsets: where each one's refreshes fall within its interval (0 unless staggered).
        num_steps: updates that each has had, on the host, so that no step has to ask the device.
        state: by name, one tensor per kind of state with the parameters along the first dimension:
            (len(params), *lead, ., .) for matrices, (len(params),) for counters.
    """

    params: list[Tensor]
    groups: list[Group]
    offsets: list[int]
    num_steps: list[int]
    state: dict[str, Tensor]

    def __getitem__(self, part: slice) -> MatrixBatch:
        """A run of the parameters; its state is a view of this one's."""
        return MatrixBatch(
            self.params[part],
            self.groups[part],
            self.offsets[part],
            self.num_steps[part],
            {name: stack[part] for name, stack in self.state.items()},
        )

    def __len__(self) -> int:
        return len(self.params)

    @property
    def options(self) -> Group:
        """The options that all parameters of the batch share."""
        return self.groups[0]

    def matrices(self, name: str) -> Tensor:
        """The state `name` as (b, ., .)."""
        return self.state[name].flatten(0, -3)

    def gradients(self) -> Tensor:
        """The gradients as (b, m, n), in the precision of the arithmetic."""
        stacked = torch.stack([parameter.grad for parameter in self.params if parameter.grad is not None])
        return stacked.flatten(0, -3).to(self.state["exp_avg"].dtype)

    def add_to_weights(self, updates: Tensor, decays: list[float]) -> None:
        """W <- decay W + update.

        Args:
            updates: (b, m, n).
            decays: one factor per parameter.
        """
        updates_by_parameter = list(updates.view_as(self.state["exp_avg"]).unbind())
        if self.params[0].dtype == updates.dtype:
            torch._foreach_mul_(self.params, decays)
            torch._foreach_add_(self.params, updates_by_parameter)
            return
        # Half-precision weights are rounded once, after the sum.
        weights = [parameter.to(updates.dtype) for parameter in self.params]
        torch._foreach_mul_(weights, decays)
        torch._foreach_add_(weights, updates_by_parameter)
        torch._foreach_copy_(self.params, weights)

    def parts(self, key: Callable[[int], Any]) -> Iterator[tuple[Any, slice]]:
        """Runs of neighbouring parameters that have the same key.

        Args:
            key: of the parameter at a place.
        """
        for value, places in groupby(range(len(self)), key):
            run = list(places)
            yield value, slice(run[0], run[-1] + 1)


def stack_state(states: Sequence[dict[str, Tensor]], blank: dict[str, Tensor]) -> dict[str, Tensor]:
    """Stack the parameters' states and turn each of them into views of the stacks.

    Args:
        states: one per parameter; an empty one belongs to a parameter that had no update yet, and stays empty.
        blank: the state before the first update.
    """
    stacks = {}
    for name, initial in blank.items():
        stack = torch.empty((len(states), *initial.shape), dtype=initial.dtype, device=initial.device)
        for state, view in zip(states, stack.unbind(), strict=True):
            view.copy_(state.get(name, initial))
            if state:
                state[name] = view
        stacks[name] = stack
    return stacks
