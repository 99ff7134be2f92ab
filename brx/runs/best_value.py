"""Which value of a setting is reported: the rule by which sweeps and figures choose a learning rate alike."""

from __future__ import annotations

import statistics
from collections.abc import Mapping


def best_value(losses: Mapping[float, Mapping[int, float]]) -> tuple[float, dict[float, float]]:
    """The value with the lowest loss.

    Values are compared over the seeds that all of them have; if there are none, over the lowest seed that any has.

    Args:
        losses: by value and seed; infinite for a run that failed, as it does when its loss diverges: it was tried.

    Returns:
        The best value, and the mean loss of each value that has those seeds, in order.
    """
    shared = set.intersection(*(set(by_seed) for by_seed in losses.values())) or {min(map(min, losses.values()))}
    scores = {
        value: statistics.fmean(by_seed[seed] for seed in shared)
        for value, by_seed in sorted(losses.items())
        if shared <= set(by_seed)
    }
    return min(scores, key=lambda value: scores[value]), scores


def is_at_edge(value: float, scores: Mapping[float, float]) -> bool:
    """Whether it is the lowest or the highest of more than one value, so that a wider grid might do better."""
    return len(scores) > 1 and value in (min(scores), max(scores))
