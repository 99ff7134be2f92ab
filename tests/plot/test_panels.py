"""Panels of loss curves: what their range leaves out, what they say of few seeds and rates, where their legend is."""

import re
from itertools import combinations

import numpy as np
import pytest
from matplotlib.colors import to_rgb

from brx.paper.scales import BASELINES_AND_STRATEGIES, VARIANTS
from brx.paper.tables import PRECONDITIONED_TABLE
from brx.plot.panels import THICK, THIN, curve_of, draw_final_losses, draw_slowdown, draw_training_losses, row_of_axes
from brx.plot.style import look_of, new_figure
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
    for seed in range(3):
        for stages, slowness in ((1, 1.0), (2, 1.9 + 0.1 * seed)):
            runs = experiment(tmp_path, "nesterov", stages, seeds=(seed,), slowness=slowness)
    undelayed, delayed = (runs[runs["pipeline.stages"] == stages] for stages in (1, 2))
    draw_slowdown(axes, undelayed, delayed, target=0.5)
    assert re.fullmatch(r"Nesterov\nslowdown 2\.0\d \[1\.\d\d, 2\.\d\d\]", axes.get_title())
    legend = axes.get_legend()
    assert [text.get_text() for text in legend.get_texts()] == ["P = 1", "P = 2"]
    assert {line.get_color() for line in legend.get_lines()} == {"black"}


# Machado, Oliveira and Fernandes (2009): what linear RGB becomes to the eyes of somebody without one kind of cone.
WITHOUT_RED = [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
WITHOUT_GREEN = [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]


def lab(color):
    """CIELAB of linear RGB in [0, 1], white point D65."""
    to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    x, y, z = np.cbrt(to_xyz @ np.clip(color, 0, 1) / [0.9505, 1.0, 1.089])
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("eyes", [np.eye(3), WITHOUT_RED, WITHOUT_GREEN], ids=["all cones", "no red", "no green"])
@pytest.mark.parametrize("together", [BASELINES_AND_STRATEGIES, PRECONDITIONED_TABLE])
def test_methods_of_one_figure_can_be_told_apart_by_colour(eyes, together):
    srgb = [np.array(to_rgb(look_of(method).color)) for method in together]
    seen = [lab(np.array(eyes) @ np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)) for rgb in srgb]
    distances = {pair: np.linalg.norm(seen[pair[0]] - seen[pair[1]]) for pair in combinations(range(len(seen)), 2)}
    closest = min(distances, key=distances.get)
    assert distances[closest] > 15, [together[place] for place in closest]
