"""The schedules of a pipeline as lines of text: actions per device, idle times, delays, versions."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator

from brx.config.schema import PipelineConfig
from brx.errors import UserError
from brx.model.stage import partition
from brx.pipeline.delay import check_devices, stage_delays
from brx.pipeline.schedule import (
    Action,
    asynchronous_1f1b,
    bubble_share,
    gpipe,
    steady_state,
    synchronous_1f1b,
    timeline,
)

MOST_ACTIONS = 20_000
"""More than anybody reads, or a figure shows."""

LEGEND = (
    "Stage, action, number: 2F5 is the forward pass of micro-batch 5 on stage 2, 2B5 its backward pass, 2U5 update 5"
    " of stage 2. A row per device, in the order in which it works."
)


def schedule_lines(pipeline: PipelineConfig, num_micro_batches: int, width: int) -> Iterator[str]:
    """GPipe and synchronous 1F1B for one step, asynchronous 1F1B until it has filled, and what the stages compute with.

    Args:
        pipeline: P, R, delays, and M of the asynchronous schedule.
        num_micro_batches: of a synchronous step.
        width: characters per line, at which rows are wrapped.

    Raises:
        UserError: so many devices cannot run the delays, or there are more than `MOST_ACTIONS` actions to print.
    """
    num_ranks, accumulation = pipeline.devices, pipeline.accumulation
    check_size(pipeline.stages, num_ranks, num_micro_batches)
    delays = stage_delays(pipeline)
    ranges = partition(pipeline.stages, num_ranks)
    check_devices(delays, ranges)
    wanted = num_micro_batches + 2 * num_ranks
    last = -(-wanted // accumulation) * accumulation  # whole updates
    schedules: dict[str, Callable[[int], Iterator[Action]]] = {
        "GPipe, one step": lambda rank: gpipe(rank, num_ranks, num_micro_batches, 1),
        "synchronous 1F1B, one step": lambda rank: synchronous_1f1b(rank, num_ranks, num_micro_batches, 1),
        "asynchronous 1F1B": lambda rank: asynchronous_1f1b(rank, num_ranks, 1, lambda: last, accumulation),
    }
    yield from textwrap.wrap(LEGEND, width)
    for name, schedule in schedules.items():
        actions = [list(schedule(rank)) for rank in range(num_ranks)]
        timed = timeline(actions)
        start, end = steady_state(timed)
        idle = f"{name}: idle {bubble_share(timed):.1%} of the time shown"
        if name.startswith("asynchronous") and end > start:
            idle += f", {bubble_share(timed, start, end):.1%} once the pipeline is full"
        yield from textwrap.wrap(idle, width)
        for row in actions:
            yield from _wrapped("  " + " ".join(map(str, row)), width)
    yield "delay of the stages, by device:"
    for rank, own in enumerate(ranges):
        yield from _wrapped(f"  {rank}: " + " ".join(str(delays[stage].tau) for stage in own), width)
    heading = "version of the weights that a stage uses for micro-batch 1, 2, ... (bar: an update), and versions kept:"
    yield from textwrap.wrap(heading, width)
    for stage, delay in enumerate(delays):
        used = ""
        for micro_batch in range(1, last + 1):
            bar = "|" if delay.ends_update(micro_batch) and delay.accumulation > 1 and micro_batch < last else " "
            used += f"{delay.version_used(micro_batch):>3}{bar}"
        yield from _wrapped(f"  {stage:>3}: {used.rstrip()}   {delay.num_slots} kept", width)


def check_size(num_stages: int, num_ranks: int, num_micro_batches: int) -> None:
    """UserError where nobody could read so many actions."""
    # A forward pass, a backward pass and an update of each micro-batch on each device, and its version on each stage.
    num_actions = (3 * num_ranks + num_stages) * (num_micro_batches + 2 * num_ranks)
    if num_actions > MOST_ACTIONS:
        raise UserError(
            f"--stages {num_stages}, --devices {num_ranks}, --micro-batches {num_micro_batches}: {num_actions:,}"
            f" actions are more than can be shown ({MOST_ACTIONS:,}); ask for fewer (--devices 1: the delays alone)"
        )


def _wrapped(row: str, width: int) -> list[str]:
    """A row over several lines, those after the first further to the right."""
    lines = textwrap.wrap(row, width, subsequent_indent="      ", drop_whitespace=False, break_long_words=False)
    return [line.rstrip() for line in lines]
