"""Strict verdicts, against scipy and against enumeration."""

import itertools
import math

import numpy as np
import pandas as pd
import pytest
from scipy.stats import ttest_1samp, ttest_ind

from brx.paper import strict

INF = math.inf
NAN = math.nan


def test_interval_is_students():
    values = [0.3, 0.1, 0.25, 0.4]
    expected = ttest_1samp(values, 0.0).confidence_interval(0.95)
    found = strict.interval_of(values)
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high))


def test_several_comparisons_share_the_chance():
    values = [0.3, 0.1, 0.25, 0.4]
    expected = ttest_1samp(values, 0.0).confidence_interval(1 - 0.05 / 6)
    found = strict.interval_of(values, comparisons=6)
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high))


def test_direction_of_one_among_six_needs_more():
    by_seed = [0.1, 0.2, 0.15]
    verdicts = [strict.direction(by_seed, comparisons) for comparisons in (1, 6)]
    assert verdicts == ["yes", "open"]


@pytest.mark.parametrize(
    ("low", "no_effect", "verdict"), [(1.05, 1.0, "yes"), (0.95, 1.0, "open"), (0.95, None, "yes")]
)
def test_interval_with_no_effect_is_no_yes(low, no_effect, verdict):
    found = strict.number(1.2, low, 1.4, 1.27, num_seeds=3, is_share=False, no_effect=no_effect)
    assert found == verdict


def test_share_saved_needs_an_interval_above_zero():
    found = strict.number(0.2, -0.02, 0.4, 0.3, num_seeds=3, is_share=True, no_effect=0.0)
    assert found == "open"


@pytest.mark.parametrize("values", [(), (1.0, 2.0), (1.0, 2.0, math.inf)])
def test_few_seeds_or_a_diverged_one_have_no_interval(values):
    assert strict.interval_over_seeds(values) is None


@pytest.mark.parametrize(
    ("ours", "verdict"), [((5.0, 5.1), "open"), ((5.0, 5.1, math.inf), "open"), ((5.0,) * 3, "yes")]
)
def test_samples_of_three_finite_numbers_are_compared(ours, verdict):
    assert strict.welch(ours, (1.0, 1.1, 1.2)) == verdict


def test_interval_of_two_samples_is_welchs():
    ours = [0.3, 0.1, 0.25]
    theirs = [1.4, 0.2, 0.9, 0.7]
    expected = ttest_ind(ours, theirs, equal_var=False).confidence_interval(0.95)
    found = strict.welch_interval(ours, theirs)
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high))


@pytest.mark.parametrize(
    ("by_seed", "verdict"),
    [
        ([0.1, 0.11, 0.12], "yes"),
        ([-0.1, -0.11, -0.12], "no"),
        ([0.1, -0.11, 0.12], "open"),
        ([0.1, 0.1001], "open"),  # two seeds decide nothing
        ([0.1, 0.11, NAN], "open"),
        ([0.1, 9.0, INF], "yes"),  # all agree, though a t interval of the first two would not
        ([0.1, -9.0, INF], "open"),
        ([-0.1, -9.0, -INF], "no"),
        ([], "open"),
    ],
)
def test_direction(by_seed, verdict):
    assert strict.direction(by_seed) == verdict


@pytest.mark.parametrize(
    ("value", "low", "high", "paper", "is_share", "verdict"),
    [
        (1.5, 1.3, 1.8, 1.4, False, "yes"),
        (1.5, 1.3, 1.8, 1.2, False, "no"),  # outside the interval
        (1.9, 1.1, 2.6, 1.2, False, "open"),  # inside, but more than a factor of 1.5 away
        (1.3, 1.1, 2.6, 2.1, False, "open"),  # the same below the paper's
        (2.0, 1.0, 3.1, 2.0, False, "open"),  # the interval agrees with too much
        (NAN, NAN, NAN, 2.0, False, "open"),
        (0.7, 0.6, 0.8, 0.72, True, "yes"),  # 0.3 [0.2, 0.4] is left, the paper's 0.28
        (0.7, 0.4, 0.85, 0.72, True, "open"),  # 0.15 to 0.6 may be left
        (0.7, 0.6, 1.0, 0.72, True, "open"),  # nothing may be left
    ],
)
def test_number(value, low, high, paper, is_share, verdict):
    found = strict.number(value, low, high, paper, num_seeds=3, is_share=is_share)
    assert found == verdict


