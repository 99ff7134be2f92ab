"""The verdict on made-up measurements whose answers are plain arithmetic."""

import math

import pytest

from brx.errors import UserError
from brx.planning.schedules import EqualStages, LocalSteps
from brx.planning.verdict import (
    ASSUMED_SPREAD,
    Question,
    answer,
    iterations_at,
    losses_to_ask,
    seed_spread,
    update_costs,
)
from brx.planning.verdict_text import (
    long_text,
    option_slowdown,
    option_table,
    sentence,
    verdict_text,
)
from brx.runs.time_to_loss import Experiment, Measurements


def experiment(method, delay, to_losses, **others):
    """Iterations to the losses 3.02, 3.0, 2.98, of one seed or several."""
    rows = [row if isinstance(row, list) else [row] for row in to_losses]
    usual = {
        "settings": {},
        "lr": 0.1,
        "num_rates": 3,
        "seconds": 1.0,
        "seeds": list(range(len(rows[0]))),
    }
    return Experiment(method=method, delay=delay, iterations=rows, **usual | others)


def of(*experiments, examples=1):
    about = {"source": "runs", "model": "4 blocks", "examples": examples, "last_iteration": 1000}
    return Measurements(**about, losses=[3.02, 3.0, 2.98], experiments=list(experiments))


MEASURED = of(
    experiment("pipedream", 0, [90, 100, 110]),
    experiment("pipedream", 3, [180, 200, 220], seconds=1.1),
    experiment("pipedream", 15, [700, 900, None], num_rates=1),
    experiment("muon", 0, [70, 80, 90], seconds=1.5),
    experiment("muon", 31, [400, 500, 600], seconds=1.6),
)


def asked(loss, num_stages, num_micro_batches, *, examples=1, costs=None, local=None):
    devices = EqualStages(num_stages, num_micro_batches, examples)
    return Question(loss, num_stages, num_micro_batches, devices, costs or {}, local)


def test_time_is_iterations_by_idle_time_and_cost():
    verdict = answer(MEASURED, asked(3.0, 4, 1))
    (asynchronous,) = verdict.asynchronous  # muon is not measured at a delay of 3, nor near it
    assert asynchronous.method == "pipedream"
    assert asynchronous.time == pytest.approx(200)
    assert [option.method for option in verdict.synchronous] == ["muon", "pipedream"]
    bubbles = {
        "GPipe": 3,
        "1F1B": 3,
        "interleaved 1F1B": 3,
        "zero-bubble H1": 2,
        "zero-bubble H2": 2,
    }
    times = {option.cut.schedule: option.time for option in verdict.schedules}
    assert times == {
        name: pytest.approx(80 * (1 + bubble + 0.5)) for name, bubble in bubbles.items()
    }
    assert verdict.advantage == pytest.approx(80 * 3.5 / 200)
    assert asynchronous.slowdown.ratio == pytest.approx(2)
    assert verdict.break_even(asynchronous) == pytest.approx(80 * 3.5 / 100)
    assert verdict.unmeasured == {"muon": (0.0, 31.0)}


def test_the_synchronous_side_splits_the_same_examples_as_it_likes():
    split = answer(MEASURED, asked(3.0, 4, 1, examples=16))
    # ZB-V and zero-bubble H2 have no bubble from 2 P - 1 micro-batches on; of equal times, the
    # larger micro-batches.
    assert split.rival.cut[:3] == ("zero-bubble H2", 8, pytest.approx(1.0))
    assert {option.cut.schedule for option in split.schedules} >= {"ZB-V", "DualPipeV"}
    assert split.asynchronous[0].time == pytest.approx(200)


def test_interpolation_is_linear_in_the_logarithm_between_neighbours_of_the_seeds_that_both_have():
    (option,) = answer(
        MEASURED, asked(3.0, 31, 10)
    ).asynchronous  # delays count in updates: as of P = 4, M = 1
    assert option.num_iterations == pytest.approx(200)
    pipedream = [one for one in MEASURED.experiments if one.method == "pipedream"]
    between = iterations_at(
        MEASURED, pipedream, 7.0, 3.0
    )  # 1 + 7 is the geometric mean of 1 + 3 and 1 + 15
    assert between.mean == pytest.approx((200 + 900) / 2)
    assert (between.delays, between.num_rates) == ((3.0, 15.0), 1)
    assert iterations_at(MEASURED, pipedream, 16.0, 3.0) is None
    low = experiment("soap", 0, [[90, 900]] * 3, seeds=[0, 1])
    for seed, mean in ((0, 135), (7, (math.sqrt(90 * 900) + 180) / 2)):
        high = experiment("soap", 3, [[180]] * 3, seeds=[seed])
        assert iterations_at(of(low, high), [low, high], 1.0, 3.0).mean == pytest.approx(mean)


