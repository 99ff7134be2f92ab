"""The estimate of a slowdown, on arrays whose answer is known in closed form."""

import math

import numpy as np
import pytest
from scipy.signal import lfilter
from scipy.stats import ttest_1samp

from brx.runs import slowdown


def power_law(iterations, stretch=1.0):
    """Reaches the loss 1 + x at stretch * x ** -2 iterations."""
    return 1.0 + (iterations / stretch) ** -0.5


def monotone_fit(losses):
    """Decreasing least squares by its min-max formula (Robertson, Wright and Dykstra, 1988,
    equation 1.4.3)."""
    n = len(losses)
    return [
        min(max(np.mean(losses[j : k + 1]) for k in range(i, n)) for j in range(i + 1))
        for i in range(n)
    ]


@pytest.mark.parametrize("seed", range(5))
def test_passage_is_where_isotonic_regression_crosses(seed):
    losses = np.linspace(3.0, 2.0, 16) + 0.3 * np.random.default_rng(seed).standard_normal(16)
    fit = np.array(monotone_fit(losses))
    num_above = int((fit > 2.5).sum())
    assert 0 < num_above < 16
    assert slowdown.iterations_to_target(np.arange(1.0, 17.0), losses, 2.5) == num_above + 0.5


LONG = np.arange(1.0, 4001.0)
ONE_TO_4 = np.arange(1.0, 5.0)
FALLING = (np.arange(1.0, 101.0), np.linspace(3.0, 2.0, 100))
EQUAL = np.full(12, 0.7)  # their mean is rounded down, and they lie above it to the end
assert EQUAL[-3:].mean() < 0.7
STEP = np.where(np.arange(400) < 200, 3.0, 2.0)
STEP[[50, 60, 300]] = [0.0, 1.0, 5.0]  # dips and a spike are no passages


@pytest.mark.parametrize(
    ("iterations", "losses", "target", "passage"),
    [
        (np.array([10.0, 20.0, 40.0]), np.array([3.0, 2.0, 1.0]), 1.5, 30.0),  # with gaps
        (*FALLING, 3.5, 1.0),  # starts below
        (*FALLING, 1.9, None),  # ends above
        (ONE_TO_4, np.array([3.0, 2.0, 2.0, 2.0]), 2.0, 1.5),  # exactly at the target
        (np.arange(1.0, 13.0), EQUAL, EQUAL[-3:].mean(), None),
        (ONE_TO_4, np.array([3.0, 2.0, 1.0, math.nan]), 2.5, None),
        (ONE_TO_4, np.array([3.0, 2.0, 1.0, math.inf]), 2.5, None),
        (np.arange(1.0, 401.0), STEP, 2.5, 200.5),
        (LONG, power_law(LONG, 1.27), 1.1, pytest.approx(1.27 * 0.1**-2, abs=0.51)),
        (LONG, power_law(LONG, 5.0), 1.1, pytest.approx(5.0 * 0.1**-2, abs=0.51)),
    ],
)
def test_passages_of_curves_whose_answer_is_plain(iterations, losses, target, passage):
    assert slowdown.iterations_to_target(iterations, losses, target) == passage


def test_target_must_be_finite():
    with pytest.raises(ValueError, match="target nan"):
        slowdown.iterations_to_target(*FALLING, math.nan)


@pytest.fixture(params=range(3))
def dipping(request):
    """Losses of 2.0 with noise; the last is 1.0 by chance."""
    losses = 2.0 + 0.3 * np.random.default_rng(request.param).standard_normal(2000)
    losses[-1] = 1.0
    assert monotone_fit(losses[-50:])[-1] == 1.0  # the fit does fall that far
    return losses


@pytest.mark.parametrize(("target", "is_passed"), [(1.8, False), (2.2, True)])
def test_low_loss_at_the_end_is_no_passage(target, is_passed, dipping):
    passage = slowdown.iterations_to_target(np.arange(1.0, 2001.0), dipping, target)
    assert (passage is not None) == is_passed


LINE = np.linspace(4.0, 2.0, 401)[1:]  # 400 steps of 0.005


def test_last_quarter_loss_is_its_mean():
    # The last 100 of the 400 steps are 49.5 steps before the last in the mean.
    assert slowdown.last_quarter_loss(LINE) == pytest.approx(2.0 + 49.5 * 0.005)


def test_last_quarter_loss_is_passed_early_enough():
    target = slowdown.last_quarter_loss(LINE)
    assert slowdown.iterations_to_target(np.arange(1.0, 401.0), LINE, target) == 350.5


FOUR_AT = {2: 400, 0: 100, 1: 200}  # seeds in any order; slow ones on both sides cancel
LOGS = np.log([2.0, 3.0, 260 / 120])
STUDENT = ttest_1samp(LOGS, 0.0).confidence_interval(0.95)
NEVER = -4000
"""Stands for a run that did not get there within 4,000 iterations."""


def reached_by(iterations):
    """When runs passed the target, by seed, from a list or from a mapping by seed."""
    by_seed = iterations if isinstance(iterations, dict) else dict(enumerate(iterations))
    reached = {}
    for seed, at in by_seed.items():
        reached[seed] = slowdown.Reached(abs(float(at)), is_reached=at != NEVER)
    return reached


def ratio_of(delayed, reference):
    return slowdown.iteration_ratio(reached_by(delayed), reached_by(reference))


