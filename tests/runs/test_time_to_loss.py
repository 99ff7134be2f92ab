"""Measurements of the demo's runs against the runs themselves."""

import itertools
import json
import math
from pathlib import Path

import pytest

from brx.errors import UserError
from brx.runs.aspects import comparable
from brx.runs.comparison import passage
from brx.runs.experiments import at_best_rates
from brx.runs.frames import has_pipeline_delays, load
from brx.runs.pace import NO_COMMON_SPEED
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


@pytest.fixture(params=DELAYS)
def run_of_delay(request, tmp_path):
    """One run of `DELAYS`, and what is expected of it."""
    settings, *expected = DELAYS[request.param]
    write_run(tmp_path, request.param, "model.blocks=8", *settings)
    return load(tmp_path / "runs"), expected


def test_pipeline_delays_are_recognised(run_of_delay):
    runs, (is_pipeline, _, _) = run_of_delay
    assert has_pipeline_delays(runs).tolist() == [is_pipeline]


def test_depth_is_the_pipelines(run_of_delay):
    runs, (_, depth, _) = run_of_delay
    assert runs["depth"].item() == depth


def test_largest_delay_is_in_updates(run_of_delay):
    runs, (_, _, largest_delay) = run_of_delay
    assert runs["largest_delay"].item() == largest_delay


def test_pipeline_delays_are_recognised_among_others(tmp_path):
    """A frame of several runs has the columns of all their settings."""
    for name, (settings, *_) in DELAYS.items():
        write_run(tmp_path, name, "model.blocks=8", *settings)
    runs = load(tmp_path / "runs").set_index("name")
    expected = {name: is_pipeline for name, (_, is_pipeline, _, _) in DELAYS.items()}
    assert has_pipeline_delays(runs).to_dict() == expected


@pytest.fixture
def measured(tmp_path):
    """The measurements of three runs that compare, and the notes on three others."""
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
    return measure_largest_set(load(tmp_path / "runs"), "runs")


def test_runs_compare_by_examples_per_update(measured):
    measurements, _ = measured
    assert measurements.examples == 4
    delays = {(one.method, one.delay, one.micro_batches) for one in measurements.experiments}
    assert delays == {("pipedream", 0.0, 1), ("pipedream", 3 / 4, 4), ("pipedream", 8.0, 1)}


def test_runs_that_do_not_compare_are_named(measured):
    _, notes = measured
    assert notes == [
        "left out, different in examples per update: a-smaller",
        "left out, different in model: d-wider",
        "left out, with delays that are no pipeline's: f-late",
    ]


def test_measurements_are_read_as_written(measured, tmp_path):
    measurements, _ = measured
    measurements.write(tmp_path / "kept.json")
    assert Measurements.read(tmp_path / "kept.json") == measurements


@pytest.fixture(scope="module")
def demo():
    """The measurements of the demo's runs."""
    measurements, _ = measure_largest_set(load(DEMO), "results/demo")
    return measurements


def test_demo_has_four_experiments(demo):
    found = {(one.method, one.delay) for one in demo.experiments}
    assert found == {*itertools.product(("pipedream", "basis-rotation"), (0.0, 7.0))}


def lowest_stored_loss(measurements, experiment):
    """The lowest that all seeds of an experiment reach."""
    stored = zip(measurements.losses, experiment.iterations, strict=True)
    return min(loss for loss, by_seed in stored if None not in by_seed)


def test_passages_are_the_runs(demo):
    (chosen,) = comparable(at_best_rates(load(DEMO)))
    for run, row in chosen.iterrows():
        key = (row["method"], row["pipeline.stages"] - 1)
        one = next(one for one in demo.experiments if (one.method, one.delay) == key)
        seed = row["training.seed"]
        target = lowest_stored_loss(demo, one)
        reached = demo.reached(one, target)[seed]
        assert reached.is_reached
        assert reached.iterations == pytest.approx(passage(run, target), abs=0.06)
        between = demo.reached(one, target + LOSS_STEP / 2)[seed]
        assert passage(run, target + LOSS_STEP) <= between.iterations <= reached.iterations


