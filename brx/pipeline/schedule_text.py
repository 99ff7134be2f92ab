"""The schedules of a pipeline as lines of text: actions per device, idle times, delays."""

from __future__ import annotations

from collections.abc import Iterator

from brx.model.stage import partition
from brx.pipeline.delay import pipeline_delays
from brx.pipeline.schedule import asynchronous_1f1b, gpipe, synchronous_1f1b
from brx.pipeline.timeline import bubble_share, steady_state, timeline


def schedule_lines(num_stages: int, num_ranks: int, num_micro_batches: int) -> Iterator[str]:
    """GPipe and synchronous 1F1B for one step, asynchronous 1F1B until it has filled, and the delays of the stages.

    Args:
        num_stages: P, virtual stages.
        num_ranks: R, devices.
        num_micro_batches: M, of a synchronous step.
    """
    ranks = range(num_ranks)
    last = num_micro_batches + 2 * num_ranks
    schedules = {
        "GPipe, one step": [list(gpipe(rank, num_ranks, num_micro_batches, 1)) for rank in ranks],
        "synchronous 1F1B, one step": [list(synchronous_1f1b(rank, num_ranks, num_micro_batches, 1)) for rank in ranks],
        "asynchronous 1F1B": [list(asynchronous_1f1b(rank, num_ranks, 1, lambda: last)) for rank in ranks],
    }
    for name, actions in schedules.items():
        timed = timeline(actions)
        start, end = steady_state(timed)
        idle = f"{name}: idle {bubble_share(timed):.1%} of the time shown"
        if name.startswith("asynchronous") and end > start:
            idle += f", {bubble_share(timed, start, end):.1%} once the pipeline is full"
        yield idle
        for row in actions:
            yield "  " + " ".join(str(action) for action in row)
    yield "delay of the stages, by device:"
    delays = pipeline_delays(num_stages)
    for rank, own in enumerate(partition(num_stages, num_ranks)):
        yield f"  {rank}: " + " ".join(str(delays[stage].tau) for stage in own)
