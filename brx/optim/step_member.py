"""One parameter in an optimizer's step: its options, its state, and when its basis is renewed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from torch import Tensor

from .dtensor import local
from .options import Group
from .parameter_state import is_rotated, state_shapes
from .shards import Shards

State = dict[str, Tensor]  # what the optimizer keeps for a parameter, by name
Refresh = Literal["exact", "power", None]


class Due(NamedTuple):
    """What an update does to a basis and its covariances; perhaps nothing."""

    refresh: Refresh  # how it renews the basis; None: not at all
    num_gradients: int  # for how many updates its gradient counts in the covariances


@dataclass(frozen=True)
class Position:
    """A parameter's position among the rotated parameters of its group, which decides when a
    staggered refresh is due."""

    index: int = 0
    num: int = 1


@dataclass(eq=False)
class StepMember:
    """A parameter with a gradient, which takes part in a step.

    Attributes:
        options: the options in this step, as numbers. They may differ from the group's, for example
            for embeddings in a group that is rotated.
        form: decides which state the parameter has, and with which others it can be stacked.
        position: see `Position`.
        shards: None for a parameter that is not sharded, or not rotated.
        state: the tensors in the optimizer's `state`, unless they were replaced there.
        num_updates: the count in `state`, kept on the host, so that no step waits for the device.
        gradient: the whole gradient; None where another rank updates the matrix.
        update: for a sharded matrix, the whole update, before it is sent to the shards.
    """

    parameter: Tensor
    group: Group
    options: Group
    form: tuple[object, ...] = ()
    position: Position = field(default_factory=Position)
    shards: Shards | None = None
    state: State = field(default_factory=dict)
    num_updates: int = 0
    gradient: Tensor | None = None
    update: Tensor | None = None

    def __post_init__(self) -> None:
        self.is_rotated = is_rotated(self.parameter, self.options)

    @property
    def is_stacked(self) -> bool:
        """Whether this rank updates it as part of a batch of matrices."""
        return self.is_rotated and (self.shards is None or self.shards.is_owner)

    @property
    def is_updated_here(self) -> bool:
        """Whether this rank computes its update, or the update of a part of it."""
        if self.is_rotated:
            return self.is_stacked
        return local(self.parameter).numel() > 0

    @property
    def state_shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of its state on this rank, by name."""
        shapes = state_shapes(self.parameter, self.options)
        if self.shards is None or self.shards.is_owner:
            return shapes
        # Another rank keeps it. Tools for checkpoints need the same names on all ranks.
        return {name: shape if name == "step" else (0,) for name, shape in shapes.items()}

    @property
    def decay(self) -> float:
        """1 - lr weight_decay."""
        return float(1 - self.options["lr"] * self.options["weight_decay"])

    def is_refresh_due(self, update: int | None = None) -> bool:
        """Whether a refresh is due at an update (None: the next)."""
        frequency = self.options["frequency"]
        if frequency is None:
            return False
        if update is None:
            update = self.num_updates + 1
        if self.options["staggered"]:
            # Shifted within the group, so that every pipeline stage spreads its refreshes evenly.
            update += int(self.position.index * frequency / self.position.num)
        # Due at a multiple of the frequency, or at the first update after one: a frequency of 9.5
        # gives intervals of 9 and 10 in turn.
        return bool(update // frequency > (update - 1) // frequency)

    def next_due(self) -> Due:
        """What the next update does to the basis and the covariances, refresh or not."""
        update = self.num_updates + 1
        first = self.options["first_refresh"]
        if self.options["as_published"]:
            # published.py decides itself. "power", because every gradient must be checked at once.
            return Due("power", 1)
        if update <= first:
            # The paper leaves the start open. Here every gradient counts until the first basis.
            return Due("exact" if update == first else None, 1)
        if not self.is_refresh_due():
            return Due(None, 1 if self.options["covariance"] == "step" else 0)
        # A refresh: algorithm 1, lines 5 and 6.
        if self.options["covariance"] == "interval":
            return Due("power", update - self._last_refresh(before=update))
        # "refresh", as printed: the average remembers frequency / (1 - beta2) updates, with "step"
        # 1 / (1 - beta2).
        return Due("power", 1)

    def _last_refresh(self, before: int) -> int:
        """The last update before the given one that renewed the basis."""
        first = self.options["first_refresh"]
        for update in range(before - 1, first, -1):
            if self.is_refresh_due(update):
                return update
        return int(first)
