"""What a device does, in order: the asynchronous one-forward-one-backward schedule.

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
