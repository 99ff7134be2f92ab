"""The schedules of a pipeline as lines of text: actions per device, idle times, delays, versions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from brx.config.schema import PipelineConfig
from brx.model.stage import partition
from brx.pipeline.delay import StageDelay, check_devices, stage_delays
from brx.pipeline.schedule import asynchronous_1f1b, gpipe, synchronous_1f1b
from brx.pipeline.timeline import bubble_share, steady_state, timeline


def schedule_lines(pipeline: PipelineConfig, num_micro_batches: int) -> Iterator[str]:
    """GPipe and synchronous 1F1B for one step, asynchronous 1F1B until it has filled, and what the stages compute with.

    Args:
        pipeline: P, R, delays, and M of the asynchronous schedule.
        num_micro_batches: of a synchronous step.

    Raises:
        UserError: so many devices cannot run the delays.
    """
    delays, num_ranks, accumulation = stage_delays(pipeline), pipeline.devices, pipeline.accumulation
    ranges = partition(pipeline.stages, num_ranks)
    check_devices(delays, ranges)
    ranks = range(num_ranks)
    wanted = num_micro_batches + 2 * num_ranks
    last = -(-wanted // accumulation) * accumulation  # whole updates
    schedules = {
        "GPipe, one step": [list(gpipe(rank, num_ranks, num_micro_batches, 1)) for rank in ranks],
        "synchronous 1F1B, one step": [list(synchronous_1f1b(rank, num_ranks, num_micro_batches, 1)) for rank in ranks],
        "asynchronous 1F1B": [
            list(asynchronous_1f1b(rank, num_ranks, 1, lambda: last, accumulation)) for rank in ranks
        ],
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
    for rank, own in enumerate(ranges):
        yield f"  {rank}: " + " ".join(str(delays[stage].tau) for stage in own)
    yield from _version_lines(delays, last)


def _version_lines(delays: Sequence[StageDelay], last: int) -> Iterator[str]:
    """What version each stage uses for each micro-batch, and how many versions it keeps."""
    yield "version of the weights that a stage uses for micro-batch 1, 2, ... (bar: an update), and versions kept:"
    for stage, delay in enumerate(delays):
        used = ""
        for micro_batch in range(1, last + 1):
            bar = "|" if delay.ends_update(micro_batch) and delay.accumulation > 1 and micro_batch < last else " "
            used += f"{delay.version_used(micro_batch):>3}{bar}"
        yield f"  {stage:>3}: {used.rstrip()}   {delay.num_slots} kept"