def test_a_run_that_never_gets_there_is_a_lower_bound_and_no_synchronous_option():
    verdict = answer(MEASURED, asked(2.98, 16, 1))
    assert (verdict.is_upper_bound, verdict.is_tie) == (True, False)
    row = option_table(verdict, "asynchronous", None).iloc[0]
    assert (row["slowdown"], row["iterations"]) == ("> 9.09", "> 1000")
    assert sentence(verdict).startswith("No verdict: no asynchronous method reached the loss")
    never = answer(NEVER_THERE, asked(3.0, 4, 1))
    assert (never.synchronous, never.advantage) == ([], None)


def test_losses_between_the_kept_ones_are_interpolated():
    first = MEASURED.experiments[0]
    for loss, iterations in ((3.01, 95), (2.98, 110), (2.5, 1000)):
        assert MEASURED.reached(first, loss) == {0: (pytest.approx(iterations), loss > 2.9)}
    two_seeds = experiment("pipedream", 0, [[90, 94], [100, None], [None, None]])
    assert MEASURED.reached(two_seeds, 3.0) == {0: (pytest.approx(100), True), 1: (1000, False)}
    with pytest.raises(UserError, match=r"--loss 3\.5: above 3\.02"):
        MEASURED.reached(first, 3.5)


def test_default_losses_are_adamws_and_the_lowest_at_this_delay():
    better = experiment("muon", 15, [500, 600, 700])
    measured = MEASURED.model_copy(update={"experiments": [*MEASURED.experiments, better]})
    assert losses_to_ask(measured, 15) == [3.0, 2.98]
    assert losses_to_ask(measured, 3) == [2.98]
    assert losses_to_ask(MEASURED, 31) == [2.98]  # muon alone
    assert losses_to_ask(MEASURED, 500) == [2.98]  # nobody: those of the longest delay
    too_slow = of(
        experiment("pipedream", 0, [90, 100, 110]), experiment("pipedream", 3, [None, None, None])
    )
    with pytest.raises(
        UserError,
        match=r"^--loss: needed, since no run falls to 3\.02 nats under the longest delay",
    ):
        losses_to_ask(too_slow, 3)


def test_costs_are_relative_to_adamw_at_as_many_micro_batches():
    assert update_costs(MEASURED.experiments[3:]) == {"muon": 0.0}
    reached = [90, 100, 110]
    experiments = [
        experiment("pipedream", 1, reached, seconds=4.0, micro_batches=4),
        experiment("muon", 1, reached, seconds=4.2, micro_batches=4),
        experiment("soap", 1, reached, seconds=5.0, micro_batches=4),
        experiment("pipedream", 0, reached, seconds=1.0),
        experiment("muon", 0, reached, seconds=1.5),
        experiment("scion", 2, reached, seconds=9.0, micro_batches=8),
    ]
    for ordered in (experiments, experiments[::-1]):
        assert update_costs(ordered) == {"pipedream": 0.0, "muon": 0.5, "soap": 0.25, "scion": 0.0}


def fresh_and_delayed(fresh, delayed, method="pipedream"):
    return of(
        *(experiment(method, delay, [seeds] * 3) for delay, seeds in ((0, fresh), (3, delayed)))
    )


# The break-even is 3. A slowdown below 1 is no gain: the advantage is of the schedules alone.
@pytest.mark.parametrize(
    ("fresh", "delayed", "advantage", "slowdown", "said"),
    [
        ([100], [50], 3.0, "0.50 (one seed)", "Asynchronous wins: "),
        (
            [100],
            [250],
            1.2,
            "2.50 (one seed)",
            "Asynchronous wins: pipedream is 1.20 times as fast (one seed) as",
        ),
        (
            [100] * 2,
            [240, 340],
            1.05,
            "2.86 [",
            "A tie, within noise: asynchronous pipedream is 1.05 [",
        ),
        (
            [100] * 2,
            [250, 252],
            1.195,
            "2.51 [2.39, 2.64]",
            "Asynchronous wins: pipedream is 1.20 [1.14, 1.26] times",
        ),
        (
            [100] * 2,
            [500, 505],
            0.597,
            "5.02 [",
            "Synchronous wins: zero-bubble H1 with pipedream is 1.67 [1.",
        ),
    ],
)
def test_intervals_over_seeds_decide_what_is_a_tie(fresh, delayed, advantage, slowdown, said):
    verdict = answer(fresh_and_delayed(fresh, delayed), asked(3.0, 4, 1))
    assert verdict.advantage == pytest.approx(advantage, rel=1e-3)
    assert option_slowdown(verdict.asynchronous[0]).startswith(slowdown)
    assert sentence(verdict).startswith(said)


def test_one_seed_has_the_noise_of_the_others():
    # 1.2 times as fast by one seed: decided if seeds differ by 5 % as is assumed, not if others
    # show 20 %.
    alone = fresh_and_delayed([100], [250])
    assert seed_spread(alone, 3.0) == ASSUMED_SPREAD
    other = experiment("muon", 31, [[1000 / 1.2, 1000 * 1.2]] * 3)
    noisy = alone.model_copy(update={"experiments": [*alone.experiments, other]})
    assert seed_spread(noisy, 3.0) == pytest.approx(math.sqrt(2) * math.log(1.2))
    assert answer(noisy, asked(3.0, 4, 1)).is_tie


