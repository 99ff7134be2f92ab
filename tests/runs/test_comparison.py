"""Runs on made-up loss curves whose crossings are known: experiments, comparison, tables, reading
and compact files."""

import json
import math
import shutil
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

from brx.cli.main import main
from brx.errors import UserError
from brx.files import write_json
from brx.names import file_name
from brx.plot.any_runs import draw_curves
from brx.runs.comparison import compare, reductions, slowdowns
from brx.runs.experiments import at_best_rates, notes, tried_rates
from brx.runs.export import export
from brx.runs.frames import load
from brx.runs.metrics import LOSS_STEPS
from brx.runs.run import Run
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


INTERNET = Path(__file__).parents[2] / "examples/delays/internet.py"
PROFILES = {  # a delay, and where its run crosses 3
    "[0, 0, 0, 6]": 150.5,
    "{like: 9}": 200.5,
    f"{{function: {INTERNET}:jitter}}": 300.5,
}


@pytest.fixture
def profiles(tmp_path):
    """Runs at P = 1 and 4, and under other delays."""
    write_pipelines(tmp_path, {1: 50.5, 4: 100.5})
    for delay, at in PROFILES.items():
        settings = ("pipeline.stages=4", f"pipeline.delay={delay}")
        write_run(tmp_path, file_name(delay), *settings, crosses_3_at=at)
    return tmp_path


def test_delay_profile_is_compared_with_no_delay(profiles):
    found = compare(best(profiles), 3.0)
    assert not found.notes
    ratios = {}
    for row in found.slowdowns.to_dict("records"):
        ratios[row["method"], row["stages"]] = row["ratio"]
    assert ratios == {
        ("pipedream", 4): pytest.approx(100.5 / 50.5, rel=1e-9),
        ("pipedream, delay 0-0-0-6", 4): pytest.approx(150.5 / 50.5, rel=1e-9),
        ("pipedream", 9): pytest.approx(200.5 / 50.5, rel=1e-9),
        ("pipedream, delay internet.py:jitter", 4): pytest.approx(300.5 / 50.5, rel=1e-9),
    }


def test_slowdown_without_a_shared_seed_is_named(tmp_path):
    write_run(tmp_path, "plain", "pipeline.stages=1")
    write_run(tmp_path, "delayed", "pipeline.stages=4", "training.seed=1", crosses_3_at=100)
    (note,) = compare(best(tmp_path), 3.0).notes
    assert note.startswith("no seed in common with the reference")
    assert note.endswith("pipedream at P = 4")


def test_profiles_have_the_reference_asked_for(profiles):
    slowdowns = compare(best(profiles), 3.0, reference_stages=4).slowdowns
    assert slowdowns["reference_iterations"].tolist() == [[pytest.approx(100.5)]] * 4


def test_figure_names_the_delay_profile(profiles):
    *_, details = draw_curves(load(profiles / "runs"), profiles / "figure")
    assert '"PipeDream, delay 0-0-0-6, P = 4"' in details.read_text()


@pytest.fixture
def axes_of(monkeypatch):
    """Draws runs, and gives the axes."""
    monkeypatch.setattr("brx.plot.any_runs.save", saved := Mock())

    def draw(runs):
        draw_curves(runs, Path("figure"))
        (axes,) = saved.call_args.args[0].axes
        return axes

    return draw


@pytest.fixture
def two_rates(tmp_path):
    """Runs at P = 1 and 4, and a faster one at P = 4."""
    write_pipelines(tmp_path, {1: 50.5, 4: 100.5})
    settings = ("pipeline.stages=4", "optimizer.lr=0.003")
    faster = write_run(tmp_path, "faster", *settings, crosses_3_at=90.5)
    return load([tmp_path / "runs", faster.path])  # named twice


def test_curves_can_be_told_apart(two_rates, axes_of):
    lines = axes_of(two_rates).lines
    looks = {(line.get_color(), line.get_linestyle()) for line in lines}
    assert len(looks) == len({line.get_label() for line in lines}) == len(two_rates) == 3


@pytest.mark.parametrize(("status", "title"), [("finished", "PipeDream"), ("diverged", "")])
def test_title_has_the_lowest_of_finished_runs(status, title, two_rates, axes_of):
    axes = axes_of(two_rates.assign(status=status))
    assert axes.get_title().partition(",")[0] == title


