"""The paper's figures: all are drawn, missing runs are named, other commands draw the same; panels,
titles and legends."""

import json
import math
from dataclasses import replace
from itertools import product

import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure

from brx.cli.main import main
from brx.curvature.oscillation import Oscillation, OscillationSettings
from brx.errors import UserError
from brx.paper.figures import FIGURES
from brx.paper.panel_titles import in_even_lines, lowest_by_depth
from brx.paper.panels import final_losses
from brx.paper.paper_figure import draw_paper_figure
from brx.paper.scales import SCALES, Experiments
from brx.plot.losses import THICK, THIN, curve_of, draw_training_losses
from brx.plot.style import new_figure
from brx.runs.frames import DEPTH
from tests.paper.helpers import LAPTOP, write_method


@pytest.fixture
def svg_alone(monkeypatch):
    """Only SVG files are rendered, because rendering takes most of the time."""
    savefig = Figure.savefig

    def save(figure, file, *, format, **options):
        if format == "svg":
            savefig(figure, file, format=format, **options)

    monkeypatch.setattr(Figure, "savefig", save)


# The mixture and the 3B model have no runs at this scale.
FROM_RUNS = sorted(
    name
    for name, figure in FIGURES.items()
    if figure.is_from_runs_of_scale and name not in ("3b", "moe")
)


def details_of(drawn, name):
    return json.loads((drawn / f"{name}.json").read_text())


def test_every_figure_with_runs_is_drawn(drawn):
    assert {path.stem for path in drawn.iterdir()} == set(FROM_RUNS)


@pytest.mark.parametrize("name", FROM_RUNS)
def test_figure_has_all_formats(drawn, name):
    for suffix in (".png", ".pdf", ".svg", ".txt", ".json"):
        assert (drawn / f"{name}{suffix}").stat().st_size > 100


@pytest.mark.parametrize("name", FROM_RUNS)
def test_caption_has_the_place_in_the_paper(drawn, name):
    assert FIGURES[name].place in (drawn / f"{name}.txt").read_text()


@pytest.mark.parametrize("name", FROM_RUNS)
def test_caption_ends_with_the_command(drawn, name):
    caption = (drawn / f"{name}.txt").read_text()
    assert caption.endswith(f"Drawn by: brx plot {name} --scale laptop\n")


@pytest.mark.parametrize("name", FROM_RUNS)
def test_details_name_the_missing_sweeps(drawn, name):
    missing = {line.rpartition("/")[2] for line in details_of(drawn, name)["not there"]}
    # At this scale the preconditioned rivals have runs at P = 1 and the deepest pipeline alone.
    expected = {"claims": {"moe.yaml", "3b.yaml"}, "main": {"preconditioned.yaml"}}
    assert missing == expected.get(name, set())


@pytest.mark.parametrize("name", FROM_RUNS)
def test_details_name_the_runs(drawn, name):
    runs = details_of(drawn, name)["runs"]
    assert runs
    assert all(runs.values())


@pytest.fixture
def teaser_runs(tmp_path):
    """PipeDream and basis rotation with two seeds at both ends. Between the ends PipeDream has one
    seed, which must not take the second one from the difference of the ends."""
    for method, slowness in (("pipedream", 4), ("basis-rotation", 2)):
        write_method(tmp_path, method, 1, seeds=(0, 1), slowness=1.5)
        write_method(tmp_path, method, 32, seeds=(0, 1), slowness=slowness)
    write_method(tmp_path, "pipedream", 8, slowness=3.5)
    return Experiments.load(LAPTOP, tmp_path)


@pytest.fixture
def teaser(teaser_runs):
    """The two panels of the teaser."""
    with new_figure() as figure:
        for panel, axes in zip(FIGURES["teaser"].panels, figure.subplots(1, 2), strict=True):
            panel(teaser_runs, axes)
        yield figure.axes


def cost_of_delay(experiments, method):
    finals = [experiments.find(method, P)["train_loss"].mean() for P in (1, 32)]
    return finals[1] - finals[0]


def one_line(axes):
    return " ".join(axes.get_title().split())


def test_title_has_the_change_between_the_ends(teaser, teaser_runs):
    cost = cost_of_delay(teaser_runs, "pipedream")
    assert one_line(teaser[0]) == f"(a) PipeDream P = 1 to P = 32: {cost:+.2f} nats"


def test_title_has_both_costs_of_delay(teaser, teaser_runs):
    theirs = cost_of_delay(teaser_runs, "pipedream")
    ours = cost_of_delay(teaser_runs, "basis-rotation")
    costs = f"PipeDream {theirs:.2f} and Basis rotation {ours:.2f} nats"
    assert one_line(teaser[1]) == f"(b) P = 32 delay costs {costs}"


def test_legend_tells_curves_without_delay(teaser):
    # The panel of this test is so narrow that labels have several lines.
    labels = [" ".join(text.get_text().split()) for text in teaser[1].get_legend().get_texts()]
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


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("", ""),
        ("short enough", "short enough"),
        ("stage-aware ends 0.01 nats above equal", "stage-aware ends 0.01\nnats above equal"),
    ],
)
def test_titles_break_into_even_lines(text, lines):
    assert in_even_lines(text) == lines


