"""Strict verdicts on the paper's claims: the statistics of docs/protocol.md, section 11.

A verdict is *yes* or *no* if at least three seeds decide it by more than chance, else *open*.
Everything here takes numbers by seed, and knows neither runs nor claims."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal

import numpy as np
import pandas as pd
from scipy.special import stdtrit

from brx.runs.slowdown import CONFIDENCE

Strict = Literal["yes", "no", "open"]

FEWEST_SEEDS = 3
CLOSE = 1.5  # the largest factor between our number and the paper's
WIDEST = 3.0  # the largest factor that an interval may span: a wider one agrees with anything
CHANCE = 1 - CONFIDENCE  # the largest p-value that is not put down to chance: 5 %


@dataclass(frozen=True)
class Interval:
    """A mean over seeds with the ends of its 95 % interval, by Student's t."""

    mean: float
    low: float
    high: float

    @property
    def sign(self) -> int:
        """1 if the whole interval is above zero, -1 if it is below zero, else 0."""
        if self.low > 0:
            return 1
        if self.high < 0:
            return -1
        return 0


def interval_of(values: Sequence[float], comparisons: int = 1) -> Interval:
    """Student's t interval of the mean of two or more finite numbers.

    With several `comparisons`, each gets an equal part of the 5 % (Bonferroni), so that the
    probability that any of them is wrong is at most 5 %."""
    mean = float(np.mean(values))
    standard_error = float(np.std(values, ddof=1)) / math.sqrt(len(values))
    quantile = float(stdtrit(len(values) - 1, 1 - CHANCE / (2 * comparisons)))
    half = quantile * standard_error
    return Interval(mean, mean - half, mean + half)


def interval_over_seeds(values: Sequence[float]) -> Interval | None:
    """`interval_of` numbers by seed; None with fewer than three seeds, or if a number is not finite
    (a run diverged)."""
    if len(values) < FEWEST_SEEDS or not np.isfinite(values).all():
        return None
    return interval_of(values)


def mean_text(values: Sequence[float], sign: Literal["-", "+"] = "-") -> str:
    """A mean over seeds with its interval, if it has one (`interval_over_seeds`):
    `0.131 [0.120, 0.142]`.

    Args:
        values: numbers by seed; without any, the text is empty.
        sign: `+` shows the sign of positive numbers, too.
    """
    if not values:
        return ""
    interval = interval_over_seeds(values)
    if interval is None:
        return f"{np.mean(values):{sign}.3f}"
    return f"{interval.mean:{sign}.3f} [{interval.low:{sign}.3f}, {interval.high:{sign}.3f}]"


def rounded_by_seed(by_seed: pd.Series) -> dict[str, float | str]:
    """Numbers by seed as a JSON file holds them: rounded, and `diverged` for one that is not
    finite."""
    rounded: dict[str, float | str] = {}
    for seed, value in by_seed.items():
        rounded[str(seed)] = round(value, 4) if math.isfinite(value) else "diverged"
    return rounded


def welch_interval(ours: Sequence[float], theirs: Sequence[float]) -> Interval:
    """Welch's 95 % t interval of mean(ours) - mean(theirs), for two independent samples with two or
    more finite numbers each."""
    # The variances of the two means, and of their difference.
    our_variance = float(np.var(ours, ddof=1)) / len(ours)
    their_variance = float(np.var(theirs, ddof=1)) / len(theirs)
    variance = our_variance + their_variance
    mean = float(np.mean(ours) - np.mean(theirs))
    if variance == 0:
        return Interval(mean, mean, mean)
    # Welch and Satterthwaite's degrees of freedom.
    spread = our_variance**2 / (len(ours) - 1) + their_variance**2 / (len(theirs) - 1)
    degrees_of_freedom = variance**2 / spread
    quantile = float(stdtrit(degrees_of_freedom, (1 + CONFIDENCE) / 2))
    half = quantile * math.sqrt(variance)
    return Interval(mean, mean - half, mean + half)


def direction(by_seed: Sequence[float], comparisons: int = 1) -> Strict:
    """Whether the mean of numbers by seed is surely above zero (*yes*) or below it (*no*).

    An infinite number stands for a seed that diverged, or for which only a bound is known: its sign
    is known, but not its size. If there is one, no interval exists, and all seeds have to have the
    same sign. A seed that diverged on both sides is NaN and is left out.

    Args:
        by_seed: a number for each seed.
        comparisons: how many such questions one claim asks; see `interval_of`.
    """
    known = [value for value in by_seed if not math.isnan(value)]
    if len(known) < FEWEST_SEEDS:
        return "open"
    if all(math.isfinite(value) for value in known):
        return _verdict_on_sign(interval_of(known, comparisons).sign)
    if min(known) > 0:
        return "yes"
    return "no" if max(known) < 0 else "open"


def welch(ours: Sequence[float], theirs: Sequence[float]) -> Strict:
    """Whether the mean of one sample is surely above the mean of another, independent one."""
    if min(len(ours), len(theirs)) < FEWEST_SEEDS or not np.isfinite([*ours, *theirs]).all():
        return "open"
    return _verdict_on_sign(welch_interval(ours, theirs).sign)


