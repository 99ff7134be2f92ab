"""Schedules: the order in which each device runs its passes and updates, and when. The asynchronous
one-forward-one-backward (1F1B) schedule is the one that the engine runs; `brx schedule` shows it
next to synchronous ones (schedule_text.py).

Action text follows torch.distributed.pipelining: `2F1` is the forward pass of micro-batch 1 on
stage 2, `2B1` its backward pass, or `2I1` and `2W1` where it is split into gradients of the input
and of the weights; `2U1` is update 1."""

from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Literal, NamedTuple

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
    """A forward pass (F), a backward pass (B), half of one (I: gradient of the input, W: gradients
    of the weights), or an update (U)."""

    stage: int  # the rank, unless the rank holds several chunks of the model
    kind: Literal["F", "B", "I", "W", "U"]
    number: int  # micro-batch or update, from 1

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.number}"


def asynchronous_1f1b(
    rank: int, num_ranks: int, first: int, last: Callable[[], int], accumulation: int = 1
) -> Iterator[Action]:
    """The actions of one rank in PipeDream (arXiv:1806.03377, section 3.2): no rank waits for
    another's update. The pipeline is empty at the beginning and at the end.

    Args:
        rank: r, from 0.
        num_ranks: R.
        first: the first micro-batch, from 1.
        last: returns the last micro-batch. It is asked before each action, so that a run may be cut
            short.
        accumulation: M, the micro-batches per update.
    """
    ahead = num_ranks - 1 - rank
    forwarded = first - 1
    micro_batch = first
    while micro_batch <= last():
        # R - r forward passes at first, and then one before each backward pass, until none is left.
        while forwarded < min(micro_batch + ahead, last()):
            forwarded += 1
            yield Action(rank, "F", forwarded)
        yield Action(rank, "B", micro_batch)
        if micro_batch % accumulation == 0:
            yield Action(rank, "U", micro_batch // accumulation)
        micro_batch += 1


def gpipe(rank: int, num_ranks: int, num_micro_batches: int, num_steps: int) -> Iterator[Action]:
    """The actions of one rank in GPipe (arXiv:1811.06965), which is synchronous: in each step all
    forward passes, all backward passes, and one update."""
    return _synchronous(rank, num_micro_batches, num_steps, ahead=num_micro_batches - 1)


def synchronous_1f1b(
    rank: int, num_ranks: int, num_micro_batches: int, num_steps: int
) -> Iterator[Action]:
    """The actions of one rank in synchronous 1F1B (PipeDream-Flush, arXiv:2006.09503): one forward
    pass, one backward pass, in turn. Each step ends with an empty pipeline and one update."""
    return _synchronous(rank, num_micro_batches, num_steps, ahead=num_ranks - 1 - rank)


def zero_bubble(
    rank: int, num_ranks: int, num_micro_batches: int, num_steps: int, depth: int = 1
) -> Iterator[Action]:
    """The actions of one rank in a zero-bubble schedule (arXiv:2401.10241): 1F1B in which the
    gradients of the weights wait until the rank would be idle.

    Every rank keeps the activations of depth (R - 1) + 1 micro-batches. At depth 1 (ZB-H1) these
    are as many as in 1F1B. At depth 2 (ZB-H2) they are about twice as many, and with enough
    micro-batches no rank is ever idle. Neither schedule waits for other ranks at an update."""
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
    """The actions of one rank in a synchronous schedule: each step has its own micro-batches, and
    one update after the last of them.

    Args:
        ahead: the warm-up of a step: how many forward passes run before its first backward pass,
            not counting the forward pass of that micro-batch.
        behind: for split backward passes, how many micro-batches may wait for the gradients of the
            weights (W) while input gradients (I) of later ones are computed. None: backward passes
            are whole.
    """
    for step in range(num_steps):
        first = step * num_micro_batches + 1
        last = (step + 1) * num_micro_batches
        forwarded = weighted = first - 1  # the last micro-batches whose F, and whose W, have run
        for micro_batch in range(first, last + 1):
            while forwarded < min(micro_batch + ahead, last):
                forwarded += 1
                yield Action(rank, "F", forwarded)
            yield Action(rank, "B" if behind is None else "I", micro_batch)
            # W waits until the rank would be idle without it.
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
    """The actions of one rank in interleaved 1F1B (arXiv:2104.04473, section 2.2), where each rank
    has several chunks of the model. Chunk c of rank r is stage c R + r.

    A rank turns to its next chunk after a round of micro-batches, as in torch's
    `ScheduleInterleaved1F1B`.

    Raises:
        ValueError: `num_micro_batches` is not a multiple of the number of rounds, which is
            max(1, num_micro_batches // num_ranks).
    """
    rounds = max(1, num_micro_batches // num_ranks)
    if num_micro_batches % rounds:
        raise ValueError(
            f"interleaving {num_ranks} ranks: {num_micro_batches} micro-batches, no multiple of "
            f"{rounds}"
        )
    per_round = num_micro_batches // rounds
    total = num_chunks * num_micro_batches
    # The warm-up of torch's schedule: a round for each chunk but the last, and two forward passes
    # for each rank that follows.
    ahead = min((num_chunks - 1) * per_round + 2 * (num_ranks - 1 - rank), total - 1)

    def chunk_and_micro_batch(index: int) -> tuple[int, int]:
        """The chunk and the micro-batch of forward pass number `index` of the rank within a step.
        All three count from 0."""
        round_index, within_round = divmod(index, num_chunks * per_round)
        chunk, within_chunk = divmod(within_round, per_round)
        return chunk, round_index * per_round + within_chunk

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
    """An action and when it runs, in units of one rank's forward pass."""

    action: Action
    start: float
    end: float


_DIRECTIONS = {"F": "forward", "B": "backward", "I": "backward"}


def timeline(
    actions: Sequence[Sequence[Action]],
    transfer_time: float = 0.0,
    duration: Callable[[Action], float] | None = None,
) -> list[list[Timed]]:
    """Compute when the actions of all ranks run, each in its rank's order and as early as it can.

    The forward pass of a micro-batch waits for its forward pass on the stage before. A backward
    pass waits for the one on the stage after.

    Args:
        actions: the actions of each rank, in order.
        transfer_time: how long a message takes from one rank to another, in units of one rank's
            forward pass. Both ranks may compute meanwhile.
        duration: returns the time that an action takes, in the same units. By default `DURATIONS`
            has it, and all stages are equal.

    Raises:
        ValueError: the ranks wait for each other forever (a deadlock).
    """
    num_ranks = len(actions)
    num_stages = 1 + max(action.stage for action in chain.from_iterable(actions))
    # Where a rank holds several chunks of the model, each takes its share of the rank's time.
    durations = {kind: rank_time * num_ranks / num_stages for kind, rank_time in DURATIONS.items()}
    latency = transfer_time if num_ranks > 1 else 0.0
    arrivals: dict[_Message, float] = {}
    timed: list[list[Timed]] = [[] for _ in actions]
    num_left = sum(len(own) for own in actions)
    while num_left:
        num_left_before = num_left
        for own, done in zip(actions, timed, strict=True):
            # This rank gets as far as it can with the messages that have arrived by now.
            while len(done) < len(own):
                action = own[len(done)]
                awaited = _awaited(action, num_stages)
                arrival = 0.0 if awaited is None else arrivals.get(awaited)
                if arrival is None:
                    break
                free = done[-1].end if done else 0.0
                start = max(free, arrival)
                end = start + (durations[action.kind] if duration is None else duration(action))
                done.append(Timed(action, start, end))
                num_left -= 1
                if action.kind in _DIRECTIONS:
                    message = (_DIRECTIONS[action.kind], action.stage, action.number)
                    arrivals[message] = end + latency
        if num_left == num_left_before:
            raise ValueError("the schedule cannot be carried out: the ranks wait for each other")
    return timed


_Message = tuple[str, int, int]
"""What a pass sends on: its direction, its stage and its micro-batch."""


def _awaited(action: Action, num_stages: int) -> _Message | None:
    """The message that an action waits for, if it waits for one."""
    if action.kind not in _DIRECTIONS:
        return None
    direction = _DIRECTIONS[action.kind]
    neighbour = action.stage - 1 if direction == "forward" else action.stage + 1
    if not 0 <= neighbour < num_stages:
        return None
    return direction, neighbour, action.number


def bubble_share(
    timed: Sequence[Sequence[Timed]], start: float = 0.0, end: float | None = None
) -> float:
    """The share of the time in which ranks are idle, over all ranks; from 0 to 1.

    Args:
        timed: the actions of each rank.
        start, end: the interval to look at; by default all of it.
    """
    if end is None:
        end = max(entry.end for entry in chain.from_iterable(timed))
    busy: list[float] = []
    for entry in chain.from_iterable(timed):
        overlap = min(entry.end, end) - max(entry.start, start)
        busy.append(max(0.0, overlap))
    return 1.0 - sum(busy) / (len(timed) * (end - start))


def steady_state(timed: Sequence[Sequence[Timed]]) -> tuple[float, float]:
    """When the pipeline is full, and when it begins to drain: the start of the first backward pass
    of rank 0, and the start of its last forward pass."""
    first_backward = next(entry.start for entry in timed[0] if entry.action.kind == "B")
    last_forward = max(entry.start for entry in timed[0] if entry.action.kind == "F")
    return first_backward, max(last_forward, first_backward)


def updates_between(actions: Sequence[Action], micro_batch: int) -> int:
    """The delay of a micro-batch's gradient in updates: how many updates a rank makes between the
    forward pass and the backward pass.

    Args:
        actions: the rank's actions, in order, with one chunk of the model.
        micro_batch: the micro-batch, from 1.
    """
    passes: list[tuple[str, int]] = [(action.kind, action.number) for action in actions]
    forward = passes.index(("F", micro_batch))
    backward = passes.index(("B", micro_batch))
    updates = [action for action in actions[forward:backward] if action.kind == "U"]
    return len(updates)


def most_in_flight(actions: Sequence[Action], num_chunks: int = 1) -> float:
    """The most micro-batches whose activations a rank keeps at one time. If the rank holds
    `num_chunks` chunks of the model, the activations of one chunk count as 1 / `num_chunks`."""
    in_flight = most = 0
    for action in actions:
        if action.kind == "F":
            in_flight += 1
        elif action.kind in ("B", "W"):
            # The gradient of the weights is computed, so the activations can go.
            in_flight -= 1
        most = max(most, in_flight)
    return most / num_chunks