def test_between_methods_the_noise_of_both_counts():
    steady = [
        experiment("pipedream", delay, [[iterations] * 2] * 3)
        for delay, iterations in ((0, 90), (3, 900))
    ]
    noisy = [
        experiment("muon", delay, [[50 * slowdown, 200 * slowdown]] * 3)
        for delay, slowdown in ((0, 1), (3, 1.1))
    ]
    verdict = answer(of(*steady, *noisy), asked(3.0, 4, 1))
    best, rival = verdict.asynchronous[0], verdict.rival
    assert (best.method, rival.method) == ("muon", "pipedream")
    assert best.paired_noise == pytest.approx(
        0.0, abs=1e-9
    )  # delay slows each seed alike, but seeds differ
    assert verdict.noise == pytest.approx(math.hypot(best.noise, rival.noise))


def test_replicas_are_a_third_rival():
    cheap, dear = (
        answer(MEASURED, asked(3.0, 4, 1, local=LocalSteps(10, cost, slowdown=1.1)))
        for cost in (1.0, 50.0)
    )
    times = {option.method: option.time for option in cheap.replicas}
    # Every replica updates the whole model: muon's 50 % are four times as much as on a quarter of
    #     it.
    assert times == {
        "pipedream": pytest.approx(110 * 1.1),
        "muon": pytest.approx(88 * (1 + 4 * 0.5 + 0.1)),
    }
    assert sentence(cheap).startswith(
        "Replicas win: replicas with pipedream is 1.65 times as fast (one seed) as"
    )
    assert dear.rival.cut.schedule == "zero-bubble H1"
    assert sentence(dear).startswith("Asynchronous wins")
    assert "Replicas, at best with pipedream, take" in verdict_text([dear], MEASURED, None)


ONLY_DELAYED = MEASURED.model_copy(
    update={"experiments": [one for one in MEASURED.experiments if one.delay]}
)
NEVER_THERE = of(experiment("pipedream", 0, [90, None, None]))


class Devices(EqualStages):
    """Equal stages of which some ways do not fit."""

    fitting = ()

    def asynchronous(self, settings, cost):
        return self._sized(super().asynchronous(settings, cost), "asynchronous")

    def synchronous(self, settings, cost):
        return (self._sized(cut, "synchronous") for cut in super().synchronous(settings, cost))

    def _sized(self, cut, kind):
        return cut._replace(memory=1.0 if kind in self.fitting else 9.0)


@pytest.mark.parametrize(
    ("measurements", "fitting", "reason"),
    [
        (MEASURED, (), "no schedule fits into the memory of a device."),
        (
            MEASURED,
            ("asynchronous",),
            "no synchronous schedule fits into the memory of a device, the asynchronous one",
        ),
        (
            MEASURED,
            ("synchronous",),
            "no asynchronous method fits into the memory of a device, zero-bubble H1 with",
        ),
        (
            ONLY_DELAYED,
            ("asynchronous", "synchronous"),
            "none of the runs is without delay; runs with pipeline.stages",
        ),
        (
            NEVER_THERE,
            ("asynchronous", "synchronous"),
            "no run without delay reaches this loss; ask for a higher",
        ),
    ],
)
def test_without_a_verdict_it_says_why(measurements, fitting, reason, monkeypatch):
    monkeypatch.setattr(Devices, "fitting", fitting)
    verdict = answer(measurements, Question(3.0, 4, 1, Devices(4, 1, 1, memory=5.0)))
    assert sentence(verdict).startswith(f"No verdict: {reason}")
    text = verdict_text([verdict], measurements, None)
    assert ("Too large for 5e-09 GB: pipedream." in text) == ("asynchronous" not in fitting)
    long_text(verdict, None)


def test_one_method_that_fits_is_enough(monkeypatch):
    monkeypatch.setattr(
        Devices, "_sized", lambda _, cut, kind: cut._replace(memory=9.0 if cut.time > 5 else 1.0)
    )
    verdict = answer(MEASURED, Question(3.0, 4, 1, Devices(4, 1, 1, memory=5.0), {"muon": 10.0}))
    assert [option.method for option in verdict.synchronous] == [
        "pipedream"
    ]  # muon, too large, is asked last
    assert verdict.has_cuts


def test_it_says_who_wins_why_and_what_is_not_measured():
    text = verdict_text([answer(MEASURED, asked(3.0, 4, 1))], MEASURED, None)
    assert (
        "Asynchronous wins: pipedream is 1.40 times as fast (one seed) as zero-bubble H1 with muon."
        in text
    )
    assert "slowdown is below 2.80; measured: 2.00 (one seed), at delays up to 3 updates." in text
    assert "no run measures a slowdown at delays up to 63 updates" in sentence(
        answer(MEASURED, asked(3.0, 64, 1))
    )
    text = long_text(answer(MEASURED, asked(3.0, 4, 1, costs={"muon": 0.25})), None)
    assert "  measured only at 0 and 31: muon" in text
    assert "muon 25% (given), pipedream 0%, what is not given by the pace of these runs" in text
    assert "upper estimates" in long_text(answer(MEASURED, asked(2.98, 16, 1)), None)