def test_title_of_pairs_is_what_delay_costs(tmp_path, axes_of):
    write_pipelines(tmp_path, {1: 50.5, 4: 100.5})
    runs = load([tmp_path / "runs"])
    losses = runs.set_index("pipeline.stages")["train_loss"]
    title = f"delay costs PipeDream {losses[4] - losses[1]:.2f} nats"
    assert axes_of(runs).get_title() == title


def test_long_legend_names_the_lowest_ends(tmp_path, monkeypatch, axes_of):
    for name, crossing in (("a", 100.5), ("b", 50.5), ("c", 150.5)):
        seed = f"training.seed={ord(name)}"
        write_run(tmp_path, name, "pipeline.stages=1", seed, crosses_3_at=crossing)
    monkeypatch.setattr("brx.plot.any_runs.MOST_LABELS", 1)
    axes = axes_of(load(tmp_path / "runs"))
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
            {1: [30.5, 31.5], 4: [120.5, 121.5, 122.5]},  # two seeds are shared
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


@pytest.fixture
def output_with_unfinished(tmp_path, capsys):
    """Output of `brx slowdown` for runs that diverged (1, 4, c), failed (d) or finished."""
    write_pipelines(tmp_path, {1: 50.5, 4: 200.5})
    write_run(tmp_path, "c", "pipeline.stages=2", crosses_3_at=9000, status="diverged")
    settings = ("pipeline.stages=4", "optimizer.lr=1e-4")
    write_run(tmp_path, "d", *settings, crosses_3_at=200.5, status="failed")
    for P in (1, 4):
        settings = (f"pipeline.stages={P}", "model.width=16")
        write_run(tmp_path, f"{P}", *settings, crosses_3_at=9000, status="diverged")
    return slowdown_command(capsys, tmp_path, "--format", "csv")


def test_diverged_runs_move_no_target(output_with_unfinished):
    assert "3.96" in output_with_unfinished.out  # 350.5 / 88.5


def test_diverged_reference_never_reaches_the_target(output_with_unfinished):
    assert "reference never reaches it" in output_with_unfinished.out


def test_diverged_runs_are_named(output_with_unfinished):
    said = "diverged, counted as tried and as never reaching a target: 1, 4, c"
    assert said in output_with_unfinished.err


def test_failed_runs_are_named(output_with_unfinished):
    """By a full disk or a lost neighbour, for example."""
    assert "failed otherwise than by diverging, left out: d" in output_with_unfinished.err


def test_rate_of_a_failed_run_was_not_tried(output_with_unfinished):
    assert "0.01*" in output_with_unfinished.out  # the star: the only rate tried


@pytest.mark.parametrize(("target", "is_early"), [("3", True), ("0.5", False)])
def test_early_target_is_told(target, is_early, tmp_path, capsys):
    write_pipelines(tmp_path, {1: [10] * 2, 4: [200] * 2})
    output = slowdown_command(capsys, tmp_path, "--target", target)
    assert ("first 5% of iterations" in output.err) == ("(early)" in output.out) == is_early


def test_target_on_a_plateau_is_told(tmp_path, capsys):
    write_pipelines(tmp_path, {1: [10] * 2, 4: [200] * 2})
    rng = np.random.default_rng(0)
    for path in (tmp_path / "runs").glob("p1*"):
        noise = 0.1 * rng.standard_normal(ITERATIONS)
        losses = np.where(np.arange(ITERATIONS) < 20, 3.5, 3 + noise)
        write_metrics(path, losses.tolist())
    output = slowdown_command(capsys, tmp_path, "--target", "3").out
    assert "noise decides when they pass" in output


@pytest.fixture
def other_origins(tmp_path):
    """Runs a and d are one experiment; b, c and e differ in corpus, length and version."""
    write_run(tmp_path, "a", "optimizer.lr=0.001", val_loss=2.0)
    write_run(tmp_path, "b", "optimizer.lr=0.01", corpus="other")
    write_run(tmp_path, "c", "optimizer.lr=0.01", "training.stop_after=300")
    write_run(tmp_path, "d", "optimizer.lr=0.003", val_loss=1.5)
    write_run(tmp_path, "e", "optimizer.lr=0.02", trajectory_version=2)
    return load(tmp_path / "runs")


def test_runs_of_other_origins_are_other_experiments(other_origins):
    num_rates = tried_rates(other_origins).groupby("experiment", sort=False).size()
    assert num_rates.to_list() == [2, 1, 1, 1]


