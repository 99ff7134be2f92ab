"""Runs as frames: what `brx.runs.load` and `brx.runs.curves` say of a folder, and which runs count as alike."""

import json

import numpy as np
import pandas as pd
import pytest

import brx.runs
from brx.config.loading import dump_config
from brx.files import write_json
from brx.methods.trajectory_version import TRAJECTORY_VERSION
from brx.runs.frames import differences, has_pipeline_delays, same_but_for
from tests.runs.helpers import write_metrics
from tests.train.helpers import tiny_config


@pytest.fixture
def write_run(tmp_path):
    def write(name, *overrides, summary=None):
        path = tmp_path / "runs" / name
        path.mkdir(parents=True)
        (path / "config.yaml").write_text(dump_config(tiny_config(tmp_path, *overrides)))
        write_metrics(path, [4.0 - t / 10 for t in range(1, 31)], [{"iteration": 30, "val_loss": 3.0}])
        if summary is not None:
            write_json(path / "summary.json", {"data_fingerprint": "f", "versions": {"torch": "2.13"}, **summary})
        return path

    return write


def test_a_row_has_settings_summary_and_outcomes(write_run, tmp_path):
    write_run("a", "optimizer.method=nesterov", summary={"status": "finished"})
    write_run("b", "optimizer.method=basis-rotation", "optimizer.source=1st")
    runs = brx.runs.load(tmp_path / "runs")
    assert list(runs.index) == [str(tmp_path / "runs" / name) for name in "ab"]
    assert runs["pipeline.stages"].tolist() == [4, 4]
    assert runs["optimizer.method"].tolist() == ["nesterov", "basis-rotation"]
    assert runs["method"].tolist() == ["nesterov", "basis-rotation 1st/bilateral"]
    assert runs["status"].tolist() == ["finished", "unfinished"]
    assert runs["versions.torch"].tolist()[0] == "2.13"
    assert runs["val_loss"].tolist() == [3.0, 3.0]
    assert runs["train_loss"].tolist() == pytest.approx([1.0, 1.0])  # 2 % of 30 iterations: the last one


def test_curves_are_long_and_a_run_that_has_changed_is_read_again(write_run, tmp_path):
    path = write_run("a", "training.iterations=30", summary={"status": "finished"})
    curves = brx.runs.curves(brx.runs.load(tmp_path / "runs"))
    assert curves["iteration"].tolist() == list(range(1, 31))
    np.testing.assert_allclose(curves["train_loss"], 4.0 - curves["iteration"] / 10)
    assert curves.set_index("iteration")["val_loss"].dropna().to_dict() == {30: 3.0}
    assert curves["run"].unique().tolist() == [str(path)]
    with (path / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"iteration": 31, "train_loss": 0.5, "seconds": 15.5}) + "\n")
    assert brx.runs.load(path)["iteration"].item() == 31


def test_runs_are_alike_but_for_what_is_named_and_what_decides_no_number(write_run, tmp_path):
    write_run("a")
    write_run("b", "training.seed=1", "training.log_every=1")
    write_run("c", "pipeline.stages=2")
    write_run("d", "optimizer.method=torch.optim:SGD", "optimizer.arguments={momentum: 0.9, betas: [1, 2]}")
    runs = brx.runs.load(tmp_path / "runs").set_index("name")
    assert same_but_for(runs, "training.seed").tolist() == [0, 0, 1, 2]
    assert same_but_for(runs, "training.seed", "pipeline.stages").tolist() == [0, 0, 0, 1]
    assert same_but_for(runs, "training.seed", "optimizer").tolist() == [0, 0, 1, 0]
    assert runs["experiment"].duplicated().tolist() == [False, True, False, False]


def test_delays_along_a_pipeline_are_told_from_others_whichever_there_are(write_run):
    own, like, constant = (
        brx.runs.load(write_run(name, delay))
        for name, delay in (("a", "pipeline.stages=4"), ("b", "pipeline.delay.like=8"), ("c", "pipeline.delay=3"))
    )
    for runs, expected in ((own, [True]), (like, [True]), (constant, [False]), (pd.concat([like, own]), [True, True])):
        assert has_pipeline_delays(runs).tolist() == expected


def test_differences_name_the_aspect_and_an_unrecorded_trajectory_version_is_the_first(write_run):
    paths = [write_run("a"), write_run("b", "model.width=16"), write_run("c", "pipeline.stages=2")]
    (line,) = differences(brx.runs.load(paths))
    assert line == f"{paths[1]} and {paths[0]} differ in model: their losses do not compare"
    versions = ({}, {"trajectory_version": 1}, {"trajectory_version": TRAJECTORY_VERSION + 1})
    runs = brx.runs.load([write_run(str(number), summary=version) for number, version in enumerate(versions)])
    (line,) = differences(runs)
    assert line.startswith(runs.index[2])
    assert "differ in trajectory version: their losses do not compare" in line
