"""The pace of pipeline schedules: how long an update takes once they are under way, and what they keep meanwhile.

Synchronous schedules are simulated action by action; ZB-V and DualPipeV, and the asynchronous one, have closed forms.
Times are in any unit, the same for all arguments; no rank waits at an update for more than its own passes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial

from brx.pipeline.schedule import (
    DURATIONS,
    Action,
    asynchronous_1f1b,
    gpipe,
    interleaved_1f1b,
    most_in_flight,
    synchronous_1f1b,
    timeline,
    zero_bubble,
)

MOST_ROUNDS = 6
"""A step of more than so many times R micro-batches is simulated as a shorter one, and the rest by its pace."""


@dataclass(frozen=True)
class Schedule:
    """A synchronous schedule; they differ in idle time and memory, never in the trajectory.

    Attributes:
        actions: by (rank, R, M, number of steps); None for one that has a closed form here.
        bubble: of such a one, per rank but the last, in forward passes of the busiest rank.
        extra: the activations that such a one keeps beyond those of R micro-batches, in micro-batches.
        num_chunks: of the model per rank.
        is_v: whether the second chunks lie in reverse order, rank r with chunk 2 R - 1 - r.
    """

    actions: Callable[[int, int, int, int], Iterator[Action]] | None = None
    bubble: float = 0.0
    extra: float = 0.0
    num_chunks: int = 1
    is_v: bool = False

    def chunks(self, rank: int, num_ranks: int) -> tuple[int, ...]:
        """The chunks of a rank, of `num_chunks` R."""
        behind = num_ranks + (num_ranks - 1 - rank if self.is_v else rank)
        return (rank, behind)[: self.num_chunks]


SYNCHRONOUS: dict[str, Schedule] = {
    "GPipe": Schedule(gpipe),
    "1F1B": Schedule(synchronous_1f1b),
    "interleaved 1F1B": Schedule(partial(interleaved_1f1b, num_chunks=2), num_chunks=2),
    "zero-bubble H1": Schedule(zero_bubble),
    "zero-bubble H2": Schedule(partial(zero_bubble, depth=2)),
    # arXiv:2401.10241, section 6: never idle if F, I and W take equally long; activations as of 1F1B's first rank.
    "ZB-V": Schedule(num_chunks=2, is_v=True),
    # github.com/deepseek-ai/DualPipe: of PP = 2 R chunks, idle for (PP / 2 - 1) (F&B + B - 3 W), with the activations
    # of PP + 1. Of a chunk, F = W = 1/2, B = 1, and F&B = B: as good as overlapping gets, and as torch's is by action.
    "DualPipeV": Schedule(bubble=0.5, extra=0.5, num_chunks=2, is_v=True),
}


@dataclass(frozen=True)
class Pace:
    """What a schedule costs once it is under way.

    Attributes:
        elapsed: from one update to the next, without the time of the update itself.
        in_flight: the most micro-batches whose activations a rank keeps at a time, by rank.
    """

    elapsed: float
    in_flight: tuple[float, ...]


@cache
def synchronous_pace(
    name: str, forward: tuple[float, ...], num_micro_batches: int, transfer: float = 0.0, recompute: float = 0.0
) -> Pace | None:
    """The pace of a synchronous schedule.

    Args:
        name: a key of `SYNCHRONOUS`.
        forward: times of a micro-batch's forward passes, by chunk (R, or 2 R where a rank has two).
        num_micro_batches: M per update.
        transfer: from one device to the next.
        recompute: of a backward pass, beside twice the forward pass, in forward passes.

    Returns:
        None where the schedule does not exist, or its closed form does not hold: interleaving needs whole rounds; ZB-V
        and DualPipeV need M >= 2 R, and are known here without transfers and recomputation alone.
    """
    schedule = SYNCHRONOUS[name]
    num_ranks = len(forward) // schedule.num_chunks
    if schedule.actions is None:
        if num_micro_batches < 2 * num_ranks or transfer or recompute:
            return None
        # As if all ranks were as slow as the busiest one.
        busiest = max(sum(forward[chunk] for chunk in schedule.chunks(rank, num_ranks)) for rank in range(num_ranks))
        elapsed = busiest * (3 * num_micro_batches + schedule.bubble * (num_ranks - 1))
        return Pace(elapsed, (num_ranks + schedule.extra,) * num_ranks)
    surplus = max(0, num_micro_batches - MOST_ROUNDS * num_ranks)
    if surplus and num_micro_batches % num_ranks == 0:
        shorter, shortest = (
            synchronous_pace(name, forward, rounds * num_ranks, transfer, recompute)
            for rounds in (MOST_ROUNDS, MOST_ROUNDS - 1)
        )
        assert shorter is not None
        assert shortest is not None
        elapsed = shorter.elapsed + surplus / num_ranks * (shorter.elapsed - shortest.elapsed)
        in_flight = tuple(num_micro_batches if name == "GPipe" else most for most in shorter.in_flight)
        return Pace(elapsed, in_flight)
    try:
        rows = [list(schedule.actions(rank, num_ranks, num_micro_batches, 2)) for rank in range(num_ranks)]
    except ValueError:
        return None

    def duration(action: Action) -> float:
        # Recomputation comes before the gradient of the input.
        again = recompute if action.kind in "BI" else 0.0
        return forward[action.stage] * (DURATIONS[action.kind] + again)

    first, second = (entry.end for entry in timeline(rows, transfer, duration)[0] if entry.action.kind == "U")
    return Pace(second - first, tuple(most_in_flight(row, schedule.num_chunks) for row in rows))


@cache
def asynchronous_elapsed(
    passes: tuple[float, ...], updates: tuple[float, ...], accumulation: int, transfer: float = 0.0
) -> float:
    """The time from one update to the next of asynchronous 1F1B once it has filled, with the time of the updates.

    A rank does M micro-batches and an update; or it waits for one of its R - r micro-batches under way, which goes
    through the passes of all ranks behind it and a transfer each way. The larger of these means over cycles of the
    schedule (a marked graph) is the pace, but where uneven ranks wait at each other's updates: that is simulated.

    Args:
        passes: time of a micro-batch's passes, by rank; a third of it forward.
        updates: time of an update, by rank.
        accumulation: M.
        transfer: from one rank to the next.
    """
    num_ranks = len(passes)
    busy = max(accumulation * time + update for time, update in zip(passes, updates, strict=True))
    waits = (
        (sum(passes[rank:]) + 2 * (num_ranks - 1 - rank) * transfer) / (num_ranks - rank) for rank in range(num_ranks)
    )
    is_even = len({*zip(passes, updates, strict=True)}) == 1
    has_updates = any(updates)
    if (accumulation == 1 and not (transfer and has_updates)) or (not transfer and (is_even or not has_updates)):
        return max(busy, accumulation * max(waits))

    def duration(action: Action) -> float:
        if action.kind == "U":
            return updates[action.stage]
        return passes[action.stage] * (1 if action.kind == "F" else 2) / 3

    start = 2 * num_ranks // accumulation + 8
    end = start + num_ranks // accumulation + 8
    last = end * accumulation + num_ranks
    rows = [list(asynchronous_1f1b(rank, num_ranks, 1, lambda: last, accumulation)) for rank in range(num_ranks)]
    ends = [entry.end for entry in timeline(rows, transfer, duration)[0] if entry.action.kind == "U"]
    return (ends[end - 1] - ends[start - 1]) / (end - start)
