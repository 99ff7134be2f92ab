"""Panels of loss curves: what their range leaves out, what they say of few seeds and rates, where their legend is."""

import re

import numpy as np
import pytest

from brx.paper.figures import final_losses, slowdown
from brx.paper.scales import Experiments
from brx.plot.losses import THICK, THIN, curve_of, draw_training_losses
from brx.plot.style import new_figure
from tests.paper.helpers import LAPTOP, write_method


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


def legend_texts(axes):
    return [text.get_text() for text in axes.get_legend().get_texts()]


def test_few_seeds_and_rates_are_told_and_the_legend_lies_below(axes, tmp_path):
    several = curve(tmp_path, "pipedream", seeds=(0, 1), rates=(1e-3, 3e-4))
    single = curve(tmp_path, "nesterov")
    for shown in ([several, single], [single], [several]):
        draw_training_losses(axes, shown)
    assert [line.get_linewidth() for line in axes.lines[:2]] == [THICK, THIN]
    notes = [text.get_text() for text in axes.texts]
    assert notes == ["thin: one seed\none rate: 1 of 2", "one seed\none rate", ""]
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
    for stages, slowness in ((8, {"pipedream": 2, "nesterov": 3}), (32, {"pipedream": 9, "nesterov": 4})):
        for method, slow in {**slowness, "basis-rotation": 1}.items():
            write(tmp_path, method, stages, slowness=slow)
    experiments = Experiments.load(LAPTOP, tmp_path)
    baselines = ("pipedream", "nesterov")
    final_losses(experiments, axes, (*baselines, "basis-rotation"), best_of=baselines)
    (best,) = [line for line in axes.lines if line.get_label() == "best baseline"]
    runs = experiments.runs
    expected = runs[runs["method"] != "basis-rotation"].groupby("depth")["train_loss"].min()
    assert best.get_ydata().tolist() == expected.tolist()
    assert legend_texts(axes) == ["best baseline", "Basis rotation"]


def test_slowdown_has_its_interval_in_the_title_and_black_lines_in_the_legend(axes, tmp_path):
    for seed in range(3):
        for stages, slowness in ((1, 1.0), (32, 1.9 + 0.1 * seed)):
            write(tmp_path, "nesterov", stages, seeds=(seed,), slowness=slowness)
    slowdown(Experiments.load(LAPTOP, tmp_path), axes, "nesterov", "(c) ")
    assert re.fullmatch(r"\(c\) Nesterov\nslowdown 2\.0\d \[1\.\d\d, 2\.\d\d\]", axes.get_title())
    assert legend_texts(axes) == ["P = 1", "P = 32"]
    assert {line.get_color() for line in axes.get_legend().get_lines()} == {"black"}