def test_same_runs_give_the_same_bytes(experiments, tmp_path, monkeypatch):
    monkeypatch.setattr("brx.plot.style.DPI", 30)
    once, _ = draw_paper_figure(FIGURES["teaser"], experiments, tmp_path / "a")
    again, _ = draw_paper_figure(FIGURES["teaser"], experiments, tmp_path / "b")
    assert [path.suffix for path in once] == [".png", ".pdf", ".svg", ".txt", ".json"]
    for ours, theirs in zip(once, again, strict=True):
        assert ours.read_bytes() == theirs.read_bytes()


@pytest.fixture
def places(tmp_path, monkeypatch):
    """Options of `brx plot` for a folder with runs of PipeDream alone; there are four figures."""
    names = ("schedule", "teaser", "weight-prediction", "preconditioned")
    monkeypatch.setattr("brx.paper.figures.FIGURES", {name: FIGURES[name] for name in names})
    runs = tmp_path / "runs"
    write_method(runs, "pipedream")
    return ["--scale", "laptop", "--runs", str(runs), "--out", str(tmp_path / "figures")]


@pytest.mark.usefixtures("svg_alone")
def test_all_draws_the_figures_with_runs(places, capsys):
    assert main(["plot", "all", *places]) == 0
    drawn = [line.rpartition("/")[2] for line in capsys.readouterr().out.splitlines()]
    assert drawn == ["schedule.png", "teaser.png"]


@pytest.mark.usefixtures("svg_alone")
@pytest.mark.parametrize(
    ("name", "sweep"),
    [("weight-prediction", "prediction"), ("preconditioned", "preconditioned")],
)
def test_figure_without_its_own_sweep_is_noted(places, capsys, name, sweep):
    assert main(["plot", "all", *places]) == 0
    error = capsys.readouterr().err
    assert f"figure {name}: none of its runs" in error
    assert f"brx sweep configs/sweeps/laptop/{sweep}.yaml" in error


@pytest.mark.usefixtures("svg_alone")
def test_figure_without_its_own_sweep_is_refused(places):
    assert main(["plot", "preconditioned", *places]) == 2


@pytest.mark.usefixtures("svg_alone")
def test_named_file_is_the_only_one(tmp_path):
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
def test_own_command_draws_the_same_figure(name, tmp_path):
    arguments = [part.format(runs=SCALES["similar"].curvature) for part in OWN_COMMANDS[name]]
    (tmp_path / "own").mkdir()
    assert main([*arguments, str(tmp_path / "own" / name)]) == 0
    assert main(["plot", FIGURES[name].place or name, "--out", str(tmp_path / "plot")]) == 0
    for suffix in (".svg", ".txt"):
        own = tmp_path / "own" / f"{name}{suffix}"
        drawn = tmp_path / "plot" / f"{name}{suffix}"
        assert own.read_bytes().replace(b"/own/", b"/plot/") == drawn.read_bytes()


@pytest.fixture
def strategy_scale(tmp_path):
    """A scale with measured norms and without runs."""
    return replace(SCALES["laptop"], runs=tmp_path / "runs")


def strategy_details(scale, tmp_path):
    """The details of the figure of strategies' norms, as a text."""
    *_, details = FIGURES["strategy-norms"].draw_to(tmp_path / "figure", scale)
    return details.read_text()


@pytest.mark.usefixtures("svg_alone")
def test_strategy_norms_need_no_runs(strategy_scale, tmp_path):
    assert "slowdown" not in strategy_details(strategy_scale, tmp_path)


@pytest.mark.usefixtures("svg_alone")
def test_strategy_norms_take_an_empty_folder_for_no_runs(strategy_scale, tmp_path):
    strategy_scale.runs.mkdir()
    assert "slowdown" not in strategy_details(strategy_scale, tmp_path)


@pytest.mark.usefixtures("svg_alone")
def test_strategy_norms_have_slowdowns_of_runs(strategy_scale, tmp_path):
    for method, stages in product(("pipedream-lr", "basis-rotation"), (1, 32)):
        write_method(strategy_scale.runs, method, stages)
    text = strategy_details(strategy_scale, tmp_path)
    assert "slowdown at P = 32" in text
    assert "(basis-rotation)" in text
    assert "not run (basis-rotation 1st/bilateral)" in text


def test_strategy_norms_need_measurements(strategy_scale, tmp_path):
    write_method(tmp_path / "unmeasured", "pipedream")
    scale = replace(strategy_scale, curvature=tmp_path / "unmeasured")
    with pytest.raises(UserError, match="has no measured hessian-norm"):
        strategy_details(scale, tmp_path)


@pytest.mark.usefixtures("svg_alone")
@pytest.mark.parametrize("name", ["hessian-norm", "oscillation"])
def test_measurements_are_drawn_into_the_scales_folder(name, tmp_path, monkeypatch):
    measured = SCALES["similar"].curvature.resolve()
    monkeypatch.setitem(SCALES, "paper", replace(SCALES["paper"], curvature=measured))
    monkeypatch.chdir(tmp_path)
    assert main(["plot", name, "--scale", "paper"]) == 0
    assert (tmp_path / "figures" / "paper" / f"{name}.svg").is_file()


