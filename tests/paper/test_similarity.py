"""The study of similarity: settings of known slowdowns, and the figure and table of the committed
runs."""

import math

import pandas as pd
import pytest

from brx.cli.main import main
from brx.errors import UserError
from brx.paper.scales import LADDER_METHODS
from brx.paper.similarity import (
    RUNS,
    SETTINGS,
    draw_study,
    least_slowed_down,
    load_study,
    study,
    study_table,
)
from brx.runs.frames import load
from tests.paper.helpers import write_experiment

UNDER_DELAY = {"pipeline.stages": 8, "pipeline.delay.like": 32}


def test_each_setting_has_the_slowdowns_of_its_own_runs(tmp_path):
    """They are 2, 3, 4 at the preset's rate; 1.5 times less with a warm-up of 31 tau, where one run
    is missing."""
    for setting, factor in (
        ("laptop preset", 1.0),
        ("warm-up 31 tau", 1 / 1.5),
        ("beta2 0.99", 1.0),
    ):
        for method, slowness in zip(LADDER_METHODS, (2, 3, 4), strict=True):
            settings = {"optimizer.method": method, "optimizer.lr": 1e-3, **SETTINGS[setting]}
            if method != "nesterov" or setting != "warm-up 31 tau":
                write_experiment(
                    tmp_path, "laptop", {**settings, "pipeline.stages": 1}, seeds=(0, 1)
                )
            write_experiment(
                tmp_path,
                "laptop",
                {**settings, **UNDER_DELAY},
                seeds=(0, 1),
                slowness=slowness * factor,
            )
    # A rate that is better on one side only: it counts in the row of chosen rates alone.
    settings = {"optimizer.method": "nesterov", "optimizer.lr": 3e-3, **UNDER_DELAY}
    write_experiment(tmp_path, "laptop", settings, seeds=(0, 1), slowness=1.2, val_loss=0.1)
    frame = study(load([tmp_path]))
    table = study_table(frame).set_index("setting")
    assert list(table.index) == [
        "laptop preset",
        "each side's best rate",
        "warm-up 31 tau",
        "beta2 0.99",
    ]
    assert (
        table.loc["warm-up 31 tau", "slowdown: nesterov"] == "-"
    )  # it has no run without delay there
    rows = frame.set_index(["setting", "method"])
    for method, slowness in zip(LADDER_METHODS, (2, 3, 4), strict=True):
        assert rows.loc[("laptop preset", method), "ratio"] == pytest.approx(slowness, rel=0.05)
    assert rows.loc[("warm-up 31 tau", "pipedream-lr"), "ratio"] == pytest.approx(4 / 1.5, rel=0.05)
    assert rows.loc[("each side's best rate", "nesterov"), "ratio"] == pytest.approx(1.2, rel=0.05)
    for setting in ("laptop preset", "beta2 0.99"):
        assert rows.loc[(setting, "nesterov"), "saved"] == pytest.approx(1 - 2 / 3, abs=0.05)
    assert set(rows["seeds"]) == {2}
    assert rows.loc[("warm-up 31 tau", "basis-rotation"), "is_changed"]
    assert not rows.loc[["laptop preset", "beta2 0.99"], "is_changed"].any()


def test_committed_runs_are_drawn(tmp_path, capsys, monkeypatch):
    assert [path.suffix for path in draw_study(RUNS, tmp_path / "similarity")][:2] == [
        ".png",
        ".pdf",
    ]
    assert main(["tables", "similarity", "--format", "csv"]) == 0
    assert "laptop preset" in capsys.readouterr().out
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="results/similarity: no such folder"):
        load_study(RUNS)


@pytest.mark.parametrize(
    ("ours", "nesterov", "title"),
    [
        ((2.0, 4.0), (3.0, 5.0), "Basis rotation: least slowed down in 2 of 2 settings"),
        ((2.0, 4.0), (3.0, math.nan), "Basis rotation: least slowed down in 2 of 2 settings"),
        ((2.0, math.nan), (3.0, math.nan), "Basis rotation: least slowed down in 1 of 1 settings"),
        ((math.nan, math.nan), (math.nan, math.nan), ""),
    ],
)
def test_title_is_the_least_slowed_down(ours, nesterov, title):
    rows = []
    for method, ratios in (("basis-rotation", ours), ("nesterov", nesterov)):
        for setting, ratio in zip("ab", ratios, strict=True):
            rows.append({"setting": setting, "method": method, "ratio": ratio})
    assert least_slowed_down(pd.DataFrame(rows)) == title
