"""The paper's figures from made-up runs: all of them draw, and say what is missing and what makes it."""

import json

import pytest

from brx.cli.main import main
from brx.cli.paper import complete_figure, complete_table
from brx.paper.figures import FIGURES, draw_paper_figure
from brx.paper.scales import SCALES, VARIANTS, Experiments
from brx.plot.style import new_figure
from tests.paper.helpers import write_experiment

LAPTOP = SCALES["laptop"]
UNTRAINED = ("3b", "moe")


def test_every_figure_draws_from_complete_results_and_names_them(drawn):
    from_runs = [name for name, figure in FIGURES.items() if not figure.draw_to]
    assert {path.stem for path in drawn.iterdir()} == set(from_runs) - set(UNTRAINED)
    for name in set(from_runs) - set(UNTRAINED):
        files = [drawn / f"{name}{suffix}" for suffix in (".png", ".pdf", ".svg", ".txt", ".json")]
        assert all(path.stat().st_size > 100 for path in files), name
        caption, details = files[3].read_text(), json.loads(files[4].read_text())
        assert FIGURES[name].place in caption
        assert caption.endswith(f"Drawn by: brx plot {name} --scale laptop\n")
        assert bool(details["not there"]) == (name == "claims"), name
        assert details["runs"], name
        assert all(details["runs"].values()), name


def test_titles_say_what_the_numbers_say(tmp_path):
    for method, slowness in (("pipedream", 4), ("basis-rotation", 2)):
        for stages in (1, 32):
            settings = {"pipeline.stages": stages, **VARIANTS[method]}
            # Two seeds at the ends: a curve between them that has one must not take the second from the difference.
            write_experiment(tmp_path, LAPTOP.preset, settings, seeds=(0, 1), slowness=slowness if stages > 1 else 3)
    between = {"pipeline.stages": 8, **VARIANTS["pipedream"]}
    write_experiment(tmp_path, LAPTOP.preset, between, slowness=3.5)
    experiments = Experiments.load(LAPTOP, tmp_path)
    finals = {name: float(experiments.find(name, P)["train_loss"].mean())
              for name, P in (("pipedream", 32), ("basis-rotation", 32))}  # fmt: skip
    undelayed = float(experiments.find("pipedream", 1)["train_loss"].mean())
    figure = FIGURES["teaser"]
    with new_figure() as drawn:
        for panel, axes in zip(figure.panels, drawn.subplots(1, 2), strict=True):
            panel(experiments, axes)
        left, right = (" ".join(axes.get_title().split()) for axes in drawn.axes)
        labels = [text.get_text() for text in drawn.axes[1].get_legend().get_texts()]
    assert left == f"(a) PipeDream P = 1 to P = 32: {finals['pipedream'] - undelayed:+.2f} nats"
    below = undelayed - finals["basis-rotation"]
    assert below > 0
    assert right == f"(b) P = 32 Basis rotation ends {below:.2f} nats below AdamW without delay"
    assert labels == ["PipeDream", "Basis rotation", "AdamW without delay"]


def test_same_runs_give_the_same_bytes(experiments, drawn, tmp_path, monkeypatch):
    monkeypatch.setattr("brx.plot.style.DPI", 30)
    draw_paper_figure(FIGURES["main"], experiments, tmp_path)
    for name in ("main.png", "main.pdf", "main.svg", "main.txt", "main.json"):
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


@pytest.mark.parametrize("form", ["png", "svg"])
def test_a_file_is_written_where_one_is_named(form, tmp_path):
    out = tmp_path / "new" / f"x.{form}"
    assert main(["plot", "Figure 1", "--out", str(out)]) == 0
    assert [path.name for path in out.parent.iterdir()] == [out.name]
    assert out.read_bytes()[:5] in (b"\x89PNG\r", b"<?xml")


def test_names_complete():
    assert complete_figure("block") == ["block-scaling", "block-scaling-all"]
    assert complete_table("sl") == ["slowdown"]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["plot", "all", "--out", "x.png"], "--out x.png: a file holds one figure"),
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
