"""What a device does, in order: the asynchronous one-forward-one-backward schedule, and the synchronous ones.

The engine runs the asynchronous one; the synchronous ones are for comparison (`brx schedule`).

Action text follows torch.distributed.pipelining: `2F0` is the forward pass of micro-batch 0 on stage 2, `2B0` its
backward pass, or `2I0` and `2W0` where that is split into the gradient of the input, which the stage before waits for,
and the gradient of the weights, which nobody does; `2U0` is update 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple


class Action(NamedTuple):
    """One unit of a device's work.

    Attributes:
        stage: the rank, unless the rank holds several chunks of the model.
        kind: forward pass, backward pass or its two parts, update.
        number: of the micro-batch, or of the update; both from 1.
    """

    stage: int
    kind: Literal["F", "B", "I", "W", "U"]
    number: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.number}"


def asynchronous_1f1b(
    rank: int, num_ranks: int, first: int, last: Callable[[], int], accumulation: int = 1
) -> Iterator[Action]:
    """The actions of one rank for micro-batches `first` to `last()`, from an empty pipeline to an empty pipeline.

    Rank r lets R - 1 - r forward passes run ahead; from then on forwards and backwards alternate, and every M-th
    backward is followed by an update, so that no rank waits for another's update (PipeDream, arXiv:1806.03377, section
    3.2).

    Args:
        last: the last one; asked anew each time, so that a run may be cut short on its way.
    """
    ahead = num_ranks - 1 - rank
    forwarded = first - 1
    micro_batch = first
    while micro_batch <= last():
        # At first R - r forward passes, then one for each backward pass, until none is left to run ahead of.
        while forwarded < min(micro_batch + ahead, last()):
            forwarded += 1
            yield Action(rank, "F", forwarded)
        yield Action(rank, "B", micro_batch)
        if micro_batch % accumulation == 0:
            yield Action(rank, "U", micro_batch // accumulation)
        micro_batch += 1


def gpipe(rank: int, num_ranks: int, num_micro_batches: int, num_steps: int) -> Iterator[Action]:
    """The synchronous schedule of GPipe (arXiv:1811.06965): all forwards, all backwards, one update per step."""
    return _synchronous(rank, num_micro_batches, num_steps, ahead=num_micro_batches - 1)


def synchronous_1f1b(rank: int, num_ranks: int, num_micro_batches: int, num_steps: int) -> Iterator[Action]:
    """One forward, one backward, with a flush and one update per step (PipeDream-Flush, arXiv:2006.09503)."""
    return _synchronous(rank, num_micro_batches, num_steps, ahead=min(num_ranks - 1 - rank, num_micro_batches - 1))


def interleaved_1f1b(
    rank: int, num_ranks: int, num_micro_batches: int, num_steps: int, num_chunks: int = 2
) -> Iterator[Action]:
    """1F1B with several chunks of the model per rank, chunk c of rank r being stage c R + r (arXiv:2104.04473, 2.2).

    A rank turns to its next chunk after a round of micro-batches; `num_micro_batches` is a multiple of their number,
    max(1, M // R), as in torch's `ScheduleInterleaved1F1B`.

    Raises:
        ValueError: it is not.
    """
    per_round = micro_batches_per_round(num_ranks, num_micro_batches)
    total = num_chunks * num_micro_batches
    ahead = min((num_chunks - 1) * per_round + 2 * (num_ranks - 1 - rank), total - 1)

    def chunk_and_micro_batch(index: int) -> tuple[int, int]:
        """Chunk and micro-batch, from 0, of the rank's forward pass `index`."""
        round_index, within = divmod(index, num_chunks * per_round)
        return within // per_round, round_index * per_round + within % per_round

    for step in range(num_steps):
        first = step * num_micro_batches + 1
        for forward in range(total + ahead):
            if forward < total:
                chunk, micro_batch = chunk_and_micro_batch(forward)
                yield Action(chunk * num_ranks + rank, "F", first + micro_batch)
            if forward >= ahead:
                chunk, micro_batch = chunk_and_micro_batch(forward - ahead)
                yield Action((num_chunks - 1 - chunk) * num_ranks + rank, "B", first + micro_batch)
        yield Action(rank, "U", step + 1)


def micro_batches_per_round(num_ranks: int, num_micro_batches: int) -> int:
    """How many micro-batches an interleaved schedule takes through a chunk before it turns to the next.

    Raises:
        ValueError: there is no interleaved schedule for so many.
    """
    rounds = max(1, num_micro_batches // num_ranks)
    if num_micro_batches % rounds:
        raise ValueError(
            f"interleaving {num_ranks} ranks: {num_micro_batches} micro-batches are no multiple of {rounds}"
        )
    return num_micro_batches // rounds


def zero_bubble(rank: int, num_ranks: int, num_micro_batches: int, num_steps: int, depth: int = 1) -> Iterator[Action]:
    """1F1B whose gradients of the weights wait until the rank would be idle (ZB-H1, ZB-H2 of arXiv:2401.10241).

    Rank r lets depth (R - 1 - r) forward passes run ahead and depth r gradients of the weights run behind, so that
    every rank keeps the activations of depth (R - 1) + 1 micro-batches.

    Args:
        depth: 1 for ZB-H1, which needs the memory of 1F1B; 2 for ZB-H2, which is never idle with enough micro-batches,
            for twice the activations. Both without waiting for other ranks at an update.
    """
    ahead, behind = depth * (num_ranks - 1 - rank), depth * rank
    for step in range(num_steps):
        first, last = step * num_micro_batches + 1, (step + 1) * num_micro_batches
        forwarded = weighted = first - 1
        for micro_batch in range(first, last + 1):
            while forwarded < min(micro_batch + ahead, last):
                forwarded += 1
                yield Action(rank, "F", forwarded)
            yield Action(rank, "I", micro_batch)
            if micro_batch - weighted > behind:  # else the rank has enough to do: W waits for its idle time
                weighted += 1
                yield Action(rank, "W", weighted)
        for micro_batch in range(weighted + 1, last + 1):
            yield Action(rank, "W", micro_batch)
        yield Action(rank, "U", step + 1)


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
        yield Action(rank, "U", step + 1)
