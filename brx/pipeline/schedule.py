"""What a device does, in order, and when: the asynchronous one-forward-one-backward schedule that
the engine runs, and synchronous ones for comparison (`brx schedule`).

Action text follows torch.distributed.pipelining: `2F1` is the forward pass of micro-batch 1 on
stage 2, `2B1` its backward pass, or `2I1` and `2W1` where it is split into gradients of the input
and of the weights; `2U1` is update 1."""

import textwrap
from collections.abc import Callable, Iterator, Sequence
from typing import Literal, NamedTuple

from brx.config.schema import PipelineConfig
from brx.errors import UserError
from brx.pipeline.delay import check_devices, stage_delays

# In units of one rank's forward pass: a backward pass does twice its multiplications, half of them
# for the gradient of the input and half for the gradient of the weights. An update takes no time.
FORWARD_TIME, BACKWARD_TIME = 1.0, 2.0
DURATIONS = {
    "F": FORWARD_TIME,
    "B": BACKWARD_TIME,
    "I": BACKWARD_TIME / 2,
    "W": BACKWARD_TIME / 2,
    "U": 0.0,
}


class Action(NamedTuple):
    stage: int  # the rank, unless the rank holds several chunks of the model
    kind: Literal["F", "B", "I", "W", "U"]
    number: int  # micro-batch or update, from 1

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.number}"


