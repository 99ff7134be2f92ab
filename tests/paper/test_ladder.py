"""The ladder: complete lengths alone, the law against polyfit and the coverage of its interval, the
figure."""

import json
import math
import re
import shutil
from itertools import product

import numpy as np
import pytest

from brx.errors import UserError
from brx.paper.figures import FIGURES, draw_paper_figure
from brx.paper.ladder import (
    PAPER_RELATIVE_DELAY,
    fill_ladder,
    fit_power_law,
    ladder_table,
    read_ladder,
)
from brx.paper.scales import LADDER_METHODS, SCALES, VARIANTS, Experiments
from brx.plot.style import new_figure
from brx.runs.comparison import common_target
from tests.paper.helpers import LAPTOP, write_experiment, write_method


def write_ladder(folder, iterations, slowness_by_method, seeds=(0,)):
    for method, slowness in slowness_by_method.items():
        for stages, slower in ((1, 1), (32, slowness)):
            write_method(
                folder,
                method,
                stages,
                {"training.iterations": iterations},
                seeds=seeds,
                slowness=slower,
            )


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Slowdowns of 1 + 200 tau / T (basis rotation), twice and three times as much; there are no
    others."""
    folder = tmp_path_factory.mktemp("ladder")
    for iterations in (2000, 4000, 16000):
        cost = 200 * 31 / iterations
        methods = {
            "basis-rotation": 1 + cost,
            "pipedream-lr": 1 + 2 * cost,
            "nesterov": 1 + 3 * cost,
        }
        write_ladder(folder, iterations, methods, seeds=(0, 1) if iterations == 2000 else (0,))
    return folder


def test_slowdowns_and_savings_of_every_complete_length(runs):
    rows, savings, _ = read_ladder(Experiments.load(LAPTOP, runs))
    assert rows.groupby("iterations_of_training")["num_seeds"].first().to_dict() == {
        2000: 2,
        4000: 1,
        16000: 1,
    }
    for row in rows.to_dict("records"):
        assert row["relative_delay"] == 31 / row["iterations_of_training"]
        factor = {"basis-rotation": 200, "pipedream-lr": 400, "nesterov": 600}[row["method"]]
        if not row["is_censored"]:
            assert row["ratio"] == pytest.approx(1 + factor * row["relative_delay"], rel=0.05)
    assert list(savings["method"]) == ["basis-rotation"] * 3
    # Both lose the same share of their slowness, so that the iterations to a loss are as slowness.
    expected = [1 - (1 + 200 * 31 / T) / (1 + 400 * 31 / T) for T in (2000, 4000, 16000)]
    assert savings["share"].to_numpy() == pytest.approx(expected, abs=0.05)


def test_other_methods_are_beside_the_ladder_where_they_were_trained_as_long(runs, tmp_path):
    folder = shutil.copytree(runs, tmp_path / "more")
    write_ladder(folder, 4000, {"basis-rotation 1st/bilateral": 2.0})
    write_method(folder, "soap", 1, {"training.iterations": 16000})  # without delay alone
    experiments = Experiments.load(LAPTOP, folder)
    rows = read_ladder(experiments).slowdowns.set_index(["iterations_of_training", "method"])
    assert not any("soap" in line for line in experiments.missing)
    ladder = set(product((2000, 4000, 16000), LADDER_METHODS))
    assert set(rows.index) == ladder | {(4000, "basis-rotation 1st/bilateral")}
    other = rows.loc[4000, "basis-rotation 1st/bilateral"]
    assert other["ratio"] == pytest.approx(2.0, rel=0.05)
    of_ladder = experiments.find_ends(*LADDER_METHODS, settings={"training.iterations": 4000})
    assert other["target"] == rows.loc[4000, "nesterov"]["target"] == common_target(of_ladder)


def test_a_length_that_lacks_a_run_is_left_out_and_without_one_the_figure_says_so(runs, tmp_path):
    folder = shutil.copytree(runs, tmp_path / "fewer")
    texts = {path: (path / "config.yaml").read_text() for path in folder.iterdir()}
    for lengths, left in ((("4000",), [2000, 16000]), (("2000", "16000"), [])):
        for path, text in texts.items():
            if any(f"iterations: {T}" in text for T in lengths) and "method: pipedream-lr" in text:
                shutil.rmtree(path)
        experiments = Experiments.load(LAPTOP, folder)
        slowdowns = read_ladder(experiments).slowdowns
        assert (
            slowdowns["iterations_of_training"].unique().tolist() if left else len(slowdowns)
        ) == (left or 0)
        assert experiments.missing
        assert all("ladder.yaml" in line for line in experiments.missing)
    written, asked = draw_paper_figure(FIGURES["ladder"], experiments, tmp_path)
    assert asked.used
    assert json.loads(written[-1].read_text())["not there"][0].startswith("pipedream-lr at P = 1")
    with pytest.raises(UserError, match="the ladder: only at the scale of a laptop"):
        read_ladder(Experiments(SCALES["paper"], experiments.runs, tmp_path))


def test_a_growing_ladder_predicts_its_longest_length_from_the_shorter_ones_seed_by_seed(tmp_path):
    """Slowdowns of 1.5, 2, 3 times 20 (tau / T)^0.4, a tenth more for seed 1; runs at other rates
    do not count."""
    scale = SCALES["similar"]
    for (T, rung), (factor, method) in product(
        [*scale.ladder.items()][:3], enumerate(("basis-rotation", "nesterov", "pipedream-lr"), 2)
    ):
        settings = {"training.iterations": T, **rung, **VARIANTS[method]}
        slowness = factor * 10 * (31 / T) ** 0.4
        for seed in (
            (0, 1, 2) if T == 32000 and factor < 4 else (0, 1)
        ):  # 2: left out, since not all have it
            status = "diverged" if (seed, factor) == (2, 3) else "finished"
            options = {"seeds": [seed], "val_loss": 1.0, "status": status}
            delayed = slowness * (1 + 0.1 * seed)
            write_experiment(
                tmp_path,
                "similar",
                {**settings, "pipeline.stages": 32},
                slowness=delayed,
                **options,
            )
            write_experiment(
                tmp_path, "similar", {**settings, "pipeline.stages": 1}, slowness=1, **options
            )
        better = {
            **settings,
            "optimizer.lr": 0.5,
        }  # by its validation loss the best, elsewhere than on the ladder
        write_experiment(
            tmp_path, "similar", {**better, "pipeline.stages": 32}, slowness=50, val_loss=0.0
        )
    experiments = Experiments.load(scale, tmp_path)
    slowed = read_ladder(experiments).slowdowns.set_index(
        ["method", "iterations_of_training", "of_seeds"]
    )["ratio"]
    assert set(slowed.index.get_level_values("of_seeds")) == {"0", "1"}
    for (method, T, seed), ratio in slowed.items():
        factor = {"basis-rotation": 20, "nesterov": 30, "pipedream-lr": 40}[method] * (
            1 + 0.1 * int(seed)
        )
        assert ratio == pytest.approx(factor * (31 / T) ** 0.4, rel=0.02)
    # Now all have seed 2, of which one diverged: nothing bounds its slowdown, and the others have
    #     theirs.
    last = {"training.iterations": 32000, **scale.ladder[32000], **VARIANTS["pipedream-lr"]}
    for stages in (1, 32):
        write_experiment(
            tmp_path, "similar", {**last, "pipeline.stages": stages}, seeds=[2], slowness=stages
        )
    rows = read_ladder(Experiments.load(scale, tmp_path)).slowdowns.set_index(
        ["of_seeds", "method"]
    )["ratio"]
    assert rows["2"].isna().to_dict() == {
        "basis-rotation": False,
        "nesterov": True,
        "pipedream-lr": False,
    }
    table = ladder_table(experiments).set_index(["iterations", "method"])
    value, low, high = re.findall(
        r"[0-9.]+", table.loc[("72000, predicted", "nesterov"), "slowdown"]
    )
    middle = 30 * math.sqrt(1.1) * (31 / 72000) ** 0.4
    assert float(value) == pytest.approx(middle, rel=0.02)
    assert float(low) < middle / math.sqrt(1.1) < middle * math.sqrt(1.1) < float(high)
    assert ("244000, extrapolated", "nesterov") in table.index
    assert any("ladder.yaml" in line and "72000" in line for line in experiments.missing)
    for runs in (
        experiments.runs,
        experiments.runs[experiments.runs["training.iterations"] == 8000],
    ):
        with new_figure() as figure:
            fill_ladder(Experiments(scale, runs, tmp_path), figure)


def test_power_law_is_the_line_through_the_logarithms():
    generator = np.random.default_rng(0)
    x = np.array([1e-4, 3e-4, 1e-3, 4e-3])
    y = 30 * x**0.7 * np.exp(0.1 * generator.standard_normal(4))
    law = fit_power_law(x.tolist(), y.tolist())
    slope, intercept = np.polyfit(np.log(x), np.log(y), 1)
    assert (law.slope, law.intercept) == (pytest.approx(slope), pytest.approx(intercept))
    assert law.at(2e-5)[0] == pytest.approx(math.exp(intercept + slope * math.log(2e-5)))
    exact = fit_power_law(x.tolist(), (30 * x**0.7).tolist()).at(PAPER_RELATIVE_DELAY)
    assert exact == pytest.approx((30 * PAPER_RELATIVE_DELAY**0.7,) * 3)
    assert fit_power_law([1e-3, 2e-3], [1.0, 2.0]) is None
    assert fit_power_law([1e-3, 2e-3, 4e-3], [0.5, 0.0, 1.0]) is None  # delay costs nothing


def test_interval_of_the_extrapolation_covers_a_new_point_as_often_as_it_says():
    generator = np.random.default_rng(1)
    x, beyond = np.array([2.4e-4, 4.8e-4, 1e-3, 2e-3, 4e-3]), 1.3e-4
    covered = 0
    for _ in range(2000):
        noise = np.exp(0.2 * generator.standard_normal(6))
        _, low, high = fit_power_law(x.tolist(), (30 * x**0.7 * noise[:5]).tolist()).at(beyond)
        covered += low < 30 * beyond**0.7 * noise[5] < high
    assert 0.93 < covered / 2000 < 0.97


def test_figure_and_table_state_the_extrapolation_with_its_interval_beside_the_papers_number(runs):
    experiments = Experiments.load(LAPTOP, runs)
    with new_figure() as figure:
        fill_ladder(experiments, figure)
        labels = [text.get_text() for axes in figure.axes for text in axes.get_legend().get_texts()]
        for axes in figure.axes:
            assert axes.get_xscale() == "log"
            assert axes.get_xlim()[0] < PAPER_RELATIVE_DELAY < axes.get_xlim()[1]
    assert all("[" in label for label in labels)
    assert any(label.startswith("PipeDream-LR: ") and label.endswith("/ 5.43") for label in labels)
    table = ladder_table(experiments)
    measured = table[~table["iterations"].str.endswith("extrapolated")]
    of_length = product(("2000", "4000", "16000"), ("basis-rotation", "nesterov", "pipedream-lr"))
    assert list(zip(measured["iterations"], measured["method"], strict=True)) == list(of_length)
    assert measured["target loss"].nunique() == 3
    assert (
        measured["iterations saved at P"].str.contains("over pipedream-lr").tolist()
        == [True, False, False] * 3
    )
    last = table[table["iterations"].str.endswith("extrapolated")].set_index("method")
    assert set(last.index) == set(LADDER_METHODS)
    for method, name in (("basis-rotation", "Basis rotation"), ("pipedream-lr", "PipeDream-LR")):
        assert any(
            label.startswith(f"{name}: {last.loc[method, 'slowdown']} / ") for label in labels
        )
    assert (
        f"Basis rotation: {last.loc['basis-rotation', 'iterations saved at P']} / 71.6%" in labels
    )
