"""The paper's figures from made-up runs: all of them draw, and say what is missing and what makes it."""

import pytest

from brx.cli.main import main
from brx.paper.figures import FIGURES, draw_paper_figure
from brx.paper.scales import SCALES, VARIANTS, Experiments
from tests.paper.helpers import write_experiment

LAPTOP = SCALES["laptop"]
UNTRAINED = ("3b", "moe")


def test_every_figure_draws_from_complete_results_and_names_them(drawn):
    from_runs = [name for name, figure in FIGURES.items() if not figure.draw_to]
    assert {path.stem for path in drawn.iterdir()} == set(from_runs) - set(UNTRAINED)
    for name in set(from_runs) - set(UNTRAINED):
        files = [drawn / f"{name}{suffix}" for suffix in (".png", ".pdf", ".txt")]
        assert all(path.stat().st_size > 200 for path in files), name
        caption = files[-1].read_text()
        assert FIGURES[name].place in caption
        assert ("not there: " in caption) == (name == "claims"), name
        assert caption.count(", P = ") > 0, name


def test_same_runs_give_the_same_bytes(experiments, drawn, tmp_path, monkeypatch):
    monkeypatch.setattr("brx.plot.style.DPI", 30)
    draw_paper_figure(FIGURES["main"], experiments, tmp_path)
    for name in ("main.png", "main.pdf", "main.txt"):
        assert (drawn / name).read_bytes() == (tmp_path / name).read_bytes()


def test_all_draws_what_there_is_and_names_the_sweep_of_the_rest(tmp_path, capsys, monkeypatch):
    few = {name: FIGURES[name] for name in ("schedule", "teaser", "weight-prediction")}
    monkeypatch.setattr("brx.paper.publishing.FIGURES", few)
    write_experiment(tmp_path / "runs", LAPTOP.preset, {"pipeline.stages": 32})
    assert main(["plot", "all", "--runs", str(tmp_path / "runs"), "--out", str(tmp_path / "figures")]) == 0
    out, error = capsys.readouterr()
    assert [line.rpartition("/")[2] for line in out.splitlines()] == ["schedule.png", "teaser.png"]
    assert "figure weight-prediction: none of its runs" in error
    assert "brx sweep configs/sweeps/laptop/prediction.yaml" in error


def test_a_figure_without_runs_of_its_own_sweep_is_not_drawn_from_others_alone(tmp_path, capsys):
    write_experiment(tmp_path / "runs", LAPTOP.preset, {"pipeline.stages": 32})
    plot = ["plot", "preconditioned", "--runs", str(tmp_path / "runs"), "--out", str(tmp_path)]
    assert main(plot) == 2
    error = capsys.readouterr().err
    assert "figure preconditioned: none of its runs are in" in error
    assert "brx sweep configs/sweeps/laptop/preconditioned.yaml" in error
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


def test_looking_up_an_experiment_takes_all_seeds_and_the_best_rate(tmp_path):
    settings = {"pipeline.stages": 32, **VARIANTS["nesterov"]}
    write_experiment(tmp_path, LAPTOP.preset, {**settings, "optimizer.lr": 0.003}, seeds=(0, 1), val_loss=1.0)
    write_experiment(tmp_path, LAPTOP.preset, {**settings, "optimizer.lr": 0.001}, seeds=(0,), val_loss=2.0)
    seeds = Experiments.load(LAPTOP, tmp_path).find("nesterov")
    assert seeds["optimizer.lr"].tolist() == [0.003, 0.003]
