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
from brx.paper.scales import LADDER_METHODS, PRECONDITIONED, STRATEGY_NAMES, Experiments
from brx.runs.comparison import common_target, reductions, slowdowns
from brx.runs.frames import DEPTH, SEED
from brx.runs.slowdown import CONFIDENCE

PAPER_RELATIVE_DELAY = 31 / 244_000
"""The paper's largest delay over its training: 1 B tokens at 4,096 per iteration."""
LEAST_LENGTHS = 3
MOST = 100
"""Ends of intervals above it are not worth their digits."""


@dataclass(frozen=True)
class Length:
    """The runs of one length of training, in iterations: of every method of the ladder at P = 1 and at `num_stages`.

    `others` are those of other methods that were trained as long at both.
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
        runs = pd.concat([self.runs, self.others])
        return runs[(runs["variant"] == method) & (runs[DEPTH] == num_stages)]

    def labelled(self, frame: pd.DataFrame) -> pd.DataFrame:
        """Rows about these runs with `iterations_of_training`, `relative_delay` and `num_seeds`, the least of any."""
        num_seeds = int(self.runs.groupby("experiment")[SEED].nunique().min())
        return frame.assign(
            iterations_of_training=self.iterations, relative_delay=self.relative_delay, num_seeds=num_seeds
        )


def complete_lengths(experiments: Experiments) -> list[Length]:
    """The lengths of which all runs are there, shortest first: slowdowns of one length have one target.

    Runs of methods beside the ladder's are taken where they are, and not missed elsewhere.

    Raises:
        UserError: the scale has one length only.
    """
    scale, quietly = experiments.scale, experiments.fresh()
    if not scale.lengths:
        raise UserError("the ladder: only at the scale of a laptop: brx sweep configs/sweeps/laptop/ladder.yaml")
    complete = []
    for iterations in scale.lengths:
        settings = {"training.iterations": iterations}
        runs = experiments.find_ends(*LADDER_METHODS, sweep="ladder", settings=settings)
        if runs is not None:
            beside = [quietly.find_ends(name, settings=settings) for name in (*STRATEGY_NAMES[1:], *PRECONDITIONED)]
            others = [pair for pair in beside if pair is not None]
            complete.append(Length(iterations, scale.deepest, runs, pd.concat(others) if others else pd.DataFrame()))
    return complete


def ladder_slowdowns(ladder: Sequence[Length], *, with_others: bool = False) -> pd.DataFrame:
    """Rows of `brx.runs.comparison.slowdowns`, labelled; each length to the target of its ladder's methods."""
    frames = []
    for length in ladder:
        runs = pd.concat([length.runs, length.others]) if with_others else length.runs
        frames.append(length.labelled(slowdowns(runs, common_target(length.runs))))
    return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame()


def ladder_savings(ladder: Sequence[Length]) -> pd.DataFrame:
    """Rows of `brx.runs.comparison.reductions` at P, labelled."""
    frames = [each.labelled(reductions(each.runs[each.runs[DEPTH] == each.num_stages])) for each in ladder]
    return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame()


class Prediction(NamedTuple):
    """What a power law says of a new length, with its 95 % interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class PowerLaw:
    """log y = intercept + slope log x, by least squares through `num_points`.

    Attributes:
        deviation: of the points from it, with n - 2 degrees of freedom.
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
    if len(x) < LEAST_LENGTHS or min(y) <= 0:
        return None
    log_x, log_y = np.log(x), np.log(y)
    centred = log_x - log_x.mean()
    spread = float((centred**2).sum())
    slope = float((centred * log_y).sum() / spread)
    intercept = float(log_y.mean() - slope * log_x.mean())
    residuals = log_y - intercept - slope * log_x
    deviation = math.sqrt(float((residuals**2).sum()) / (len(x) - 2))
    return PowerLaw(intercept, slope, deviation, len(x), float(log_x.mean()), spread)


class Quantity(NamedTuple):
    """What the ladder measures: a column that follows `shift` + `factor` times a power law of the relative delay."""

    column: str
    shift: float
    factor: float
    form: str
    """Of its texts."""

    def law(self, rows: pd.DataFrame) -> PowerLaw | None:
        """Through the lengths of one method at which it is known and no bound."""
        known = rows[rows[self.column].notna()]
        known = known[~known["is_censored"]] if "is_censored" in known else known
        y = (known[self.column] - self.shift) / self.factor
        return fit_power_law(known["relative_delay"].tolist(), y.tolist())

    def predicted(self, law: PowerLaw, relative_delay: float) -> Prediction:
        """Its value and the ends of its interval at a relative delay."""
        return Prediction(*(self.shift + self.factor * each for each in law.at(relative_delay)))

    def at_the_papers_delay(self, law: PowerLaw | None) -> str:
        """Its value and interval at the paper's relative delay."""
        if law is None:
            return "no law"
        value, *ends = self.predicted(law, PAPER_RELATIVE_DELAY)
        low, high = sorted(ends)
        low_text = f"{low:{self.form}}" if low >= 0 else f"< {0:{self.form}}"
        high_text = f"{high:{self.form}}" if high <= MOST else f"> {MOST}"
        return f"{value:{self.form}} [{low_text}, {high_text}]"


SLOWDOWN = Quantity("ratio", 1, 1, ".2f")
SAVING = Quantity("share", 1, -1, ".0%")
