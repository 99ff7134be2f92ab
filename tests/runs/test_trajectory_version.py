"""Runs of two trajectory versions are never mixed silently."""

import json

import pytest

from brx.cli.main import main
from brx.config.loading import dump_config
from brx.methods.trajectory_version import TRAJECTORY_VERSION
from brx.runs.experiments import at_best_rates, notes
from brx.runs.frames import comparable, differences, load
from tests.train.helpers import tiny_config

UNRECORDED, NEXT = {}, {"trajectory_version": TRAJECTORY_VERSION + 1}


@pytest.fixture
def write_run(tmp_path):
    def write(name, version, *overrides, val_loss=1.0):
        path = tmp_path / "runs" / name
        path.mkdir(parents=True)
        (path / "config.yaml").write_text(dump_config(tiny_config(tmp_path, *overrides)))
        lines = [{"iteration": t, "train_loss": 4.0 - t / 10, "seconds": 0.5 * t} for t in range(1, 31)]
        lines.append({"iteration": 30, "val_loss": val_loss})
        (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        summary = {"status": "finished", "data_fingerprint": "f", **version}
        (path / "summary.json").write_text(json.dumps(summary))
        return path

    return write


def test_comparability_names_the_version(write_run):
    old, older, new = (
        write_run("old", {"trajectory_version": 1}),
        write_run("older", UNRECORDED),
        write_run("new", NEXT),
    )
    assert differences(load([old, older])) == []
    (line,) = differences(load([old, new]))
    assert "differ in trajectory version: their losses do not compare" in line


def test_plot_says_so(write_run, tmp_path, capsys):
    paths = [str(write_run("old", UNRECORDED)), str(write_run("new", NEXT))]
    assert main(["plot", "curves", *paths, "--out", str(tmp_path / "figure")]) == 0
    assert "differ in trajectory version" in capsys.readouterr().err


def test_versions_are_experiments_of_their_own(write_run, tmp_path):
    write_run("a", UNRECORDED, "optimizer.lr=0.01")
    write_run("b", UNRECORDED, "optimizer.lr=0.02", val_loss=0.9)
    write_run("c", UNRECORDED, "pipeline.stages=1")
    write_run("d", NEXT, "optimizer.lr=0.03", val_loss=0.1)  # the best, but of another version
    runs = load(tmp_path / "runs")
    chosen = at_best_rates(runs)
    assert sorted(chosen["name"]) == ["b", "c", "d"]
    (note,) = notes(runs, chosen)
    assert "take 2 of 3 experiments, on f, of version 1" in note
    assert [len(alike) for alike in comparable(chosen)] == [2, 1]
