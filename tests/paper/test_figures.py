"""The paper's figures: all draw, say what is missing, and are those of their own commands; panels
and their legends."""

import json
import math
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure

from brx.cli.main import main
from brx.errors import UserError
from brx.paper.figures import FIGURES, draw_paper_figure, final_losses, lowest_by_depth
from brx.paper.scales import SCALES, Experiments
from brx.plot.losses import THICK, THIN, curve_of, draw_training_losses
from brx.plot.style import new_figure
from brx.runs.frames import DEPTH
from tests.paper.helpers import LAPTOP, write_method


@pytest.fixture
def svg_alone(monkeypatch):
    """Where the same figure is drawn, its text says so; pictures cost most of the time."""
    savefig = Figure.savefig

    def save(figure, file, *, format, **options):
        if format == "svg":
            savefig(figure, file, format=format, **options)

    monkeypatch.setattr(Figure, "savefig", save)


def test_every_figure_draws_from_complete_results_and_names_them(drawn):
    from_runs = {name for name, figure in FIGURES.items() if figure.is_from_runs_of_scale} - {
        "3b",
        "moe",
    }
    assert {path.stem for path in drawn.iterdir()} == from_runs
    for name in from_runs:
        files = [drawn / f"{name}{suffix}" for suffix in (".png", ".pdf", ".svg", ".txt", ".json")]
        assert all(path.stat().st_size > 100 for path in files), name
        caption, details = files[3].read_text(), json.loads(files[4].read_text())
        assert FIGURES[name].place in caption
        assert caption.endswith(f"Drawn by: brx plot {name} --scale laptop\n")
        missing = {line.rpartition("/")[2] for line in details["not there"]}
        # At this scale the preconditioned rivals have runs at P = 1 and the deepest pipeline alone.
        expected = {"claims": {"moe.yaml", "3b.yaml"}, "main": {"preconditioned.yaml"}}
        assert missing == expected.get(name, set()), name
        assert details["runs"], name
        assert all(details["runs"].values()), name


def test_titles_say_what_the_numbers_say(tmp_path):
    for method, slowness in (("pipedream", 4), ("basis-rotation", 2)):
        for stages in (1, 32):
            # Two seeds at the ends: a curve between them that has one must not take the second from
            #     the difference.
            write_method(
                tmp_path, method, stages, seeds=(0, 1), slowness=slowness if stages > 1 else 1.5
            )
    write_method(tmp_path, "pipedream", 8, slowness=3.5)
    experiments = Experiments.load(LAPTOP, tmp_path)
    undelayed, delayed, ours_undelayed, ours = (
        float(experiments.find(name, P)["train_loss"].mean())
        for name in ("pipedream", "basis-rotation")
        for P in (1, 32)
    )
    figure = FIGURES["teaser"]
    with new_figure() as drawn:
        for panel, axes in zip(figure.panels, drawn.subplots(1, 2), strict=True):
            panel(experiments, axes)
        left, right = (" ".join(axes.get_title().split()) for axes in drawn.axes)
        labels = [text.get_text() for text in drawn.axes[1].get_legend().get_texts()]
    assert left == f"(a) PipeDream P = 1 to P = 32: {delayed - undelayed:+.2f} nats"
    assert right == (
        f"(b) P = 32 delay costs PipeDream {delayed - undelayed:.2f} and Basis rotation "
        f"{ours - ours_undelayed:.2f} nats"
    )
    assert labels == [
        "PipeDream",
        "Basis rotation",
        "AdamW without delay",
        "Basis rotation without delay",
    ]


@pytest.mark.parametrize(
    ("pipedream", "soap", "title"),
    [
        ((1.5, 1.6), (1.7, 1.8), "PipeDream lowest at 2 of 2 P"),
        ((1.5, 1.6), (1.496, 1.8), "PipeDream lowest or level at 2 of 2 P"),
        ((1.5, 1.6), (1.494, 1.5), "SOAP lowest at 2 of 2 P"),
        ((1.5, 1.6), (math.nan, 1.7), "PipeDream lowest at 2 of 2 P"),
    ],
)
def test_title_counts_where_a_method_is_lowest(pipedream, soap, title):
    rows = []
    for variant, losses in (("pipedream", pipedream), ("soap", soap)):
        for stages, loss in zip((1, 32), losses, strict=True):
            rows.append({"variant": variant, DEPTH: stages, "train_loss": loss})
    assert lowest_by_depth(pd.DataFrame(rows)) == title


