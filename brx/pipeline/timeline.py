"""When things happen: start and end of every action of a schedule, and what follows from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from brx.pipeline.schedule import Action

FORWARD_TIME, BACKWARD_TIME = 1.0, 2.0
"""In units of one forward pass: a backward pass does twice its multiplications. An update counts as instantaneous."""


@dataclass(frozen=True)
class Timed:
    """An action with its time.

    Attributes:
        action: what is done.
        start: when it begins, in units of one forward pass.
        end: when it is over.
    """

    action: Action
    start: float
    end: float


def timeline(actions: Sequence[Sequence[Action]]) -> list[list[Timed]]:
    """Times of the actions of all ranks.

    A rank does its actions in order, each as soon as it can: a forward pass needs the same micro-batch's forward pass
    on the rank before, a backward pass that on the rank behind. Communication takes no time.

    Args:
        actions: of each rank, in the order in which the rank does them.

    Raises:
        ValueError: the ranks wait for each other for ever.
    """
    num_ranks = len(actions)
    ends: dict[Action, float] = {}
    done: list[list[Timed]] = [[] for _ in actions]
    while any(len(done[rank]) < len(actions[rank]) for rank in range(num_ranks)):
        progress = False
        for rank in range(num_ranks):
            while len(done[rank]) < len(actions[rank]):
                action = actions[rank][len(done[rank])]
                needed = _needed(action, num_ranks)
                if needed is not None and needed not in ends:
                    break
                free = done[rank][-1].end if done[rank] else 0.0
                start = max(free, ends[needed] if needed is not None else 0.0)
                ends[action] = start + {"F": FORWARD_TIME, "B": BACKWARD_TIME, "U": 0.0}[action.kind]
                done[rank].append(Timed(action, start, ends[action]))
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
    forward = next(i for i, action in enumerate(actions) if (action.kind, action.micro_batch) == ("F", micro_batch))
    update = next(i for i, action in enumerate(actions) if (action.kind, action.micro_batch) == ("U", micro_batch))
    return sum(action.kind == "U" for action in actions[forward:update])


def _needed(action: Action, num_ranks: int) -> Action | None:
    """What has to be over on a neighbouring rank."""
    if action.kind == "F" and action.rank > 0:
        return Action(action.rank - 1, "F", action.micro_batch)
    if action.kind == "B" and action.rank < num_ranks - 1:
        return Action(action.rank + 1, "B", action.micro_batch)
    return None
