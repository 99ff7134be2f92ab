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
def test_passage_is_that_of_the_least_squares_decreasing_fit(seed):
    losses = np.linspace(3.0, 2.0, 16) + 0.3 * np.random.default_rng(seed).standard_normal(16)
    fit, target = np.array(monotone_fit(losses)), 2.5
    num_above = int((fit > target).sum())
    assert 0 < num_above < 16
    assert slowdown.iterations_to_target(np.arange(1.0, 17.0), losses, target) == num_above + 0.5


LONG = np.arange(1.0, 4001.0)
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
        (LONG, power_law(LONG, 1.27), 1.1, pytest.approx(1.27 * 0.1**-2, abs=0.51)),
        (LONG, power_law(LONG, 5.0), 1.1, pytest.approx(5.0 * 0.1**-2, abs=0.51)),
    ],
)
def test_passages_of_curves_whose_answer_is_plain(iterations, losses, target, passage):
    assert slowdown.iterations_to_target(iterations, losses, target) == passage
    with pytest.raises(ValueError, match="target nan"):
        slowdown.iterations_to_target(iterations, losses, math.nan)


@pytest.mark.parametrize("seed", range(3))
def test_low_losses_by_chance_at_the_end_are_no_passage(seed):
    iterations = np.arange(1.0, 2001.0)
    losses = 2.0 + 0.3 * np.random.default_rng(seed).standard_normal(2000)
    losses[-1] = 1.0
    assert monotone_fit(losses[-50:])[-1] == 1.0  # the fit does fall that far
    assert slowdown.iterations_to_target(iterations, losses, 1.8) is None
    assert slowdown.iterations_to_target(iterations, losses, 2.2) is not None


def test_last_quarter_is_passed_an_eighth_before_the_end():
    losses = np.linspace(4.0, 2.0, 401)[1:]
    # The last 100 of 400 steps of 0.005, in the mean 49.5 steps before the last.
    assert slowdown.last_quarter_loss(losses) == pytest.approx(2.0 + 49.5 * 0.005)
    assert (
        slowdown.iterations_to_target(
            np.arange(1.0, 401.0), losses, slowdown.last_quarter_loss(losses)
        )
        == 350.5
    )


FOUR_AT = {2: 400, 0: 100, 1: 200}  # seeds in any order; slow ones on both sides cancel
LOGS = np.log([2.0, 3.0, 260 / 120])
STUDENT = ttest_1samp(LOGS, 0.0).confidence_interval(0.95)


@pytest.mark.parametrize(
    ("delayed", "reference", "ratio", "interval"),
    [
        (
            (200, 330, 260),
            (100, 110, 120),
            math.exp(LOGS.mean()),
            (math.exp(STUDENT.low), math.exp(STUDENT.high)),
        ),
        ({seed: 2 * at for seed, at in FOUR_AT.items()} | {7: 9}, FOUR_AT, 2.0, (2.0, 2.0)),
        ((400, 100), (50,), 8.0, None),  # of seed 0
        ((400, 100), {7: 50}, 4.0, None),  # without a seed in common: sqrt(400 * 100) / 50
        ({0: 300, 1: -4000, 2: 300}, (100, 100, 100), (300 * 300 * 4000) ** (1 / 3) / 100, None),
        ({0: 300, 1: 300, 2: 300, 5: -4000}, (100, 100, 100), 3.0, None),
        ((300, 300), {0: 100, 1: 100, 5: -4000}, None, None),  # nothing bounds it
    ],
)
def test_ratio_is_of_pairs_of_seeds_and_a_run_that_never_gets_there_makes_a_bound(
    delayed, reference, ratio, interval
):
    """Negative iterations are those of a run that never got there."""
    ours, theirs = (
        {
            seed: slowdown.Reached(abs(float(at)), at > 0)
            for seed, at in (side if isinstance(side, dict) else dict(enumerate(side))).items()
        }
        for side in (delayed, reference)
    )
    estimate = slowdown.iteration_ratio(ours, theirs)
    if ratio is None:
        assert estimate is None
        return
    assert estimate.ratio == pytest.approx(ratio)
    assert (estimate.low, estimate.high) == (
        (None, None) if interval is None else pytest.approx(interval)
    )
    assert estimate.is_lower_bound == (not all(run.is_reached for run in ours.values()))


def noise(rng, shape, correlation, deviation):
    """White, or AR(1): neighbours correlate."""
    drawn = rng.standard_normal(shape)
    drawn[..., 1:] *= math.sqrt(1 - correlation**2)
    return deviation * lfilter([1.0], [1.0, -correlation], drawn, axis=-1)


@pytest.mark.parametrize("correlation", [0.0, 0.9])
def test_no_slowdown_at_a_target_that_noise_decides(correlation):
    rng, iterations, errors = np.random.default_rng(0), np.arange(1.0, 4001.0), []
    for curve in (2 + 2 * np.exp(-iterations / 100), 1.2 + 6 * (iterations + 20) ** -0.25):
        runs = curve + noise(rng, (30, 4000), correlation, 0.1)
        target = max(map(slowdown.last_quarter_loss, runs))
        passages = [slowdown.iterations_to_target(iterations, losses, target) for losses in runs]
        errors.append(
            [slowdown.passage_error(iterations, *pair) for pair in zip(runs, passages, strict=True)]
        )
    plateau, falling = errors
    assert max(falling) < min(np.median(plateau), slowdown.PLATEAU) < max(plateau)


def test_passage_error_is_the_spread_of_passages_over_noise():
    rng = np.random.default_rng(0)
    iterations = np.arange(1.0, 2001.0)
    losses = 4 - 0.5 * np.log(iterations) + 0.2 * rng.standard_normal((300, 2000))
    passages = [
        slowdown.iterations_to_target(iterations, one, 4 - 0.5 * math.log(700)) for one in losses
    ]
    errors = [
        slowdown.passage_error(iterations, one, at)
        for one, at in zip(losses, passages, strict=True)
    ]
    assert np.median(errors) == pytest.approx(np.std(np.log(passages)), rel=0.2)
    assert slowdown.passage_error(iterations, np.full(2000, 3.0), 700.5) == math.inf
