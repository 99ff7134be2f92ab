"""Slowdowns and savings of a whole folder of experiments, set by set of those whose losses compare."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from brx.runs.experiments import Group
from brx.runs.slowdown import (
    Reduction,
    Slowdown,
    comparable_sets,
    reductions,
    slowdowns,
    slowest_final,
    with_reference,
)


@dataclass(frozen=True)
class Comparison:
    """What experiments say about the cost of delay.

    Attributes:
        sets: the experiments, sorted into sets of the same data, model and budget; the largest first.
        slowdowns: of every method that has runs at the reference number of stages and at others.
        reductions: the iterations that methods save over the best baseline.
        without_reference: experiments whose method has no runs at the reference number of stages.
    """

    sets: list[list[Group]]
    slowdowns: list[Slowdown]
    reductions: list[Reduction]
    without_reference: list[Group]


def compare(groups: Sequence[Group], target: float | None = None, reference_stages: int = 1) -> Comparison:
    """Compare experiments within each set of the same data, model and budget.

    Args:
        groups: the experiments.
        target: the training loss to reach, in nats; None for the lowest that all experiments of the set reach.
        reference_stages: number of stages to compare to.
    """
    comparison = Comparison(comparable_sets(groups), [], [], [])
    for alike in comparison.sets:
        compared = with_reference(alike, reference_stages)
        if any(group.stages != reference_stages for group in compared):
            reach = target if target is not None else slowest_final(compared)
            comparison.slowdowns.extend(slowdowns(compared, reach, reference_stages))
        comparison.reductions.extend(reductions(alike))
        comparison.without_reference.extend(group for group in alike if group not in compared)
    return comparison
