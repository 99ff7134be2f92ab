"""Measurements of the demo's runs against the runs themselves."""

from pathlib import Path

import pytest

from brx.runs.experiments import Results
from brx.runs.reading import iterations_to_target
from brx.runs.slowdown import comparable_sets
from brx.runs.time_to_loss import measure

DEMO = Path(__file__).parents[2] / "results" / "demo"


def test_what_is_kept_is_what_the_runs_say():
    (groups,) = comparable_sets(Results([DEMO]).groups)
    measured = measure(groups, "results/demo")
    assert {(one.method, one.delay) for one in measured.experiments} == {
        ("pipedream", 0.0),
        ("pipedream", 7.0),
        ("basis-rotation", 0.0),
        ("basis-rotation", 7.0),
    }
    for group in groups:
        (run,) = group.runs
        one = next(e for e in measured.experiments if (e.method, e.delay) == (run.method, run.stages - 1))
        target = measured.lowest_loss(one)
        count, is_bound = measured.reached(one, target)
        assert not is_bound
        assert count == pytest.approx(iterations_to_target(run, target), abs=0.06)
        between = target + 0.01
        assert measured.reached(one, between)[0] == pytest.approx(iterations_to_target(run, between), rel=0.05)
