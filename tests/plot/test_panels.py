"""Panels of loss curves: what their range leaves out, what they say of few seeds and rates, where their legend is."""

import numpy as np
import pytest

from brx.paper.scales import VARIANTS
from brx.plot.panels import THICK, THIN, curve_of, draw_final_losses, draw_slowdown, draw_training_losses, row_of_axes
from brx.plot.style import new_figure
from brx.runs.experiments import at_best_rates
from brx.runs.frames import load
from tests.paper.helpers import write_experiment


@pytest.fixture
def axes():
    with new_figure(height=3.0) as figure:
        yield row_of_axes(figure, 1)[0]


def experiment(folder, method, stages=32, rates=(1e-3,), **options):
    for rate in rates:
        settings = {"pipeline.stages": stages, "optimizer.lr": rate, **VARIANTS[method]}
        write_experiment(folder, "laptop", settings, **options)
    chosen = at_best_rates(load([folder]))
    return chosen[chosen["variant"] == method]


def notes(axes):
    return [text.get_text() for text in axes.texts]


def test_curves_of_one_seed_are_thin_and_of_one_rate_are_counted(axes, tmp_path):
    several = experiment(tmp_path, "pipedream", seeds=(0, 1), rates=(1e-3, 3e-4))
    single = experiment(tmp_path, "nesterov")
    draw_training_losses(axes, [curve_of(several), curve_of(single)])
    assert [line.get_linewidth() for line in axes.lines] == [THICK, THIN]
    assert notes(axes) == ["thin: one seed\none rate: 1 of 2"]


def test_panel_says_if_all_are_of_one_seed_or_of_several(axes, tmp_path):
    draw_training_losses(axes, [curve_of(experiment(tmp_path / "a", "pipedream"))])
    several = experiment(tmp_path / "b", "pipedream", seeds=(0, 1), rates=(1e-3, 3e-4))
    draw_training_losses(axes, [curve_of(several)])
    assert notes(axes) == ["one seed\none rate", ""]


def test_spikes_do_not_set_the_range(axes, tmp_path):
    spiked = experiment(tmp_path, "scion")
    (path,) = spiked.index
    with np.load(f"{path}/curves.npz") as file:
        arrays = dict(file)
    arrays["train_loss"][300:900] += 50.0  # of 8,000
    np.savez(f"{path}/curves.npz", **arrays)
    draw_training_losses(axes, [curve_of(spiked)])
    low, high = axes.get_ylim()
    assert low < arrays["train_loss"].min()
    assert np.quantile(arrays["train_loss"], 0.5) < high < 5


def test_legend_lies_below_the_panel(axes, tmp_path):
    draw_training_losses(axes, [curve_of(experiment(tmp_path, "pipedream"))], title="P = 32")
    axes.figure.draw_without_rendering()
    legend, label = (artist.get_window_extent() for artist in (axes.get_legend(), axes.xaxis.label))
    assert legend.y1 < label.y0


def test_best_baseline_is_one_line_that_takes_the_lowest_at_each_number_of_stages(axes, tmp_path):
    for stages, slowness in ((8, {"pipedream": 2, "nesterov": 3}), (32, {"pipedream": 9, "nesterov": 4})):
        for method, slow in slowness.items():
            experiment(tmp_path, method, stages, slowness=slow)
        experiment(tmp_path, "basis-rotation", stages, slowness=1)
    runs = at_best_rates(load([tmp_path]))
    draw_final_losses(axes, runs, best_of=("pipedream", "nesterov"))
    (best,) = [line for line in axes.lines if line.get_label() == "best baseline"]
    expected = runs[runs["method"] != "basis-rotation"].groupby("depth")["train_loss"].min()
    assert best.get_ydata().tolist() == expected.tolist()
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["best baseline", "Basis rotation"]


def test_slowdown_has_its_interval_in_the_title_and_black_lines_in_the_legend(axes, tmp_path):
    seeds = (0, 1, 2)
    ends = [experiment(tmp_path, "nesterov", stages, seeds=seeds, slowness=stages) for stages in (1, 2)]
    undelayed, delayed = (ends[1][ends[1]["pipeline.stages"] == stages] for stages in (1, 2))
    draw_slowdown(axes, undelayed, delayed, target=0.5)
    assert axes.get_title().startswith("Nesterov\nslowdown 2.0")
    assert axes.get_title().endswith("]")
    legend = axes.get_legend()
    assert [text.get_text() for text in legend.get_texts()] == ["P = 1", "P = 2"]
    assert {line.get_color() for line in legend.get_lines()} == {"black"}
