"""The ladder: what delay costs against the relative delay tau / T, from trainings of several lengths T.

A laptop cannot train as long as the paper, but it can show how the cost falls with the length, and extrapolate: a power
law in the relative delay, fitted to slowdown - 1 and to the share of the best baseline's iterations that are left.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import pandas as pd
from scipy.special import stdtrit

from brx.errors import UserError
from brx.paper.scales import LADDER_METHODS, STRATEGY_NAMES, Experiments, sweep_of
from brx.runs.comparison import common_target, reductions, slowdowns
from brx.runs.frames import DEPTH, SEED
from brx.runs.slowdown import CONFIDENCE

PAPER_RELATIVE_DELAY = 31 / 244_000
"""The paper's largest delay over its training: 1 B tokens at 4,096 per iteration."""
LEAST_RUNGS = 3
MOST = 100
"""Ends of intervals above it are not worth their digits."""
BESIDE_THE_LADDER = (*STRATEGY_NAMES[1:], "soap", "muon", "scion")


@dataclass(frozen=True)
class Rung:
    """The runs of one length.

    Attributes:
        iterations: T.
        num_stages: P; the largest delay is P - 1.
        runs: of every method of the ladder at P = 1 and at P, rows of `at_best_rates`.
        others: those of other methods that were trained as long at both.
    """

    iterations: int
    num_stages: int
    runs: pd.DataFrame
    others: pd.DataFrame = field(default_factory=pd.DataFrame)

    @property
    def relative_delay(self) -> float:
        """tau / T."""
        return (self.num_stages - 1) / self.iterations

    def seeds(self, method: str, num_stages: int) -> pd.DataFrame:
        """The runs of a method at one number of stages."""
        runs = self.all_runs
        return runs[(runs["variant"] == method) & (runs[DEPTH] == num_stages)]

    @property
    def all_runs(self) -> pd.DataFrame:
        """Those of the ladder's methods, then the others'."""
        return pd.concat([self.runs, self.others])

    @property
    def num_seeds(self) -> int:
        """Of the experiment with the fewest."""
        return int(self.runs.groupby("experiment")[SEED].nunique().min())


def rungs(experiments: Experiments) -> list[Rung]:
    """The lengths of which all runs are there, shortest first: slowdowns of one length have one target.

    Raises:
        UserError: the scale has one length only.
    """
    scale = experiments.scale
    if not scale.lengths:
        raise UserError("the ladder: only at the scale of a laptop: brx sweep configs/sweeps/laptop/ladder.yaml")
    complete = []
    for iterations in scale.lengths:
        experiments_of = [
            experiments.find(method, P, "ladder", settings={"training.iterations": iterations})
            for method in LADDER_METHODS
            for P in experiments.ends
        ]
        present = [seeds for seeds in experiments_of if seeds is not None]
        if len(present) == len(experiments_of):
            others = _trained_as_long(experiments, iterations)
            complete.append(Rung(iterations, scale.deepest, pd.concat(present), others))
    return complete


def _trained_as_long(experiments: Experiments, iterations: int) -> pd.DataFrame:
    """The runs of methods beside the ladder's that are there at both ends; the others are not missed."""
    settings, quietly = {"training.iterations": iterations}, experiments.fresh()
    found = []
    for method in BESIDE_THE_LADDER:
        pair = [quietly.find(method, P, sweep_of(method), settings=settings) for P in experiments.ends]
        present = [seeds for seeds in pair if seeds is not None]
        if len(present) == len(pair):
            found += present
    return pd.concat(found) if found else pd.DataFrame()


def ladder_slowdowns(ladder: Sequence[Rung], *, with_others: bool = False) -> pd.DataFrame:
    """Rows of `brx.runs.comparison.slowdowns`, each length to the target of its ladder's methods, and three columns.

    They are `iterations_of_training`, `relative_delay` and `num_seeds`.
    """
    frames = []
    for rung in ladder:
        frame = slowdowns(rung.all_runs if with_others else rung.runs, common_target(rung.runs))
        frames.append(_with_rung(frame, rung))
    return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame()


