"""The effective delay against closed forms, its error against simulation, and slowdowns under delay
profiles."""

import json
import math
from itertools import product
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
        # All of the curvature is in one stage of four: tau' is its delay.
        ([0, 5, 0, 0, 0, 0], 4, None, 9),
        ([0, 0, 0, 0, 2, 3], 4, None, 0),
        ([1, 2, 3, 4, 5, 6], 4, None, (9 * (1 + 2) + 4 * 3 + 1 * 4) / 21),
        # Stages of one, one and two blocks.
        ([1, 2, 3, 4, 5, 6], 3, None, (4 * (1 + 2) + 1 * 3) / 21),
        # Delays in micro-batches, two per update.
        ([1, 2, 3, 4, 5, 6], 4, (0, 6, 0, 2), (9 * 3 + 1 * (5 + 6)) / 21),
    ],
)
def test_closed_form(squares, stages, taus, squared):
    by_stage = taus and [StageDelay(tau, 2) for tau in taus]
    found = delays.effective_delay(result_with(squares), stages, by_stage)
    assert found.delay == pytest.approx(math.sqrt(squared))


def test_closed_form_of_equal_stages():
    assert delays.uniform_effective_delay(4) == pytest.approx(math.sqrt((9 + 4 + 1) / 4))


def test_more_stages_than_blocks_are_refused():
    with pytest.raises(UserError, match="--stages 5: must be from 1 to the model's 4 blocks"):
        delays.effective_delay(result_with([1] * 6), 5)


