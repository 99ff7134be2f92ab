"""The paper's figures and tables from made-up runs: all of them draw, and say what is missing and what makes it."""

from dataclasses import replace

import pytest

from brx.cli.main import main
from brx.errors import UserError
from brx.paper.figures import FIGURES, draw_paper_figure
from brx.paper.scales import LADDER_METHODS, SCALES, SEVEN, STRATEGY_NAMES, VARIANTS, Experiments
from brx.paper.standalone_figures import STANDALONE
from brx.paper.tables import TABLES
from brx.runs.formats import format_table
from tests.paper.helpers import write_experiment

LAPTOP = SCALES["laptop"]


@pytest.mark.parametrize("name", [name for name in FIGURES if name not in ("3b", "moe", "claims")])
def test_every_figure_draws_from_complete_results(complete, tmp_path, name):
    written, found = draw_paper_figure(name, Experiments.load(LAPTOP, complete), tmp_path)
    assert found.missing == []
    assert [path.suffix for path in written] == [".png", ".pdf", ".txt"]
    assert all(path.stat().st_size > 200 for path in written)
    caption = written[2].read_text()
    assert FIGURES[name].place in caption
    for seeds in found.used.values():
        assert seeds["name"].iloc[0] in caption


def test_same_runs_give_the_same_bytes(complete, tmp_path):
    for folder in ("a", "b"):
        draw_paper_figure("main", Experiments.load(LAPTOP, complete), tmp_path / folder)
    for name in ("main.png", "main.pdf", "main.txt"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_all_draws_what_there_is_and_names_the_sweep_of_the_rest(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("brx.paper.publishing.STANDALONE", {"schedule": STANDALONE["schedule"]})
    write_experiment(tmp_path / "runs", LAPTOP.preset, {"pipeline.stages": 32})
    assert main(["plot", "all", "--runs", str(tmp_path / "runs"), "--out", str(tmp_path / "figures")]) == 0
    out, error = capsys.readouterr()
    assert "teaser.png" in out
    assert "figure weight-prediction: none of its runs" in error
    assert "brx sweep configs/sweeps/laptop/prediction.yaml" in error


def test_a_figure_without_runs_is_one_line_that_names_the_sweep(tmp_path, capsys):
    write_experiment(tmp_path / "runs", LAPTOP.preset, {"pipeline.stages": 32})
    assert main(["plot", "moe", "--runs", str(tmp_path / "runs")]) == 2
    error = capsys.readouterr().err
    assert "figure moe: none of its runs are in" in error
    assert "brx sweep configs/sweeps/laptop/moe.yaml" in error


def test_a_figure_without_runs_of_its_own_sweep_is_not_drawn_from_others_alone(tmp_path, capsys):
    write_experiment(tmp_path / "runs", LAPTOP.preset, {"pipeline.stages": 32})
    plot = ["plot", "preconditioned", "--runs", str(tmp_path / "runs"), "--out", str(tmp_path)]
    assert main(plot) == 2
    assert "brx sweep configs/sweeps/laptop/preconditioned.yaml" in capsys.readouterr().err
    write_experiment(tmp_path / "runs", LAPTOP.preset, {"pipeline.stages": 32, **VARIANTS["soap"]})
    assert main(plot) == 0
    assert (tmp_path / "preconditioned.png").is_file()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["plot", "mian"], "unknown figure 'mian'"),
        (["plot", "main", "--runs", "nowhere"], "nowhere: no such folder; make the runs with brx sweep"),
        (["plot", "curves"], "name at least one run's folder"),
        (["plot", "main", "runs/a"], "RUN: only curves, staleness, profiles take runs; name the folder of main's"),
        (["tables", "nothing"], "unknown table 'nothing'"),
    ],
)
def test_mistakes(arguments, expected, capsys):
    assert main(arguments) == 2
    assert expected in capsys.readouterr().err


def test_tables_from_complete_results(complete, tmp_path):
    assert main(["tables", "all", "--runs", str(complete), "--out", str(tmp_path)]) == 0
    for name in TABLES:
        lines = (tmp_path / f"{name}.csv").read_text().splitlines()
        assert len(lines) > 2, name
        assert (tmp_path / f"{name}.md").read_text().count("\n| ") >= len(lines)
    slowdown = (tmp_path / "slowdown.csv").read_text()
    for method in SEVEN:
        assert f"{method}," in slowdown


def test_tables_without_runs_are_those_of_their_commands(complete, capsys):
    experiments = Experiments.load(LAPTOP, complete)
    assert main(["stages", "--format", "csv"]) == 0
    assert capsys.readouterr().out == format_table(TABLES["stages"].make(experiments), "csv") + "\n"
    sizes = TABLES["memory"].make(experiments).iloc[:, 4:6].to_numpy().tolist()
    assert sizes == [["0.25", "1.66"], ["0.13", "0.13"], ["0.13", "0.83"], ["0.06", "0.06"]]
    assert {"original", "rotated, own basis"} <= set(TABLES["hessian-norm"].make(experiments)["coordinates"])


