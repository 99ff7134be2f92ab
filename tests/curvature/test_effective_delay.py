"""The effective delay in closed form, its error by simulation, its table with slowdowns, delay
profiles, the commands."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from brx.cli.main import main
from brx.curvature import effective_delay as delays
from brx.errors import UserError
from brx.files import write_json
from brx.pipeline.delay import StageDelay
from brx.runs.frames import load
from tests.curvature.helpers import norm_result
from tests.paper.helpers import write_experiment


def result_with(squares, covariance=None):
    """A measurement of a model of four blocks with these sums of squared row norms."""
    return norm_result("run", "pipedream", 4, 10, "original", 6, 6.0, squares, covariance)


@pytest.mark.parametrize(
    ("squares", "stages", "taus", "squared"),
    [
        (
            [0, 5, 0, 0, 0, 0],
            4,
            None,
            9,
        ),  # one stage of four with all of the curvature: tau' is its delay
        ([0, 0, 0, 0, 2, 3], 4, None, 0),
        ([1, 2, 3, 4, 5, 6], 4, None, (9 * (1 + 2) + 4 * 3 + 1 * 4) / 21),
        (
            [1, 2, 3, 4, 5, 6],
            3,
            None,
            (4 * (1 + 2) + 1 * 3) / 21,
        ),  # stages of one, one and two blocks
        (
            [1, 2, 3, 4, 5, 6],
            4,
            (0, 6, 0, 2),
            (9 * 3 + 1 * (5 + 6)) / 21,
        ),  # of two micro-batches per update
    ],
)
def test_closed_form(squares, stages, taus, squared):
    by_stage = taus and [StageDelay(tau, 2) for tau in taus]
    assert delays.effective_delay(result_with(squares), stages, by_stage).delay == pytest.approx(
        math.sqrt(squared)
    )
    assert delays.uniform_effective_delay(4) == pytest.approx(math.sqrt((9 + 4 + 1) / 4))
    with pytest.raises(UserError, match="--stages 5: must be from 1 to the model's 4 blocks"):
        delays.effective_delay(result_with([1] * 6), 5)


def test_standard_error_is_that_of_noisy_sums():
    rng = np.random.default_rng(0)
    squares = np.array([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    root = 0.02 * rng.standard_normal((6, 6))
    noisy = [
        delays.effective_delay(result_with(squares + root @ rng.standard_normal(6)), 4).delay
        for _ in range(2000)
    ]
    found = delays.effective_delay(result_with(squares, (root @ root.T).tolist()), 4)
    assert found.standard_error == pytest.approx(np.std(noisy), rel=0.1)


def test_slowdown_is_against_the_run_without_delay(tmp_path, capsys):
    for stages in (1, 4):
        write_experiment(
            tmp_path / "runs", "quick", {"pipeline.stages": stages}
        )  # as many times slower
    runs = load(tmp_path / "runs")
    fresh, late = map(Path, runs.sort_values("pipeline.stages").index)
    command = ["effective-delay", str(fresh), str(late)]
    assert main(command) == 2
    assert f"run `brx hessian-norm {fresh}` first" in capsys.readouterr().err
    result = norm_result(late, "pipedream", 4, 30, "original", 6, 6.0, [0, *SQUARES, 0])
    result.write(late)
    [point] = delays.measured_points(runs, [result])[0].to_dict("records")
    assert point["profile"] == "3, 2, 1, 0"
    assert (point["ratio"], point["tau"]) == pytest.approx(
        (4.0, math.sqrt((9 * 7 + 4 * 3 + 2) / 14)), rel=0.02
    )
    assert delays.measured_points(runs[runs["pipeline.stages"] > 1], [result])[
        0
    ].empty  # no run without delay
    assert main([*command, "--out", str(tmp_path / "figure")]) == 0
    assert "slowdown" in capsys.readouterr().out
    assert all(text in (tmp_path / "figure.json").read_text() for text in ("tau'", "3, 2, 1, 0"))
    for run, status, expected in ((late, "diverged", [True]), (fresh, "interrupted", [])):
        write_json(
            run / "summary.json",
            json.loads((run / "summary.json").read_text()) | {"status": status},
        )
        points = delays.measured_points(load(tmp_path / "runs"), [result])[0]
        assert [
            text.startswith("> ") for text in delays.profile_table(points).get("slowdown", [])
        ] == expected


SQUARES = [4.0, 3.0, 2.0, 1.0, 1.0, 1.0, 1.0, 1.0]
"""Sums of the squared row norms of the eight blocks, one per stage; embedding and head have none.
"""
# By the profile's text: the delays, how many times slower training is, and tau'.
PROFILES = {
    "4 x 8": (4, 4.0, 4.0),
    "8 x 4, 0 x 4": ([8, 8, 8, 8, 0, 0, 0, 0], 6.0, math.sqrt(64 * (4 + 3 + 2 + 1) / 14)),
    "0 x 4, 8 x 4": ([0, 0, 0, 0, 8, 8, 8, 8], 4.5, math.sqrt(64 * 4 / 14)),
    "32, 0 x 7": ([32, 0, 0, 0, 0, 0, 0, 0], 12.0, math.sqrt(32**2 * 4 / 14)),
}
# Of a method: how many times slower than basis rotation, the coordinates of its steps, and its norm
#     per parameter.
METHODS = {"pipedream": (2.0, "original", 0.4), "basis-rotation": (1.0, "rotated", 0.1)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """AdamW and basis rotation without delay and under every profile, at two rates; the higher one
    is better."""
    folder = tmp_path_factory.mktemp("profiles")
    for method, (factor, _, _) in METHODS.items():
        for lr, val_loss in ((0.001, 2.0), (0.003, 1.0)):
            common = {"optimizer.method": method, "optimizer.lr": lr}
            write_experiment(
                folder, "compare", {"pipeline.stages": 1, **common}, slowness=1.0, val_loss=val_loss
            )
            for delay, slowness, _ in PROFILES.values():
                settings = {"pipeline.stages": 8, "pipeline.delay": delay, **common}
                write_experiment(
                    folder,
                    "compare",
                    settings,
                    slowness=factor * slowness * lr / 3e-3,
                    val_loss=val_loss,
                )
    runs = load(folder)
    best = runs[(runs["pipeline.stages"] == 1) & (runs["optimizer.lr"] == 0.003)]
    for run, method in zip(best.index, best["method"], strict=True):
        _, space, norm = METHODS[method]
        norm_result(run, method, 1, 4000, space, 100, 100 * norm, [0.0, *SQUARES, 0.0]).write(
            Path(run)
        )
    return folder


def test_points_are_the_profiles_at_their_best_rates_and_correlations_tell_the_predictors_apart(
    folder,
):
    frame = delays.profile_points(load(folder))
    points = frame.set_index(["method", "profile"])
    assert set(points.index) == {(method, profile) for method in METHODS for profile in PROFILES}
    for (method, profile), point in points.iterrows():
        (factor, _, norm), (_, slowness, tau) = METHODS[method], PROFILES[profile]
        assert point["lr"] == 0.003
        assert (point["tau"], point["product"]) == pytest.approx((tau, norm * tau))
        # 3 / (1 + t / (100 slowness)) reaches every loss after iterations in proportion to the
        # slowness.
        assert point["ratio"] == pytest.approx(factor * slowness, rel=0.01)
    for _, own in frame.groupby("method"):
        assert delays.rank_correlation(own, "tau") == pytest.approx(1.0)
    assert delays.rank_correlation(frame, "product") > delays.rank_correlation(frame, "tau")
    assert np.isnan(delays.rank_correlation(frame[:2], "tau"))


def test_figure_of_exported_runs_names_those_that_do_not_compare(folder, tmp_path, capsys):
    assert main(["export", str(folder), "--to", str(tmp_path / "kept")]) == 0
    tables = [
        delays.profile_table(delays.profile_points(load(where)))
        for where in (folder, tmp_path / "kept")
    ]
    assert tables[0].equals(tables[1])
    write_experiment(
        tmp_path / "other", "compare", {"training.iterations": 2000, "pipeline.stages": 1}
    )
    (other,) = (tmp_path / "other").iterdir()
    capsys.readouterr()
    assert (
        main(
            [
                "plot",
                "profiles",
                str(tmp_path / "kept"),
                str(other),
                "--out",
                str(tmp_path / "profiles"),
            ]
        )
        == 0
    )
    assert f"differ from the rest in iterations: {other.name}" in capsys.readouterr().err.replace(
        "\n", " "
    )
    caption = (tmp_path / "profiles.json").read_text()
    assert caption.count("Spearman correlation with") == 2
    assert '"32, 0 x 7"' in caption


def test_runs_whose_settings_are_no_variant_stay_apart(tmp_path):
    for warmup, stages, slowness in ((0.1, 1, 1.0), (0.1, 8, 2.0), (0.2, 1, 1.0), (0.2, 8, 3.0)):
        settings = {
            "optimizer.method": "pipedream-lr",
            "training.warmup_fraction": warmup,
            "pipeline.stages": stages,
        }
        write_experiment(tmp_path, "compare", settings, slowness=slowness)
    runs = load(tmp_path)
    run = Path(runs.index[0])
    norm_result(run, "pipedream-lr", 1, 4000, "original", 100, 40.0, [0.0, *SQUARES, 0.0]).write(
        run
    )
    assert sorted(delays.profile_points(runs)["ratio"]) == pytest.approx([2, 3], rel=0.02)
    with pytest.raises(UserError, match="pipedream-lr has runs with several settings"):
        delays.strategy_slowdowns(runs)
    with pytest.raises(UserError, match="has no norm in original"):
        delays._norm_of("pipedream-lr", runs[1:].assign(architecture="another model"), runs)


def test_what_is_missing_is_one_line(tmp_path, capsys):
    write_experiment(tmp_path, "compare", {"pipeline.stages": 1})
    assert main(["plot", "profiles", str(tmp_path)]) == 2
    assert "no method has a run without delay and one with" in capsys.readouterr().err
    write_experiment(tmp_path, "compare", {"pipeline.stages": 8, "pipeline.delay": 4}, slowness=2.0)
    with pytest.raises(
        UserError, match=r"has no norm in original coordinates; run `brx hessian-norm .*` first"
    ):
        delays.profile_points(load(tmp_path))
    assert main(["plot", "profiles"]) == 2
    assert "RUN: name at least one run's folder" in capsys.readouterr().err
