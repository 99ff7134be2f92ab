"""Evidence for a claim: runs that are there, compared seed by seed."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pandas as pd
from scipy.special import stdtrit

from brx.paper.scales import Experiments
from brx.runs.frames import SEED
from brx.runs.slowdown import CONFIDENCE

SEEDS_FOR_AN_INTERVAL = 3


class NotTriedError(Exception):
    """What a claim needs is not there; says what."""


@dataclass(frozen=True)
class Evidence:
    """What our runs say of a number, `value` with its interval, or of a direction, whether it `holds`.

    Attributes:
        is_bound: whether `value` is a bound: of a slowdown a lower one, of a share saved an upper one.
        text: in words, for a direction.
        num_seeds: of measurements that are kept beside the runs, or that both sides have; None: as many as the runs
            that were asked for.
    """

    value: float = float("nan")
    low: float = float("nan")
    high: float = float("nan")
    is_bound: bool = False
    holds: bool | None = None
    text: str = ""
    num_seeds: int | None = None

    def decisive(self, num_seeds: int | None) -> float:
        """What decides: the lower end of the interval from three seeds on, else the value (docs/protocol.md, 5)."""
        has_interval = not math.isnan(self.low) and (num_seeds is None or num_seeds >= SEEDS_FOR_AN_INTERVAL)
        return self.low if has_interval else self.value


Question = Callable[[Experiments], Evidence]


@dataclass(frozen=True)
class Margin:
    """By how much something is as the paper says, by seed; negative where it is not.

    `by_seed` has the seeds that both sides of a comparison have. It is infinite where one side diverged; where both
    did, a seed says nothing and is left out.
    """

    by_seed: pd.Series

    def __post_init__(self) -> None:
        object.__setattr__(self, "by_seed", self.by_seed.dropna())
        if self.by_seed.empty:
            raise NotTriedError("no seed in common that did not diverge on both sides")

    @property
    def mean(self) -> float:
        """Over the seeds."""
        return float(self.by_seed.mean())

    @property
    def interval(self) -> tuple[float, float] | None:
        """Student's, of the mean, 95 %; None with fewer than three seeds, or where one diverged."""
        count = len(self.by_seed)
        if count < SEEDS_FOR_AN_INTERVAL or not math.isfinite(self.mean):
            return None
        half = float(stdtrit(count - 1, (1 + CONFIDENCE) / 2) * self.by_seed.sem())  # quantile of Student's t
        return self.mean - half, self.mean + half

    @property
    def least(self) -> float:
        """What decides: the lower end of the interval, or the mean where there is none (docs/protocol.md, 5).

        Where a seed diverged, there is no mean either: all seeds have to agree.
        """
        if self.interval:
            return self.interval[0]
        return self.mean if math.isfinite(self.mean) else float(self.by_seed.min())

    @property
    def holds(self) -> bool:
        """Whether it is as the paper says: by more than chance, as far as the seeds can say."""
        return self.least > 0

    def __sub__(self, other: Margin) -> Margin:
        """How much larger than another; over the seeds that both have."""
        return Margin(self.by_seed - other.by_seed)


def runs_of(
    experiments: Experiments, method: str, stages: int | None = None, sweep: str = "", **options: Any
) -> pd.DataFrame:
    """The runs that `Experiments.find` finds; of a seed that diverged a row with infinite losses: it ended above all.

    Raises:
        NotTriedError: there are none; `experiments.missing` names the sweep that makes them.
    """
    seeds = experiments.find(method, stages, sweep, **options)
    if seeds is None:
        what, _, why = experiments.missing[-1].partition(": ")
        raise NotTriedError(f"every run of {what} diverged" if "diverged" in why else f"no runs of {what} yet")
    lost = {"status": "diverged", "train_loss": math.inf, "val_loss": math.inf}
    rows = [seeds.iloc[[0]].assign(**lost, **{SEED: seed}) for seed in seeds["diverged_seeds"].iloc[0]]
    return pd.concat([seeds, *rows]) if rows else seeds


def shared_seeds(*experiments: pd.DataFrame) -> list[pd.DataFrame]:
    """The runs of each experiment with a seed that all have: it decides weights and order, so that they make pairs.

    Other seeds that diverged are forgotten, as others that finished are.

    Raises:
        NotTriedError: they have none in common.
    """
    seeds = set[int].intersection(*(set(runs[SEED]) for runs in experiments))
    if not seeds:
        raise NotTriedError(f"no seed in common among {', '.join(str(runs.index[0]) for runs in experiments)}")
    return [_of_seeds(runs, seeds) for runs in experiments]


def _of_seeds(runs: pd.DataFrame, seeds: set[int]) -> pd.DataFrame:
    kept = runs[runs[SEED].isin(seeds)]
    lost = [[seed for seed in diverged if seed in seeds] for diverged in kept["diverged_seeds"]]
    return kept.assign(diverged_seeds=pd.Series(lost, kept.index, dtype=object))
