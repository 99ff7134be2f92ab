"""Slowdown: how many times the iterations a method needs to reach a loss at P stages, relative to fewer stages."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Container, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.stats import bootstrap

from brx.runs.experiments import RATE, SEED, Group
from brx.runs.folder import settings_key, trajectory_of
from brx.runs.reading import Run, iterations_to_target

BASELINES = ("pipedream", "pipedream-lr", "nesterov")
CONFIDENCE, RESAMPLES = 0.95, 9999
EARLY = 0.05


@dataclass(frozen=True)
class Reached:
    """Iterations that an experiment's seeds needed to reach a loss and stay there.

    Attributes:
        iterations: of each seed; of one that never got there, all that it ran.
        is_censored: whether one never got there, so that the mean is a lower bound.
    """

    iterations: list[float]
    is_censored: bool

    @property
    def mean(self) -> float:
        """Over the seeds."""
        return statistics.fmean(self.iterations)


@dataclass(frozen=True)
class Slowdown:
    """One method at one number of stages.

    Attributes:
        group: the runs.
        reference: the same method's runs at the reference number of stages.
        target: the loss to reach, in nats.
        reached: what the group needed.
        reference_reached: what the reference needed.
        ratio: of the means; a lower bound if `is_censored`; None if the reference never reached the loss.
        low: lower end of the bootstrap interval (nominally 95 %) over the seeds that both have; None with one seed.
        high: its upper end.
    """

    group: Group
    reference: Group
    target: float
    reached: Reached
    reference_reached: Reached
    ratio: float | None
    low: float | None
    high: float | None

    @property
    def is_censored(self) -> bool:
        """Whether a run never reached the loss."""
        return self.reached.is_censored

    @property
    def is_early(self) -> bool:
        """Whether the reference reaches the loss in the first 5 % of its iterations, before training has settled."""
        return self.ratio is not None and self.reference_reached.mean < EARLY * self.reference.runs[0].budget[1]

    @property
    def text(self) -> str:
        """For example `4.24`, `1.27 [1.21, 1.35]`, or `> 8.1` for a run that never got there."""
        if self.ratio is None:
            return "reference never reaches it"
        if self.is_censored:
            return f"> {self.ratio:.2f}"
        interval = f" [{self.low:.2f}, {self.high:.2f}]" if self.low is not None and self.high is not None else ""
        return f"{self.ratio:.2f}{interval}"


def comparable_sets(groups: Sequence[Group]) -> list[list[Group]]:
    """Sort groups by what makes losses comparable: data, trajectory version, model, budget; the largest set first."""
    sets: dict[str, list[Group]] = defaultdict(list)
    for group in groups:
        first = group.runs[0]
        key = (first.origin, first.config.model, first.budget, first.config.training.batch_size)
        sets[repr(key)].append(group)
    return sorted(sets.values(), key=len, reverse=True)


def slowest_final(groups: Sequence[Group]) -> float:
    """The lowest loss that all runs reach: the highest of their final smoothed training losses."""
    return max(loss for group in groups for loss in group.final_losses)


def reached(group: Group, target: float, seeds: Container[int] | None = None) -> Reached:
    """The iterations from which the smoothed training loss of each seed (of `seeds`) stays at or below `target`."""
    runs = [run for run in group.runs if seeds is None or run.config.training.seed in seeds]
    found = [iterations_to_target(run, target) for run in runs]
    iterations = [_last(run) if one is None else one for run, one in zip(runs, found, strict=True)]
    return Reached(iterations, None in found)


def slowdowns(groups: Sequence[Group], target: float, reference_stages: int = 1) -> list[Slowdown]:
    """The slowdown of every group whose method has runs at `reference_stages`, those themselves aside."""
    by_key = {_without_stages(group): group for group in groups if group.stages == reference_stages}
    found = []
    for group in sorted(groups, key=lambda one: (one.variant, one.stages)):
        reference = by_key.get(_without_stages(group))
        if reference is not None and group.stages != reference_stages:
            found.append(slowdown(group, reference, target))
    return found


def slowdown(group: Group, reference: Group, target: float) -> Slowdown:
    """The slowdown of one experiment against another."""
    shared = group.seeds & reference.seeds
    if len(shared) < 2:  # no interval: then each side's mean is the best that there is
        ours, theirs = reached(group, target), reached(reference, target)
    else:
        ours, theirs = reached(group, target, shared), reached(reference, target, shared)
    if theirs.is_censored:
        return Slowdown(group, reference, target, ours, theirs, None, None, None)
    low, high = _interval(ours, theirs) if len(shared) > 1 else (None, None)
    return Slowdown(group, reference, target, ours, theirs, ours.mean / theirs.mean, low, high)


def with_reference(groups: Sequence[Group], reference_stages: int) -> list[Group]:
    """Groups whose method has runs at the reference number of stages, those themselves among them."""
    references = {_without_stages(group) for group in groups if group.stages == reference_stages}
    return [group for group in groups if _without_stages(group) in references]


@dataclass(frozen=True)
class Reduction:
    """How many fewer iterations a method needs to end where the best baseline ends, as the paper's headlines put it.

    Attributes:
        group: the method's runs.
        baseline: the baseline with the lowest final loss, all settings but the optimizer's being equal.
        share: 1 - iterations needed / iterations of the baseline; None if the method never gets there.
    """

    group: Group
    baseline: Group
    share: float | None


def reductions(groups: Sequence[Group]) -> list[Reduction]:
    """For every method but the baselines that has a baseline to compare with."""
    found = []
    for group in sorted(groups, key=lambda one: (one.stages, one.variant)):
        baselines = [one for one in groups if one.method in BASELINES and _beside_method(one) == _beside_method(group)]
        if group.method in BASELINES or not baselines:
            continue
        best = min(baselines, key=lambda one: one.final_loss)
        needed, available = reached(group, best.final_loss), statistics.fmean(map(_last, best.runs))
        share = None if needed.is_censored else 1.0 - needed.mean / available
        found.append(Reduction(group, best, share))
    return found


def _interval(ours: Reached, theirs: Reached) -> tuple[float, float]:
    """Percentile bootstrap of the ratio of means, seeds resampled in pairs.

    With three seeds its ends are those of the single seeds' ratios, which cover less than the 95 % of its name.
    """
    interval = bootstrap(
        (np.array(ours.iterations), np.array(theirs.iterations)),
        lambda one, other, axis=-1: one.mean(axis=axis) / other.mean(axis=axis),
        paired=True,
        vectorized=True,
        confidence_level=CONFIDENCE,
        n_resamples=RESAMPLES,
        method="percentile",
        rng=np.random.default_rng(0),
    ).confidence_interval
    return float(interval.low), float(interval.high)


def _beside_method(group: Group) -> object:
    """All settings that decide a trajectory but the optimizer's and the seed."""
    settings = trajectory_of(group.config)
    del settings["optimizer"], settings["training"]["seed"]
    return settings


def _without_stages(group: Group) -> str:
    return settings_key(group.config, without=(RATE, SEED, "pipeline.stages"))


def _last(run: Run) -> float:
    """The iteration of the last smoothed loss."""
    return float(run.iterations[run.centres][-1])