def test_standard_error_matches_simulated_noise():
    rng = np.random.default_rng(0)
    squares = np.array([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    root = 0.02 * rng.standard_normal((6, 6))
    noisy = [
        delays.effective_delay(result_with(squares + root @ rng.standard_normal(6)), 4).delay
        for _ in range(2000)
    ]
    found = delays.effective_delay(result_with(squares, (root @ root.T).tolist()), 4)
    assert found.standard_error == pytest.approx(np.std(noisy), rel=0.1)


# One method without delay and with it.

SQUARES = [4.0, 3.0, 2.0, 1.0, 1.0, 1.0, 1.0, 1.0]
"""Sums of the squared row norms of the eight blocks; embedding and head have none."""


@pytest.fixture
def ends(tmp_path):
    """A run without delay, and one with four stages that takes four times as long."""
    folder = tmp_path / "runs"
    for stages in (1, 4):
        write_experiment(folder, "quick", {"pipeline.stages": stages})
    fresh, late = map(Path, load(folder).sort_values("pipeline.stages").index)
    return fresh, late


@pytest.fixture
def measured(ends):
    """The norm of the run with delay, which is also in its folder."""
    _, late = ends
    result = norm_result(late, "pipedream", 4, 30, "original", 6, 6.0, [0, *SQUARES, 0])
    result.write(late)
    return result


def set_status(run, status):
    summary = json.loads((run / "summary.json").read_text())
    write_json(run / "summary.json", summary | {"status": status})


def points_of(ends, measured):
    fresh, _ = ends
    points, _ = delays.measured_points(load(fresh.parent), [measured])
    return points


def test_command_asks_for_a_missing_norm(ends, capsys):
    fresh, late = ends
    assert main(["effective-delay", str(fresh), str(late)]) == 2
    assert f"run `brx hessian-norm {fresh}` first" in capsys.readouterr().err


def test_slowdown_is_against_the_run_without_delay(ends, measured):
    [point] = points_of(ends, measured).to_dict("records")
    assert point["ratio"] == pytest.approx(4.0, rel=0.02)


def test_profile_has_the_delay_of_each_stage(ends, measured):
    [point] = points_of(ends, measured).to_dict("records")
    assert point["profile"] == "3, 2, 1, 0"


def test_effective_delay_weighs_the_stages(ends, measured):
    [point] = points_of(ends, measured).to_dict("records")
    # Two blocks per stage: 4 + 3, 2 + 1, 1 + 1, 1 + 1.
    assert point["tau"] == pytest.approx(math.sqrt((9 * 7 + 4 * 3 + 2) / 14))


def test_no_points_without_an_undelayed_run(ends, measured):
    fresh, _ = ends
    runs = load(fresh.parent)
    points, why = delays.measured_points(runs[runs["pipeline.stages"] > 1], [measured])
    assert points.empty
    assert "no method has a run without delay" in why


def test_command_prints_slowdowns(ends, measured, capsys):
    assert main(["effective-delay", *map(str, ends)]) == 0
    assert "slowdown" in capsys.readouterr().out


def test_figure_has_the_numbers_in_its_details(ends, measured, tmp_path):
    assert main(["effective-delay", *map(str, ends), "--out", str(tmp_path / "figure")]) == 0
    details = json.loads((tmp_path / "figure.json").read_text())
    [row] = details["slowdowns"]
    assert row["delays"] == "3, 2, 1, 0"


def test_diverged_run_has_a_lower_bound(ends, measured):
    _, late = ends
    set_status(late, "diverged")
    [text] = delays.profile_table(points_of(ends, measured))["slowdown"]
    assert text.startswith("> ")


def test_interrupted_reference_leaves_no_points(ends, measured):
    fresh, _ = ends
    set_status(fresh, "interrupted")
    assert points_of(ends, measured).empty


# Two methods under several delay profiles.

# By the profile's text: the delays, how many times slower training is, and tau'.
PROFILES = {
    "4 x 8": (4, 4.0, 4.0),
    "8 x 4, 0 x 4": ([8, 8, 8, 8, 0, 0, 0, 0], 6.0, math.sqrt(64 * (4 + 3 + 2 + 1) / 14)),
    "0 x 4, 8 x 4": ([0, 0, 0, 0, 8, 8, 8, 8], 4.5, math.sqrt(64 * 4 / 14)),
    "32, 0 x 7": ([32, 0, 0, 0, 0, 0, 0, 0], 12.0, math.sqrt(32**2 * 4 / 14)),
}
# For each method: how many times slower it is than basis rotation, the coordinates of its steps,
# and its norm per parameter.
METHODS = {"pipedream": (2.0, "original", 0.4), "basis-rotation": (1.0, "rotated", 0.1)}
BEST_RATE = 0.003


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """AdamW and basis rotation without delay and under every profile, at two learning rates. The
    runs without delay at the better rate have measured norms. Read only."""
    folder = tmp_path_factory.mktemp("profiles")
    for method in METHODS:
        for lr, val_loss in ((0.001, 2.0), (BEST_RATE, 1.0)):
            write_profiles(folder, method, lr, val_loss)
    runs = load(folder)
    best = runs[(runs["pipeline.stages"] == 1) & (runs["optimizer.lr"] == BEST_RATE)]
    for run, method in zip(best.index, best["method"], strict=True):
        _, space, norm = METHODS[method]
        result = norm_result(run, method, 1, 4000, space, 100, 100 * norm, [0.0, *SQUARES, 0.0])
        result.write(Path(run))
    return folder


def write_profiles(folder, method, lr, val_loss):
    """A method's runs at one rate: without delay, and under every profile."""
    factor, _, _ = METHODS[method]
    settings = {"optimizer.method": method, "optimizer.lr": lr}
    undelayed = {"pipeline.stages": 1, **settings}
    write_experiment(folder, "compare", undelayed, slowness=1.0, val_loss=val_loss)
    for delay, slowness, _ in PROFILES.values():
        delayed = {"pipeline.stages": 8, "pipeline.delay": delay, **settings}
        slowness *= factor * lr / BEST_RATE
        write_experiment(folder, "compare", delayed, slowness=slowness, val_loss=val_loss)


@pytest.fixture(scope="module")
def frame(folder):
    return delays.profile_points(load(folder))


@pytest.fixture(scope="module")
def point_by_place(frame):
    """The points by method and profile."""
    return frame.set_index(["method", "profile"]).to_dict("index")


def test_every_method_has_every_profile(point_by_place):
    assert set(point_by_place) == set(product(METHODS, PROFILES))


def test_points_are_at_the_best_rate(frame):
    assert (frame["lr"] == BEST_RATE).all()


def test_points_have_their_effective_delays(point_by_place):
    for (_, profile), point in point_by_place.items():
        _, _, tau = PROFILES[profile]
        assert point["tau"] == pytest.approx(tau)


def test_product_is_delay_times_norm(point_by_place):
    for (method, profile), point in point_by_place.items():
        _, _, norm = METHODS[method]
        _, _, tau = PROFILES[profile]
        assert point["product"] == pytest.approx(norm * tau)


def test_slowdown_of_each_profile(point_by_place):
    for (method, profile), point in point_by_place.items():
        factor, _, _ = METHODS[method]
        _, slowness, _ = PROFILES[profile]
        # 3 / (1 + t / (100 slowness)) reaches every loss after iterations in proportion to the
        # slowness.
        assert point["ratio"] == pytest.approx(factor * slowness, rel=0.01)


def test_delay_orders_the_slowdowns_of_one_method(frame):
    for _, own in frame.groupby("method"):
        assert delays.rank_correlation(own, "tau") == pytest.approx(1.0)


def test_product_predicts_both_methods_better(frame):
    assert delays.rank_correlation(frame, "product") > delays.rank_correlation(frame, "tau")


def test_two_points_have_no_correlation(frame):
    assert np.isnan(delays.rank_correlation(frame[:2], "tau"))


@pytest.fixture(scope="module")
def exported(folder, tmp_path_factory):
    """The same runs in the compact form."""
    target = tmp_path_factory.mktemp("exported") / "kept"
    assert main(["export", str(folder), "--to", str(target)]) == 0
    return target


def test_exported_runs_give_the_same_table(frame, exported):
    own = delays.profile_table(frame)
    assert own.equals(delays.profile_table(delays.profile_points(load(exported))))


def test_figure_names_runs_that_do_not_compare(exported, tmp_path, capsys):
    settings = {"training.iterations": 2000, "pipeline.stages": 1}
    write_experiment(tmp_path / "other", "compare", settings)
    (other,) = (tmp_path / "other").iterdir()
    figure = str(tmp_path / "profiles")
    assert main(["plot", "profiles", str(exported), str(other), "--out", figure]) == 0
    told = capsys.readouterr().err.replace("\n", " ")
    assert f"different from the rest in iterations: {other.name}" in told


def test_figure_of_profiles_has_its_details(exported, tmp_path):
    assert main(["plot", "profiles", str(exported), "--out", str(tmp_path / "profiles")]) == 0
    details = json.loads((tmp_path / "profiles.json").read_text())
    assert len(details["correlations"]) == 2
    assert {row["delays"] for row in details["profiles"]} == set(PROFILES)


# Settings that variants' names do not tell apart.


@pytest.fixture
def two_warmups(tmp_path):
    """Runs of one method with two warm-ups; without delay and with it, twice and three times as
    slow."""
    for warmup, stages, slowness in ((0.1, 1, 1.0), (0.1, 8, 2.0), (0.2, 1, 1.0), (0.2, 8, 3.0)):
        settings = {
            "optimizer.method": "pipedream-lr",
            "training.warmup_fraction": warmup,
            "pipeline.stages": stages,
        }
        write_experiment(tmp_path, "compare", settings, slowness=slowness)
    return load(tmp_path)


def test_points_keep_settings_apart(two_warmups):
    run = Path(two_warmups.index[0])
    squares = [0.0, *SQUARES, 0.0]
    norm_result(run, "pipedream-lr", 1, 4000, "original", 100, 40.0, squares).write(run)
    assert sorted(delays.profile_points(two_warmups)["ratio"]) == pytest.approx([2, 3], rel=0.02)


def test_strategy_with_several_settings_is_refused(two_warmups):
    with pytest.raises(UserError, match="pipedream-lr has runs with several settings"):
        delays.strategy_slowdowns(two_warmups)


def test_norm_of_another_model_does_not_count(two_warmups):
    run = Path(two_warmups.index[0])
    squares = [0.0, *SQUARES, 0.0]
    norm_result(run, "pipedream-lr", 1, 4000, "original", 100, 40.0, squares).write(run)
    others = two_warmups[1:].assign(architecture="another model")
    with pytest.raises(UserError, match="has no norm in original"):
        delays._norm_of("pipedream-lr", others, two_warmups)


# What is missing.


def test_profiles_need_a_run_with_delay(tmp_path, capsys):
    write_experiment(tmp_path, "compare", {"pipeline.stages": 1})
    assert main(["plot", "profiles", str(tmp_path)]) == 2
    assert "no method has a run without delay and one with" in capsys.readouterr().err


def test_profiles_need_a_norm(tmp_path):
    write_experiment(tmp_path, "compare", {"pipeline.stages": 1})
    write_experiment(tmp_path, "compare", {"pipeline.stages": 8, "pipeline.delay": 4}, slowness=2.0)
    refusal = r"has no norm in original coordinates; run `brx hessian-norm .*` first"
    with pytest.raises(UserError, match=refusal):
        delays.profile_points(load(tmp_path))


def test_profiles_need_a_folder(capsys):
    assert main(["plot", "profiles"]) == 2
    assert "RUN: name at least one run's folder" in capsys.readouterr().err