def test_rate_is_chosen_within_an_origin(other_origins):
    rates = at_best_rates(other_origins).set_index("name")["optimizer.lr"]
    assert rates.to_dict() == {"b": 0.01, "c": 0.01, "d": 0.003, "e": 0.02}


def test_other_origins_are_told(other_origins):
    (note,) = notes(other_origins, at_best_rates(other_origins))
    assert "of one origin are at most 2 of 4 experiments, on f, of version 1" in note


SCORES = {0.001: 2.0, 0.01: 1.5, 0.1: float("inf")}
"""Validation losses of `three_rates`, by rate."""


@pytest.fixture(params=["with losses", "without losses"])
def three_rates(request, tmp_path):
    """Runs at three rates; at the highest, the run diverged after some losses or at once."""
    for lr, val_loss in ((0.001, 2.0), (0.01, 1.5)):
        write_run(tmp_path, f"lr{lr}", f"optimizer.lr={lr}", val_loss=val_loss)
    run = write_run(tmp_path, "lr0.1", "optimizer.lr=0.1", val_loss=0.5, status="diverged")
    (run.path / "failed.txt").touch()  # with which a sweep counts it as done
    if request.param == "without losses":
        (run.path / "metrics.jsonl").unlink()
    return tmp_path


def test_rates_are_scored_by_validation_loss(three_rates):
    scores = tried_rates(load(three_rates / "runs")).set_index("optimizer.lr")["score"]
    assert scores.to_dict() == SCORES


def test_lowest_validation_loss_decides_the_rate(three_rates):
    (chosen,) = best(three_rates).to_dict("records")
    assert chosen["optimizer.lr"] == 0.01


def test_diverged_rate_counts_for_the_edge(three_rates):
    (chosen,) = best(three_rates).to_dict("records")
    assert not chosen["lr_at_edge"]


def test_training_losses_decide_if_a_validation_lacks(three_rates):
    runs = load(three_rates / "runs")
    runs.loc[runs["optimizer.lr"] == 0.001, "val_loss"] = np.nan
    assert tried_rates(runs)["score"].tolist() == [*runs["train_loss"][:2], np.inf]


def test_exported_runs_have_the_same_scores(three_rates):
    assert main(["export", str(three_rates / "runs"), "--to", str(three_rates / "compact")]) == 0
    scores = tried_rates(load(three_rates / "compact"))["score"]
    assert scores.tolist() == list(SCORES.values())


def test_export_keeps_the_mark_of_a_failure(three_rates):
    assert main(["export", str(three_rates / "runs"), "--to", str(three_rates / "compact")]) == 0
    assert len(list((three_rates / "compact").glob("*/failed.txt"))) == 1


def test_export_replaces_no_whole_run(tmp_path, capsys):
    run = write_run(tmp_path, "a")
    export(run.path, tmp_path / "compact" / "a")
    assert main(["export", str(tmp_path / "compact"), "--to", str(tmp_path / "runs")]) == 2
    assert "is a whole run" in capsys.readouterr().err


def test_run_without_losses_has_no_curve(tmp_path):
    run = write_run(tmp_path, "a", status="diverged")
    (run.path / "metrics.jsonl").unlink()
    with pytest.raises(UserError, match="ended before its first loss"):
        draw_curves(load(tmp_path / "runs"), tmp_path / "figure")


def test_losses_that_are_not_finite_leave_the_curve_before_them(tmp_path):
    diverged = write_run(tmp_path, "diverged", status="diverged")
    write_metrics(diverged.path, [4.0, 3.0, 2.0, float("nan"), float("inf")])
    *_, details = draw_curves(load(tmp_path / "runs"), tmp_path / "figure")
    assert str(diverged.path) in details.read_text()


@pytest.fixture
def shared_seed(tmp_path):
    """At one rate seed 0, at the other seeds 0 and 1; seed 1 ends high."""
    runs = (("a", 0.001, 0, 2.0), ("b", 0.01, 0, 1.9), ("c", 0.01, 1, 9.0))
    for name, lr, seed, val_loss in runs:
        write_run(tmp_path, name, f"optimizer.lr={lr}", f"training.seed={seed}", val_loss=val_loss)
    return tmp_path


