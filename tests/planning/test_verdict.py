"""The verdict on made-up measurements whose answers are plain arithmetic."""

import math

import pytest

from brx.planning.schedules import EqualStages
from brx.planning.verdict import Question, answer
from tests.planning.measurements import MEASURED, asked, experiment, fresh_and_delayed, of


@pytest.fixture
def verdict():
    return answer(MEASURED, asked(3.0, 4, 1))


def test_asynchronous_time_is_its_iterations(verdict):
    # Muon is not measured at a delay of 3, nor near it.
    (asynchronous,) = verdict.asynchronous
    assert asynchronous.method == "pipedream"
    assert asynchronous.time == pytest.approx(200)


def test_schedules_pay_for_bubbles(verdict):
    bubbles = {"1F1B": 3, "interleaved 1F1B": 3, "zero-bubble H1": 2, "zero-bubble H2": 2}
    times = {option.cut.schedule: option.time for option in verdict.schedules}
    # 80 iterations of Muon, whose update costs half of the passes.
    assert times == {name: pytest.approx(80 * (1 + n + 0.5)) for name, n in bubbles.items()}


def test_synchronous_methods_come_fastest_first(verdict):
    assert [option.method for option in verdict.synchronous] == ["muon", "pipedream"]


def test_unmeasured_methods_are_listed_with_their_delays(verdict):
    assert verdict.unmeasured == {"muon": (0.0, 31.0)}


def test_headline_has_one_method_on_both_sides(verdict):
    pair = verdict.same_method
    assert (pair.asynchronous.method, pair.synchronous.method) == ("pipedream", "pipedream")
    assert pair.advantage == pytest.approx(100 * 3 / 200)


def test_best_of_each_side_may_be_two_methods(verdict):
    pair = verdict.best_of_each
    assert (pair.asynchronous.method, pair.synchronous.method) == ("pipedream", "muon")
    assert pair.advantage == pytest.approx(80 * 3.5 / 200)


def test_headline_skips_methods_without_a_reference():
    # SOAP is the fastest under delay, but was never run without.
    measured = of(*MEASURED.experiments, experiment("soap", 3, [100] * 3))
    found = answer(measured, asked(3.0, 4, 1))
    assert found.best_of_each.asynchronous.method == "soap"
    assert found.same_method.asynchronous.method == "pipedream"


def test_no_method_on_both_sides_is_no_headline():
    measured = of(experiment("muon", 0, [80] * 3), experiment("soap", 3, [100] * 3))
    assert answer(measured, asked(3.0, 4, 1)).same_method is None


def test_break_even_is_relative_to_the_fastest(verdict):
    (asynchronous,) = verdict.asynchronous
    assert asynchronous.slowdown.ratio == pytest.approx(2)
    assert verdict.break_even(asynchronous) == pytest.approx(80 * 3.5 / 100)


def test_break_even_of_one_method(verdict):
    pair = verdict.same_method
    assert verdict.break_even(pair.asynchronous, pair.synchronous) == pytest.approx(3)


def test_break_even_is_of_the_schedules_where_delay_seemed_to_help():
    found = answer(fresh_and_delayed([100], [50]), asked(3.0, 4, 1))
    assert found.break_even(found.same_method.asynchronous) == pytest.approx(3)


def test_synchronous_side_splits_the_same_examples():
    split = answer(MEASURED, asked(3.0, 4, 1, examples=16))
    # Zero-bubble H2 has no bubble from 2 P - 1 micro-batches on; of equal times, the larger
    # micro-batches come first.
    assert split.rival.cut[:3] == ("zero-bubble H2", 8, pytest.approx(1.0))


def test_delays_count_in_updates():
    # 31 stages and 10 micro-batches have the delay of 4 stages and one.
    (option,) = answer(MEASURED, asked(3.0, 31, 10)).asynchronous
    assert option.num_iterations == pytest.approx(200)


def test_run_that_never_arrives_is_a_bound():
    pair = answer(MEASURED, asked(2.98, 16, 1)).best_of_each
    assert (pair.is_upper_bound, pair.is_tie) == (True, False)


