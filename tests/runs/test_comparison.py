"""Runs on made-up loss curves whose crossings are known: experiments, comparison, tables, reading
and compact files."""

import json
import shutil
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

from brx.cli.main import main
from brx.errors import UserError
from brx.files import write_json
from brx.plot.any_runs import draw_curves
from brx.runs.comparison import compare, reductions, slowdowns
from brx.runs.experiments import at_best_rates, notes, tried_rates
from brx.runs.frames import Run, load
from brx.runs.metrics import LOSS_STEPS, export
from brx.runs.tables import slowdown_text
from tests.runs.helpers import ITERATIONS, write_metrics, write_run


def write_pipelines(folder, crossings, *overrides, **more):
    """A run per number of stages and seed, by where each crosses 3 (and its status)."""
    for P, ats in crossings.items():
        for seed, at in enumerate(ats if isinstance(ats, list) else [ats]):
            at, status = at if isinstance(at, tuple) else (at, "finished")
            settings = (f"pipeline.stages={P}", f"training.seed={seed}", *overrides)
            write_run(folder, f"p{P}s{seed}", *settings, crosses_3_at=at, status=status, **more)


def best(folder):
    return at_best_rates(load(folder / "runs"))


def slowdown_command(capsys, folder, *arguments, code=0):
    assert main(["slowdown", str(folder / "runs"), *arguments]) == code
    return capsys.readouterr()


def slowdowns_in_json(*arguments):
    return json.loads(slowdown_command(*arguments, "--format", "json").out)["slowdowns"]


def test_a_delay_profile_is_compared_with_the_run_without_delay(tmp_path):
    write_pipelines(tmp_path, {1: 50.5, 4: 100.5})
    function = f"{{function: {Path(__file__).parents[2] / 'examples/delays/internet.py'}:jitter}}"
    for name, profile, at in (
        ("a", "[0, 0, 0, 6]", 150.5),
        ("b", "{like: 9}", 200.5),
        ("c", function, 300.5),
    ):
        write_run(tmp_path, name, "pipeline.stages=4", f"pipeline.delay={profile}", crosses_3_at=at)
    found = compare(best(tmp_path), 3.0)
    assert not found.notes
    assert {
        (row["method"], row["stages"]): row["ratio"] for row in found.slowdowns.to_dict("records")
    } == {
        ("pipedream", 4): pytest.approx(100.5 / 50.5, rel=1e-9),
        ("pipedream, delay 0-0-0-6", 4): pytest.approx(150.5 / 50.5, rel=1e-9),
        ("pipedream", 9): pytest.approx(200.5 / 50.5, rel=1e-9),
        ("pipedream, delay internet.py:jitter", 4): pytest.approx(300.5 / 50.5, rel=1e-9),
    }
    against_p4 = compare(best(tmp_path), 3.0, reference_stages=4).slowdowns
    assert against_p4["reference_iterations"].map(tuple).unique().tolist() == [
        (pytest.approx(100.5),)
    ]
    *_, details = draw_curves(load(tmp_path / "runs"), tmp_path / "figure")
    assert '"PipeDream, delay 0-0-0-6, P = 4"' in details.read_text()


def test_curves_can_be_told_apart_and_the_lowest_end_is_named_where_all_ended(
    tmp_path, monkeypatch
):
    write_pipelines(tmp_path, {1: 50.5, 4: 100.5})
    faster = write_run(
        tmp_path, "faster", "pipeline.stages=4", "optimizer.lr=0.003", crosses_3_at=90.5
    )
    monkeypatch.setattr("brx.plot.any_runs.save", saved := Mock())
    runs = load([tmp_path / "runs", faster.path])  # named twice
    for status, title in (("finished", "PipeDream"), ("diverged", "")):
        draw_curves(runs.assign(status=status), tmp_path / "figure")
        (axes,) = saved.call_args.args[0].axes
        looks = {(line.get_color(), line.get_linestyle()) for line in axes.lines}
        assert len(looks) == len({line.get_label() for line in axes.lines}) == len(runs) == 3
        assert axes.get_title().partition(",")[0] == title


def test_title_of_pairs_is_what_delay_costs(tmp_path, monkeypatch):
    write_pipelines(tmp_path, {1: 50.5, 4: 100.5})
    monkeypatch.setattr("brx.plot.any_runs.save", saved := Mock())
    runs = load([tmp_path / "runs"])
    draw_curves(runs, tmp_path / "figure")
    (axes,) = saved.call_args.args[0].axes
    losses = runs.set_index("pipeline.stages")["train_loss"]
    assert axes.get_title() == f"delay costs PipeDream {losses[4] - losses[1]:.2f} nats"


