"""Slowdown: how many times the iterations training needs to reach a loss with delay, from loss curves as arrays."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pandas as pd
from scipy.stats import bootstrap

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
    """One experiment against another.

    Attributes:
        reached: what the experiment needed.
        reference_reached: what the reference needed.
        ratio: of the means; a lower bound if `reached.is_censored`; None if the reference never reached the loss.
        low: lower end of the bootstrap interval (nominally 95 %) over the seeds that both have; None with one seed.
        high: its upper end.
    """

    reached: Reached
    reference_reached: Reached
    ratio: float | None
    low: float | None
    high: float | None


def slowdown(ours: Mapping[int, pd.Series], theirs: Mapping[int, pd.Series], target: float) -> Slowdown:
    """The slowdown of one experiment against another.

    Args:
        ours: smoothed training losses by seed, each indexed by iteration.
        theirs: those of the reference.
        target: the loss to reach, in nats.
    """
    if len(shared := ours.keys() & theirs.keys()) > 1:  # else no interval: each side's mean is the best that there is
        ours, theirs = ({seed: side[seed] for seed in side if seed in shared} for side in (ours, theirs))
    reached, reference = reach(ours, target), reach(theirs, target)
    if reference.is_censored:
        return Slowdown(reached, reference, None, None, None)
    low, high = _interval(reached, reference) if len(shared) > 1 else (None, None)
    return Slowdown(reached, reference, reached.mean / reference.mean, low, high)


def reach(losses: Mapping[int, pd.Series], target: float) -> Reached:
    """What the seeds of an experiment needed to a loss."""
    iterations = [iterations_to_target(series, target) for series in losses.values()]
    ends = [float(series.index[-1]) for series in losses.values()]
    return Reached([end if t is None else t for t, end in zip(iterations, ends, strict=True)], None in iterations)


def iterations_to_target(losses: pd.Series, target: float) -> float | None:
    """The iteration from which a smoothed training loss stays at or below `target`.

    Interpolated between iterations; None if the run never gets there.

    Args:
        losses: indexed by iteration.
        target: in nats.
    """
    iterations, values = losses.index.to_numpy(), losses.to_numpy()
    above = np.flatnonzero(values > target)
    if len(above) == 0:
        return float(iterations[0])
    last = int(above[-1])
    if last + 1 == len(values):
        return None
    share = (values[last] - target) / (values[last] - values[last + 1])
    return float(iterations[last] + share * (iterations[last + 1] - iterations[last]))


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