def test_oscillation_with_other_settings_alone_is_refused(tmp_path):
    write_method(tmp_path, "pipedream")
    (run,) = tmp_path.iterdir()
    (kept, *_) = SCALES["similar"].curvature.glob("*/analysis/oscillation-*.json")
    settings = OscillationSettings(iterations=50)
    Oscillation.read(kept).model_copy(update={"settings": settings}).write(run)
    scale = replace(SCALES["laptop"], curvature=tmp_path)
    with pytest.raises(UserError, match="no oscillation was measured with the usual settings"):
        FIGURES["oscillation"].draw_to(tmp_path / "figure", scale)


def test_scale_without_measurements_is_refused(tmp_path, monkeypatch, capsys):
    nothing = tmp_path / "nothing"
    monkeypatch.setitem(SCALES, "similar", replace(SCALES["similar"], curvature=nothing))
    assert main(["plot", "oscillation", "--out", str(tmp_path)]) == 2
    told = capsys.readouterr().err
    assert told == f"brx: figure oscillation: {nothing}: no such folder\n"


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


@pytest.fixture
def several(tmp_path):
    """A curve of two seeds and two rates."""
    return curve(tmp_path / "several", "pipedream", seeds=(0, 1), rates=(1e-3, 3e-4))


@pytest.fixture
def single(tmp_path):
    """A curve of one seed and one rate."""
    return curve(tmp_path / "single", "nesterov")


def test_curve_of_one_seed_is_thin(axes, several, single):
    draw_training_losses(axes, [several, single])
    assert [line.get_linewidth() for line in axes.lines] == [THICK, THIN]


def test_corner_tells_some_curves_with_one_seed(axes, several, single):
    draw_training_losses(axes, [several, single])
    assert axes.texts[0].get_text() == "thin: one seed\none rate: 1 of 2"


def test_corner_tells_all_curves_with_one_seed(axes, single):
    draw_training_losses(axes, [single])
    assert axes.texts[0].get_text() == "one seed\none rate"


def test_corner_is_empty_for_several_seeds(axes, several):
    draw_training_losses(axes, [several])
    assert axes.texts[0].get_text() == ""


def test_legend_lies_below_the_axis_label(axes, single):
    draw_training_losses(axes, [single])
    axes.figure.draw_without_rendering()
    legend = axes.get_legend().get_window_extent()
    label = axes.xaxis.label.get_window_extent()
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


@pytest.fixture
def with_best_baseline(axes, tmp_path):
    """The panel of final losses in which two baselines are one line, and their runs."""
    slowness_at_depth = {
        8: {"pipedream": 2, "nesterov": 3, "basis-rotation": 1},
        32: {"pipedream": 9, "nesterov": 4, "basis-rotation": 1},
    }
    for stages, slowness_of in slowness_at_depth.items():
        for method, slowness in slowness_of.items():
            write(tmp_path, method, stages, slowness=slowness)
    experiments = Experiments.load(LAPTOP, tmp_path)
    baselines = ("pipedream", "nesterov")
    final_losses(experiments, axes, (*baselines, "basis-rotation"), best_of=baselines)
    return axes, experiments.runs[experiments.runs["method"] != "basis-rotation"]


def test_best_baseline_is_the_lowest_at_each_depth(with_best_baseline):
    axes, runs = with_best_baseline
    (best,) = [line for line in axes.lines if line.get_label() == "best baseline"]
    assert best.get_ydata().tolist() == runs.groupby("depth")["train_loss"].min().tolist()


def test_best_baseline_is_over_the_seeds_of_all(axes, tmp_path):
    """On seed 1 only PipeDream is there, which is not the best."""
    write(tmp_path, "pipedream", 32, slowness=9, seeds=(0, 1))
    write(tmp_path, "nesterov", 32, slowness=4)
    write(tmp_path, "basis-rotation", 32)
    experiments = Experiments.load(LAPTOP, tmp_path)
    baselines = ("pipedream", "nesterov")
    final_losses(experiments, axes, (*baselines, "basis-rotation"), best_of=baselines)
    (best,) = [line for line in axes.lines if line.get_label() == "best baseline"]
    assert best.get_ydata().tolist() == [experiments.find("nesterov")["train_loss"].item()]


def test_caption_names_seeds_that_diverged(tmp_path):
    write(tmp_path, "scion", 32, seeds=(0, 1))
    write(tmp_path, "scion", 32, seeds=(2,), status="diverged")
    experiments = Experiments.load(LAPTOP, tmp_path)
    written, _ = draw_paper_figure(FIGURES["preconditioned"], experiments, tmp_path / "figures")
    caption = written[0].with_suffix(".txt").read_text()
    assert "Diverged, and in no curve or mean: scion at P = 32 (1 seed)." in caption


def test_best_baseline_is_one_entry_of_the_legend(with_best_baseline):
    axes, _ = with_best_baseline
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    assert labels == ["best baseline", "Basis rotation"]