def test_long_legend_names_the_lowest_ends(tmp_path, monkeypatch):
    for name, crossing in (("a", 100.5), ("b", 50.5), ("c", 150.5)):
        seed = f"training.seed={ord(name)}"
        write_run(tmp_path, name, "pipeline.stages=1", seed, crosses_3_at=crossing)
    monkeypatch.setattr("brx.plot.any_runs.MOST_LABELS", 1)
    monkeypatch.setattr("brx.plot.any_runs.save", saved := Mock())
    draw_curves(load(tmp_path / "runs"), tmp_path / "figure")
    (axes,) = saved.call_args.args[0].axes
    texts = [text.get_text() for text in axes.get_legend().get_texts()]
    assert texts == ["PipeDream, P = 1 (b)", "and 2 that end higher"]


LOGS = np.log([120.5 / 30.5, 121.5 / 31.5])
DIVERGED = {
    "is_censored": True,
    "iterations": [200.5, ITERATIONS, ITERATIONS],
    "ratio": pytest.approx((200.5 * ITERATIONS**2) ** (1 / 3) / 50.5),
}


@pytest.mark.parametrize(
    ("crossings", "text", "expected"),
    [
        (
            {1: 50.5, 4: 4000},
            "> 7.92",
            {"is_censored": True, "ratio": pytest.approx(ITERATIONS / 50.5)},
        ),
        ({1: [50.5] * 3, 4: [200.5, (100.5, "diverged"), (None, "diverged")]}, "> 6.29", DIVERGED),
        (
            {1: [50.5, (50.5, "diverged")], 4: 200.5},
            "reference never reaches it",
            {"reference_is_censored": True},
        ),
        (
            {1: [50.5, 4000], 4: 200.5},
            "reference never reaches it",
            {"reference_is_censored": True},
        ),
        (
            {
                1: [30.5, 31.5],
                4: [120.5, 121.5, 122.5],
            },  # the interval is of the seeds that both have
            "3.90 [3.35, 4.55]",
            {
                "ratio": pytest.approx(np.exp(LOGS.mean())),
                "high": pytest.approx(
                    np.exp(LOGS.mean() + 12.706 * LOGS.std(ddof=1) / np.sqrt(2)), rel=1e-4
                ),
            },
        ),
        ({1: [50.5] * 2, 4: [50.5] * 2}, "1.00 (to 0.02)", {}),
    ],
    ids=["never", "diverged", "reference diverged", "reference never", "interval", "resolution"],
)
def test_slowdown_of_runs_whose_crossings_are_known(crossings, text, expected, tmp_path):
    write_pipelines(tmp_path, crossings)
    (slowdown,) = slowdowns(best(tmp_path), 3.0).to_dict("records")
    assert {key: slowdown[key] for key in expected} == expected
    assert slowdown_text(slowdown) == text


def test_runs_that_did_not_finish_move_no_target_and_are_named(tmp_path, capsys):
    """One that failed otherwise (a full disk, a lost neighbour) is neither tried nor a bound."""
    write_pipelines(tmp_path, {1: 50.5, 4: 200.5})
    write_run(tmp_path, "c", "pipeline.stages=2", crosses_3_at=9000, status="diverged")
    write_run(
        tmp_path, "d", "pipeline.stages=4", "optimizer.lr=1e-4", crosses_3_at=200.5, status="failed"
    )
    for P in (1, 4):  # of another model, both
        write_run(
            tmp_path,
            f"{P}",
            f"pipeline.stages={P}",
            "model.width=16",
            crosses_3_at=9000,
            status="diverged",
        )
    out, error = slowdown_command(capsys, tmp_path, "--format", "csv")
    assert "reference never reaches it" in out
    assert "3.96" in out  # 350.5 / 88.5
    assert "0.01*" in out  # the only rate tried
    assert "diverged, counted as tried and as never reaching a target: 1, 4, c" in error
    assert "failed otherwise than by diverging, left out: d" in error


