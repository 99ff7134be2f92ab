"""Slowdown: how many times the iterations a method needs to reach a loss at P stages, relative to fewer stages."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.stats import bootstrap

from brx.analysis.results import RATE, SEED, Group
from brx.analysis.runs import Run, iterations_to_target
from brx.train.run_folder import settings_key

BASELINES = ("pipedream", "pipedream-lr", "nesterov")
CONFIDENCE, RESAMPLES = 0.95, 9999


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
        low: lower end of the 95 % bootstrap interval over seeds; None with one seed.
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
    def text(self) -> str:
        """For example `4.24`, `1.27 [1.21, 1.35]`, or `> 8.1` for a run that never got there."""
        if self.ratio is None:
            return "reference never reaches it"
        if self.is_censored:
            return f"> {self.ratio:.2f}"
        interval = f" [{self.low:.2f}, {self.high:.2f}]" if self.low is not None and self.high is not None else ""
        return f"{self.ratio:.2f}{interval}"


def comparable_sets(groups: Sequence[Group]) -> list[list[Group]]:
    """Sort groups by what makes losses comparable: data, model, and token budget; the largest set first."""
    sets: dict[str, list[Group]] = defaultdict(list)
    for group in groups:
        training = group.config.training
        fingerprint = group.runs[0].summary.get("data_fingerprint")
        key = (fingerprint, group.config.model.model_dump_json(), training.iterations, training.batch_size)
        sets[repr(key)].append(group)
    return sorted(sets.values(), key=len, reverse=True)


def slowest_final(groups: Sequence[Group]) -> float:
    """The lowest loss that all runs reach: the highest of their final smoothed training losses."""
    return max(loss for group in groups for loss in group.final_losses)


def reached(group: Group, target: float) -> Reached:
    """The iterations from which the smoothed training loss of each seed stays at or below `target`."""
    found = [iterations_to_target(run, target) for run in group.runs]
    iterations = [float(_last(run)) if one is None else one for run, one in zip(group.runs, found, strict=True)]
    return Reached(iterations, None in found)


def slowdowns(groups: Sequence[Group], target: float, reference_stages: int = 1) -> list[Slowdown]:
    """The slowdown of every group whose method has runs at `reference_stages`, those themselves aside."""
    by_key = {_without_stages(group): group for group in groups if group.stages == reference_stages}
    found = []
    for group in sorted(groups, key=lambda one: (one.variant, one.stages)):
        reference = by_key.get(_without_stages(group))
        if reference is not None and group.stages != reference_stages:
            found.append(_slowdown(group, reference, target))
    return found


def without_reference(groups: Sequence[Group], reference_stages: int) -> list[Group]:
    """Groups whose method has no runs at the reference number of stages."""
    references = {_without_stages(group) for group in groups if group.stages == reference_stages}
    return [group for group in groups if _without_stages(group) not in references]


@dataclass(frozen=True)
class Reduction:
    """How many fewer iterations a method needs to end where the best baseline ends, as the paper's headlines put it.

    Attributes:
        group: the method's runs.
        baseline: the baseline with the lowest final loss at the same number of stages.
        share: 1 - iterations needed / iterations of the baseline; None if the method never gets there.
    """

    group: Group
    baseline: Group
    share: float | None


def reductions(groups: Sequence[Group]) -> list[Reduction]:
    """For every method but the baselines, at every number of stages at which there is a baseline."""
    found = []
    for group in sorted(groups, key=lambda one: (one.stages, one.variant)):
        peers = [one for one in groups if one.stages == group.stages and one.config.model == group.config.model]
        baselines = [one for one in peers if one.method in BASELINES]
        if group.method in BASELINES or not baselines:
            continue
        best = min(baselines, key=lambda one: one.final_loss)
        needed = reached(group, best.final_loss)
        share = None if needed.is_censored else 1.0 - needed.mean / statistics.fmean(map(_last, best.runs))
        found.append(Reduction(group, best, share))
    return found


def _slowdown(group: Group, reference: Group, target: float) -> Slowdown:
    ours, theirs = reached(group, target), reached(reference, target)
    if theirs.is_censored:
        return Slowdown(group, reference, target, ours, theirs, None, None, None)
    low, high = _interval(group, reference, ours, theirs)
    return Slowdown(group, reference, target, ours, theirs, ours.mean / theirs.mean, low, high)


def _interval(group: Group, reference: Group, ours: Reached, theirs: Reached) -> tuple[float | None, float | None]:
    """Percentile bootstrap of the ratio of means, seeds resampled in pairs."""
    seed_of = [[run.config.training.seed for run in one.runs] for one in (group, reference)]
    shared = sorted(set(seed_of[0]) & set(seed_of[1]))
    if len(shared) < 2:
        return None, None
    delayed = np.array([ours.iterations[seed_of[0].index(seed)] for seed in shared])
    undelayed = np.array([theirs.iterations[seed_of[1].index(seed)] for seed in shared])
    interval = bootstrap(
        (delayed, undelayed),
        lambda one, other, axis=-1: one.mean(axis=axis) / other.mean(axis=axis),
        paired=True,
        vectorized=True,
        confidence_level=CONFIDENCE,
        n_resamples=RESAMPLES,
        method="percentile",
        rng=np.random.default_rng(0),
    ).confidence_interval
    return float(interval.low), float(interval.high)


def _without_stages(group: Group) -> str:
    return settings_key(group.config, without=(RATE, SEED, "pipeline.stages"))


def _last(run: Run) -> float:
    return float(run.iterations[-1])
