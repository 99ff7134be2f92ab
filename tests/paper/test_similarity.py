"""The study of similarity: settings with known slowdowns, and the committed runs."""

import math

import pandas as pd
import pytest

from brx.cli.main import main
from brx.errors import UserError
from brx.paper.scales import LADDER_METHODS
from brx.paper.similarity import (
    RUNS,
    SETTINGS,
    draw_similarity,
    least_slowed_down,
    load_study,
    study,
    study_table,
)
from brx.runs.frames import load
from tests.paper.helpers import write_experiment

UNDER_DELAY = {"pipeline.stages": 8, "pipeline.delay.like": 32}


PRESET = "laptop preset"
LONGER_WARMUP = "warm-up 31 tau"
UNCHANGED = "beta2 0.99"
BEST_RATES = "each side's best rate"
SLOWNESS = dict(zip(LADDER_METHODS, (2, 3, 4), strict=True))
FACTOR = {PRESET: 1.0, LONGER_WARMUP: 1 / 1.5, UNCHANGED: 1.0}
"""How many times as slow as with the preset the methods are."""


def write_setting(folder, setting, method, slowness):
    """Runs at the common rate without delay, and with it so many times as slow."""
    settings = {"optimizer.method": method, "optimizer.lr": 1e-3, **SETTINGS[setting]}
    without_delay = {**settings, "pipeline.stages": 1}
    # One method lacks its run without delay in one setting.
    if (method, setting) != ("nesterov", LONGER_WARMUP):
        write_experiment(folder, "laptop", without_delay, seeds=(0, 1))
    delayed = {**settings, **UNDER_DELAY}
    write_experiment(folder, "laptop", delayed, seeds=(0, 1), slowness=slowness)


@pytest.fixture(scope="module")
def frame(tmp_path_factory):
    """The study of three settings at the common rate. One run at a better rate, on one side only,
    counts in the row of best rates alone."""
    folder = tmp_path_factory.mktemp("study")
    for setting, factor in FACTOR.items():
        for method, slowness in SLOWNESS.items():
            write_setting(folder, setting, method, slowness * factor)
    better = {"optimizer.method": "nesterov", "optimizer.lr": 3e-3, **UNDER_DELAY}
    write_experiment(folder, "laptop", better, seeds=(0, 1), slowness=1.2, val_loss=0.1)
    return study(load([folder]))


@pytest.fixture(scope="module")
def rows(frame):
    return frame.set_index(["setting", "method"])


def test_table_has_the_settings_with_runs(frame):
    table = study_table(frame)
    assert list(table["setting"]) == [PRESET, BEST_RATES, LONGER_WARMUP, UNCHANGED]


def test_method_without_both_ends_has_no_slowdown(frame):
    table = study_table(frame).set_index("setting")
    assert table.loc[LONGER_WARMUP, "slowdown: nesterov"] == "-"


@pytest.mark.parametrize("method", SLOWNESS)
def test_slowdown_with_the_preset(rows, method):
    assert rows.loc[(PRESET, method), "ratio"] == pytest.approx(SLOWNESS[method], rel=0.05)


def test_slowdown_with_another_setting(rows):
    ratio = rows.loc[(LONGER_WARMUP, "pipedream-lr"), "ratio"]
    assert ratio == pytest.approx(SLOWNESS["pipedream-lr"] / 1.5, rel=0.05)


def test_slowdown_at_the_best_rates(rows):
    assert rows.loc[(BEST_RATES, "nesterov"), "ratio"] == pytest.approx(1.2, rel=0.05)


@pytest.mark.parametrize("setting", [PRESET, UNCHANGED])
def test_iterations_saved_in_a_setting(rows, setting):
    assert rows.loc[(setting, "nesterov"), "saved"] == pytest.approx(1 - 2 / 3, abs=0.05)


def test_rows_count_their_seeds(rows):
    assert set(rows["seeds"]) == {2}


def test_setting_with_another_slowdown_is_changed(rows):
    assert rows.loc[(LONGER_WARMUP, "basis-rotation"), "is_changed"]


@pytest.mark.parametrize("setting", [PRESET, UNCHANGED])
def test_setting_with_the_same_slowdown_is_unchanged(rows, setting):
    assert not rows.loc[setting, "is_changed"].any()


def test_unknown_slowdown_is_not_changed(tmp_path):
    """With the changed setting, one of the runs without delay diverged. It counts with all its
    iterations, and all three ratios are about 7 / 8."""
    method = {"optimizer.method": "basis-rotation", "optimizer.lr": 1e-3}
    usual, changed = ({**method, **SETTINGS[setting]} for setting in (PRESET, UNCHANGED))
    for settings, slowness in ((usual, 2.0), (changed, 0.875)):
        without_delay = {**settings, "pipeline.stages": 1}
        write_experiment(tmp_path, "laptop", without_delay, seeds=(0, 1, 2))
        delayed = {**settings, **UNDER_DELAY}
        write_experiment(tmp_path, "laptop", delayed, seeds=(0, 1, 2), slowness=slowness)
    write_experiment(tmp_path, "laptop", without_delay, seeds=(2,), status="diverged")
    write_experiment(tmp_path, "laptop", delayed, seeds=(2,), slowness=2.0)
    rows = study(load([tmp_path])).set_index("setting")
    assert math.isnan(rows.loc[UNCHANGED, "ratio"])
    assert not rows.loc[UNCHANGED, "is_changed"]


def test_committed_runs_are_drawn(tmp_path):
    suffixes = [path.suffix for path in draw_similarity(RUNS, tmp_path / "similarity")]
    assert suffixes[:2] == [".png", ".pdf"]


def test_committed_runs_have_a_table(capsys):
    assert main(["tables", "similarity", "--format", "csv"]) == 0
    assert "laptop preset" in capsys.readouterr().out


def test_missing_folder_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="results/similarity: no such folder"):
        load_study(RUNS)


@pytest.mark.parametrize(
    ("ours", "nesterov", "title"),
    [
        ((2.0, 4.0), (3.0, 5.0), "Basis rotation: least slowed down in 2 of 2 settings"),
        ((2.0, 4.0), (3.0, math.nan), "Basis rotation: least slowed down in 2 of 2 settings"),
        ((2.0, math.nan), (3.0, math.nan), "Basis rotation: least slowed down in 1 of 1 setting"),
        ((math.nan, math.nan), (math.nan, math.nan), ""),
    ],
)
def test_title_is_the_least_slowed_down(ours, nesterov, title):
    rows = []
    for method, ratios in (("basis-rotation", ours), ("nesterov", nesterov)):
        for setting, ratio in zip("ab", ratios, strict=True):
            row = {"setting": setting, "method": method, "ratio": ratio, "is_censored": False}
            rows.append(row)
    assert least_slowed_down(pd.DataFrame(rows)) == title


def test_lower_bound_is_not_the_least_slowdown():
    bound = {"setting": "a", "method": "nesterov", "ratio": 2.0, "is_censored": True}
    known = {"setting": "a", "method": "basis-rotation", "ratio": 3.0, "is_censored": False}
    assert least_slowed_down(pd.DataFrame([bound, known])) == ""
