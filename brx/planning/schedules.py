"""How long an update takes on P devices, and what they keep meanwhile: by each pipeline schedule,
and as replicas.

Synchronous schedules are simulated action by action; ZB-V and DualPipeV, and the asynchronous one,
have closed forms. Times are in any unit, the same for all arguments; no rank waits at an update for
more than its own passes."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from itertools import accumulate, combinations
from typing import Any, NamedTuple

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
from brx.planning.margin import usable

ASYNCHRONOUS, REPLICAS = "asynchronous", "replicas"


@dataclass(frozen=True)
class Schedule:
    """A synchronous schedule; they differ in idle time and memory, never in the trajectory."""

    actions: Callable[[int, int, int, int], Iterator[Action]] | None = None
    """By (rank, R, M, number of steps); None for one that has a closed form here."""
    bubble: float = (
        0.0  # of such a one, per rank but the last, in forward passes of the busiest rank
    )
    # the activations that such a one keeps beyond those of R micro-batches, in micro-batches
    extra: float = 0.0
    num_chunks: int = 1  # of the model per rank
    is_v: bool = (
        False  # whether the second chunks lie in reverse order, rank r with chunk 2 R - 1 - r
    )

    def chunks(self, rank: int, num_ranks: int) -> tuple[int, ...]:
        behind = num_ranks + (num_ranks - 1 - rank if self.is_v else rank)
        return (rank, behind)[: self.num_chunks]


SYNCHRONOUS: dict[str, Schedule] = {
    "GPipe": Schedule(gpipe),
    "1F1B": Schedule(synchronous_1f1b),
    "interleaved 1F1B": Schedule(partial(interleaved_1f1b, num_chunks=2), num_chunks=2),
    "zero-bubble H1": Schedule(zero_bubble),
    "zero-bubble H2": Schedule(partial(zero_bubble, depth=2)),
    # arXiv:2401.10241, section 6: never idle if F, I and W take equally long; activations as of
    # 1F1B's first rank.
    "ZB-V": Schedule(num_chunks=2, is_v=True),
    # github.com/deepseek-ai/DualPipe: of PP = 2 R chunks, idle for (PP / 2 - 1) (F&B + B - 3 W),
    # with the activations of PP + 1. Of a chunk, F = W = 1/2, B = 1, and F&B = B: as good as
    # overlapping gets, and as torch's is by action.
    "DualPipeV": Schedule(bubble=0.5, extra=0.5, num_chunks=2, is_v=True),
}


class Pace(NamedTuple):  # once a schedule is under way
    elapsed: float  # from one update to the next, without the time of the update itself
    in_flight: tuple[
        float, ...
    ]  # the most micro-batches whose activations a rank keeps at a time, by rank


@cache
def synchronous_pace(
    name: str,
    forward: tuple[float, ...],
    num_micro_batches: int,
    transfer: float = 0.0,
    recompute: float = 0.0,
) -> Pace | None:
    """The pace of a schedule of `SYNCHRONOUS`, from the times of a micro-batch's forward passes by
    chunk.

    `transfer` is the time from one device to the next, `recompute` that of recomputation in forward
    passes. None where there is no such schedule (interleaving needs whole rounds) or closed form
    (ZB-V and DualPipeV with M >= 2 R, and without transfers and recomputation)."""
    schedule = SYNCHRONOUS[name]
    num_ranks = len(forward) // schedule.num_chunks
    if schedule.actions is None:
        if num_micro_batches < 2 * num_ranks or transfer or recompute:
            return None
        # As if all ranks were as slow as the busiest one.
        busiest = max(
            sum(forward[chunk] for chunk in schedule.chunks(rank, num_ranks))
            for rank in range(num_ranks)
        )
        elapsed = busiest * (3 * num_micro_batches + schedule.bubble * (num_ranks - 1))
        return Pace(elapsed, (num_ranks + schedule.extra,) * num_ranks)
    try:
        rows = [
            list(schedule.actions(rank, num_ranks, num_micro_batches, 2))
            for rank in range(num_ranks)
        ]
    except ValueError:
        return None

    def duration(action: Action) -> float:
        # Recomputation comes before the gradient of the input.
        return forward[action.stage] * (
            DURATIONS[action.kind] + (recompute if action.kind in "BI" else 0.0)
        )

    first, second = (
        entry.end for entry in timeline(rows, transfer, duration)[0] if entry.action.kind == "U"
    )
    return Pace(second - first, tuple(most_in_flight(row, schedule.num_chunks) for row in rows))


@cache
def asynchronous_elapsed(
    passes: tuple[float, ...], updates: tuple[float, ...], accumulation: int, transfer: float = 0.0
) -> float:
    """The time from one update to the next of asynchronous 1F1B once it has filled, with the time
    of the updates.

    A rank does M micro-batches and an update; or some ranks in a row wait for each other, one
    micro-batch per rank under way through their passes and a transfer each way between them. The
    largest of these means over cycles of the schedule (a marked graph) is the pace, but where
    uneven ranks wait at each other's updates: that is simulated. `passes` are the times of a
    micro-batch's passes by rank, a third of each forward; `accumulation` is M."""
    num_ranks = len(passes)
    by_rank = list(zip(passes, updates, strict=True))
    busy = max(accumulation * time + update for time, update in by_rank)
    sums = [0.0, *accumulate(passes)]
    rows = combinations(range(num_ranks + 1), 2)
    waits = (
        (sums[end] - sums[first] + 2 * (end - first - 1) * transfer) / (end - first)
        for first, end in rows
    )
    is_even, has_updates = len(set(by_rank)) == 1, any(updates)
    if (accumulation == 1 and not (transfer and has_updates)) or (
        not transfer and (is_even or not has_updates)
    ):
        return max(busy, accumulation * max(waits))

    def duration(action: Action) -> float:
        if action.kind == "U":
            return updates[action.stage]
        return passes[action.stage] * (1 if action.kind == "F" else 2) / 3

    start = 2 * num_ranks // accumulation + 8
    end = start + 4 * num_ranks  # whole cycles, or so many that a part of one hardly counts
    last = end * accumulation + num_ranks
    actions = [
        list(asynchronous_1f1b(rank, num_ranks, 1, lambda: last, accumulation))
        for rank in range(num_ranks)
    ]
    ends = [
        entry.end for entry in timeline(actions, transfer, duration)[0] if entry.action.kind == "U"
    ]
    return (ends[end - 1] - ends[start - 1]) / (end - start)