def test_rates_are_compared_over_shared_seeds(shared_seed):
    assert best(shared_seed)["optimizer.lr"].tolist() == [0.01, 0.01]


def test_no_rate_is_chosen_under_way(shared_seed):
    for name in "abc":
        write_json(shared_seed / "runs" / name / "summary.json", {"status": "running"})
    assert best(shared_seed).empty


def test_without_validation_training_losses_decide(tmp_path):
    for at in (80, 40):
        rate = f"optimizer.lr={1 / at}"
        write_run(tmp_path, f"at {at}", rate, val_loss=float("inf"), crosses_3_at=at)
    assert best(tmp_path)["optimizer.lr"].tolist() == [1 / 40]


CROSSINGS = {"pipedream": 300, "nesterov": 200, "basis-rotation": 100}


def write_methods(folder, *overrides):
    for method, at in CROSSINGS.items():
        write_run(folder, method, f"optimizer.method={method}", *overrides, crosses_3_at=at)


@pytest.fixture
def reduction(tmp_path):
    """The only one among three methods, where another stash mode has a better baseline."""
    write_methods(tmp_path)
    settings = ("optimizer.method=nesterov", "pipeline.stash=none")
    write_run(tmp_path, "another", *settings, crosses_3_at=100)
    (row,) = reductions(best(tmp_path)).to_dict("records")
    return row


def test_baseline_differs_only_in_the_optimizer(reduction):
    assert reduction["baseline"] == "nesterov"


def test_loss_to_reach_is_the_last_quarters(reduction):
    assert reduction["baseline_final_loss"] == pytest.approx(4 - 350.5 / 200)


def test_reduction_is_the_share_of_iterations_saved(reduction):
    assert reduction["share"] == pytest.approx(1 - 100 / 200, abs=0.01)


def reduction_with_second_seed(folder, *diverged):
    """The reduction over two seeds, of which the second diverged with some methods."""
    write_methods(folder)
    for method in CROSSINGS:
        settings = (f"optimizer.method={method}", "training.seed=1")
        status = "diverged" if method in diverged else "finished"
        write_run(folder, f"{method} s1", *settings, crosses_3_at=150, status=status)
    (row,) = reductions(best(folder)).to_dict("records")
    return row


@pytest.fixture
def reduction_of_two_seeds(tmp_path):
    """Nesterov is the best baseline for seed 0 and diverged for seed 1."""
    return reduction_with_second_seed(tmp_path, "nesterov")


@pytest.mark.parametrize(
    ("diverged", "why"),
    [
        (["basis-rotation"], "never gets there"),
        (["pipedream", "nesterov"], "the best baseline diverged"),
    ],
)
def test_seed_that_diverged_leaves_no_share(diverged, why, tmp_path):
    row = reduction_with_second_seed(tmp_path, *diverged)
    assert math.isnan(row["share"])
    assert row["missing"] == why


def test_each_seed_has_its_own_best_baseline(reduction_of_two_seeds):
    assert reduction_of_two_seeds["baseline"] == "nesterov or pipedream"


def test_reduction_is_a_geometric_mean_over_seeds(reduction_of_two_seeds):
    share = 1 - (100 / 200 * 150 / 150) ** 0.5
    assert reduction_of_two_seeds["share"] == pytest.approx(share, abs=0.01)


def test_interval_of_a_reduction_is_students_over_seeds(reduction_of_two_seeds):
    # The ratios are 1/2 and 1; 12.7062 is Student's quantile for one degree of freedom. It
    # multiplies the error of the passages, too.
    factor = math.exp(12.7062 * math.log(2) / 2)
    assert reduction_of_two_seeds["low"] == pytest.approx(1 - 0.5**0.5 * factor, rel=0.3)
    assert reduction_of_two_seeds["high"] == pytest.approx(1 - 0.5**0.5 / factor, abs=0.005)


@pytest.fixture
def unusual_baselines(tmp_path):
    """All methods have one unusual setting, and a faster baseline has a rare one."""
    write_methods(tmp_path, "optimizer.beta2=0.95")
    settings = ("optimizer.method=nesterov", "optimizer.weight_decay=0")
    write_run(tmp_path, "rare", *settings, crosses_3_at=150)
    return tmp_path


def test_baseline_has_the_settings_of_most(unusual_baselines):
    rows = reductions(best(unusual_baselines)).to_dict("records")
    baselines = {row["method"]: row["baseline"] for row in rows}
    assert baselines["basis-rotation, beta2 0.95"] == "nesterov, beta2 0.95"


