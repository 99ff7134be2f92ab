"""Idle time of synchronous and asynchronous pipelines, read off their simulated schedules."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial

from brx.pipeline.schedule import Action, asynchronous_1f1b, gpipe, interleaved_1f1b, synchronous_1f1b, zero_bubble
from brx.pipeline.timeline import BACKWARD_TIME, FORWARD_TIME, most_in_flight, timeline

Schedule = Callable[[int, int, int, int], Iterator[Action]]

NUM_CHUNKS = 2
"""Chunks of the model per rank of the interleaved schedule."""

SYNCHRONOUS: dict[str, Schedule] = {
    "GPipe": gpipe,
    "1F1B": synchronous_1f1b,
    "interleaved 1F1B": partial(interleaved_1f1b, num_chunks=NUM_CHUNKS),
    "zero-bubble H1": zero_bubble,
    "zero-bubble H2": partial(zero_bubble, depth=2),
}
"""The synchronous schedules by name; they differ in idle time and memory, never in the trajectory."""


@dataclass(frozen=True)
class Idle:
    """What a schedule costs once it is under way.

    Attributes:
        share: of the time in which a rank waits.
        in_flight: the most micro-batches whose activations a rank keeps at a time, by rank.
    """

    share: float
    in_flight: tuple[float, ...]

    @property
    def time_factor(self) -> float:
        """How many times the time of the passes alone an update takes: 1 / (1 - share)."""
        return 1.0 / (1.0 - self.share)


@cache
def synchronous_idle(name: str, num_ranks: int, num_micro_batches: int, transfer_time: float = 0.0) -> Idle | None:
    """The idle share between the updates of one step and of the next.

    Args:
        name: a key of `SYNCHRONOUS`.
        num_ranks: P devices with a stage each (or `NUM_CHUNKS` chunks).
        num_micro_batches: M per update.
        transfer_time: from one device to the next, in units of a micro-batch's forward pass.

    Returns:
        None where the schedule does not exist for so many micro-batches.
    """
    try:
        rows = [list(SYNCHRONOUS[name](rank, num_ranks, num_micro_batches, 2)) for rank in range(num_ranks)]
    except ValueError:
        return None
    first, second = (entry.end for entry in timeline(rows, transfer_time)[0] if entry.action.kind == "U")
    return Idle(_share(num_micro_batches, second - first), _in_flight(rows))


@cache
def asynchronous_idle(num_ranks: int, transfer_time: float = 0.0) -> Idle:
    """The idle share of the asynchronous schedule once the pipeline is full: none unless transfers take time.

    Counted over whole rounds of P micro-batches, after which the pattern of waiting repeats.
    """
    last = 8 * num_ranks
    rows = [list(asynchronous_1f1b(rank, num_ranks, 1, lambda: last)) for rank in range(num_ranks)]
    ends = [entry.end for entry in timeline(rows, transfer_time)[0] if entry.action.kind == "U"]
    counted = 4 * num_ranks
    return Idle(_share(counted, ends[6 * num_ranks - 1] - ends[2 * num_ranks - 1]), _in_flight(rows))


def _share(num_micro_batches: int, elapsed: float) -> float:
    return max(0.0, 1.0 - num_micro_batches * (FORWARD_TIME + BACKWARD_TIME) / elapsed)


def _in_flight(rows: list[list[Action]]) -> tuple[float, ...]:
    num_chunks = (1 + max(action.stage for row in rows for action in row)) // len(rows)
    return tuple(most_in_flight(row, num_chunks) for row in rows)
