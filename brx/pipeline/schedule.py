"""What a device does, in order: the asynchronous one-forward-one-backward schedule, and the synchronous ones.

The engine runs the asynchronous one; the synchronous ones are for comparison (`brx schedule`).

Action text follows torch.distributed.pipelining: `2F0` is the forward pass of micro-batch 0 on rank 2, `2B0` its
backward pass; `2U0` is the update that follows from it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Action:
    """One unit of a device's work."""

    rank: int
    kind: Literal["F", "B", "U"]
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.rank}{self.kind}{self.micro_batch}"


def asynchronous_1f1b(rank: int, num_ranks: int, first: int, last: Callable[[], int]) -> Iterator[Action]:
    """The actions of one rank for micro-batches `first` to `last()`, from an empty pipeline to an empty pipeline.

    Rank r lets R - 1 - r forward passes run ahead; from then on forwards and backwards alternate, and each backward
    is followed by its update, so that no rank waits for another's update (PipeDream, arXiv:1806.03377, section 3.2).

    Args:
        rank: r.
        num_ranks: R.
        first: the first micro-batch.
        last: the last one; asked anew each time, so that a run may be cut short on its way.
    """
    ahead = num_ranks - 1 - rank
    forwarded = first - 1
    iteration = first
    while iteration <= last():
        while forwarded < min(iteration + ahead, last()):
            forwarded += 1
            yield Action(rank, "F", forwarded)
        yield Action(rank, "B", iteration)
        yield Action(rank, "U", iteration)
        iteration += 1


def gpipe(rank: int, num_ranks: int, num_micro_batches: int, num_steps: int) -> Iterator[Action]:
    """The synchronous schedule of GPipe (arXiv:1811.06965): all forwards, all backwards, one update a step."""
    return _synchronous(rank, num_micro_batches, num_steps, ahead=num_micro_batches - 1)


def synchronous_1f1b(rank: int, num_ranks: int, num_micro_batches: int, num_steps: int) -> Iterator[Action]:
    """One forward, one backward, with a flush and one update a step (PipeDream-Flush, arXiv:2006.09503)."""
    return _synchronous(rank, num_micro_batches, num_steps, ahead=min(num_ranks - 1 - rank, num_micro_batches - 1))


def _synchronous(rank: int, num_micro_batches: int, num_steps: int, ahead: int) -> Iterator[Action]:
    """Each step its own micro-batches, `ahead` forward passes in advance; the update comes after the last of them."""
    for step in range(num_steps):
        last = (step + 1) * num_micro_batches
        forwarded = backwarded = step * num_micro_batches
        while backwarded < last:
            while forwarded < min(backwarded + 1 + ahead, last):
                forwarded += 1
                yield Action(rank, "F", forwarded)
            backwarded += 1
            yield Action(rank, "B", backwarded)
        yield Action(rank, "U", last)