class Cut(NamedTuple):  # one way to run a method on the devices
    schedule: str  # a key of `SYNCHRONOUS`, `ASYNCHRONOUS` or `REPLICAS`
    num_micro_batches: int  # that an update's examples are split up into
    # from one update to the next, in units of an update's passes, shared evenly among the devices
    time: float
    idle: float  # the share of that time, without the time of the updates, in which devices wait
    memory: float | None = None  # bytes of the busiest device; None where no model is given


class LocalSteps(NamedTuple):
    """Data-parallel replicas, each with the whole model, that average their weights every few
    steps.

    Local SGD (arXiv:1805.09767), DiLoCo (arXiv:2311.08105).
    """

    steps: int  # between two averagings
    averaging: float  # time of one, in units of an update's passes
    slowdown: float = 1.0  # iterations over those of synchronous training, as the user expects them


@dataclass(frozen=True)
class EqualStages:
    """P equal stages, a device each, of a model that is not known; `PlannedRun` is the same of a
    known one.

    Both are asked about methods by their settings (`Experiment.settings`) and by the cost of their
    update as a share of an update's passes (None: what their products take, if that is known)."""

    num_stages: int
    num_micro_batches: int  # M of the asynchronous pipeline
    examples: int  # of an update; the synchronous side may split them up otherwise
    memory: float | None = None

    def asynchronous(self, settings: Mapping[str, Any], cost: float | None) -> Cut:
        """The cut of asynchronous 1F1B with M micro-batches per update."""
        return Cut(ASYNCHRONOUS, self.num_micro_batches, 1.0 + (cost or 0.0), 0.0)

    def synchronous(self, settings: Mapping[str, Any], cost: float | None) -> Iterator[Cut]:
        """The cuts of every schedule with every number of micro-batches that exists, fastest
        first."""
        cuts = []
        for name, schedule in SYNCHRONOUS.items():
            forward = (1.0 / schedule.num_chunks,) * self.num_stages * schedule.num_chunks
            for count in {*divisors(self.examples), self.num_micro_batches}:
                pace = synchronous_pace(name, forward, count)
                if pace is not None:
                    time = pace.elapsed / (3 * count)
                    cuts.append(Cut(name, count, time + (cost or 0.0), 1.0 - 1.0 / time))
        return iter(sorted(cuts, key=preference))

    def replicas(
        self, settings: Mapping[str, Any], cost: float | None, local: LocalSteps
    ) -> Cut | None:
        """The cut of replicas, each with the whole model; None where the examples are no multiple
        of their number."""
        return Cut(
            REPLICAS, 1, 1.0 + self.num_stages * (cost or 0.0) + local.averaging / local.steps, 0.0
        )


def first_that_fits(cuts: Iterable[Cut], memory: float | None) -> Cut | None:
    """The first cut that leaves a device's margin free, as in `brx plan`; None if none does."""
    for cut in cuts:
        if memory is None or (cut.memory or 0.0) <= usable(memory):
            return cut
    return None


def divisors(number: int) -> list[int]:
    return [one for one in range(1, number + 1) if number % one == 0]


def preference(cut: Cut) -> tuple[float, int, int]:
    """A sort key: fastest first; of equally fast ones the larger micro-batches, and the better
    known schedule."""
    return round(cut.time, 9), cut.num_micro_batches, list(SYNCHRONOUS).index(cut.schedule)