def test_table_that_was_not_measured_is_refused_alone_and_noted_among_others(complete, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(SCALES, "laptop", replace(LAPTOP, curvature=tmp_path / "nothing"))
    assert main(["tables", "hessian-norm", "--runs", str(complete)]) == 2
    assert "nothing: no such folder" in capsys.readouterr().err
    assert main(["tables", "all", "--runs", str(complete), "--out", str(tmp_path / "tables")]) == 0
    assert "note: table hessian-norm: " in capsys.readouterr().err
    assert (tmp_path / "tables" / "slowdown.csv").exists()


def test_slowdown_table_agrees_with_the_made_up_curves(complete, tmp_path):
    # Every curve falls as 1 / (1 + t / (100 P)), so P = 32 takes 32 times as long (means of a convex curve aside).
    table = TABLES["slowdown"].make(Experiments.load(LAPTOP, complete))
    for text in table["slowdown at P = 32"]:
        assert float(text.split()[0]) == pytest.approx(32, rel=0.05)
    assert set(table["seeds"]) == {"3"}


def test_ladder_table_has_a_target_for_each_length(complete):
    everything = TABLES["ladder"].make(Experiments.load(LAPTOP, complete))
    beside = everything[~everything["method"].isin(LADDER_METHODS)]
    assert set(beside["method"]) == {*STRATEGY_NAMES[1:], "soap", "muon", "scion"}
    assert set(beside["iterations"]) == {"8000"}  # those of the main comparison
    extrapolated = everything[everything["iterations"].str.endswith("extrapolated")]
    assert set(extrapolated["method"]) == set(LADDER_METHODS)
    table = everything.drop([*beside.index, *extrapolated.index])
    assert list(zip(table["method"], table["iterations"], strict=True)) == [
        (method, iterations)
        for iterations in ("2000", "4000", "8000", "16000", "32000", "64000", "128000")
        for method in ("basis-rotation", "nesterov", "pipedream-lr")
    ]
    slowdowns = [float(text.split()[0]) for text in table["slowdown"]]
    assert slowdowns == pytest.approx([32] * 21, rel=0.05)
    saved = [text.partition(" (over ")[0] for text in table["iterations saved at P"] if text]
    assert saved == ["0.0%"] * 2 + ["0.0% [0.0%, 0.0%]"] + ["0.0%"] * 4  # three seeds of 8,000
    assert table["target loss"].nunique() == 7
    with pytest.raises(UserError, match="only at the scale of a laptop"):
        TABLES["ladder"].make(Experiments.load(SCALES["paper"], complete))


def test_wider_rates_stand_beside_the_papers_and_never_enter_another_table(complete):
    experiments = Experiments.load(LAPTOP, complete)
    table = TABLES["wider-rates"].make(experiments)
    assert list(zip(table["rates"], table["lr at P = 32"], strict=True)) == (
        [("the paper's", "0.001*")] * 4 + [("wider", "0.003*")] * 4
    )
    slowdowns = [float(text.split()[0]) for text in table["slowdown at P = 32"]]
    assert slowdowns == pytest.approx([32] * 4 + [1] * 4, rel=0.05)
    assert set(TABLES["slowdown"].make(experiments.fresh())["lr at P = 32"]) == {"0.001*"}
    with pytest.raises(UserError, match="laptop-rates-rates: no such folder"):
        TABLES["wider-rates"].make(Experiments.load(LAPTOP, complete.with_name("laptop-rates")))


def test_looking_up_an_experiment_takes_all_seeds_and_the_best_rate(tmp_path):
    settings = {"pipeline.stages": 32, **VARIANTS["nesterov"]}
    write_experiment(tmp_path, LAPTOP.preset, {**settings, "optimizer.lr": 0.003}, seeds=(0, 1), val_loss=1.0)
    write_experiment(tmp_path, LAPTOP.preset, {**settings, "optimizer.lr": 0.001}, seeds=(0,), val_loss=2.0)
    seeds = Experiments.load(LAPTOP, tmp_path).find("nesterov", 32, "main")
    assert seeds["optimizer.lr"].tolist() == [0.003, 0.003]


def test_tables_and_figures_share_one_target_that_pipedream_does_not_set(complete):
    experiments = Experiments.load(LAPTOP, complete)
    tables = [TABLES[name].make(experiments.fresh()) for name in ("slowdown", "preconditioned")]
    slowest = experiments.find("nesterov", 32, "main")["last_quarter_loss"].max()
    assert {target for table in tables for target in table["target loss"]} == {f"{slowest:.3f}"}
    assert experiments.slowdown_target() == pytest.approx(slowest)
