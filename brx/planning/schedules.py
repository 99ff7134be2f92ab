"""Computes how long an update takes on P devices under a pipeline schedule, and which activations
each device keeps meanwhile.

Synchronous schedules are simulated action by action. The asynchronous one has a closed form, except
where unequal devices wait for each other at updates. Times are in any unit, the same for all
arguments. It is assumed that no device waits at an update for longer than its own passes take."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from itertools import accumulate, combinations
from typing import Any, NamedTuple

from brx.pipeline.schedule import (
    DURATIONS,
    Action,
    asynchronous_1f1b,
    interleaved_1f1b,
    most_in_flight,
    synchronous_1f1b,
    timeline,
    zero_bubble,
)
from brx.planning.margin import usable

ASYNCHRONOUS = "asynchronous"

Actions = Callable[[int, int, int, int], Iterator[Action]]
"""The actions of one rank, by (rank, R, M, number of steps); ValueError where the schedule does not
exist for this R and M."""


@dataclass(frozen=True)
class Schedule:
    """A synchronous schedule. Schedules differ in idle time and memory, never in the
    trajectory."""

    actions: Actions
    num_chunks: int = 1
    """The parts of the model that each rank holds."""

    def chunks(self, rank: int, num_ranks: int) -> tuple[int, ...]:
        """The chunks of a rank, of `num_chunks` x R in model order."""
        return tuple(rank + number * num_ranks for number in range(self.num_chunks))


SYNCHRONOUS: dict[str, Schedule] = {
    "1F1B": Schedule(synchronous_1f1b),
    "interleaved 1F1B": Schedule(partial(interleaved_1f1b, num_chunks=2), num_chunks=2),
    "zero-bubble H1": Schedule(zero_bubble),
    "zero-bubble H2": Schedule(partial(zero_bubble, depth=2)),
}
"""By name, the better known first."""


class Pace(NamedTuple):
    """The pace and the activations of a schedule once the pipeline is full."""

    elapsed: float
    """The time from one update to the next, without the time of the update itself."""
    in_flight: tuple[float, ...]
    """By rank, the most micro-batches whose activations it keeps at one time."""


@cache
def synchronous_pace(
    name: str,
    forward: tuple[float, ...],
    num_micro_batches: int,
    transfer: float = 0.0,
    recompute: tuple[float, ...] = (),
) -> Pace | None:
    """The pace of a schedule; None where it does not exist (interleaving needs whole rounds).

    Args:
        name: a key of `SYNCHRONOUS`.
        forward: the time of a micro-batch's forward pass through each chunk, in model order.
        num_micro_batches: M, the micro-batches of one update.
        transfer: the time from one device to the next.
        recompute: for each chunk, the time of recomputation; none if it is empty.
    """
    schedule = SYNCHRONOUS[name]
    num_ranks = len(forward) // schedule.num_chunks
    repeated = recompute or (0.0,) * len(forward)
    num_steps = 2
    try:
        rows = [
            list(schedule.actions(rank, num_ranks, num_micro_batches, num_steps))
            for rank in range(num_ranks)
        ]
    except ValueError:
        return None

    def duration(action: Action) -> float:
        # Recomputation comes before the gradient of the input.
        extra = repeated[action.stage] if action.kind in "BI" else 0.0
        return forward[action.stage] * DURATIONS[action.kind] + extra

    first_rank = timeline(rows, transfer, duration)[0]
    first, second = (entry.end for entry in first_rank if entry.action.kind == "U")
    in_flight = tuple(most_in_flight(row, schedule.num_chunks) for row in rows)
    return Pace(second - first, in_flight)


@cache
def asynchronous_elapsed(
    passes: tuple[float, ...], updates: tuple[float, ...], accumulation: int, transfer: float = 0.0
) -> float:
    """The time from one update to the next in asynchronous 1F1B, once the pipeline is full. Updates
    are included.

    Two things bound the pace. Each rank has to do M micro-batches and an update. And in a row of
    neighbouring ranks there is one micro-batch per rank, each on its way down the row and up again,
    with a transfer each way between neighbours. The pace is the largest of these means over cycles
    of the schedule (a marked graph). Unequal ranks that wait at each other's updates take longer;
    for them the schedule is simulated.

    Args:
        passes: for each rank, the time of a micro-batch's passes, a third of it the forward pass.
        updates: for each rank, the time of an update.
        accumulation: M, the micro-batches of one update.
        transfer: the time from one device to the next.
    """
    ranks = list(zip(passes, updates, strict=True))
    is_even = len(set(ranks)) == 1
    has_updates = any(updates)
    busiest = max(accumulation * time + update for time, update in ranks)
    longest_wait = accumulation * _longest_wait(passes, transfer)
    if accumulation == 1:
        is_exact = not (transfer and has_updates)
    else:
        is_exact = not transfer and (is_even or not has_updates)
    if is_exact:
        return max(busiest, longest_wait)
    return _simulated_elapsed(passes, updates, accumulation, transfer)


def _longest_wait(passes: tuple[float, ...], transfer: float) -> float:
    """The largest mean time per micro-batch of any row of neighbouring ranks, through which one
    micro-batch per rank goes down and up."""
    sums = [0.0, *accumulate(passes)]
    means = []
    for first, end in combinations(range(len(sums)), 2):
        num_links = end - first - 1
        time = sums[end] - sums[first] + 2 * num_links * transfer
        means.append(time / (end - first))
    return max(means)


def _simulated_elapsed(
    passes: tuple[float, ...], updates: tuple[float, ...], accumulation: int, transfer: float
) -> float:
    num_ranks = len(passes)
    # Measured over many updates, so that a part of a cycle of the schedule hardly counts.
    start = 2 * num_ranks // accumulation + 8
    end = start + 4 * num_ranks
    last = end * accumulation + num_ranks

    def duration(action: Action) -> float:
        if action.kind == "U":
            return updates[action.stage]
        return passes[action.stage] * (1 if action.kind == "F" else 2) / 3

    actions = [
        list(asynchronous_1f1b(rank, num_ranks, 1, lambda: last, accumulation))
        for rank in range(num_ranks)
    ]
    first_rank = timeline(actions, transfer, duration)[0]
    ends = [entry.end for entry in first_rank if entry.action.kind == "U"]
    return (ends[end - 1] - ends[start - 1]) / (end - start)


class Cut(NamedTuple):
    """One way to run a method on the devices."""

    schedule: str
    """A key of `SYNCHRONOUS`, or `ASYNCHRONOUS`."""
    num_micro_batches: int
    """M, into which the examples of an update are split."""
    time: float
    """The time from one update to the next. The unit is the time of an update's passes if they are
    divided evenly among the devices."""
    idle: float
    """The share of the time in which devices wait; the time of updates is not counted."""
    memory: float | None = None
    """Bytes of the fullest device; None where no model is given."""


@dataclass(frozen=True)
class EqualStages:
    """P equal stages of an unknown model, each on its own device. `PlannedRun` answers the same
    questions for a known model.

    A question is about a method, given by its settings (`Experiment.settings`), and the cost of its
    update as a share of an update's passes. If the cost is None, `PlannedRun` counts the products
    of the update, and `EqualStages` takes it as zero."""

    num_stages: int
    num_micro_batches: int
    """M of the asynchronous pipeline."""
    examples: int
    """The examples in one update. The synchronous side may split them into other micro-batches."""
    memory: float | None = None
    """Of a device, in bytes."""

    def asynchronous(self, settings: Mapping[str, Any], cost: float | None) -> Cut:
        """Asynchronous 1F1B with M micro-batches per update."""
        return Cut(ASYNCHRONOUS, self.num_micro_batches, 1.0 + (cost or 0.0), 0.0)

    def synchronous(self, settings: Mapping[str, Any], cost: float | None) -> Iterator[Cut]:
        """Every schedule with every number of micro-batches for which it exists, fastest first."""
        cuts = []
        for name, schedule in SYNCHRONOUS.items():
            num_chunks = self.num_stages * schedule.num_chunks
            # The forward passes of a micro-batch take a rank one unit, and its backward passes two.
            forward = (1.0 / schedule.num_chunks,) * num_chunks
            for count in {*divisors(self.examples), self.num_micro_batches}:
                pace = synchronous_pace(name, forward, count)
                if pace is not None:
                    passes_of_an_update = 3.0 * count
                    time = pace.elapsed / passes_of_an_update
                    cuts.append(Cut(name, count, time + (cost or 0.0), 1.0 - 1.0 / time))
        return iter(sorted(cuts, key=preference))


def first_that_fits(cuts: Iterable[Cut], memory: float | None) -> Cut | None:
    """The first cut that leaves a device's margin free, as in `brx plan`; None if none does."""
    for cut in cuts:
        if memory is None or (cut.memory or 0.0) <= usable(memory):
            return cut
    return None


def divisors(number: int) -> list[int]:
    """All divisors of a number, rising."""
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def preference(cut: Cut) -> tuple[float, int, int]:
    """A sort key that puts the fastest cut first. Of equally fast cuts, the one with larger
    micro-batches comes first, then the better known schedule."""
    return round(cut.time, 9), cut.num_micro_batches, list(SYNCHRONOUS).index(cut.schedule)
