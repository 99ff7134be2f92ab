"""The devices of a run as one of them sees them."""

from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
Topic = str
"""A subject on which ranks announce something to all others: "stop-asked", "stop", "diverged",
"failed", and the progress of a checkpoint."""


class Channel(Protocol):
    """Sends tensors (B, S, D) in one direction along the pipeline: from one neighbour to this
    device, and from this device to the other neighbour."""

    def send(self, tensor: Tensor) -> None:
        """Begin to send a tensor. B may be smaller than usual."""

    def wait_for_send(self) -> None:
        """Wait until the last tensor is sent."""

    def post_receive(self) -> None:
        """Post the receive of the next tensor, so that it may arrive while this device computes."""

    def receive(self) -> Tensor:
        """Wait for the next tensor and return it."""
        ...


@dataclass(frozen=True)
class Neighbours:
    """The connections of a device to the previous and the next one."""

    activations: Channel
    """The residual stream, from the previous device and to the next one."""
    gradients: Channel
    """The gradient of the residual stream, from the next device and to the previous one."""


class World:
    """The R processes of a run, one per device, as this one sees them. This class is a run with a
    single process; `DistributedWorld` has several."""

    rank = 0
    """r. Rank 0 has the first stages, and writes the run's files."""
    num_ranks = 1
    """R."""
    local_rank = 0
    """The number of this process among those on the same machine."""
    num_local_ranks = 1

    def __init__(self) -> None:
        self._announced: dict[str, str] = {}

    def connect(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> Neighbours | None:
        """Connect to the neighbours, for tensors of a shape and data type; None if there are
        none."""
        return None

    def gather(self, value: T) -> list[T]:
        """On rank 0: the values of all ranks, in order. Other ranks get an empty list, at once."""
        return [value]

    def broadcast(self, value: T) -> T:
        """The value of rank 0, on all ranks."""
        return value

    def barrier(self, *, patient: bool = False) -> None:
        """Wait for all ranks; if `patient`, for hours (while rank 0 prepares the data)."""

    def announce(self, topic: Topic, message: str) -> None:
        """Send a message under a topic to all ranks. Any rank announces that it was asked to stop,
        that it has diverged, or that it has failed. Rank 0 announces the iteration after which all
        ranks stop."""
        self._announced[topic] = message

    def announce_first(self, topic: Topic, message: str) -> None:
        """As `announce`, unless a message was announced under this topic before: that one stays."""
        self._announced.setdefault(topic, message)

    def announced(self, topic: Topic) -> str | None:
        """The message that was announced under a topic; None if there is none yet. Never waits."""
        return self._announced.get(topic)

    def close(self) -> None:
        """Close the connections. All ranks have to call it."""
