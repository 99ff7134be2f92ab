"""The text of `brx schedule`: the actions of each device, the delays, and the versions that each
stage uses."""

import math
import textwrap
from collections.abc import Iterator, Sequence

from brx.config.schema import PipelineConfig
from brx.errors import UserError
from brx.pipeline.delay import StageDelay, check_devices, stage_delays
from brx.pipeline.schedule import (
    DURATIONS,
    Action,
    asynchronous_1f1b,
    bubble_share,
    gpipe,
    steady_state,
    synchronous_1f1b,
    timeline,
)

MOST_ACTIONS = 20_000  # more than anybody reads, or a figure shows
LEGEND = (
    "Device, action, number: 2F5 is the forward pass of micro-batch 5 on device 2, 2B5 its "
    "backward pass, 2U5 update 5 of device 2. A row per device, in the order in which it works."
)


def schedule_lines(pipeline: PipelineConfig, num_micro_batches: int, width: int) -> Iterator[str]:
    """The text of `brx schedule`: GPipe and synchronous 1F1B for one step, asynchronous 1F1B until
    the pipeline is full, and the version of the weights that each stage uses.

    Args:
        pipeline: stages, devices, delays and accumulation.
        num_micro_batches: per step of the synchronous schedules.
        width: the width of the lines, in characters.

    Raises:
        UserError: this number of devices cannot run the delays, or there is too much to print.
    """
    # This import loads torch. A verdict needs only schedules and must not wait for it.
    from brx.model.stage import partition

    num_ranks, accumulation = pipeline.devices, pipeline.accumulation
    check_size(pipeline.stages, num_ranks, num_micro_batches, accumulation)
    delays = stage_delays(pipeline)
    ranges = partition(pipeline.stages, num_ranks)
    check_devices(delays, ranges)
    # The asynchronous schedule has at least this many micro-batches, and whole updates.
    least = num_micro_batches + 2 * num_ranks
    num_updates = math.ceil(least / accumulation)
    last = num_updates * accumulation
    every_rank = range(num_ranks)
    schedules = {
        "GPipe, one step": [gpipe(rank, num_ranks, num_micro_batches, 1) for rank in every_rank],
        "synchronous 1F1B, one step": [
            synchronous_1f1b(rank, num_ranks, num_micro_batches, 1) for rank in every_rank
        ],
        "asynchronous 1F1B": [
            asynchronous_1f1b(rank, num_ranks, 1, lambda: last, accumulation) for rank in every_rank
        ],
    }
    yield from textwrap.wrap(LEGEND, width)
    num_stages = [len(own) for own in ranges]
    if len(set(num_stages)) > 1:
        held = " ".join(map(str, num_stages))
        yield from textwrap.wrap(
            f"stages per device, each of which takes the same time: {held}", width
        )
    for name, by_rank in schedules.items():
        yield from _schedule_rows(name, [list(actions) for actions in by_rank], num_stages, width)
    yield from _delay_rows(delays, ranges, width)
    heading = (
        "version of the weights that a stage uses for micro-batch 1, 2, ... (bar: an "
        "update), and versions kept:"
    )
    yield from textwrap.wrap(heading, width)
    for stage, delay in enumerate(delays):
        yield from _wrapped(_versions_row(stage, delay, last), width)


def _delay_rows(
    delays: Sequence[StageDelay], ranges: Sequence[Sequence[int]], width: int
) -> Iterator[str]:
    """The delay of each stage, one row per device. If a delay function's mean is below its largest
    delay, a second table has the means."""
    largest = [str(delay.tau) for delay in delays]
    realised = [f"{delay.realised_tau:.8g}" for delay in delays]
    if realised == largest:
        tables = {"delay of the stages, by device:": largest}
    else:
        tables = {
            "largest delay asked of the stages, by device:": largest,
            "mean delay realised (it rises by at most 1 per micro-batch):": realised,
        }
    for heading, by_stage in tables.items():
        yield from textwrap.wrap(heading, width)
        for rank, own in enumerate(ranges):
            taus = " ".join(by_stage[stage] for stage in own)
            yield from _wrapped(f"  {rank}: {taus}", width)


def _schedule_rows(
    name: str, actions: Sequence[Sequence[Action]], num_stages: Sequence[int], width: int
) -> Iterator[str]:
    """The idle share of a schedule, and a row per rank with its actions.

    Args:
        num_stages: how many stages each rank holds. The passes of a rank take as many times as long
            as those of one stage.
    """

    def duration(action: Action) -> float:
        return DURATIONS[action.kind] * num_stages[action.stage]

    timed = timeline(actions, duration=duration)
    idle = f"{name}: idle {bubble_share(timed):.1%} of the time shown"
    start, end = steady_state(timed)
    if name.startswith("asynchronous") and end > start:
        # No rank waits for updates, so the busiest one sets the pace and is never idle.
        share_when_full = 1.0 - sum(num_stages) / (len(num_stages) * max(num_stages))
        idle += f", {share_when_full:.1%} once the pipeline is full"
    yield from textwrap.wrap(idle, width)
    for own in actions:
        yield from _wrapped("  " + " ".join(map(str, own)), width)


def _versions_row(stage: int, delay: StageDelay, last: int) -> str:
    """The versions that a stage uses for micro-batches 1 to `last`, and how many it keeps."""
    used = ""
    for micro_batch in range(1, last + 1):
        used += f"{delay.version_used(micro_batch):>3}"
        is_before_bar = delay.accumulation > 1 and delay.ends_update(micro_batch)
        used += "|" if is_before_bar and micro_batch < last else " "
    return f"  {stage:>3}: {used.rstrip()}   {delay.num_slots} kept"


def check_size(
    num_stages: int, num_ranks: int, num_micro_batches: int, accumulation: int = 1
) -> None:
    """UserError if `brx schedule` would have more than `MOST_ACTIONS` entries to print."""
    # For each micro-batch: a forward pass, a backward pass and an update on each device, and a
    # version on each stage.
    num_actions = (3 * num_ranks + num_stages) * (
        num_micro_batches + 2 * num_ranks + accumulation - 1
    )
    if num_actions > MOST_ACTIONS:
        raise UserError(
            f"--stages {num_stages}, --devices {num_ranks}, --micro-batches {num_micro_batches}, "
            f"--accumulation {accumulation}: {num_actions:,} actions are more than can be shown "
            f"({MOST_ACTIONS:,}); ask for fewer (--devices 1: the delays alone)"
        )


def _wrapped(row: str, width: int) -> list[str]:
    lines = textwrap.wrap(
        row, width, subsequent_indent="      ", drop_whitespace=False, break_long_words=False
    )
    return [line.rstrip() for line in lines]
