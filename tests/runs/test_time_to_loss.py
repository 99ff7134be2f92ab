"""Measurements of the demo's runs against the runs themselves."""

from pathlib import Path

import pytest

from brx.runs.comparison import passage
from brx.runs.experiments import at_best_rates
from brx.runs.frames import comparable, load
from brx.runs.measuring import measure
from brx.runs.time_to_loss import LOSS_STEP

DEMO = Path(__file__).parents[2] / "results" / "demo"


def test_what_is_kept_is_what_the_runs_say():
    runs = load(DEMO)
    (chosen,) = comparable(at_best_rates(runs))
    measured = measure(chosen, dict.fromkeys(chosen["experiment"], 1), "results/demo")
    assert {(one.method, one.delay) for one in measured.experiments} == {
        ("pipedream", 0.0),
        ("pipedream", 7.0),
        ("basis-rotation", 0.0),
        ("basis-rotation", 7.0),
    }
    for run, row in chosen.iterrows():
        key = (row["method"], row["pipeline.stages"] - 1)
        one = next(e for e in measured.experiments if (e.method, e.delay) == key)
        target = measured.lowest_loss(one)
        count, is_bound = measured.reached(one, target)
        assert not is_bound
        assert count == pytest.approx(passage(run, target), abs=0.06)
        earlier = passage(run, target + LOSS_STEP)
        assert earlier <= measured.reached(one, target + LOSS_STEP / 2)[0] <= count