def ladder_savings(ladder: Sequence[Rung]) -> pd.DataFrame:
    """Rows of `brx.runs.comparison.reductions` at P, with the same columns more."""
    frames = []
    for rung in ladder:
        frame = reductions(rung.runs[rung.runs[DEPTH] == rung.num_stages])
        frames.append(_with_rung(frame, rung))
    return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame()


def _with_rung(frame: pd.DataFrame, rung: Rung) -> pd.DataFrame:
    return frame.assign(
        iterations_of_training=rung.iterations, relative_delay=rung.relative_delay, num_seeds=rung.num_seeds
    )


class Prediction(NamedTuple):
    """What a power law says of a new rung, with its 95 % interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class PowerLaw:
    """log y = intercept + slope log x, by least squares.

    Attributes:
        intercept: of the line.
        slope: of the line: the exponent.
        deviation: of the points from it, with n - 2 degrees of freedom.
        num_points: n.
        centre: mean of log x.
        spread: sum of squared deviations of log x from it.
    """

    intercept: float
    slope: float
    deviation: float
    num_points: int
    centre: float
    spread: float

    def at(self, x: float) -> Prediction:
        """The 95 % prediction interval is that of one more point at x."""
        log_x = math.log(x)
        value = self.intercept + self.slope * log_x
        leverage = 1 + 1 / self.num_points + (log_x - self.centre) ** 2 / self.spread
        width = float(stdtrit(self.num_points - 2, (1 + CONFIDENCE) / 2)) * self.deviation * math.sqrt(leverage)
        return Prediction(math.exp(value), math.exp(value - width), math.exp(value + width))


def fit_power_law(x: Sequence[float], y: Sequence[float]) -> PowerLaw | None:
    """The power law through some points; None for fewer than three, or where y is not above zero: there is none."""
    if len(x) < LEAST_RUNGS or min(y) <= 0:
        return None
    log_x, log_y = np.log(x), np.log(y)
    centred = log_x - log_x.mean()
    spread = float((centred**2).sum())
    slope = float((centred * log_y).sum() / spread)
    intercept = float(log_y.mean() - slope * log_x.mean())
    residuals = log_y - intercept - slope * log_x
    deviation = math.sqrt(float((residuals**2).sum()) / (len(x) - 2))
    return PowerLaw(intercept, slope, deviation, len(x), float(log_x.mean()), spread)


def slowdown_law(slowdowns_of_method: pd.DataFrame) -> PowerLaw | None:
    """Of slowdown - 1, by the lengths at which the slowdown is known and no bound."""
    exact = slowdowns_of_method[slowdowns_of_method["ratio"].notna() & ~slowdowns_of_method["is_censored"]]
    return fit_power_law(exact["relative_delay"].tolist(), (exact["ratio"] - 1).tolist())


def saving_law(reductions_of_method: pd.DataFrame) -> PowerLaw | None:
    """Of the share of the best baseline's iterations that is left."""
    known = reductions_of_method[reductions_of_method["share"].notna()]
    return fit_power_law(known["relative_delay"].tolist(), (1 - known["share"]).tolist())


def at_the_papers_delay(law: PowerLaw | None, shift: float, factor: float, form: str) -> str:
    """The value and interval of shift + factor times a law at the paper's relative delay."""
    if law is None:
        return "no law"
    value, *ends = (shift + factor * end for end in law.at(PAPER_RELATIVE_DELAY))
    low, high = min(ends), max(ends)
    low_text = f"{low:{form}}" if low >= 0 else f"< {0:{form}}"
    high_text = f"{high:{form}}" if high <= MOST else f"> {MOST}"
    return f"{value:{form}} [{low_text}, {high_text}]"
