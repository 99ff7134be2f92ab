"""Committed runs keep their identities, whatever settings brx has gained since."""

from pathlib import Path

import pytest

from brx.config.loading import load_config
from brx.config.schema import PRECISIONS, RunConfig
from brx.runs.run import unusual_optimizer_settings
from brx.runs.trajectory import _MAY_CHANGE, first_difference, trajectory_of
from brx.sweep.cell import trajectory_id

RESULTS = Path(__file__).parents[2] / "results"
EVERY = 25  # one run of this many is read
# A run of a sweep has its identity at the end of its name. Those of `laptop-start` were trained
# before `optimizer.first_refresh` had its present default.
FOLDERS = {
    path.parent for path in RESULTS.glob("*/*--????????") if path.parent.name != "laptop-start"
}


@pytest.mark.parametrize("folder", sorted(FOLDERS), ids=lambda folder: folder.name)
def test_committed_runs_keep_their_identity(folder):
    # It changes if a default changes, or if a setting begins or ceases to count.
    for run in sorted(folder.glob("*--????????"))[::EVERY]:
        assert trajectory_id(load_config(run / "config.yaml")) == run.name[-8:], run.name


def rotated(*settings):
    return load_config("quick", ["optimizer.method=basis-rotation", *settings])


@pytest.mark.parametrize("key", PRECISIONS)
def test_fp32_is_the_default_by_another_name(key):
    # Runs from before the default was `auto` have `highest`, as a setting of their own.
    default, fp32 = rotated(), rotated(f"optimizer.{key}=highest")
    assert trajectory_id(fp32) == trajectory_id(default)
    assert first_difference(trajectory_of(fp32), trajectory_of(default)) is None
    assert unusual_optimizer_settings(fp32) == []


@pytest.mark.parametrize("key", PRECISIONS)
def test_tf32_tells_runs_apart(key):
    default, tf32 = rotated(), rotated(f"optimizer.{key}=tf32")
    assert trajectory_id(tf32) != trajectory_id(default)
    assert first_difference(trajectory_of(default), trajectory_of(tf32)) is not None
    assert unusual_optimizer_settings(tf32) == [f"{key} tf32"]


@pytest.mark.parametrize("section", _MAY_CHANGE)
def test_settings_that_may_change_are_settings(section):
    settings = RunConfig.model_fields[section].annotation.model_fields
    assert _MAY_CHANGE[section] <= settings.keys()