def test_same_runs_give_the_same_bytes(experiments, tmp_path, monkeypatch):
    monkeypatch.setattr("brx.plot.style.DPI", 30)
    once, again = (
        draw_paper_figure(FIGURES["teaser"], experiments, tmp_path / which)[0]
        for which in ("a", "b")
    )
    assert [path.suffix for path in once] == [".png", ".pdf", ".svg", ".txt", ".json"]
    for ours, theirs in zip(once, again, strict=True):
        assert ours.read_bytes() == theirs.read_bytes()


@pytest.mark.usefixtures("svg_alone")
def test_all_draws_what_there_is_and_names_the_sweep_of_the_rest(tmp_path, capsys, monkeypatch):
    few = {
        name: FIGURES[name]
        for name in ("schedule", "teaser", "weight-prediction", "preconditioned")
    }
    monkeypatch.setattr("brx.paper.figures.FIGURES", few)
    write_method(tmp_path / "runs", "pipedream")
    places = [
        "--scale",
        "laptop",
        "--runs",
        str(tmp_path / "runs"),
        "--out",
        str(tmp_path / "figures"),
    ]
    assert main(["plot", "all", *places]) == 0
    out, error = capsys.readouterr()
    assert [line.rpartition("/")[2] for line in out.splitlines()] == ["schedule.png", "teaser.png"]
    # A figure without runs of its own sweep is not drawn from others alone.
    for name, sweep in (("weight-prediction", "prediction"), ("preconditioned", "preconditioned")):
        assert f"figure {name}: none of its runs" in error
        assert f"brx sweep configs/sweeps/laptop/{sweep}.yaml" in error
    assert main(["plot", "preconditioned", *places]) == 2


@pytest.mark.usefixtures("svg_alone")
def test_a_file_is_written_where_one_is_named(tmp_path):
    out = tmp_path / "new" / "x.svg"
    assert main(["plot", "Figure 1", "--out", str(out)]) == 0
    assert [path.name for path in out.parent.iterdir()] == [out.name]
    assert out.read_bytes().startswith(b"<?xml")


OWN_COMMANDS = {
    "schedule": ["schedule", "--stages", "4", "--figure"],
    "effective-delay": ["effective-delay", "{runs}", "--out"],
}


@pytest.mark.usefixtures("svg_alone")
@pytest.mark.parametrize("name", OWN_COMMANDS)
def test_figure_is_that_of_its_own_command(name, tmp_path):
    arguments = [part.format(runs=SCALES["similar"].curvature) for part in OWN_COMMANDS[name]]
    (tmp_path / "own").mkdir()
    assert main([*arguments, str(tmp_path / "own" / name)]) == 0
    assert main(["plot", FIGURES[name].place or name, "--out", str(tmp_path / "plot")]) == 0
    for suffix in (".svg", ".txt"):
        own, drawn = (tmp_path / which / f"{name}{suffix}" for which in ("own", "plot"))
        assert own.read_bytes().replace(b"/own/", b"/plot/") == drawn.read_bytes()


def test_norms_by_strategy_stand_beside_the_slowdowns_of_the_scale_as_far_as_there_are_any(
    tmp_path,
):
    scale = replace(SCALES["laptop"], runs=tmp_path / "runs")
    *_, details = FIGURES["strategy-norms"].draw_to(tmp_path / "figure", scale)
    assert "slowdown" not in details.read_text()
    for method in ("pipedream-lr", "basis-rotation"):
        for stages in (1, 32):
            write_method(scale.runs, method, stages)
    text = FIGURES["strategy-norms"].draw_to(tmp_path / "figure", scale)[-1].read_text()
    assert "slowdown at P = 32" in text
    assert "(basis-rotation)" in text
    assert "not run (basis-rotation 1st/bilateral)" in text
    write_method(tmp_path / "unmeasured", "pipedream")
    with pytest.raises(UserError, match="has no measured hessian-norm"):
        FIGURES["strategy-norms"].draw_to(
            tmp_path / "figure", replace(scale, curvature=tmp_path / "unmeasured")
        )