def test_each_baseline_may_have_settings_of_its_own(tmp_path):
    # A search chose a momentum for each method.
    settings = ("optimizer.method=pipedream", "optimizer.beta1=0.8")
    write_run(tmp_path, "pipedream", *settings, crosses_3_at=200)
    settings = ("optimizer.method=nesterov", "optimizer.beta1=0.995")
    write_run(tmp_path, "nesterov", *settings, crosses_3_at=150)
    write_run(tmp_path, "ours", "optimizer.method=basis-rotation", crosses_3_at=100)
    (row,) = reductions(best(tmp_path)).to_dict("records")
    assert row["baseline"] == "nesterov, beta1 0.995"


def test_baseline_with_usual_settings_comes_first(unusual_baselines):
    write_run(unusual_baselines, "plain", "optimizer.method=nesterov", crosses_3_at=250)
    assert set(reductions(best(unusual_baselines))["baseline"]) == {"nesterov"}


@pytest.fixture(params=["1", "4"], scope="module")
def all_targets(request, tmp_path_factory):
    """A figure of runs at P = 1 and 4 relative to one of these, and the other P.

    There is a larger set without a reference (another model), and a method without one.
    """
    folder = tmp_path_factory.mktemp("all-targets")
    write_pipelines(folder, {1: 50, 4: 200})
    for seed in range(3):
        settings = ("pipeline.stages=4", "model.width=16", f"training.seed={seed}")
        write_run(folder, f"other{seed}", *settings, crosses_3_at=100)
    settings = ("pipeline.stages=8", "model.blocks=8", "optimizer.method=nesterov")
    write_run(folder, "p8", *settings, crosses_3_at=100)
    figure = folder / "figure"
    arguments = ("--all-targets", str(figure), "--reference-stages", request.param)
    assert main(["slowdown", str(folder / "runs"), *arguments]) == 0
    return figure, {"1": 4, "4": 1}[request.param]


def test_all_targets_figure_shows_runs_with_slowdowns(all_targets):
    figure, stages = all_targets
    caption = figure.with_suffix(".txt").read_text()
    assert caption.startswith(f"Slowdown at P = {stages} ")
    assert "other" not in caption


def test_all_targets_figure_is_drawn(all_targets):
    figure, _ = all_targets
    assert figure.with_suffix(".png").stat().st_size > 5000


LOW = (0.001, 0.001, pytest.approx(150.5 / 100.5), False)
HIGH = (0.01, 0.01, pytest.approx(200.5 / 50.5), False)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], [(0.001, 0.01, pytest.approx(150.5 / 50.5), True)]),
        (["--rates", "1e-2"], [(*HIGH[:3], True)]),
        (["--same-rate"], [LOW, HIGH]),
        (["--same-rate", "--rates", "0.001"], [LOW]),
    ],
    ids=["best", "one", "same", "one, same"],
)
def test_rates_on_both_sides(arguments, expected, tmp_path, capsys):
    """At P = 1 the higher rate is faster, at P = 4 it is slower."""
    runs = ((1, 0.001, 100.5, 1.0), (1, 0.01, 50.5, 0.5), (4, 0.001, 150.5, 1), (4, 0.01, 200.5, 2))
    for P, lr, at, val_loss in runs:
        settings = (f"pipeline.stages={P}", f"optimizer.lr={lr}")
        write_run(tmp_path, f"p{P}-{lr}", *settings, crosses_3_at=at, val_loss=val_loss)
    rows = slowdowns_in_json(capsys, tmp_path, "--target", "3", *arguments)
    shown = ("lr", "reference_lr", "ratio", "lr_at_edge")
    assert [tuple(row[key] for key in shown) for row in rows] == expected


@pytest.fixture(params=[(), ("--same-rate",)], ids=["best rate", "same rate"])
def two_and_four(request, tmp_path, capsys):
    """The slowdowns at P = 2, and at P = 4, where the only run diverged."""
    write_pipelines(tmp_path, {1: 50.5, 2: 100.5, 4: (None, "diverged")})
    return slowdowns_in_json(capsys, tmp_path, *request.param)