def test_method_that_arrives_comes_before_one_that_never_does():
    # PipeDream is stopped at iteration 1,000, before Muon with its costly update arrives.
    measured = of(
        experiment("pipedream", 3, [900, None, None]), experiment("muon", 3, [800, 900, None])
    )
    found = answer(measured, asked(3.0, 4, 1, costs={"muon": 0.5}))
    first, second = found.asynchronous
    assert (first.method, second.method) == ("muon", "pipedream")
    assert first.time > second.time


def test_run_that_never_arrives_is_no_synchronous_option():
    never = answer(of(experiment("pipedream", 0, [90, None, None])), asked(3.0, 4, 1))
    assert never.synchronous == []
    assert never.best_of_each is None


# The break-even is 3. A slowdown below 1 is no gain: the advantage is of the schedules alone.
@pytest.mark.parametrize(
    ("fresh", "delayed", "advantage", "is_tie"),
    [
        ([100], [50], 3.0, False),
        ([100], [250], 1.2, False),
        ([100] * 2, [240, 340], 1.05, True),
        ([100] * 2, [250, 252], 1.195, False),
        ([100] * 2, [500, 505], 0.597, False),
        # Seeds that agree to the iteration show no noise, but not even half a percent decides.
        ([100] * 2, [299] * 2, 1.0033, True),
        ([100] * 2, [297] * 2, 1.0101, False),
    ],
)
def test_intervals_over_seeds_decide_a_tie(fresh, delayed, advantage, is_tie):
    pair = answer(fresh_and_delayed(fresh, delayed), asked(3.0, 4, 1)).same_method
    assert pair.advantage == pytest.approx(advantage, rel=1e-3)
    assert pair.is_tie == is_tie


def test_one_seed_has_the_noise_of_the_others():
    # 1.2 times as fast by one seed: decided if seeds differ by 5 %, as is assumed; not if others
    # show 20 %.
    alone = fresh_and_delayed([100], [250])
    other = experiment("muon", 31, [[1000 / 1.2, 1000 * 1.2]] * 3)
    noisy = alone.model_copy(update={"experiments": [*alone.experiments, other]})
    assert not answer(alone, asked(3.0, 4, 1)).same_method.is_tie
    assert answer(noisy, asked(3.0, 4, 1)).same_method.is_tie


@pytest.fixture
def steady_and_noisy():
    """PipeDream, the best without delay, does not vary between seeds; Muon, the best with delay,
    does."""
    return answer(
        of(
            experiment("pipedream", 0, [[90] * 2] * 3),
            experiment("pipedream", 3, [[900] * 2] * 3),
            experiment("muon", 0, [[50, 200]] * 3),
            experiment("muon", 3, [[55, 220]] * 3),
        ),
        asked(3.0, 4, 1),
    )


def test_noise_of_both_methods_counts(steady_and_noisy):
    pair = steady_and_noisy.best_of_each
    assert (pair.asynchronous.method, pair.synchronous.method) == ("muon", "pipedream")
    # Two seeds that differ by a factor of 4 have the variance log(4)^2 / 2. Half of the experiments
    # do, so that a seed has log(4)^2 / 4, a mean of two half of it, and a difference of means twice
    # that.
    assert pair.noise == pytest.approx(1.96 * math.log(4) / 2)


def test_one_method_has_the_slowdowns_noise(steady_and_noisy):
    # Delay slows each seed alike, although seeds differ.
    pair = steady_and_noisy.same_method
    assert pair.asynchronous.method == "muon"
    assert pair.noise == pytest.approx(0.0, abs=1e-9)


def test_one_pair_of_seeds_has_the_assumed_spread_twice():
    # The logarithm of a slowdown is a difference, of two numbers that spread by 0.05 each.
    pair = answer(fresh_and_delayed([100], [250]), asked(3.0, 4, 1)).same_method
    assert pair.noise == pytest.approx(1.96 * math.sqrt(0.05**2 + 0.05**2))


class LimitedDevices(EqualStages):
    """Cuts of more than five units of time do not fit."""

    def synchronous(self, settings, cost):
        for cut in super().synchronous(settings, cost):
            yield cut._replace(memory=9.0 if cut.time > 5 else 1.0)


def test_one_method_that_fits_is_enough():
    # Muon, with its costly update, does not fit.
    devices = LimitedDevices(4, 1, 1, memory=5.0)
    found = answer(MEASURED, Question(3.0, 4, 1, devices, {"muon": 10.0}))
    assert [option.method for option in found.synchronous] == ["pipedream"]
    assert found.has_cuts
