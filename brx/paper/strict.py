"""Strict verdicts on the paper's claims: the statistics of docs/protocol.md, section 11.

A verdict is *yes* or *no* where at least three seeds decide it by more than chance, else *open*.
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
CHANCE = 1 - CONFIDENCE


@dataclass(frozen=True)
class Interval:
    """A mean over seeds with the ends of its 95 % interval, by Student's t."""

    mean: float
    low: float
    high: float

    @property
    def sign(self) -> int:
        """1 or -1 where zero lies below or above the interval, else 0."""
        if self.low > 0:
            return 1
        return -1 if self.high < 0 else 0


def interval_of(values: Sequence[float], comparisons: int = 1) -> Interval:
    """Student's t interval of the mean of two or more finite numbers.

    Of several `comparisons` each has a part of the 5 % (Bonferroni), so that all of them together
    are wrong in at most 5 %."""
    mean = float(np.mean(values))
    standard_error = float(np.std(values, ddof=1)) / math.sqrt(len(values))
    quantile = float(stdtrit(len(values) - 1, 1 - CHANCE / (2 * comparisons)))
    half = quantile * standard_error
    return Interval(mean, mean - half, mean + half)


def welch_interval(ours: Sequence[float], theirs: Sequence[float]) -> Interval:
    """Welch's t interval of the difference of the means of two samples of two or more numbers that
    have nothing in common."""
    variances = [float(np.var(sample, ddof=1)) / len(sample) for sample in (ours, theirs)]
    variance = sum(variances)
    mean = float(np.mean(ours) - np.mean(theirs))
    if variance == 0:
        return Interval(mean, mean, mean)
    # Satterthwaite's degrees of freedom.
    parts = [
        part**2 / (len(sample) - 1) for part, sample in zip(variances, (ours, theirs), strict=True)
    ]
    half = float(stdtrit(variance**2 / sum(parts), (1 + CONFIDENCE) / 2)) * math.sqrt(variance)
    return Interval(mean, mean - half, mean + half)


def direction(by_seed: Sequence[float], comparisons: int = 1) -> Strict:
    """Whether numbers by seed are surely above zero (*yes*) or below it (*no*), as one of several
    `comparisons`.

    An infinite one, of a seed that diverged or only has a bound, says which side, not how far: then
    all seeds have to agree. NaN, of a seed that diverged on both sides, is left out."""
    known = [value for value in by_seed if not math.isnan(value)]
    if len(known) < FEWEST_SEEDS:
        return "open"
    if all(math.isfinite(value) for value in known):
        return _of_sign(interval_of(known, comparisons).sign)
    if min(known) > 0:
        return "yes"
    return "no" if max(known) < 0 else "open"


def welch(ours: Sequence[float], theirs: Sequence[float]) -> Strict:
    """Whether the mean of one sample is surely above the other's, which shares no seed with it."""
    if min(len(ours), len(theirs)) < FEWEST_SEEDS or not np.isfinite([*ours, *theirs]).all():
        return "open"
    return _of_sign(welch_interval(ours, theirs).sign)


def all_of(verdicts: Iterable[Strict]) -> Strict:
    """*Yes* if every part of a claim is, *no* if one part is."""
    found = set(verdicts)
    if "no" in found:
        return "no"
    return "yes" if found == {"yes"} else "open"


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
    """Our number with its interval, compared with the paper's.

    Args: value, low, high, paper: above zero; of a share (`is_share`) that is saved, below 1.
    num_seeds: those that the interval is from. is_share: factors are of what is left, 1 - x.
    no_effect: the number where there is no effect; an interval that contains it is no *yes*."""
    if num_seeds < FEWEST_SEEDS or not np.isfinite([value, low, high]).all():
        return "open"
    may_be_nothing = no_effect is not None and low <= no_effect <= high
    numbers = [1 - x if is_share else x for x in (value, low, high, paper)]
    ours, one_end, other_end, theirs = numbers
    bottom, top = min(one_end, other_end), max(one_end, other_end)
    if not bottom <= theirs <= top:
        return "no"
    is_narrow = bottom > 0 and top / bottom <= WIDEST
    is_close = ours > 0 and 1 / CLOSE <= ours / theirs <= CLOSE
    return "yes" if is_narrow and is_close and not may_be_nothing else "open"


def bound(low: float, high: float, paper: float, *, num_seeds: int) -> Strict:
    """Whether a whole interval lies at or above the paper's bound (*yes*), or below it (*no*)."""
    if num_seeds < FEWEST_SEEDS or not np.isfinite([low, high]).all():
        return "open"
    if low >= paper:
        return "yes"
    return "no" if high < paper else "open"


def kendall_s(values: Sequence[float]) -> int:
    """Kendall's S of numbers in their order: pairs that rise minus pairs that fall."""
    column = np.asarray(values)[:, np.newaxis]
    # Row i, column j: value i against value j; below the diagonal i comes after j. Two infinite
    # values, of runs that diverged, are a tie.
    rises = np.tril(column > column.T, -1)
    falls = np.tril(column < column.T, -1)
    return int(rises.sum()) - int(falls.sum())


@cache
def chance_of_s(num_points: int, num_seeds: int, at_least: int) -> float:
    """The probability that the S of seeds add up to so much or more, if on each seed all orders of
    its points are equally likely."""
    # Inversions of a random order: a sum of independent uniform numbers on 0 .. k, k < num_points.
    inversions = np.ones(1)
    for k in range(1, num_points):
        inversions = np.convolve(inversions, np.full(k + 1, 1 / (k + 1)))
    of_sum = np.ones(1)
    for _ in range(num_seeds):
        of_sum = np.convolve(of_sum, inversions)
    num_pairs = num_seeds * num_points * (num_points - 1) // 2
    sums = num_pairs - 2 * np.arange(len(of_sum))
    return float(of_sum[sums >= at_least].sum())


@dataclass(frozen=True)
class Trend:
    """Whether numbers rise along some points, by the rank test and the ends."""

    verdict: Strict
    chance: float  # p-value of the sum of S over all points; NaN without seeds
    chance_without_last: float


def trend(table: pd.DataFrame) -> Trend:
    """Whether numbers rise along the columns of a table with a row per seed.

    *Yes* needs the rank test over all points and without the last one, and the last point minus the
    first above zero by more than chance. *No* is the same of numbers that fall, but for the last
    condition of the rank test. Seeds with a missing number are left out."""
    known = table.dropna()
    if known.empty or len(table.columns) < 2:
        return Trend("open", math.nan, math.nan)
    chance = chance_of_rise(known)
    chance_without_last = chance_of_rise(known.iloc[:, :-1])
    fall = chance_of_rise(-known)
    ends = (known.iloc[:, -1] - known.iloc[:, 0]).tolist()
    verdict: Strict = "open"
    if len(known) >= FEWEST_SEEDS:
        of_ends = direction(ends)
        if max(chance, chance_without_last) <= CHANCE and of_ends == "yes":
            verdict = "yes"
        elif fall <= CHANCE or of_ends == "no":
            verdict = "no"
    return Trend(verdict, chance, chance_without_last)


def chance_of_rise(table: pd.DataFrame) -> float:
    """The rank test's chance of so much of a rise along the columns, with a row per seed; no number
    may be missing."""
    total = sum(kendall_s(row) for row in table.to_numpy())
    return chance_of_s(len(table.columns), len(table), total)


def _of_sign(sign: int) -> Strict:
    verdicts: dict[int, Strict] = {1: "yes", -1: "no", 0: "open"}
    return verdicts[sign]