def test_an_early_target_and_one_on_a_plateau_are_told(tmp_path, capsys):
    write_pipelines(tmp_path, {1: [10] * 2, 4: [200] * 2})
    for target, is_told in (("3", True), ("0.5", False)):
        output = slowdown_command(capsys, tmp_path, "--target", target)
        assert ("first 5% of iterations" in output.err) == ("(early)" in output.out) == is_told
    rng = np.random.default_rng(0)
    for path in (tmp_path / "runs").glob("p1*"):
        losses = np.where(
            np.arange(ITERATIONS) < 20, 3.5, 3 + 0.1 * rng.standard_normal(ITERATIONS)
        )
        write_metrics(path, losses.tolist())
    assert "noise decides when they pass" in slowdown_command(capsys, tmp_path, "--target", "3").out


def test_runs_of_another_length_corpus_or_version_are_other_experiments(tmp_path):
    write_run(tmp_path, "a", "optimizer.lr=0.001", val_loss=2.0)
    write_run(tmp_path, "b", "optimizer.lr=0.01", corpus="other")
    write_run(tmp_path, "c", "optimizer.lr=0.01", "training.stop_after=300")
    write_run(tmp_path, "d", "optimizer.lr=0.003", val_loss=1.5)
    write_run(tmp_path, "e", "optimizer.lr=0.02", trajectory_version=2)
    runs = load(tmp_path / "runs")
    chosen = at_best_rates(runs)
    assert chosen.set_index("name")["optimizer.lr"].to_dict() == {
        "b": 0.01,
        "c": 0.01,
        "d": 0.003,
        "e": 0.02,
    }
    assert tried_rates(runs).groupby("experiment", sort=False).size().to_list() == [2, 1, 1, 1]
    (note,) = notes(runs, chosen)
    assert "of one origin are at most 2 of 4 experiments, on f, of version 1" in note


def test_learning_rate_is_the_one_with_the_lowest_validation_loss(tmp_path):
    for lr, val_loss, status in (
        (0.001, 2.0, "finished"),
        (0.01, 1.5, "finished"),
        (0.1, 0.5, "diverged"),
    ):
        run = write_run(tmp_path, f"lr{lr}", f"optimizer.lr={lr}", val_loss=val_loss, status=status)
    scores = {0.001: 2.0, 0.01: 1.5, 0.1: float("inf")}
    for _ in range(2):  # whether or not the run that diverged had a loss
        assert (
            tried_rates(load(tmp_path / "runs")).set_index("optimizer.lr")["score"].to_dict()
            == scores
        )
        (chosen,) = best(tmp_path).to_dict("records")
        assert chosen["optimizer.lr"] == 0.01
        assert not chosen["lr_at_edge"]  # the highest rate was tried, and diverged
        (run.path / "metrics.jsonl").unlink(missing_ok=True)
    (run.path / "failed.txt").touch()  # with which a sweep counts it as done
    assert main(["export", str(tmp_path / "runs"), "--to", str(tmp_path / "compact")]) == 0
    assert (
        main(["export", str(tmp_path / "compact"), "--to", str(tmp_path / "runs")]) == 2
    )  # over whole runs
    assert len(list((tmp_path / "compact").glob("*/failed.txt"))) == 1
    assert tried_rates(load(tmp_path / "compact"))["score"].tolist() == list(scores.values())
    runs = load(tmp_path / "runs")
    with pytest.raises(UserError, match="ended before its first loss"):
        draw_curves(runs, tmp_path / "figure")
    runs.loc[runs["optimizer.lr"] == 0.001, "val_loss"] = (
        np.nan
    )  # not every one validated: training losses decide
    assert tried_rates(runs)["score"].tolist() == [*runs["train_loss"][:2], np.inf]


def test_rates_are_compared_over_the_seeds_they_share_and_none_is_chosen_under_way(tmp_path):
    for name, lr, seed, val_loss in (
        ("a", 0.001, 0, 2.0),
        ("b", 0.01, 0, 1.9),
        ("c", 0.01, 1, 9.0),
    ):
        write_run(tmp_path, name, f"optimizer.lr={lr}", f"training.seed={seed}", val_loss=val_loss)
    assert best(tmp_path)["optimizer.lr"].tolist() == [0.01, 0.01]
    for name in "abc":
        write_json(tmp_path / "runs" / name / "summary.json", {"status": "running"})
    assert best(tmp_path).empty


def test_rates_of_runs_without_validation_are_compared_by_training_loss(tmp_path):
    for at in (80, 40):
        write_run(
            tmp_path, f"at {at}", f"optimizer.lr={1 / at}", val_loss=float("inf"), crosses_3_at=at
        )
    assert best(tmp_path)["optimizer.lr"].tolist() == [1 / 40]


