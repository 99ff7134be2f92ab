"""The devices of a run as one of them sees them; `SingleDevice` is the world without neighbours."""

from __future__ import annotations

from typing import Protocol, TypeVar

import torch

from brx.pipeline.engine import Neighbours

T = TypeVar("T")


class World(Protocol):
    """The R processes of a run, one per device.

    Attributes:
        rank: this process, 0 .. R-1; rank 0 holds the first stages and does the writing.
        num_ranks: R.
        local_rank: this process among those on the same machine.
        num_local_ranks: how many those are.
    """

    rank: int
    num_ranks: int
    local_rank: int
    num_local_ranks: int

    def connect(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Neighbours | None:
        """Connect to the neighbours for tensors of that shape and dtype; None where there are none."""

    def gather(self, value: T) -> list[T]:
        """Everybody's value in order of rank, on rank 0; nothing elsewhere, and at once."""

    def broadcast(self, value: T) -> T:
        """Rank 0's value, everywhere."""

    def barrier(self, *, patient: bool = False) -> None:
        """Wait for all; `patient`: for hours if need be (while rank 0 prepares the data)."""

    def announce_stop(self, iteration: int) -> None:
        """Rank 0: let everybody stop after `iteration`."""

    def announced_stop(self) -> int | None:
        """The iteration that rank 0 announced, if it did; never waits for anybody."""

    def announce_divergence(self, message: str) -> None:
        """Tell rank 0, which would see a lost neighbour, that numbers are no longer finite, and where."""

    def announced_divergence(self) -> str | None:
        """What a rank announced so, if one did; never waits for anybody."""

    def close(self) -> None:
        """Part from the others, all at once."""


class SingleDevice:
    """One process that holds all stages."""

    rank = 0
    num_ranks = 1
    local_rank = 0
    num_local_ranks = 1

    def __init__(self) -> None:
        self._stop: int | None = None
        self._divergence: str | None = None

    def connect(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        return None

    def gather(self, value: T) -> list[T]:
        return [value]

    def broadcast(self, value: T) -> T:
        return value

    def barrier(self, *, patient: bool = False) -> None:
        return

    def announce_stop(self, iteration: int) -> None:
        self._stop = iteration

    def announced_stop(self) -> int | None:
        return self._stop

    def announce_divergence(self, message: str) -> None:
        self._divergence = message

    def announced_divergence(self) -> str | None:
        return self._divergence

    def close(self) -> None:
        return