def test_number_of_two_seeds_is_open():
    assert strict.number(1.5, 1.3, 1.8, 1.4, num_seeds=2, is_share=False) == "open"


@pytest.mark.parametrize(
    ("low", "high", "num_seeds", "verdict"),
    [
        (0.45, 0.6, 3, "yes"),
        (0.2, 0.35, 3, "no"),
        (0.3, 0.6, 3, "open"),
        (0.45, 0.6, 2, "open"),
    ],
)
def test_bound(low, high, num_seeds, verdict):
    assert strict.bound(low, high, 0.4, num_seeds=num_seeds) == verdict


@pytest.mark.parametrize(
    ("verdicts", "expected"),
    [
        (["yes", "yes"], "yes"),
        (["yes", "open"], "open"),
        (["yes", "open", "no"], "no"),
        ([], "open"),
    ],
)
def test_all_of(verdicts, expected):
    assert strict.all_of(verdicts) == expected


@pytest.mark.parametrize(("num_points", "num_seeds"), [(2, 3), (3, 2), (4, 2), (5, 1)])
def test_chance_counts_all_orders(num_points, num_seeds):
    values_of_s = [strict.kendall_s(o) for o in itertools.permutations(range(num_points))]
    sums = [sum(by_seed) for by_seed in itertools.product(values_of_s, repeat=num_seeds)]
    for at_least in sorted(set(sums)):
        expected = np.mean([total >= at_least for total in sums])
        assert strict.chance_of_s(num_points, num_seeds, at_least) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("values", "expected"), [([1, 2, 3], 3), ([3, 2, 1], -3), ([1, 3, 2], 1), ([1, 1, 2], 2)]
)
def test_kendall_s(values, expected):
    assert strict.kendall_s(values) == expected


@pytest.mark.parametrize(
    ("rows", "verdict"),
    [
        ([[1, 2, 3, 4], [1.1, 2.1, 3, 4.1], [1, 2, 3.1, 4]], "yes"),
        ([[4, 3, 2, 1], [4.1, 3, 2, 1.1], [4, 3.1, 2, 1]], "no"),
        ([[1, 2, 3, 4], [1, 2, 3, 4.1]], "open"),  # two seeds
        ([[1, 2, 3, 4], [1, 2, 3, 4.1], [1, NAN, 3, 4]], "open"),
        # Ranks rise, the ends are within chance.
        ([[1, 2, 3, 4], [1, 1.01, 1.02, 1.03], [1, 1.001, 1.002, 1.003]], "open"),
        # Falling ranks are enough for a no, and so are surely falling ends.
        ([[4, 3, 2, 1], [1.03, 1.02, 1.01, 1], [1.003, 1.002, 1.001, 1]], "no"),
        ([[2.0, 1], [2.1, 1], [2.05, 1]], "no"),
    ],
)
def test_trend(rows, verdict):
    assert strict.trend(pd.DataFrame(rows)).verdict == verdict


def test_rise_to_the_last_point_alone_is_no_trend():
    # The last point lies far above the others, whose order is chance.
    rows = [[1.0, 1.1, 1.2, 4.0], [1.2, 1.1, 1.0, 4.1], [1.0, 1.2, 1.1, 4.2]]
    found = strict.trend(pd.DataFrame(rows))
    assert found.chance < 0.05 < found.chance_without_last
    assert strict.direction([row[-1] - row[0] for row in rows]) == "yes"
    assert found.verdict == "open"


def test_two_points_need_more_than_three_seeds():
    rows = [[1, 2.0], [1, 2.1], [1, 2.05]]
    assert strict.trend(pd.DataFrame(rows)).verdict == "open"
    assert strict.trend(pd.DataFrame(rows)).chance == pytest.approx(1 / 8)


def direction_without_effect(rng):
    return strict.direction(rng.normal(size=3))


def welch_without_effect(rng):
    return strict.welch(rng.normal(size=3), 3 * rng.normal(size=3))


def trend_without_effect(rng):
    """Points of one seed have its level in common."""
    return strict.trend(pd.DataFrame(rng.normal(size=(3, 5)) + rng.normal(size=(3, 1)))).verdict


@pytest.mark.parametrize(
    "rule", [direction_without_effect, welch_without_effect, trend_without_effect]
)
def test_worlds_without_effect_pass_in_five_percent(rule):
    rng = np.random.default_rng(0)
    verdicts = [rule(rng) for _ in range(1000)]
    assert verdicts.count("yes") / len(verdicts) < 0.05