def asynchronous_1f1b(
    rank: int, num_ranks: int, first: int, last: Callable[[], int], accumulation: int = 1
) -> Iterator[Action]:
    """The actions of one rank for micro-batches `first` to `last()`, from an empty pipeline to an
    empty pipeline.

    PipeDream (arXiv:1806.03377, section 3.2): no rank waits for another's update. `last` is asked
    anew each time, so that a run may be cut short on its way."""
    ahead = num_ranks - 1 - rank
    forwarded = first - 1
    micro_batch = first
    while micro_batch <= last():
        # At first R - r forward passes, then one for each backward pass, until none is left to run
        # ahead of.
        while forwarded < min(micro_batch + ahead, last()):
            forwarded += 1
            yield Action(rank, "F", forwarded)
        yield Action(rank, "B", micro_batch)
        if micro_batch % accumulation == 0:
            yield Action(rank, "U", micro_batch // accumulation)
        micro_batch += 1


def gpipe(rank: int, num_ranks: int, num_micro_batches: int, num_steps: int) -> Iterator[Action]:
    """The synchronous schedule of GPipe (arXiv:1811.06965): all forwards, all backwards, one update
    per step."""
    return _synchronous(rank, num_micro_batches, num_steps, ahead=num_micro_batches - 1)


def synchronous_1f1b(
    rank: int, num_ranks: int, num_micro_batches: int, num_steps: int
) -> Iterator[Action]:
    """One forward, one backward, with a flush and one update per step (PipeDream-Flush,
    arXiv:2006.09503)."""
    return _synchronous(rank, num_micro_batches, num_steps, ahead=num_ranks - 1 - rank)


def zero_bubble(
    rank: int, num_ranks: int, num_micro_batches: int, num_steps: int, depth: int = 1
) -> Iterator[Action]:
    """1F1B whose gradients of the weights wait until the rank would be idle (arXiv:2401.10241).

    Every rank keeps the activations of depth (R - 1) + 1 micro-batches: those of 1F1B at depth 1
    (ZB-H1), twice as many at 2 (ZB-H2), which is never idle with enough micro-batches. Neither
    waits for other ranks at an update."""
    return _synchronous(
        rank,
        num_micro_batches,
        num_steps,
        ahead=depth * (num_ranks - 1 - rank),
        behind=depth * rank,
    )


def _synchronous(
    rank: int, num_micro_batches: int, num_steps: int, ahead: int, behind: int | None = None
) -> Iterator[Action]:
    """Each step its own micro-batches, `ahead` forward passes in advance, and one update after the
    last of them.

    Backward passes are whole, or split, with the gradients of the weights `behind` those of the
    inputs."""
    for step in range(num_steps):
        first, last = step * num_micro_batches + 1, (step + 1) * num_micro_batches
        forwarded = weighted = first - 1
        for micro_batch in range(first, last + 1):
            while forwarded < min(micro_batch + ahead, last):
                forwarded += 1
                yield Action(rank, "F", forwarded)
            yield Action(rank, "B" if behind is None else "I", micro_batch)
            # Otherwise W waits until the rank would be idle.
            if behind is not None and micro_batch - weighted > behind:
                weighted += 1
                yield Action(rank, "W", weighted)
        if behind is not None:
            for micro_batch in range(weighted + 1, last + 1):
                yield Action(rank, "W", micro_batch)
        yield Action(rank, "U", step + 1)


def interleaved_1f1b(
    rank: int, num_ranks: int, num_micro_batches: int, num_steps: int, num_chunks: int = 2
) -> Iterator[Action]:
    """1F1B with several chunks of the model per rank, chunk c of rank r being stage c R + r
    (arXiv:2104.04473, 2.2).

    A rank turns to its next chunk after a round of micro-batches, as in torch's
    `ScheduleInterleaved1F1B`. ValueError where `num_micro_batches` is no multiple of the number of
    rounds, max(1, M // R)."""
    rounds = max(1, num_micro_batches // num_ranks)
    if num_micro_batches % rounds:
        raise ValueError(
            f"interleaving {num_ranks} ranks: {num_micro_batches} micro-batches, no multiple of "
            f"{rounds}"
        )
    per_round = num_micro_batches // rounds
    total = num_chunks * num_micro_batches
    ahead = min((num_chunks - 1) * per_round + 2 * (num_ranks - 1 - rank), total - 1)

    def chunk_and_micro_batch(index: int) -> tuple[int, int]:
        # For the rank's forward pass `index`, from 0
        round_index, within = divmod(index, num_chunks * per_round)
        return within // per_round, round_index * per_round + within % per_round

    for step in range(num_steps):
        first = step * num_micro_batches + 1
        for forward in range(total + ahead):
            if forward < total:
                chunk, micro_batch = chunk_and_micro_batch(forward)
                yield Action(chunk * num_ranks + rank, "F", first + micro_batch)
            if forward >= ahead:  # backward passes take the chunks from the last to the first
                chunk, micro_batch = chunk_and_micro_batch(forward - ahead)
                yield Action((num_chunks - 1 - chunk) * num_ranks + rank, "B", first + micro_batch)
        yield Action(rank, "U", step + 1)


class Timed(NamedTuple):
    action: Action
    start: float  # in units of one forward pass
    end: float


_DIRECTIONS = {"F": "forward", "B": "backward", "I": "backward"}


def timeline(
    actions: Sequence[Sequence[Action]],
    transfer_time: float = 0.0,
    duration: Callable[[Action], float] | None = None,
) -> list[list[Timed]]:
    """Times of the actions of all ranks, each in order and as soon as it can; ValueError where they
    wait for ever.

    A forward pass needs the same micro-batch's forward pass on the stage before, a backward pass
    that on the stage behind, and `transfer_time` (in units of one forward pass, beside the
    computation) from one rank to another. `duration` of an action is by default that of
    `DURATIONS`, equal for all stages."""
    num_ranks = len(actions)
    num_stages = 1 + max(action.stage for rank in actions for action in rank)
    # Where a rank holds several chunks of the model, each takes its share of the time.
    durations = {kind: duration * num_ranks / num_stages for kind, duration in DURATIONS.items()}
    latency = transfer_time if num_ranks > 1 else 0.0
    arrivals: dict[tuple[str, int, int], float] = {}  # by direction, stage and micro-batch
    done: list[list[Timed]] = [[] for _ in actions]
    while any(len(done[rank]) < len(actions[rank]) for rank in range(num_ranks)):
        progress = False
        for rank in range(num_ranks):  # as far as it gets with what has arrived by now
            free = done[rank][-1].end if done[rank] else 0.0
            while len(done[rank]) < len(actions[rank]):
                action = actions[rank][len(done[rank])]
                direction = _DIRECTIONS.get(action.kind, "")
                neighbour = action.stage + (-1 if direction == "forward" else 1)
                is_needed = bool(direction) and 0 <= neighbour < num_stages
                if is_needed and (direction, neighbour, action.number) not in arrivals:
                    break
                start = max(
                    free, arrivals[direction, neighbour, action.number] if is_needed else 0.0
                )
                free = start + (durations[action.kind] if duration is None else duration(action))
                if direction:
                    arrivals[direction, action.stage, action.number] = free + latency
                done[rank].append(Timed(action, start, free))
                progress = True
        if not progress:
            raise ValueError("the schedule cannot be carried out: the ranks wait for each other")
    return done


def bubble_share(
    timed: Sequence[Sequence[Timed]], start: float = 0.0, end: float | None = None
) -> float:
    """The share of the time from `start` to `end` (default: all) in which the ranks are idle, over
    all ranks."""
    if end is None:
        end = max(entry.end for rank in timed for entry in rank)
    busy = sum(
        max(0.0, min(entry.end, end) - max(entry.start, start)) for rank in timed for entry in rank
    )
    return 1.0 - busy / (len(timed) * (end - start))


def steady_state(timed: Sequence[Sequence[Timed]]) -> tuple[float, float]:
    """From the first backward pass of rank 0, when the pipeline is full, to its last forward pass,
    when it drains."""
    first_backward = next(entry.start for entry in timed[0] if entry.action.kind == "B")
    last_forward = max(entry.start for entry in timed[0] if entry.action.kind == "F")
    return first_backward, max(last_forward, first_backward)


def updates_between(actions: Sequence[Action], micro_batch: int) -> int:
    """The delay of a micro-batch's gradient: how many updates its rank makes between its forward
    pass and its own."""
    passes: list[tuple[str, int]] = [(action.kind, action.number) for action in actions]
    forward, backward = (passes.index((kind, micro_batch)) for kind in "FB")
    return sum(action.kind == "U" for action in actions[forward:backward])


def most_in_flight(actions: Sequence[Action], num_chunks: int = 1) -> float:
    """The most micro-batches whose activations a rank keeps at one time, a chunk of the model
    counting as its share."""
    in_flight = most = 0
    for action in actions:
        # Activations are kept until the gradient of the weights is there.
        in_flight += (action.kind == "F") - (action.kind in "BW")
        most = max(most, in_flight)
    return most / num_chunks


MOST_ACTIONS = 20_000  # more than anybody reads, or a figure shows
LEGEND = (
    "Stage, action, number: 2F5 is the forward pass of micro-batch 5 on stage 2, 2B5 its backward "
    "pass, 2U5 update 5"
    " of stage 2. A row per device, in the order in which it works."
)


def schedule_lines(pipeline: PipelineConfig, num_micro_batches: int, width: int) -> Iterator[str]:
    """GPipe and synchronous 1F1B for one step, asynchronous 1F1B until it has filled, and what the
    stages compute with; UserError where so many devices cannot run the delays, or there is too much
    to print."""
    # This import loads torch. A verdict needs only schedules and must not wait for it.
    from brx.model.stage import partition

    num_ranks, accumulation = pipeline.devices, pipeline.accumulation
    check_size(pipeline.stages, num_ranks, num_micro_batches, accumulation)
    delays = stage_delays(pipeline)
    ranges = partition(pipeline.stages, num_ranks)
    check_devices(delays, ranges)
    wanted = num_micro_batches + 2 * num_ranks
    last = -(-wanted // accumulation) * accumulation  # whole updates
    schedules: dict[str, Callable[[int], Iterator[Action]]] = {
        "GPipe, one step": lambda rank: gpipe(rank, num_ranks, num_micro_batches, 1),
        "synchronous 1F1B, one step": lambda rank: synchronous_1f1b(
            rank, num_ranks, num_micro_batches, 1
        ),
        "asynchronous 1F1B": lambda rank: asynchronous_1f1b(
            rank, num_ranks, 1, lambda: last, accumulation
        ),
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
        yield from _wrapped(
            f"  {rank}: " + " ".join(str(delays[stage].tau) for stage in own), width
        )
    heading = (
        "version of the weights that a stage uses for micro-batch 1, 2, ... (bar: an "
        "update), and versions kept:"
    )
    yield from textwrap.wrap(heading, width)
    for stage, delay in enumerate(delays):
        used = ""
        for micro_batch in range(1, last + 1):
            bar = (
                "|"
                if delay.ends_update(micro_batch) and delay.accumulation > 1 and micro_batch < last
                else " "
            )
            used += f"{delay.version_used(micro_batch):>3}{bar}"
        yield from _wrapped(f"  {stage:>3}: {used.rstrip()}   {delay.num_slots} kept", width)


def check_size(
    num_stages: int, num_ranks: int, num_micro_batches: int, accumulation: int = 1
) -> None:
    # A forward pass, a backward pass and an update of each micro-batch on each device, and its
    # version on each stage.
    num_actions = (3 * num_ranks + num_stages) * (
        num_micro_batches + 2 * num_ranks + accumulation - 1
    )
    if num_actions > MOST_ACTIONS:
        raise UserError(
            f"--stages {num_stages}, --devices {num_ranks}, --micro-batches {num_micro_batches}, "
            f"--accumulation"
            f" {accumulation}: {num_actions:,} actions are more than can be shown "
            f"({MOST_ACTIONS:,}); ask for fewer"
            " (--devices 1: the delays alone)"
        )


def _wrapped(row: str, width: int) -> list[str]:
    lines = textwrap.wrap(
        row, width, subsequent_indent="      ", drop_whitespace=False, break_long_words=False
    )
    return [line.rstrip() for line in lines]
