"""Measurements of the demo's runs against the runs themselves."""

import json
from pathlib import Path

import pytest

from brx.errors import UserError
from brx.runs.comparison import passage
from brx.runs.experiments import at_best_rates
from brx.runs.frames import comparable, has_pipeline_delays, load
from brx.runs.time_to_loss import LOSS_STEP, Measurements, measure_largest_set
from tests.runs.helpers import write_run

DEMO = Path(__file__).parents[2] / "results" / "demo"

DELAYS = {
    "p8": (["pipeline.stages=8"], True, 8, 7.0),
    "m4": (["pipeline.stages=8", "pipeline.accumulation=4"], True, 8, 7 / 4),
    "like": (["pipeline.stages=4", "pipeline.delay={like: 32}"], True, 32, 31.0),
    "2bw": (["pipeline.stages=8", "pipeline.delay=2bw", "pipeline.accumulation=8"], False, 8, 1.0),
    "one": (["pipeline.stages=3", "pipeline.delay=[0, 4, 0]"], False, 3, 4.0),
    "fresh": (["pipeline.stages=3", "pipeline.delay=0"], False, 3, 0.0),
}
"""By run: its settings; whether its delays fall as a pipeline's, its depth, and the largest delay
in updates."""


def test_delays_are_those_of_pipelines_in_updates(tmp_path):
    for name, (settings, *_) in DELAYS.items():
        write_run(tmp_path, name, "model.blocks=8", *settings)
    runs = load(tmp_path / "runs").set_index("name")
    found = zip(has_pipeline_delays(runs), runs["depth"], runs["largest_delay"], strict=True)
    assert dict(zip(runs.index, found, strict=True)) == {
        name: tuple(of) for name, (_, *of) in DELAYS.items()
    }
    for name, (
        _,
        is_pipeline,
        *_,
    ) in DELAYS.items():  # in a frame that lacks the columns of the others' settings
        assert has_pipeline_delays(load(tmp_path / "runs" / name)).tolist() == [is_pipeline]


def test_runs_compare_by_the_examples_of_an_update_and_others_are_named(tmp_path):
    runs = {
        "a-smaller": ["pipeline.stages=4", "training.batch_size=2"],
        "b-whole": ["pipeline.stages=1", "training.batch_size=4"],
        "c-split": ["pipeline.stages=4", "training.batch_size=1", "pipeline.accumulation=4"],
        "d-wider": ["pipeline.stages=4", "training.batch_size=4", "model.width=16"],
        "e-like": ["pipeline.delay.like=9", "training.batch_size=4"],
        "f-late": ["pipeline.delay=[0, 0, 0, 9]", "training.batch_size=4"],
    }
    for name, settings in runs.items():
        write_run(tmp_path, name, *settings, crosses_3_at=150)
    measured, notes = measure_largest_set(load(tmp_path / "runs"), "runs")
    delays = {(one.method, one.delay, one.micro_batches) for one in measured.experiments}
    assert delays == {("pipedream", 0.0, 1), ("pipedream", 3 / 4, 4), ("pipedream", 8.0, 1)}
    assert notes == [
        "Left out: 1 run(s) that differ in examples per update: a-smaller.",
        "Left out: 1 run(s) that differ in model: d-wider.",
        "Left out: 1 run(s) that have delays that are no pipeline's: f-late.",
    ]
    assert measured.examples == 4
    measured.write(tmp_path / "kept.json")
    assert Measurements.read(tmp_path / "kept.json") == measured


def test_what_is_kept_is_what_the_runs_say():
    runs = load(DEMO)
    (chosen,) = comparable(at_best_rates(runs))
    measured, _ = measure_largest_set(runs, "results/demo")
    expected = {
        (method, delay) for method in ("pipedream", "basis-rotation") for delay in (0.0, 7.0)
    }
    assert {(one.method, one.delay) for one in measured.experiments} == expected
    for run, row in chosen.iterrows():
        key = (row["method"], row["pipeline.stages"] - 1)
        one = next(e for e in measured.experiments if (e.method, e.delay) == key)
        target = min(
            loss
            for loss, row in zip(measured.losses, one.iterations, strict=True)
            if None not in row
        )
        reached = measured.reached(one, target)[row["training.seed"]]
        assert reached.is_reached
        assert reached.iterations == pytest.approx(passage(run, target), abs=0.06)
        between = measured.reached(one, target + LOSS_STEP / 2)[row["training.seed"]]
        assert passage(run, target + LOSS_STEP) <= between.iterations <= reached.iterations


def test_a_seed_that_diverged_never_reaches_a_loss_and_a_methods_settings_are_kept(tmp_path):
    settings = [
        "optimizer={method: basis-rotation, geometry: unilateral, lr: 0.02}",
        "pipeline.stash=none",
    ]
    for seed, status in ((0, "finished"), (1, "diverged")):
        write_run(
            tmp_path,
            f"s{seed}",
            *settings,
            f"training.seed={seed}",
            crosses_3_at=150,
            status=status,
        )
    (only,) = measure_largest_set(load(tmp_path / "runs"), "runs")[0].experiments
    assert {row[1] for row in only.iterations} == {None}
    assert any(row[0] is not None for row in only.iterations)
    assert only.settings == {
        "optimizer": {"method": "basis-rotation", "geometry": "unilateral"},
        "pipeline": {"stash": "none", "forecast": None},
    }


def test_measurements_that_are_none_are_refused(tmp_path):
    path = tmp_path / "kept.json"
    measure_largest_set(load([DEMO]), "demo")[0].write(path)
    good = path.read_text()
    for change, problem in (
        (lambda content: content["losses"].reverse(), "losses: must descend"),
        (
            lambda content: content["experiments"][0]["iterations"].pop(),
            "iterations must have a row per loss",
        ),
        (
            lambda content: content["experiments"][0]["iterations"][1].append(1.0),
            "must have a row per loss",
        ),
        (
            lambda content: content["experiments"][0].update(seconds=0),
            "input should be greater than 0",
        ),
    ):
        change(content := json.loads(good))
        path.write_text(json.dumps(content))
        with pytest.raises(UserError, match=problem):
            Measurements.read(path)