@pytest.mark.parametrize(
    ("delayed", "reference", "ratio"),
    [
        ((200, 330, 260), (100, 110, 120), math.exp(LOGS.mean())),
        ({seed: 2 * at for seed, at in FOUR_AT.items()} | {7: 9}, FOUR_AT, 2.0),
        ((400, 100), (50,), 8.0),  # seed 0
        ((400, 100), {7: 50}, 4.0),  # sqrt(400 * 100) / 50
    ],
    ids=["three pairs", "equal pairs", "one pair", "no pair"],
)
def test_ratio_is_of_shared_seeds(delayed, reference, ratio):
    assert ratio_of(delayed, reference).ratio == pytest.approx(ratio)


def test_interval_is_students_over_pairs():
    estimate = ratio_of((200, 330, 260), (100, 110, 120))
    expected = (math.exp(STUDENT.low), math.exp(STUDENT.high))
    assert (estimate.low, estimate.high) == pytest.approx(expected)


def test_equal_pairs_have_no_spread():
    estimate = ratio_of({seed: 2 * at for seed, at in FOUR_AT.items()}, FOUR_AT)
    assert (estimate.low, estimate.high) == pytest.approx((2.0, 2.0))


def test_two_pairs_have_an_interval():
    estimate = ratio_of((200, 400), (100, 100))
    # 12.7062 is Student's quantile for one degree of freedom; the error of the mean log is ln(2)/2.
    factor = math.exp(12.7062 * math.log(2) / 2)
    expected = (math.sqrt(8) / factor, math.sqrt(8) * factor)
    assert (estimate.low, estimate.high) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("reference", [(50,), {7: 50}], ids=["one pair", "no pair"])
def test_less_than_two_pairs_have_no_interval(reference):
    estimate = ratio_of((400, 100), reference)
    assert (estimate.low, estimate.high) == (None, None)


BOUNDS = [
    ({0: 300, 1: NEVER, 2: 300}, (300 * 300 * 4000) ** (1 / 3) / 100),
    ({0: 300, 1: 300, 2: 300, 5: NEVER}, 3.0),  # the other side has no seed 5
]


@pytest.mark.parametrize(("delayed", "ratio"), BOUNDS, ids=["a pair", "alone"])
def test_run_that_never_gets_there_makes_a_bound(delayed, ratio):
    expected = slowdown.IterationRatio(pytest.approx(ratio), None, None, is_lower_bound=True)
    assert ratio_of(delayed, (100, 100, 100)) == expected


def test_ratio_of_reached_targets_is_no_bound():
    assert not ratio_of((200, 330, 260), (100, 110, 120)).is_lower_bound


def test_reference_that_never_gets_there_bounds_nothing():
    assert ratio_of((300, 300), {0: 100, 1: 100, 5: NEVER}) is None


def noise(rng, shape, correlation, deviation):
    """White, or AR(1): neighbours correlate."""
    drawn = rng.standard_normal(shape)
    drawn[..., 1:] *= math.sqrt(1 - correlation**2)
    return deviation * lfilter([1.0], [1.0, -correlation], drawn, axis=-1)


def passage_errors(curve, correlation):
    """At the last quarter's loss of 30 noisy runs along a curve (n,)."""
    iterations = np.arange(1.0, len(curve) + 1)
    rng = np.random.default_rng(0)
    runs = curve + noise(rng, (30, len(curve)), correlation, 0.1)
    target = max(map(slowdown.last_quarter_loss, runs))
    errors = []
    for losses in runs:
        passage = slowdown.iterations_to_target(iterations, losses, target)
        errors.append(slowdown.passage_error(iterations, losses, passage))
    return errors


@pytest.mark.parametrize("correlation", [0.0, 0.9])
def test_passage_error_is_large_on_a_plateau(correlation):
    errors = passage_errors(2 + 2 * np.exp(-LONG / 100), correlation)
    assert max(errors) > slowdown.PLATEAU


@pytest.mark.parametrize("correlation", [0.0, 0.9])
def test_passage_error_is_small_on_a_slope(correlation):
    falling = passage_errors(1.2 + 6 * (LONG + 20) ** -0.25, correlation)
    plateau = passage_errors(2 + 2 * np.exp(-LONG / 100), correlation)
    assert max(falling) < min(np.median(plateau), slowdown.PLATEAU)


def test_passage_error_is_the_spread_over_noise():
    rng = np.random.default_rng(0)
    iterations = np.arange(1.0, 2001.0)
    target = 4 - 0.5 * math.log(700)
    passages = []
    errors = []
    for losses in 4 - 0.5 * np.log(iterations) + 0.2 * rng.standard_normal((300, 2000)):
        passage = slowdown.iterations_to_target(iterations, losses, target)
        passages.append(passage)
        errors.append(slowdown.passage_error(iterations, losses, passage))
    assert np.median(errors) == pytest.approx(np.std(np.log(passages)), rel=0.2)


def test_passage_error_of_flat_losses_is_infinite():
    assert slowdown.passage_error(np.arange(1.0, 2001.0), np.full(2000, 3.0), 700.5) == math.inf


def test_passage_error_of_a_few_losses_is_unknown():
    losses = 4 - np.log(np.arange(1.0, 61.0)) + 0.2 * np.random.default_rng(0).standard_normal(60)
    assert slowdown.passage_error(np.arange(1.0, 61.0), losses, 30.5) == 0
