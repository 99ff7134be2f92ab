"""The estimate of a slowdown, on arrays whose answer is known in closed form."""

import math

import numpy as np
import pytest
from scipy.signal import lfilter
from scipy.stats import ttest_1samp

from brx.runs.slowdown import (
    PLATEAU,
    Reached,
    iteration_ratio,
    iterations_to_target,
    last_quarter_loss,
    passage_error,
)


def power_law(iterations, stretch=1.0):
    """Reaches the loss 1 + x at stretch * x ** -2 iterations."""
    return 1.0 + (iterations / stretch) ** -0.5


def passages(*iterations):
    return {seed: Reached(float(one), True) for seed, one in enumerate(iterations)}


def monotone_fit(losses):
    """Decreasing least squares by its min-max formula (Robertson, Wright and Dykstra, 1988, equation 1.4.3)."""
    n = len(losses)
    return [min(max(np.mean(losses[j : k + 1]) for k in range(i, n)) for j in range(i + 1)) for i in range(n)]


@pytest.mark.parametrize(("stretch", "target"), [(1.0, 1.05), (1.27, 1.1), (2.0, 1.2), (5.0, 1.1)])
def test_a_smooth_curve_passes_where_its_formula_says(stretch, target):
    iterations = np.arange(1.0, 4001.0)
    passage = iterations_to_target(iterations, power_law(iterations, stretch), target)
    assert passage == pytest.approx(stretch * (target - 1) ** -2, abs=0.51)


@pytest.mark.parametrize("seed", range(5))
def test_passage_is_that_of_the_least_squares_decreasing_fit(seed):
    rng = np.random.default_rng(seed)
    losses = np.linspace(3.0, 2.0, 16) + 0.3 * rng.standard_normal(16)
    fit, target = np.array(monotone_fit(losses)), 2.5
    num_above = int((fit > target).sum())
    assert 0 < num_above < 16
    assert iterations_to_target(np.arange(1.0, 17.0), losses, target) == num_above + 0.5


ONE_TO_4 = np.arange(1.0, 5.0)
FALLING = (np.arange(1.0, 101.0), np.linspace(3.0, 2.0, 100))
STEP = np.where(np.arange(400) < 200, 3.0, 2.0)
STEP[[50, 60, 300]] = [0.0, 1.0, 5.0]  # dips and a spike are no passages


@pytest.mark.parametrize(
    ("iterations", "losses", "target", "passage"),
    [
        (np.array([10.0, 20.0, 40.0]), np.array([3.0, 2.0, 1.0]), 1.5, 30.0),  # with gaps
        (*FALLING, 3.5, 1.0),  # starts below
        (*FALLING, 1.9, None),  # ends above
        (ONE_TO_4, np.array([3.0, 2.0, 2.0, 2.0]), 2.0, 1.5),  # exactly at the target
        (ONE_TO_4, np.array([3.0, 2.0, 1.0, math.nan]), 2.5, None),
        (ONE_TO_4, np.array([3.0, 2.0, 1.0, math.inf]), 2.5, None),
        (np.arange(1.0, 401.0), STEP, 2.5, 200.5),
    ],
)
def test_passages_of_curves_whose_answer_is_plain(iterations, losses, target, passage):
    assert iterations_to_target(iterations, losses, target) == passage


@pytest.mark.parametrize("seed", range(3))
def test_low_losses_by_chance_at_the_end_are_no_passage(seed):
    iterations = np.arange(1.0, 2001.0)
    losses = 2.0 + 0.3 * np.random.default_rng(seed).standard_normal(2000)
    losses[-1] = 1.0
    assert monotone_fit(losses[-50:])[-1] == 1.0  # the fit does fall that far
    assert iterations_to_target(iterations, losses, 1.8) is None
    assert iterations_to_target(iterations, losses, 2.2) is not None


def test_last_quarter_is_passed_an_eighth_before_the_end():
    losses = np.linspace(4.0, 2.0, 401)[1:]
    # The last 100 of 400 steps of 0.005, in the mean 49.5 steps before the last.
    assert last_quarter_loss(losses) == pytest.approx(2.0 + 49.5 * 0.005)
    assert iterations_to_target(np.arange(1.0, 401.0), losses, last_quarter_loss(losses)) == 350.5


def test_interval_is_students_of_the_mean_log_ratio():
    estimate = iteration_ratio(passages(200, 330, 260), passages(100, 110, 120))
    logs = np.log([2.0, 3.0, 260 / 120])
    interval = ttest_1samp(logs, 0.0).confidence_interval(0.95)
    assert estimate.ratio == pytest.approx(math.exp(logs.mean()))
    assert (estimate.low, estimate.high) == (
        pytest.approx(math.exp(interval.low)),
        pytest.approx(math.exp(interval.high)),
    )
    assert not estimate.is_lower_bound


def test_seeds_are_compared_in_pairs():
    """Seeds that are slow on both sides cancel, in whatever order they come."""
    delayed = {2: Reached(800.0, True), 0: Reached(200.0, True), 1: Reached(400.0, True), 7: Reached(9.0, True)}
    reference = {0: Reached(100.0, True), 1: Reached(200.0, True), 2: Reached(400.0, True)}
    estimate = iteration_ratio(delayed, reference)
    assert (estimate.ratio, estimate.low, estimate.high) == (pytest.approx(2),) * 3


