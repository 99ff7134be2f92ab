"""The sentences of a verdict."""

import pytest

from brx.planning.schedules import EqualStages
from brx.planning.verdict import Question, answer
from brx.planning.verdict_text import (
    long_text,
    option_slowdown,
    option_table,
    sentence,
    verdict_text,
)
from tests.planning.measurements import MEASURED, asked, experiment, fresh_and_delayed, of


@pytest.fixture
def text():
    return verdict_text([answer(MEASURED, asked(3.0, 4, 1))], MEASURED, None)


def test_first_line_compares_one_method(text):
    assert text.splitlines()[0] == (
        "Asynchronous wins: with pipedream on both sides, it is 1.50 times as fast (one seed) as "
        "synchronous zero-bubble H1."
    )


def test_second_line_compares_the_best_of_each_side(text):
    assert text.splitlines()[1] == (
        "  Best of each side: asynchronous pipedream is 1.40 times as fast (one seed) as "
        "zero-bubble H1 with muon."
    )


def test_rival_without_runs_at_the_delay_is_named(text):
    assert "muon was not run at such delays." in text


def test_reason_is_the_break_even(text):
    assert (
        "With pipedream, asynchronous training is faster if its slowdown is below 3.00; measured: "
        "2.00 (one seed), at delays up to 3 updates." in text
    )


def test_one_method_alone_needs_no_second_line():
    measured = fresh_and_delayed([100], [250])
    text = verdict_text([answer(measured, asked(3.0, 4, 1))], measured, None)
    assert "No other method is faster on either side (of 1 with delay, 1 without)." in text


@pytest.mark.parametrize(
    ("fresh", "delayed", "slowdown", "said"),
    [
        ([100], [50], "0.50 (one seed)", "Asynchronous wins: "),
        ([100] * 2, [240, 340], "2.86 [", "A tie, within noise: with pipedream on both sides, "),
        (
            [100] * 2,
            [250, 252],
            "2.51 [2.39, 2.64]",
            "Asynchronous wins: with pipedream on both sides, it is 1.20 [1.14, 1.26] times as",
        ),
        (
            [100] * 2,
            [500, 505],
            "5.02 [",
            "Synchronous wins: with pipedream on both sides, zero-bubble H1 is 1.67 [1.",
        ),
    ],
)
def test_sentence_says_who_wins(fresh, delayed, slowdown, said):
    found = answer(fresh_and_delayed(fresh, delayed), asked(3.0, 4, 1))
    assert sentence(found).startswith(said)
    assert option_slowdown(found.asynchronous[0]).startswith(slowdown)


def test_bound_is_marked_in_the_table():
    row = option_table(answer(MEASURED, asked(2.98, 16, 1)), "asynchronous", None).iloc[0]
    assert (row["slowdown"], row["iterations"]) == ("> 9.09", "> 1000")


def test_open_comparison_is_no_verdict():
    found = sentence(answer(MEASURED, asked(2.98, 16, 1)))
    assert found.startswith("No verdict: no asynchronous method reached the loss")


def test_methods_on_one_side_each_are_no_verdict():
    measured = of(experiment("muon", 0, [80] * 3), experiment("soap", 3, [100] * 3))
    text = verdict_text([answer(measured, asked(3.0, 4, 1))], measured, None)
    assert text.startswith("No verdict on one method: none has runs to this loss both without")
    assert "Best of each side: asynchronous soap is" in text


def test_unmeasured_delay_is_no_verdict():
    found = sentence(answer(MEASURED, asked(3.0, 64, 1)))
    assert "no run measures a slowdown at delays up to 63 updates" in found


class Devices(EqualStages):
    """Equal stages of which some ways do not fit."""

    fitting = ()

    def asynchronous(self, settings, cost):
        return self._sized(super().asynchronous(settings, cost), "asynchronous")

    def synchronous(self, settings, cost):
        return (self._sized(cut, "synchronous") for cut in super().synchronous(settings, cost))

    def _sized(self, cut, kind):
        return cut._replace(memory=1.0 if kind in self.fitting else 9.0)


BOTH = ("asynchronous", "synchronous")
ONLY_DELAYED = of(*(one for one in MEASURED.experiments if one.delay))
NEVER_THERE = of(experiment("pipedream", 0, [90, None, None]))


@pytest.mark.parametrize(
    ("measurements", "fitting", "reason"),
    [
        (MEASURED, (), "no schedule fits into the memory of a device."),
        (MEASURED, BOTH[:1], "no synchronous schedule fits into the memory of a device, the"),
        (MEASURED, BOTH[1:], "no asynchronous method fits into the memory of a device, zero-"),
        (ONLY_DELAYED, BOTH, "none of the runs is without delay; runs with pipeline.stages"),
        (NEVER_THERE, BOTH, "no run without delay reaches this loss; ask for a higher"),
    ],
)
def test_without_a_verdict_it_says_why(measurements, fitting, reason, monkeypatch):
    monkeypatch.setattr(Devices, "fitting", fitting)
    verdict = answer(measurements, Question(3.0, 4, 1, Devices(4, 1, 1, memory=5.0)))
    text = verdict_text([verdict], measurements, None)
    assert text.startswith(f"No verdict: {reason}")
    assert ("Too large for 5e-09 GB: pipedream." in text) == ("asynchronous" not in fitting)


@pytest.fixture
def details():
    return long_text(answer(MEASURED, asked(3.0, 4, 1, costs={"muon": 0.25})), None)


def test_gaps_are_listed(details):
    assert "  measured only at 0 and 31: muon" in details


@pytest.mark.parametrize(
    ("costs", "said"),
    [
        ({}, "equal stages, updates as they cost in these runs."),
        ({"muon": 0.25}, "updates (where no cost is given) as they cost in these runs."),
    ],
)
def test_last_lines_say_where_costs_are_from(costs, said):
    found = answer(MEASURED, asked(3.0, 4, 1, costs=costs))
    assert said in verdict_text([found], MEASURED, None)


def test_costs_say_where_they_are_from(details):
    assert "muon 25% (given), pipedream 0%, what is not given by the pace of these runs" in details


def test_one_learning_rate_is_an_upper_estimate():
    assert "upper estimates" in long_text(answer(MEASURED, asked(2.98, 16, 1)), None)