@pytest.fixture
def one_diverged(tmp_path):
    """An experiment of two seeds; the second diverged."""
    settings = [
        "optimizer={method: basis-rotation, geometry: unilateral, lr: 0.02}",
        "pipeline.stash=none",
    ]
    for seed, status in ((0, "finished"), (1, "diverged")):
        own = f"training.seed={seed}"
        write_run(tmp_path, f"s{seed}", *settings, own, crosses_3_at=150, status=status)
    measurements, _ = measure_largest_set(load(tmp_path / "runs"), "runs")
    (only,) = measurements.experiments
    return only


def test_seed_that_diverged_never_reaches_a_loss(one_diverged):
    assert {by_seed[1] for by_seed in one_diverged.iterations} == {None}
    assert any(by_seed[0] is not None for by_seed in one_diverged.iterations)


def test_settings_of_the_method_are_kept(one_diverged):
    assert one_diverged.settings == {
        "optimizer": {"method": "basis-rotation", "geometry": "unilateral"},
        "pipeline": {"stash": "none", "forecast": None},
    }


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (lambda content: content["losses"].reverse(), "losses: must descend"),
        (
            lambda content: content["experiments"][0]["iterations"][0].insert(0, 0.0),
            "experiments.0.iterations.0.0: input should be greater than 0, got 0.0",
        ),
        (
            lambda content: content["experiments"][0].update(delay=math.inf),
            "experiments.0.delay: input should be a finite number, got inf",
        ),
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
    ],
    ids=["rising", "no iterations", "no delay", "a row less", "a column more", "no time"],
)
def test_wrong_measurements_are_refused(damage, problem, demo, tmp_path):
    content = json.loads(demo.model_dump_json())
    damage(content)
    path = tmp_path / "kept.json"
    path.write_text(json.dumps(content))
    with pytest.raises(UserError, match=problem):
        Measurements.read(path)


def test_damaged_file_names_the_command_that_writes_it(tmp_path):
    path = tmp_path / "kept.json"
    path.write_text("{")
    with pytest.raises(UserError, match=rf"not readable: .*; brx verdict RUNS --save {path} "):
        Measurements.read(path)


def test_runs_without_a_result_are_noted(tmp_path):
    write_run(tmp_path, "fresh", val_loss=2.0)
    write_run(tmp_path, "under way", "training.seed=1", status=None)
    write_run(tmp_path, "lost", "model.blocks=2", "pipeline.stages=2", status="diverged")
    _, notes = measure_largest_set(load(tmp_path / "runs"), "runs")
    assert notes == [
        "left out, not finished: under way",
        "left out, diverged as all of the same settings: lost",
    ]


def test_run_without_times_is_refused(tmp_path):
    run = write_run(tmp_path, "timeless")
    metrics = run.path / "metrics.jsonl"
    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    lines = [json.dumps(record | {"seconds": 0.0}) + "\n" for record in records]
    metrics.write_text("".join(lines))
    with pytest.raises(UserError, match="timeless: an iteration takes 0 s by its metrics"):
        measure_largest_set(load(tmp_path / "runs"), "runs")


def test_updates_of_unknown_size_are_refused(tmp_path):
    write_run(tmp_path, "recorded")
    runs = load(tmp_path / "runs").assign(examples_per_update=float("nan"))
    with pytest.raises(UserError, match="runs: how many examples an update takes is not known"):
        measure_largest_set(runs, "runs")


@pytest.mark.parametrize(("compiled", "notes"), [("false", []), ("true", [NO_COMMON_SPEED])])
def test_times_that_do_not_compare_are_noted(compiled, notes, tmp_path):
    write_run(tmp_path, "adamw", "pipeline.stages=1")
    muon = ["optimizer.method=muon", f"runtime.compile={compiled}"]
    write_run(tmp_path, "muon", "pipeline.stages=1", *muon)
    assert measure_largest_set(load(tmp_path / "runs"), "runs")[1] == notes