@pytest.mark.parametrize(
    ("reference", "ratio"),
    [(passages(50), 8.0), ({7: Reached(50.0, True)}, 4.0)],  # of seed 0; without a seed in common sqrt(400 * 100) / 50
)
def test_without_two_seeds_in_common_there_is_no_interval(reference, ratio):
    estimate = iteration_ratio(passages(400, 100), reference)
    assert (estimate.ratio, estimate.low, estimate.high) == (pytest.approx(ratio), None, None)


@pytest.mark.parametrize("seed_of_failure", [1, 5])
def test_a_delayed_run_that_never_gets_there_is_a_lower_bound(seed_of_failure):
    delayed = {0: Reached(300.0, True), 1: Reached(300.0, True), 2: Reached(300.0, True)}
    delayed[seed_of_failure] = Reached(4000.0, False)
    estimate = iteration_ratio(delayed, passages(100, 100, 100))
    assert estimate.is_lower_bound
    assert (estimate.low, estimate.high) == (None, None)
    expected = (300 * 300 * 4000) ** (1 / 3) / 100 if seed_of_failure == 1 else 3.0
    assert estimate.ratio == pytest.approx(expected)
    reference = passages(100, 100) | {5: Reached(4000.0, False)}
    assert iteration_ratio(passages(300, 300), reference) is None  # nothing bounds it


def test_estimates_of_noisy_stretches_are_unbiased_and_their_intervals_cover():
    """In small what benchmarks/slowdown_study.py does: three seeds, noise as in real runs, stretch 2."""
    rng = np.random.default_rng(0)
    iterations = np.arange(1.0, 1001.0)
    curves = {stretch: 1.0 + 4.0 * (iterations / stretch + 10) ** -0.3 for stretch in (1.0, 2.0)}
    errors, covered = [], []
    for _ in range(400):
        factors = 0.1 * rng.standard_normal((2, 3, 1))
        slow, fast = (
            np.interp(iterations * np.exp(factor), iterations, curves[stretch]) + 0.2 * rng.standard_normal((3, 1000))
            for stretch, factor in zip((2.0, 1.0), factors, strict=True)
        )
        target = max(map(last_quarter_loss, [*slow, *fast]))
        sides = [
            {seed: Reached(iterations_to_target(iterations, losses, target), True) for seed, losses in enumerate(side)}
            for side in (slow, fast)
        ]
        estimate = iteration_ratio(*sides)
        errors.append(math.log(estimate.ratio / 2.0))
        covered.append(estimate.low < 2.0 < estimate.high)
    assert abs(np.mean(errors)) < 0.03
    assert 0.92 < np.mean(covered) < 0.98


def noise(rng, shape, correlation, deviation):
    """White, or AR(1): neighbours correlate."""
    drawn = rng.standard_normal(shape)
    drawn[..., 1:] *= math.sqrt(1 - correlation**2)
    return deviation * lfilter([1.0], [1.0, -correlation], drawn, axis=-1)


@pytest.mark.parametrize("correlation", [0.0, 0.9])
@pytest.mark.parametrize(
    ("curve", "is_plateau"),
    [(lambda x: 2 + 2 * np.exp(-x / 100), True), (lambda x: 1.2 + 6 * (x + 20) ** -0.25, False)],
    ids=["plateau", "falling"],
)
def test_no_slowdown_at_a_target_that_noise_decides(curve, is_plateau, correlation):
    """At a true slowdown of 3, three seeds: on a plateau the estimate is a fifth too low, what is left of it is not."""
    rng = np.random.default_rng(0)
    iterations = np.arange(1.0, 4001.0)
    logs, is_given = [], []
    for _ in range(120):
        slow, fast = (curve(iterations / s) + noise(rng, (3, 4000), correlation, 0.1) for s in (3.0, 1.0))
        target = max(map(last_quarter_loss, [*slow, *fast]))
        passed = [[iterations_to_target(iterations, losses, target) for losses in side] for side in (slow, fast)]
        errors = [
            np.median([passage_error(iterations, *pair) for pair in zip(side, passages, strict=True)])
            for side, passages in zip((slow, fast), passed, strict=True)
        ]
        logs.append(np.log(passed[0]).mean() - np.log(passed[1]).mean() - math.log(3))
        is_given.append(max(errors) <= PLATEAU)
    logs, is_given = np.array(logs), np.array(is_given)
    if is_plateau:
        assert logs.mean() < math.log(0.85)  # what the rule is for
        assert is_given.mean() < (0.6 if correlation == 0 else 0.25)
        assert abs(logs[is_given].mean()) < 0.07
    else:
        assert is_given.all()
        assert abs(logs.mean()) < 0.03


def test_passage_error_is_the_spread_of_passages_over_noise():
    rng = np.random.default_rng(0)
    iterations = np.arange(1.0, 2001.0)
    losses = 4 - 0.5 * np.log(iterations) + 0.2 * rng.standard_normal((300, 2000))
    passages = [iterations_to_target(iterations, one, 4 - 0.5 * math.log(700)) for one in losses]
    errors = [passage_error(iterations, one, at) for one, at in zip(losses, passages, strict=True)]
    assert np.median(errors) == pytest.approx(np.std(np.log(passages)), rel=0.2)
    assert passage_error(iterations, np.full(2000, 3.0), 700.5) == math.inf


def test_a_target_that_is_no_loss_is_refused():
    with pytest.raises(ValueError, match="target nan"):
        iterations_to_target(np.arange(1.0, 5.0), np.arange(5.0, 1.0, -1.0), math.nan)