def test_target_is_the_last_quarter_of_the_slowest(two_and_four):
    two, four = two_and_four
    assert two["target"] == four["target"] == pytest.approx(4 - 350.5 / 100.5)
    assert two["ratio"] == pytest.approx(350.5 / (350.5 / 100.5 * 50.5), abs=0.01)


def test_experiment_that_diverged_is_a_bound(two_and_four):
    two, four = two_and_four
    assert (two["is_censored"], four["is_censored"]) == (False, True)
    assert four["iterations"] == [ITERATIONS]


def test_incomparable_runs_are_told(tmp_path, capsys):
    write_pipelines(tmp_path, {1: 50})
    write_pipelines(tmp_path, {4: 200}, "model.width=16")
    error = slowdown_command(capsys, tmp_path, code=2).err
    assert "2 sets of runs that differ in data, trajectory version, model or budget" in error
    assert "nothing to compare" in error


def test_damaged_run_is_not_exported(tmp_path):
    run = write_run(tmp_path, "a", iteration=ITERATIONS)
    metrics = run.path / "metrics.jsonl"
    metrics.write_text("".join(metrics.read_text().splitlines(keepends=True)[:9]))
    said = r"metrics\.jsonl: damaged: lacks 391 of the 400 iterations"
    with pytest.raises(UserError, match=said):
        export(run.path, tmp_path / "compact")
    assert not (tmp_path / "compact").exists()


def test_run_continued_after_an_early_stop_is_unfinished(tmp_path):
    run = write_run(tmp_path, "a", last_iteration=ITERATIONS // 2)
    assert run.status == "unfinished"


def test_export_replaces_what_was_there(tmp_path):
    run = write_run(tmp_path, "a", crosses_3_at=70)
    for measured in ("old", "new"):
        (run.path / "analysis").mkdir()
        (run.path / "analysis" / f"{measured}.json").write_text("{}")
        export(run.path, tmp_path / "kept" / "a")
        shutil.rmtree(run.path / "analysis")
    assert [path.name for path in (tmp_path / "kept" / "a" / "analysis").iterdir()] == ["new.json"]
    assert [path.name for path in (tmp_path / "kept").iterdir()] == ["a"]


def test_compact_run_reads_like_the_original(tmp_path):
    run = write_run(tmp_path, "a", crosses_3_at=70)
    again = Run.load(export(run.path, tmp_path / "kept" / "a"))
    np.testing.assert_array_equal(again.iterations, run.iterations)
    np.testing.assert_array_equal(
        again.train_loss * LOSS_STEPS, (run.train_loss * LOSS_STEPS).round()
    )
    np.testing.assert_allclose(again.seconds, run.seconds, rtol=1e-6)
    np.testing.assert_array_equal(again.val_loss, run.val_loss)
    assert (again.config, again.summary) == (run.config, run.summary)


SUMMARIES = {
    "a list": "[]",
    "a text for a number": '{"status": "finished", "iteration": "x"}',
    "a number for a text": '{"status": 3}',
    "cut off": "{",
    "a list for a text": '{"data_fingerprint": [1]}',
}


@pytest.mark.parametrize("content", SUMMARIES.values(), ids=SUMMARIES.keys())
def test_damaged_summary_is_one_line(content, tmp_path, capsys):
    summary = write_run(tmp_path, "a").path / "summary.json"
    summary.write_text(content)
    error = slowdown_command(capsys, tmp_path, code=2).err
    assert f"{summary}: not readable" in error
    assert "; restore it, or train the run again\n" in error


@pytest.mark.parametrize(
    ("name", "damage", "problem"),
    [
        ("steps", lambda steps: -steps, "iterations must rise"),
        (
            "train_loss",
            lambda losses: losses[:, :-1],
            "iterations and train_loss must be two lists of one length",
        ),
        (
            "val_loss",
            lambda losses: losses[None],
            "val_iterations and val_loss must be two lists",
        ),
    ],
    ids=["falling", "shorter", "nested"],
)
def test_damaged_curves_are_one_line(name, damage, problem, tmp_path, capsys):
    run = write_run(tmp_path, "a")
    path = export(run.path, tmp_path / "compact" / "runs" / "a") / "curves.npz"
    with np.load(path) as file:
        arrays = dict(file)
    np.savez(path, **{**arrays, name: damage(arrays[name])})
    error = slowdown_command(capsys, tmp_path / "compact", code=2).err
    assert f"{path}: not readable: {problem}" in error
    assert "; restore it, or export the run again\n" in error
