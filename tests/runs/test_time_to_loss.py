"""Measurements of the demo's runs against the runs themselves."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from brx.runs.comparison import passage
from brx.runs.experiments import at_best_rates
from brx.runs.frames import comparable, load
from brx.runs.measuring import largest_delay, measure
from brx.runs.time_to_loss import LOSS_STEP

DEMO = Path(__file__).parents[2] / "results" / "demo"


def test_delays_are_those_of_pipelines_in_updates():
    def delay(**settings):
        return largest_delay(
            pd.Series({f"pipeline.{key.replace('__', '.')}": value for key, value in settings.items()})
        )

    assert delay(stages=8, delay="pipeline", accumulation=1) == 7
    assert delay(stages=8, delay="pipeline", accumulation=4) == 7 / 4
    assert delay(stages=8, delay=np.nan, delay__like=32.0, accumulation=1) == 31
    assert delay(stages=8, delay="2bw", accumulation=8) is None
    assert delay(stages=3, delay=[0, 4, 0], accumulation=1) is None


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
