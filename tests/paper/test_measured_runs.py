"""Which measured runs belong to a scale's comparisons."""

from dataclasses import replace

import pytest

from brx.errors import UserError
from brx.methods.trajectory_version import TRAJECTORY_VERSION
from brx.paper.measured_runs import measured_runs
from brx.runs.run import read_run
from tests.paper.helpers import LAPTOP, write_method

RATE = "optimizer.lr"


@pytest.fixture
def scale(tmp_path):
    """A scale whose runs and measured runs are in two folders."""
    return replace(LAPTOP, runs=tmp_path / "runs", curvature=tmp_path / "measured")


def write(folder, rate, val_loss):
    write_method(folder, "pipedream", settings={RATE: rate}, val_loss=val_loss)


def rates_of(runs):
    return [read_run(run).config.optimizer.lr for run in runs]


def test_rate_is_the_one_of_the_scales_comparisons(scale):
    write(scale.runs, 1e-3, val_loss=2.0)
    write(scale.runs, 3e-3, val_loss=2.1)
    write(scale.curvature, 1e-3, val_loss=2.0)
    write(scale.curvature, 3e-3, val_loss=1.9)
    assert rates_of(measured_runs(scale)) == [1e-3]


def test_experiment_that_was_not_measured_at_that_rate_has_the_best_measured_one(scale):
    write(scale.runs, 1e-3, val_loss=2.0)
    write(scale.curvature, 3e-3, val_loss=2.1)
    write(scale.curvature, 1e-2, val_loss=2.2)
    assert rates_of(measured_runs(scale)) == [3e-3]


def test_scale_without_other_runs_has_the_best_measured_rate(scale):
    write(scale.curvature, 3e-3, val_loss=2.1)
    write(scale.curvature, 1e-2, val_loss=2.2)
    assert rates_of(measured_runs(scale)) == [3e-3]


def test_runs_are_of_one_trajectory_version(scale):
    write_method(scale.curvature, "pipedream", 1)
    write_method(scale.curvature, "basis-rotation", 1)
    write_method(scale.curvature / "newer", "basis-rotation", 1, version=TRAJECTORY_VERSION)
    (newer,) = (scale.curvature / "newer").iterdir()
    newer = newer.rename(scale.curvature / "newer-run")
    (scale.curvature / "newer").rmdir()
    write_method(scale.curvature, "basis-rotation", 8)
    kept = measured_runs(scale)
    assert len(kept) == 3
    assert newer not in kept


def test_two_measured_runs_of_a_method_and_seed_are_refused(scale):
    """Such as basis rotation with other refreshes: one would take the other's place."""
    write_method(scale.curvature, "basis-rotation", 8)
    write_method(scale.curvature, "basis-rotation", 8, {"optimizer.frequency": 100})
    with pytest.raises(UserError, match=r"method basis-rotation, depth 8, training\.seed 0"):
        measured_runs(scale)
