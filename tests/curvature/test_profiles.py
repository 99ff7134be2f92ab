"""Delay profiles on made-up runs: which run, which delay and which norm each point is from, and the figure."""

import math
from pathlib import Path

import numpy as np
import pytest

from brx.cli.main import main
from brx.config.loading import PRESETS
from brx.curvature.effective_delay import profile_points, profile_table, profile_text, rank_correlation
from brx.curvature.norm_result import result_path
from brx.errors import UserError
from brx.runs.frames import load
from brx.sweep.spec import Sweep
from tests.curvature.helpers import norm_result
from tests.paper.helpers import write_experiment

PROFILES = {
    "4 x 8": 4,
    "8 x 4, 0 x 4": [8, 8, 8, 8, 0, 0, 0, 0],
    "0 x 4, 8 x 4": [0, 0, 0, 0, 8, 8, 8, 8],
    "32, 0 x 7": [32, 0, 0, 0, 0, 0, 0, 0],
}
SLOWNESS = {"4 x 8": 4.0, "8 x 4, 0 x 4": 6.0, "0 x 4, 8 x 4": 4.5, "32, 0 x 7": 12.0}
SQUARES = [4.0, 3.0, 2.0, 1.0, 1.0, 1.0, 1.0, 1.0]
"""Sums of the squared row norms of the eight blocks, one per stage; embedding and head have none."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """AdamW, twice as slow as basis rotation under every profile, at two rates; the higher one is better."""
    folder = tmp_path_factory.mktemp("profiles")
    for method, factor in (("pipedream", 2.0), ("basis-rotation", 1.0)):
        for lr, val_loss in ((0.001, 2.0), (0.003, 1.0)):
            common = {"optimizer.method": method, "optimizer.lr": lr}
            write_experiment(folder, "compare", {"pipeline.stages": 1, **common}, slowness=1.0, val_loss=val_loss)
            for profile, delay in PROFILES.items():
                settings = {"pipeline.stages": 8, "pipeline.delay": delay, **common}
                slowness = factor * SLOWNESS[profile] if lr == 0.003 else 1.0
                write_experiment(folder, "compare", settings, slowness=slowness, val_loss=val_loss)
    runs = load(folder)
    best = runs[(runs["pipeline.stages"] == 1) & (runs["optimizer.lr"] == 0.003)]
    for name, method in zip(best["name"], best["method"], strict=True):
        space, norm = ("rotated", 10.0) if method == "basis-rotation" else ("original", 40.0)
        squares = [0.0, *SQUARES, 0.0]
        result = norm_result(folder / name, method, 1, 4000, space, 100, norm, squares)
        result.write(result_path(folder / name, space, 4000))
    return folder


def test_points_are_the_profiles_at_their_best_rates(folder):
    points = profile_points(load(folder))
    assert {(point.method, point.profile) for point in points} == {
        (method, profile) for method in ("pipedream", "basis-rotation") for profile in PROFILES
    }
    total = sum(SQUARES)
    taus = {
        "4 x 8": 4.0,
        "8 x 4, 0 x 4": math.sqrt(64 * (4 + 3 + 2 + 1) / total),
        "0 x 4, 8 x 4": math.sqrt(64 * 4 / total),
        "32, 0 x 7": math.sqrt(32**2 * 4 / total),
    }
    for point in points:
        factor, norm = (2.0, 0.4) if point.method == "pipedream" else (1.0, 0.1)
        assert point.slowdown["lr"] == 0.003
        assert point.effective.delay == pytest.approx(taus[point.profile])
        assert point.product == pytest.approx(norm * taus[point.profile])
        # 3 / (1 + t / (100 slowness)) reaches every loss after iterations in proportion to the slowness.
        assert point.ratio == pytest.approx(factor * SLOWNESS[point.profile], rel=0.01)


def test_correlations_tell_the_predictors_apart(folder):
    points = profile_points(load(folder))
    by_delay = [point.effective.delay for point in points]
    by_product = [point.product for point in points]
    for method in ("pipedream", "basis-rotation"):
        own = [place for place, point in enumerate(points) if point.method == method]
        assert rank_correlation([points[i] for i in own], [by_delay[i] for i in own]) == pytest.approx(1.0)
    assert rank_correlation(points, by_product) > rank_correlation(points, by_delay)
    assert np.isnan(rank_correlation(points[:2], by_delay[:2]))


def test_figure_and_caption_through_the_command(folder, tmp_path, capsys):
    assert main(["plot", "profiles", str(folder), "--out", str(tmp_path / "profiles")]) == 0
    assert [Path(line).suffix for line in capsys.readouterr().out.splitlines()] == [".png", ".pdf", ".svg", ".txt"]
    caption = (tmp_path / "profiles.txt").read_text()
    assert caption.count("Spearman correlation with") == 2
    assert len(profile_table(profile_points(load(folder)))) == 8
    assert "| pipedream | 32, 0 x 7 |" in caption


def test_exported_runs_draw_the_same(folder, tmp_path):
    assert main(["export", str(folder), "--to", str(tmp_path / "kept")]) == 0
    texts = [profile_table(profile_points(load(where))).to_csv() for where in (folder, tmp_path / "kept")]
    assert texts[0] == texts[1]


def test_runs_that_do_not_compare_are_named(folder, tmp_path, capsys):
    shorter = {"training.iterations": 2000, "pipeline.stages": 1}
    write_experiment(tmp_path / "other", "compare", shorter)
    (other,) = (tmp_path / "other").iterdir()
    assert main(["plot", "profiles", str(folder), str(other), "--out", str(tmp_path / "figure")]) == 0
    note = capsys.readouterr().err.replace("\n", " ")
    assert f"left out, since they differ from the rest in iterations: {other.name}" in note


def test_what_is_missing_is_one_line(tmp_path, capsys):
    write_experiment(tmp_path, "compare", {"pipeline.stages": 1})
    assert main(["plot", "profiles", str(tmp_path)]) == 2
    assert "no method has a run without delay and one with" in capsys.readouterr().err
    write_experiment(tmp_path, "compare", {"pipeline.stages": 8, "pipeline.delay": 4}, slowness=2.0)
    with pytest.raises(UserError, match=r"has no norm in original coordinates; run `brx hessian-norm .*` first"):
        profile_points(load(tmp_path))
    assert main(["plot", "profiles"]) == 2
    assert "RUN: name at least one run's folder" in capsys.readouterr().err


def test_the_sweep_has_one_mean_delay():
    sweep = Sweep.load(PRESETS / "sweeps" / "lab" / "profiles.yaml")
    delays = [cell.config.pipeline.delay for cell in sweep.cells if cell.config.pipeline.stages > 1]
    means = {np.mean(delay if isinstance(delay, list) else [delay]) for delay in delays}
    assert means == {4.0}
    assert len(sweep.cells) == 14


def test_equal_neighbours_are_written_together():
    assert profile_text([4] * 8) == "4 x 8"
    assert profile_text([0, 0, 0, 32, 0]) == "0 x 3, 32, 0"
