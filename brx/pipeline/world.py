"""The devices of a run as one of them sees them."""

from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
Topic = str
"""What a rank tells all others of: "stop-asked", "stop", "diverged", "failed", and how far it is
with a checkpoint."""


class Channel(Protocol):
    """Tensors of one shape (B, S, D) between neighbouring devices in one direction, in the order of
    the schedule."""

    def send(self, tensor: Tensor) -> None: ...  # starts to; B may be smaller
    def wait_for_send(self) -> None: ...
    def post_receive(
        self,
    ) -> None: ...  # so that the next tensor can arrive while this device computes
    def receive(self) -> Tensor: ...  # waits for it


@dataclass(frozen=True)
class Neighbours:
    """The connections of a device to the ones before and behind it."""

    activations: Channel  # the residual stream, from the previous device and to the next one
    gradients: Channel  # its gradient, from the next device and to the previous one


class World:
    """The R processes of a run, one per device; here one that holds all stages, `DistributedWorld`
    several."""

    rank, num_ranks = 0, 1  # r and R; rank 0 holds the first stages and does the writing
    local_rank, num_local_ranks = 0, 1  # among those on the same machine

    def __init__(self) -> None:
        self._announced: dict[str, str] = {}

    def connect(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> Neighbours | None:
        """Connect to the neighbours for tensors of that shape and dtype; None where there are
        none."""
        return None

    def gather(self, value: T) -> list[T]:
        """Everybody's value in order of rank, on rank 0; nothing elsewhere, and at once."""
        return [value]

    def broadcast(self, value: T) -> T:
        """Rank 0's value, everywhere."""
        return value

    def barrier(self, *, patient: bool = False) -> None:
        """Wait for all; `patient`: for hours if need be (while rank 0 prepares the data)."""

    def announce(self, topic: Topic, message: str) -> None:
        """Tell everybody: any rank that it was asked to stop, rank 0 after which iteration all do,
        any rank of its divergence or other failure."""
        self._announced[topic] = message

    def announced(self, topic: Topic) -> str | None:
        """What was announced, if it was; never waits for anybody."""
        return self._announced.get(topic)

    def close(self) -> None:
        """Part from the others, all at once."""