def test_reduction_is_against_the_best_baseline_that_differs_in_nothing_but_the_optimizer(tmp_path):
    for method, at in (("pipedream", 300), ("nesterov", 200), ("basis-rotation", 100)):
        write_run(tmp_path, method, f"optimizer.method={method}", crosses_3_at=at)
    write_run(
        tmp_path, "another", "optimizer.method=nesterov", "pipeline.stash=none", crosses_3_at=100
    )
    (reduction,) = reductions(best(tmp_path)).to_dict("records")
    assert reduction["baseline"] == "nesterov"
    assert reduction["baseline_final_loss"] == pytest.approx(
        4 - 350.5 / 200
    )  # the mean of its last quarter
    assert reduction["share"] == pytest.approx(0.5, abs=0.01)
    # Each seed has the baseline that is the best there; one that diverged is not.
    for method, status in (
        ("nesterov", "diverged"),
        ("pipedream", "finished"),
        ("basis-rotation", "finished"),
    ):
        settings = f"optimizer.method={method}", "training.seed=1"
        write_run(tmp_path, f"{method} s1", *settings, crosses_3_at=150, status=status)
    (reduction,) = reductions(best(tmp_path)).to_dict("records")
    assert reduction["baseline"] == "nesterov or pipedream"
    assert reduction["share"] == pytest.approx(1 - 0.5**0.5, abs=0.01)


def test_a_baseline_has_its_usual_settings_or_those_that_most_baselines_share(tmp_path):
    for method, at in (("pipedream", 300), ("nesterov", 200), ("basis-rotation", 100)):
        write_run(
            tmp_path, method, f"optimizer.method={method}", "optimizer.beta2=0.95", crosses_3_at=at
        )
    write_run(
        tmp_path, "rare", "optimizer.method=nesterov", "optimizer.weight_decay=0", crosses_3_at=150
    )
    of_ours = {
        row["method"]: row["baseline"] for row in reductions(best(tmp_path)).to_dict("records")
    }
    assert of_ours["basis-rotation, beta2 0.95"] == "nesterov, beta2 0.95"
    write_run(tmp_path, "plain", "optimizer.method=nesterov", crosses_3_at=250)
    assert set(reductions(best(tmp_path))["baseline"]) == {"nesterov"}


def test_all_targets_figure_is_of_runs_that_have_slowdowns(tmp_path, capsys):
    write_pipelines(tmp_path, {1: 50, 4: 200})
    for seed in range(
        3
    ):  # another model, the largest set, without a reference; and a method without one
        settings = ("pipeline.stages=4", "model.width=16", f"training.seed={seed}")
        write_run(tmp_path, f"other{seed}", *settings, crosses_3_at=100)
    write_run(
        tmp_path,
        "p8",
        "pipeline.stages=8",
        "model.blocks=8",
        "optimizer.method=nesterov",
        crosses_3_at=100,
    )
    for reference in ("1", "4"):
        slowdown_command(
            capsys,
            tmp_path,
            "--all-targets",
            str(tmp_path / "figure"),
            "--reference-stages",
            reference,
        )
        caption = (tmp_path / "figure.txt").read_text()
        assert caption.startswith(f"Slowdown at P = {5 - int(reference)} ")
        assert "other" not in caption
    assert (tmp_path / "figure.png").stat().st_size > 5000


def test_rates_can_be_restricted_or_the_same_on_both_sides(tmp_path, capsys):
    """At P = 1 the higher rate is faster, at P = 4 it is slower."""
    runs = ((1, 0.001, 100.5, 1.0), (1, 0.01, 50.5, 0.5), (4, 0.001, 150.5, 1), (4, 0.01, 200.5, 2))
    for P, lr, at, val_loss in runs:
        settings = (f"pipeline.stages={P}", f"optimizer.lr={lr}")
        write_run(tmp_path, f"p{P}-{lr}", *settings, crosses_3_at=at, val_loss=val_loss)
    low, high = (
        (0.001, 0.001, pytest.approx(150.5 / 100.5), False),
        (0.01, 0.01, pytest.approx(200.5 / 50.5), False),
    )
    for arguments, expected in (
        ([], [(0.001, 0.01, pytest.approx(150.5 / 50.5), True)]),
        (["--rates", "1e-2"], [(*high[:3], True)]),
        (["--same-rate"], [low, high]),
        (["--same-rate", "--rates", "0.001"], [low]),
    ):
        rows = slowdowns_in_json(capsys, tmp_path, "--target", "3", *arguments)
        assert [
            (row["lr"], row["reference_lr"], row["ratio"], row["lr_at_edge"]) for row in rows
        ] == expected


