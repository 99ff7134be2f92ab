"""How many iterations a method needs to reach a loss under a delay, from measured runs.

Delays are the largest of any stage, in updates: (P - 1) / M in a pipeline of P stages with M
micro-batches per update."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np

from brx.errors import UserError, counted
from brx.runs.frames import load
from brx.runs.slowdown import Reached, geometric_mean
from brx.runs.time_to_loss import Experiment, Measurements, measure_largest_set

COMMITTED = Path("results/tables/similar/time-to-loss.json")
"""The measurements of the committed runs; `make reproduce-figures` writes the file."""

REFERENCE_METHOD = "pipedream"
"""AdamW. Its lowest loss is the default loss to reach, and costs of updates are relative to its."""

WIDEST_GAP = 4.0
"""Iterations are interpolated between two measured delays whose values of 1 + delay differ by at
most this factor."""

ASSUMED_SPREAD = 0.05
"""Standard deviation of log(iterations) between seeds, where no experiment has two seeds."""


class Iterations(NamedTuple):
    """The iterations that a method needs to reach a loss under a delay."""

    by_seed: Mapping[int, Reached]
    """A run that never reached the loss counts with all of its iterations."""
    delays: tuple[float, ...]
    """The measured delays that this comes from: one, or the two of an interpolation."""
    num_rates: int
    """How many learning rates were tried; of two experiments, the smaller number."""

    @property
    def is_lower_bound(self) -> bool:
        """Whether a run never reached the loss."""
        return not _mean(self.by_seed.values()).is_reached

    @property
    def mean(self) -> float:
        """The geometric mean over seeds."""
        return _mean(self.by_seed.values()).iterations


def iterations_at(
    measurements: Measurements, experiments: Sequence[Experiment], delay: float, loss: float
) -> Iterations | None:
    """The iterations that one method needs to reach a loss at a delay.

    Between two measured delays, iterations are interpolated linearly in log(1 + delay): seed by
    seed, or between means if the two experiments have no seed in common.

    Args:
        measurements: hold the losses.
        experiments: the experiments of one method.
        delay: the delay, in updates.
        loss: the loss to reach, in nats.

    Returns:
        None beyond the measured delays, and in gaps wider than `WIDEST_GAP`.

    Raises:
        UserError: the loss is above those that were measured.
    """
    ordered = sorted(experiments, key=lambda experiment: experiment.delay)
    for experiment in ordered:
        if math.isclose(experiment.delay, delay, abs_tol=1e-9):
            by_seed = measurements.reached(experiment, loss)
            return Iterations(by_seed, (experiment.delay,), experiment.num_rates)
    for low, high in pairwise(ordered):
        gap = (1 + high.delay) / (1 + low.delay)
        if low.delay < delay < high.delay and gap <= WIDEST_GAP:
            share = math.log((1 + delay) / (1 + low.delay)) / math.log(gap)
            below = measurements.reached(low, loss)
            above = measurements.reached(high, loss)
            return Iterations(
                _interpolated(below, above, share),
                (low.delay, high.delay),
                min(low.num_rates, high.num_rates),
            )
    return None


def _interpolated(
    below: Mapping[int, Reached], above: Mapping[int, Reached], share: float
) -> dict[int, Reached]:
    """By seed, the point at `share` of the way from `below` to `above`."""
    if not below.keys() & above.keys():
        no_seed = -1  # stands for the mean over seeds
        below = {no_seed: _mean(below.values())}
        above = {no_seed: _mean(above.values())}
    by_seed = {}
    for seed, (first, first_there) in below.items():
        if seed in above:
            last, last_there = above[seed]
            between = first + share * (last - first)
            by_seed[seed] = Reached(between, first_there and last_there)
    return by_seed


def _mean(runs: Collection[Reached]) -> Reached:
    is_reached = all(run.is_reached for run in runs)
    return Reached(geometric_mean([run.iterations for run in runs]), is_reached)


def seed_spread(measurements: Measurements, loss: float) -> float:
    """The standard deviation of log(iterations to a loss) between seeds, pooled over all
    experiments with several seeds."""
    squares = 0.0
    freedom = 0
    for experiment in measurements.experiments:
        runs = measurements.reached(experiment, loss).values()
        if _mean(runs).is_reached:
            # s^2 = sum (x - mean)^2 / sum (n - 1), both sums over all experiments of n seeds
            logs = np.log([run.iterations for run in runs])
            squares += len(logs) * logs.var()
            freedom += len(logs) - 1
    return math.sqrt(squares / freedom) if freedom else ASSUMED_SPREAD


def losses_to_ask(measurements: Measurements, delay: float) -> list[float]:
    """The default losses to reach: the lowest loss that AdamW reaches both without delay and at
    this delay, and then the lowest of any method if that is a different one.

    If no run measures this delay, the longest measured delay is taken instead.

    Raises:
        UserError: no run under that delay reaches any of the losses.
    """
    longest = max(experiment.delay for experiment in measurements.experiments)
    for asked in (delay, longest):
        lowest = {
            method: _lowest(measurements, experiments, asked)
            for method, experiments in by_method(measurements).items()
        }
        lowest_of_any = min(lowest.values())
        if lowest_of_any < math.inf:
            lowest_of_adamw = lowest.get(REFERENCE_METHOD, math.inf)
            return sorted({lowest_of_any, lowest_of_adamw} - {math.inf}, reverse=True)
    highest = f"{measurements.losses[0]:g} nats"
    raise UserError(
        f"--loss: needed, since no run falls to {highest} under the longest delay, "
        f"{counted(longest, 'update', 'g')}"
    )


def _lowest(measurements: Measurements, experiments: Sequence[Experiment], delay: float) -> float:
    """The lowest loss that all seeds of a method reach at a delay, and also without delay if that
    was measured."""
    lowest = math.inf
    for loss in measurements.losses:
        delayed = iterations_at(measurements, experiments, delay, loss)
        fresh = iterations_at(measurements, experiments, 0.0, loss)
        if delayed is None or delayed.is_lower_bound:
            break
        if fresh is not None and fresh.is_lower_bound:
            break
        lowest = loss
    return lowest


def by_method(measurements: Measurements) -> dict[str, list[Experiment]]:
    """The experiments of each variant of a method, in order of first appearance."""
    grouped: dict[str, list[Experiment]] = {}
    for experiment in measurements.experiments:
        grouped.setdefault(experiment.method, []).append(experiment)
    return grouped


def read_measurements(runs: Sequence[Path]) -> tuple[Measurements, list[str]]:
    """Measurements, and lines about the runs that are left out.

    Args:
        runs: a file that `Measurements.write` made, or folders of runs. Of these, the largest
            comparable set is measured. By default the committed file.

    Raises:
        UserError: they do not exist, or hold no usable run.
    """
    if not runs and not COMMITTED.is_file():
        raise UserError(
            f"RUNS: needed, since {COMMITTED} is not there (it is in a checkout of brx)"
        )
    paths = list(runs) or [COMMITTED]
    if len(paths) == 1 and not paths[0].is_dir():
        return Measurements.read(paths[0]), []
    return measure_largest_set(load(paths), ", ".join(map(str, paths)))