def all_of(verdicts: Iterable[Strict]) -> Strict:
    """The verdict on a claim of several parts: *yes* if every part is *yes*, *no* if any part is
    *no*, else *open*. Without parts it is *open*."""
    parts = set(verdicts)
    if "no" in parts:
        return "no"
    return "yes" if parts == {"yes"} else "open"


def number(
    value: float,
    low: float,
    high: float,
    paper: float,
    *,
    num_seeds: int,
    is_share: bool,
    no_effect: float | None = None,
) -> Strict:
    """Whether our number agrees with the paper's.

    *No*: our interval does not contain the paper's number. *Yes*: it contains it, spans at most a
    factor of `WIDEST`, our number is within a factor of `CLOSE`, and the interval excludes
    `no_effect`. Everything else is *open*, and so are fewer than three seeds.

    Args:
        value, low, high: our number and its interval.
        paper: the paper's number, above zero; for a share, below 1.
        num_seeds: the seeds behind the interval.
        is_share: the number is a share saved; then the remaining shares, 1 - x, are compared.
        no_effect: the number that we would measure if there were no effect; None: no such number.
    """
    if num_seeds < FEWEST_SEEDS or not np.isfinite([value, low, high]).all():
        return "open"
    may_have_no_effect = no_effect is not None and low <= no_effect <= high
    if is_share:
        # The more is saved, the less remains: the ends change places.
        value, low, high, paper = 1 - value, 1 - high, 1 - low, 1 - paper
    if not low <= paper <= high:
        return "no"
    is_narrow = low > 0 and high / low <= WIDEST
    is_close = value > 0 and 1 / CLOSE <= value / paper <= CLOSE
    return "yes" if is_narrow and is_close and not may_have_no_effect else "open"


def bound(low: float, high: float, paper: float, *, num_seeds: int) -> Strict:
    """Whether a whole interval lies at or above the paper's bound (*yes*), or below it (*no*)."""
    if num_seeds < FEWEST_SEEDS or not np.isfinite([low, high]).all():
        return "open"
    if low >= paper:
        return "yes"
    if high < paper:
        return "no"
    return "open"


def kendall_s(values: Sequence[float]) -> int:
    """Kendall's S of a sequence: the number of pairs that rise (the later number is larger) minus
    the number of pairs that fall."""
    column = np.asarray(values)[:, np.newaxis]
    # Row i, column j compares value i with value j; below the diagonal, i comes after j. Two
    # infinite values (of runs that diverged) are a tie.
    rises = np.tril(column > column.T, -1)
    falls = np.tril(column < column.T, -1)
    return int(rises.sum()) - int(falls.sum())


@cache
def chance_of_s(num_points: int, num_seeds: int, at_least: int) -> float:
    """The probability that Kendall's S, summed over the seeds, is `at_least` or more, if for each
    seed all orders of its points are equally likely."""
    # The number of inversions (falling pairs) of a random order is a sum of independent numbers,
    # one for each k < num_points, uniform on 0 .. k. A convolution adds one of them. Entry i of
    # each array is the probability of i inversions.
    inversions = np.ones(1)
    for k in range(1, num_points):
        inversions = np.convolve(inversions, np.full(k + 1, 1 / (k + 1)))
    of_all_seeds = np.ones(1)
    for _ in range(num_seeds):
        of_all_seeds = np.convolve(of_all_seeds, inversions)
    num_pairs = num_seeds * num_points * (num_points - 1) // 2
    sums = num_pairs - 2 * np.arange(len(of_all_seeds))  # S = pairs - 2 inversions
    return float(of_all_seeds[sums >= at_least].sum())


@dataclass(frozen=True)
class Trend:
    """The verdict on whether numbers rise along some points, and the chances of the rank test."""

    verdict: Strict
    chance: float  # p-value of the sum of S over all points; NaN without seeds
    chance_without_last: float


def trend(table: pd.DataFrame) -> Trend:
    """Whether numbers rise along the columns of a table with a row per seed.

    *Yes*: the rank test finds a rise over all points and also without the last point, and the last
    point is above the first by more than chance. *No*: the rank test finds a fall over all points,
    or the last point is below the first by more than chance. Seeds with a missing number are left
    out."""
    known = table.dropna()
    if known.empty or len(table.columns) < 2:
        return Trend("open", math.nan, math.nan)
    chance = chance_of_rise(known)
    chance_without_last = chance_of_rise(known.iloc[:, :-1])
    fall = chance_of_rise(-known)
    ends = (known.iloc[:, -1] - known.iloc[:, 0]).tolist()
    verdict: Strict = "open"
    if len(known) >= FEWEST_SEEDS:
        ends_rise = direction(ends)
        if max(chance, chance_without_last) <= CHANCE and ends_rise == "yes":
            verdict = "yes"
        elif fall <= CHANCE or ends_rise == "no":
            verdict = "no"
    return Trend(verdict, chance, chance_without_last)


def chance_of_rise(table: pd.DataFrame) -> float:
    """The rank test's p-value of a rise along the columns of a table with a row per seed; no number
    may be missing."""
    total = sum(kendall_s(row) for row in table.to_numpy())
    return chance_of_s(len(table.columns), len(table), total)


def _verdict_on_sign(sign: int) -> Strict:
    """*Yes* for an interval above zero (1), *no* for one below (-1), *open* if it contains zero."""
    verdicts: dict[int, Strict] = {1: "yes", -1: "no", 0: "open"}
    return verdicts[sign]