@pytest.mark.usefixtures("svg_alone")
def test_what_a_scale_has_measured_is_drawn_into_its_own_folder_and_refused_without(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setitem(
        SCALES, "paper", replace(SCALES["paper"], curvature=SCALES["similar"].curvature.resolve())
    )
    monkeypatch.setitem(
        SCALES, "similar", replace(SCALES["similar"], curvature=tmp_path / "nothing")
    )
    monkeypatch.chdir(tmp_path)
    for name in ("hessian-norm", "oscillation"):
        assert main(["plot", name, "--scale", "paper"]) == 0
        assert (tmp_path / "figures" / "paper" / f"{name}.svg").is_file()
    assert main(["plot", "oscillation"]) == 2
    assert (
        capsys.readouterr().err
        == f"brx: figure oscillation: {tmp_path / 'nothing'}: no such folder\n"
    )


@pytest.fixture
def axes():
    with new_figure(height=3.0) as figure:
        yield figure.subplots()


def write(folder, method, stages=32, rates=(1e-3,), **options):
    for rate in rates:
        write_method(folder, method, stages, {"optimizer.lr": rate}, **options)
    return folder


def curve(folder, method, **options):
    return curve_of(Experiments.load(LAPTOP, write(folder, method, **options)).find(method))


def test_few_seeds_and_rates_are_told_and_the_legend_lies_below(axes, tmp_path):
    several = curve(tmp_path, "pipedream", seeds=(0, 1), rates=(1e-3, 3e-4))
    single = curve(tmp_path, "nesterov")
    for shown in ([several, single], [single], [several]):
        draw_training_losses(axes, shown)
    assert [line.get_linewidth() for line in axes.lines[:2]] == [THICK, THIN]
    assert [text.get_text() for text in axes.texts] == [
        "thin: one seed\none rate: 1 of 2",
        "one seed\none rate",
        "",
    ]
    axes.figure.draw_without_rendering()
    legend, label = (artist.get_window_extent() for artist in (axes.get_legend(), axes.xaxis.label))
    assert legend.y1 < label.y0


def test_spikes_do_not_set_the_range(axes, tmp_path):
    (run,) = write(tmp_path, "scion").iterdir()
    with np.load(run / "curves.npz") as file:
        arrays = dict(file)
    arrays["train_loss"][300:900] += 50.0  # of 8,000
    np.savez(run / "curves.npz", **arrays)
    draw_training_losses(axes, [curve_of(Experiments.load(LAPTOP, tmp_path).find("scion"))])
    low, high = axes.get_ylim()
    assert low < arrays["train_loss"].min()
    assert np.quantile(arrays["train_loss"], 0.5) < high < 5


def test_best_baseline_is_one_line_that_takes_the_lowest_at_each_number_of_stages(axes, tmp_path):
    for stages, slowness in (
        (8, {"pipedream": 2, "nesterov": 3}),
        (32, {"pipedream": 9, "nesterov": 4}),
    ):
        for method, slow in {**slowness, "basis-rotation": 1}.items():
            write(tmp_path, method, stages, slowness=slow)
    experiments = Experiments.load(LAPTOP, tmp_path)
    baselines = ("pipedream", "nesterov")
    final_losses(experiments, axes, (*baselines, "basis-rotation"), best_of=baselines)
    (best,) = [line for line in axes.lines if line.get_label() == "best baseline"]
    runs = experiments.runs[experiments.runs["method"] != "basis-rotation"]
    assert best.get_ydata().tolist() == runs.groupby("depth")["train_loss"].min().tolist()
    assert [text.get_text() for text in axes.get_legend().get_texts()] == [
        "best baseline",
        "Basis rotation",
    ]
