"""Iterations at a delay, on made-up measurements."""

import math

import pytest

from brx.errors import UserError
from brx.planning.iterations import (
    ASSUMED_SPREAD,
    iterations_at,
    losses_to_ask,
    seed_spread,
)
from tests.planning.measurements import MEASURED, PIPEDREAM, experiment, fresh_and_delayed, of


def test_measured_delays_are_taken_as_they_are():
    found = iterations_at(MEASURED, PIPEDREAM, 3.0, 3.0)
    assert (found.delays, found.num_rates) == ((3.0,), 3)
    assert found.mean == pytest.approx(200)


def test_interpolation_is_linear_in_the_logarithm():
    # 1 + 7 is the geometric mean of 1 + 3 and 1 + 15.
    between = iterations_at(MEASURED, PIPEDREAM, 7.0, 3.0)
    assert between.mean == pytest.approx((200 + 900) / 2)


def test_interpolation_names_both_delays():
    between = iterations_at(MEASURED, PIPEDREAM, 7.0, 3.0)
    assert (between.delays, between.num_rates) == ((3.0, 15.0), 1)


@pytest.mark.parametrize("delay", [16.0, 0.5 * 31])
def test_nothing_beyond_the_measured_delays(delay):
    assert iterations_at(MEASURED, PIPEDREAM, delay, 3.0) is None


def test_wide_gaps_are_not_bridged():
    far = [experiment("muon", 0, [80] * 3), experiment("muon", 31, [500] * 3)]
    assert iterations_at(of(*far), far, 3.0, 3.0) is None


@pytest.mark.parametrize(
    ("seed", "mean"), [(0, (90 + 180) / 2), (7, (math.sqrt(90 * 900) + 180) / 2)]
)
def test_interpolation_pairs_common_seeds(seed, mean):
    low = experiment("soap", 0, [[90, 900]] * 3, seeds=[0, 1])
    high = experiment("soap", 3, [[180]] * 3, seeds=[seed])
    assert iterations_at(of(low, high), [low, high], 1.0, 3.0).mean == pytest.approx(mean)


@pytest.mark.parametrize("never", [0, 3])
def test_interpolation_to_a_run_that_never_arrives_is_a_bound(never):
    two = []
    for delay in (0, 3):
        two.append(experiment("soap", delay, [[None if delay == never else 90]] * 3))
    assert iterations_at(of(*two), two, 1.0, 3.0).is_lower_bound


@pytest.mark.parametrize(("loss", "iterations"), [(3.01, 95), (2.98, 110), (2.5, 1000)])
def test_losses_between_the_kept_ones_are_interpolated(loss, iterations):
    first = MEASURED.experiments[0]
    assert MEASURED.reached(first, loss) == {0: (pytest.approx(iterations), loss > 2.9)}


def test_seed_that_never_arrives_counts_all_iterations():
    two_seeds = experiment("pipedream", 0, [[90, 94], [100, None], [None, None]])
    assert MEASURED.reached(two_seeds, 3.0) == {0: (pytest.approx(100), True), 1: (1000, False)}


def test_loss_above_the_measured_ones_is_refused():
    with pytest.raises(UserError, match=r"--loss 3\.5: above 3\.02"):
        MEASURED.reached(MEASURED.experiments[0], 3.5)


def test_default_losses_are_adamws_then_the_lowest():
    better = experiment("muon", 15, [500, 600, 700])
    measured = MEASURED.model_copy(update={"experiments": [*MEASURED.experiments, better]})
    assert losses_to_ask(measured, 15) == [3.0, 2.98]


# Muon alone is measured at 31; nothing at 500, where the longest delay counts.
@pytest.mark.parametrize("delay", [3, 31, 500])
def test_default_loss_is_the_lowest_that_is_reached(delay):
    assert losses_to_ask(MEASURED, delay) == [2.98]


def test_default_loss_is_reached_without_delay_too():
    # The lowest loss is reached with delay only: no slowdown could be told there.
    measured = of(
        experiment("pipedream", 0, [90, 100, None]), experiment("pipedream", 3, [180, 200, 220])
    )
    assert losses_to_ask(measured, 3) == [3.0]


def test_default_loss_needs_a_run_that_gets_there():
    too_slow = of(
        experiment("pipedream", 0, [90, 100, 110]), experiment("pipedream", 3, [None, None, None])
    )
    expected = r"^--loss: needed, since no run falls to 3\.02 nats under the longest delay"
    with pytest.raises(UserError, match=expected):
        losses_to_ask(too_slow, 3)


def test_spread_of_single_seeds_is_assumed():
    assert seed_spread(fresh_and_delayed([100], [250]), 3.0) == ASSUMED_SPREAD


def test_spread_is_that_of_logarithms():
    noisy = of(experiment("muon", 31, [[1000 / 1.2, 1000 * 1.2]] * 3))
    assert seed_spread(noisy, 3.0) == pytest.approx(math.sqrt(2) * math.log(1.2))


def test_spread_leaves_out_runs_that_never_arrive():
    # How much later the second seed would have arrived is unknown.
    noisy = experiment("muon", 31, [[1000 / 1.2, 1000 * 1.2]] * 3)
    never = experiment("soap", 3, [[90, None]] * 3)
    spread = seed_spread(of(noisy, never), 3.0)
    assert spread == pytest.approx(math.sqrt(2) * math.log(1.2))