@pytest.mark.parametrize("arguments", [(), ("--same-rate",)])
def test_the_target_is_what_all_reach_and_an_experiment_that_failed_altogether_is_a_bound(
    arguments, tmp_path, capsys
):
    write_pipelines(tmp_path, {1: 50.5, 2: 100.5, 4: (None, "diverged")})
    two, four = slowdowns_in_json(capsys, tmp_path, *arguments)
    # In the middle of the last quarter of the slowest.
    assert two["target"] == four["target"] == pytest.approx(4 - 350.5 / 100.5)
    assert two["ratio"] == pytest.approx(350.5 / (350.5 / 100.5 * 50.5), abs=0.01)
    assert (two["is_censored"], four["is_censored"]) == (False, True)
    assert four["iterations"] == [ITERATIONS]


def test_incomparable_runs_are_told(tmp_path, capsys):
    write_pipelines(tmp_path, {1: 50})
    write_pipelines(tmp_path, {4: 200}, "model.width=16")
    error = slowdown_command(capsys, tmp_path, code=2).err
    assert "2 sets of runs that differ in data, trajectory version, model or budget" in error
    assert "nothing to compare" in error


def test_a_damaged_file_of_a_finished_run_is_not_taken_for_a_short_one(tmp_path):
    run = write_run(tmp_path, "a", iteration=ITERATIONS)
    metrics = run.path / "metrics.jsonl"
    metrics.write_text("".join(metrics.read_text().splitlines(keepends=True)[:9]))
    with pytest.raises(
        UserError, match=r"metrics\.jsonl: damaged: lacks 391 of the 400 iterations"
    ):
        export(run.path, tmp_path / "compact")
    assert not (tmp_path / "compact").exists()
    write_json(run.path / "summary.json", {"status": "finished", "last_iteration": ITERATIONS // 2})
    assert Run.load(run.path).status == "unfinished"  # taken up after an early stop


def test_compact_runs_read_like_the_originals_and_replace_what_was_there(tmp_path):
    run = write_run(tmp_path, "a", crosses_3_at=70)
    for measured in ("old", "new"):
        (run.path / "analysis").mkdir()
        (run.path / "analysis" / f"{measured}.json").write_text("{}")
        export(run.path, tmp_path / "kept" / "a")
        shutil.rmtree(run.path / "analysis")
    assert [path.name for path in (tmp_path / "kept" / "a" / "analysis").iterdir()] == ["new.json"]
    assert [path.name for path in (tmp_path / "kept").iterdir()] == ["a"]
    again = Run.load(tmp_path / "kept" / "a")
    np.testing.assert_array_equal(again.iterations, run.iterations)
    np.testing.assert_array_equal(
        again.train_loss * LOSS_STEPS, (run.train_loss * LOSS_STEPS).round()
    )
    np.testing.assert_allclose(again.seconds, run.seconds, rtol=1e-6)
    np.testing.assert_array_equal(again.val_loss, run.val_loss)
    assert (again.config, again.summary) == (run.config, run.summary)


def test_damaged_files_are_one_line(tmp_path, capsys):
    summary = write_run(tmp_path, "a").path / "summary.json"
    good = summary.read_text()
    for wrong in (
        "[]",
        '{"status": "finished", "iteration": "x"}',
        '{"status": 3}',
        "{",
        '{"data_fingerprint": [1]}',
    ):
        summary.write_text(wrong)
        assert f"{summary}: not readable" in slowdown_command(capsys, tmp_path, code=2).err
    summary.write_text(good)
    path = export(summary.parent, tmp_path / "compact" / "runs" / "a") / "curves.npz"
    with np.load(path) as file:
        arrays = dict(file)
    for name, wrong, problem in (
        ("steps", -arrays["steps"], "iterations must rise"),
        (
            "train_loss",
            arrays["train_loss"][:, :-1],
            "iterations and train_loss must be two lists of one length",
        ),
        ("val_loss", arrays["val_loss"][None], "val_iterations and val_loss must be two lists"),
    ):
        np.savez(path, **{**arrays, name: wrong})
        assert (
            f"{path}: not readable: {problem}"
            in slowdown_command(capsys, tmp_path / "compact", code=2).err
        )
