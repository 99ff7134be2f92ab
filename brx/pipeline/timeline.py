"""When things happen: start and end of every action of a schedule, and what follows from them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from brx.pipeline.schedule import Action

FORWARD_TIME, BACKWARD_TIME = 1.0, 2.0
DURATIONS = {"F": FORWARD_TIME, "B": BACKWARD_TIME, "I": BACKWARD_TIME / 2, "W": BACKWARD_TIME / 2, "U": 0.0}
"""In units of one rank's forward pass: a backward pass does twice its multiplications, half of them for the gradient of
the input and half for that of the weights. An update counts as instantaneous."""


class Timed(NamedTuple):
    """An action with its time.

    Attributes:
        action: what is done.
        start: when it begins, in units of one forward pass.
        end: when it is over.
    """

    action: Action
    start: float
    end: float


def timeline(
    actions: Sequence[Sequence[Action]],
    transfer_time: float = 0.0,
    duration: Callable[[Action], float] | None = None,
) -> list[list[Timed]]:
    """Times of the actions of all ranks.

    A rank does its actions in order, each as soon as it can: a forward pass needs the same micro-batch's forward pass
    on the stage before, a backward pass that on the stage behind. Where a rank holds several chunks of the model, each
    takes its share of the time.

    Args:
        actions: of each rank, in the order in which the rank does them.
        transfer_time: of activations or gradients from one rank to another, in units of one forward pass. Links are
            busy beside the computation and never in each other's way.
        duration: of an action; by default `DURATIONS`, equal for all stages.

    Raises:
        ValueError: the ranks wait for each other for ever.
    """
    num_ranks = len(actions)
    num_stages = 1 + max(action.stage for rank in actions for action in rank)
    durations = {kind: duration * num_ranks / num_stages for kind, duration in DURATIONS.items()}
    latency = transfer_time if num_ranks > 1 else 0.0
    arrivals: dict[_Pass, float] = {}
    done: list[list[Timed]] = [[] for _ in actions]
    while any(len(done[rank]) < len(actions[rank]) for rank in range(num_ranks)):
        progress = False
        for rank in range(num_ranks):
            free = done[rank][-1].end if done[rank] else 0.0
            while len(done[rank]) < len(actions[rank]):
                action = actions[rank][len(done[rank])]
                needed = _needed(action, num_stages)
                if needed is not None and needed not in arrivals:
                    break
                start = max(free, arrivals[needed] if needed is not None else 0.0)
                free = start + (durations[action.kind] if duration is None else duration(action))
                if action.kind in _DIRECTIONS:
                    arrivals[_DIRECTIONS[action.kind], action.stage, action.number] = free + latency
                done[rank].append(Timed(action, start, free))
                progress = True
        if not progress:
            raise ValueError("the schedule cannot be carried out: the ranks wait for each other")
    return done


def bubble_share(timed: Sequence[Sequence[Timed]], start: float = 0.0, end: float | None = None) -> float:
    """The share of the time from `start` to `end` (default: all) in which the ranks are idle, over all ranks."""
    if end is None:
        end = max(entry.end for rank in timed for entry in rank)
    busy = sum(max(0.0, min(entry.end, end) - max(entry.start, start)) for rank in timed for entry in rank)
    return 1.0 - busy / (len(timed) * (end - start))


def steady_state(timed: Sequence[Sequence[Timed]]) -> tuple[float, float]:
    """From the first backward pass of rank 0, when the pipeline is full, to its last forward pass, when it drains."""
    first_backward = next(entry.start for entry in timed[0] if entry.action.kind == "B")
    last_forward = max(entry.start for entry in timed[0] if entry.action.kind == "F")
    return first_backward, max(last_forward, first_backward)


def updates_between(actions: Sequence[Action], micro_batch: int) -> int:
    """The delay of a micro-batch's gradient: how many updates its rank makes between its forward pass and its own."""
    forward, backward = (
        next(i for i, action in enumerate(actions) if (action.kind, action.number) == (kind, micro_batch))
        for kind in "FB"
    )
    return sum(action.kind == "U" for action in actions[forward:backward])


def most_in_flight(actions: Sequence[Action], num_chunks: int = 1) -> float:
    """The most micro-batches whose activations a rank keeps at one time, a chunk of the model counting as its share.

    Those of a micro-batch go when the gradient of its weights is there.
    """
    in_flight = most = 0
    for action in actions:
        in_flight += (action.kind == "F") - (action.kind in "BW")
        most = max(most, in_flight)
    return most / num_chunks


_Pass = tuple[str, int, int]
"""Direction, stage and micro-batch of what one stage waits for from another."""

_DIRECTIONS = {"F": "forward", "B": "backward", "I": "backward"}


def _needed(action: Action, num_stages: int) -> _Pass | None:
    """What has to have arrived from a neighbouring stage."""
    direction = _DIRECTIONS.get(action.kind)
    if direction == "forward" and action.stage > 0:
        return direction, action.stage - 1, action.number
    if direction == "backward" and action.stage < num_stages - 1:
        return direction, action.stage + 1, action.number
    return None
