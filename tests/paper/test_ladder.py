"""The ladder: complete lengths alone, the law against polyfit and the coverage of its interval, the
figure."""

import json
import math
import re
import shutil
from itertools import product

import numpy as np
import pandas as pd
import pytest

from brx.errors import UserError
from brx.paper.figures import FIGURES
from brx.paper.ladder import (
    PAPER_RELATIVE_DELAY,
    SLOWDOWN,
    fill_ladder,
    fit_power_law,
    ladder_table,
    read_ladder,
)
from brx.paper.paper_figure import draw_paper_figure
from brx.paper.scales import LADDER_METHODS, SCALES, VARIANTS, Experiments
from brx.plot.style import new_figure
from brx.runs.comparison import common_target
from tests.paper.helpers import LAPTOP, write_experiment, write_method

LENGTHS = (2000, 4000, 16000)
# By method: the slowdown is 1 plus so many times the relative delay.
COSTS = {"basis-rotation": 200, "pipedream-lr": 400, "nesterov": 600}


def slowdown_at(method, T):
    return 1 + COSTS[method] * 31 / T


def write_ladder(folder, iterations, slowness_by_method, seeds=(0,)):
    settings = {"training.iterations": iterations}
    for method, slowness in slowness_by_method.items():
        write_method(folder, method, 1, settings, seeds=seeds, slowness=1)
        write_method(folder, method, 32, settings, seeds=seeds, slowness=slowness)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The ladder's methods at LENGTHS, the shortest with two seeds; there are no others."""
    folder = tmp_path_factory.mktemp("ladder")
    for T in LENGTHS:
        slowness = {method: slowdown_at(method, T) for method in COSTS}
        write_ladder(folder, T, slowness, seeds=(0, 1) if T == 2000 else (0,))
    return folder


@pytest.fixture(scope="module")
def ladder(runs):
    return read_ladder(Experiments.load(LAPTOP, runs))


def test_ladder_counts_the_seeds_of_each_length(ladder):
    num_seeds = ladder.slowdowns.groupby("iterations_of_training")["num_seeds"].first()
    assert num_seeds.to_dict() == {2000: 2, 4000: 1, 16000: 1}


def test_ladder_finds_the_slowdowns_of_every_length(ladder):
    rows = ladder.slowdowns
    known = rows[~rows["is_censored"]]
    assert set(known["iterations_of_training"]) == set(LENGTHS)
    for row in known.to_dict("records"):
        expected = slowdown_at(row["method"], row["iterations_of_training"])
        assert row["ratio"] == pytest.approx(expected, rel=0.05)


def test_relative_delay_is_tau_over_t(ladder):
    rows = ladder.slowdowns
    assert (rows["relative_delay"] == 31 / rows["iterations_of_training"]).all()


def test_ladder_finds_the_savings_of_every_length(ladder):
    assert list(ladder.savings["method"]) == ["basis-rotation"] * 3
    # Both lose the same share of their slowness, so that the iterations to a loss are as slowness.
    expected = [
        1 - slowdown_at("basis-rotation", T) / slowdown_at("pipedream-lr", T) for T in LENGTHS
    ]
    assert ladder.savings["share"].to_numpy() == pytest.approx(expected, abs=0.05)


@pytest.fixture(scope="module")
def with_others(runs, tmp_path_factory):
    """The ladder with a strategy at one length, and SOAP without delay alone: the experiments, and
    the slowdowns read from them."""
    folder = shutil.copytree(runs, tmp_path_factory.mktemp("others") / "more")
    write_ladder(folder, 4000, {"basis-rotation 1st/bilateral": 2.0})
    write_method(folder, "soap", 1, {"training.iterations": 16000})
    experiments = Experiments.load(LAPTOP, folder)
    rows = read_ladder(experiments).slowdowns
    return experiments, rows.set_index(["iterations_of_training", "method"])


def test_other_methods_join_lengths_they_were_trained(with_others):
    _, rows = with_others
    ladder = set(product(LENGTHS, LADDER_METHODS))
    assert set(rows.index) == ladder | {(4000, "basis-rotation 1st/bilateral")}
    assert rows.loc[4000, "basis-rotation 1st/bilateral"]["ratio"] == pytest.approx(2.0, rel=0.05)


def test_other_methods_do_not_move_the_target(with_others):
    experiments, rows = with_others
    of_ladder = experiments.find_ends(*LADDER_METHODS, settings={"training.iterations": 4000})
    targets = rows.loc[4000]["target"]
    assert set(targets) == {common_target(of_ladder)}


def test_other_methods_are_not_missed(with_others):
    experiments, _ = with_others
    assert not any("soap" in line for line in experiments.missing)


def without(runs, folder, method, lengths):
    """A copy of runs that lacks a method's at some lengths."""
    shutil.copytree(runs, folder)
    for path in folder.iterdir():
        text = (path / "config.yaml").read_text()
        is_of_lengths = any(f"iterations: {T}\n" in text for T in lengths)
        if is_of_lengths and f"method: {method}\n" in text:
            shutil.rmtree(path)
    return Experiments.load(LAPTOP, folder)


def test_length_without_a_run_is_left_out(runs, tmp_path):
    experiments = without(runs, tmp_path / "fewer", "pipedream-lr", [4000])
    slowdowns = read_ladder(experiments).slowdowns
    assert slowdowns["iterations_of_training"].unique().tolist() == [2000, 16000]


def test_runs_missing_from_the_ladder_name_its_sweep(runs, tmp_path):
    experiments = without(runs, tmp_path / "fewer", "pipedream-lr", [4000])
    read_ladder(experiments)
    assert experiments.missing
    assert all("ladder.yaml" in line for line in experiments.missing)


def test_figure_without_a_complete_length_says_so(runs, tmp_path):
    experiments = without(runs, tmp_path / "none", "pipedream-lr", LENGTHS)
    written, asked = draw_paper_figure(FIGURES["ladder"], experiments, tmp_path)
    assert asked.used
    assert json.loads(written[-1].read_text())["not there"][0].startswith("pipedream-lr at P = 1")


def test_a_scale_without_a_ladder_is_refused(runs, tmp_path):
    experiments = Experiments.load(LAPTOP, runs)
    with pytest.raises(UserError, match="the ladder: only at the scale of a laptop"):
        read_ladder(Experiments(SCALES["paper"], experiments.runs, tmp_path))


# A ladder whose model grows. Slowdowns are FACTORS times (tau / T)^0.4, a tenth more for seed 1.
FACTORS = {"basis-rotation": 20, "nesterov": 30, "pipedream-lr": 40}
GROWING = SCALES["similar"]


def write_growing(folder, settings, method, T, seed, status="finished"):
    """Both ends of a method on one seed."""
    slowness = FACTORS[method] * (31 / T) ** 0.4 * (1 + 0.1 * seed)
    options = {"seeds": [seed], "val_loss": 1.0, "status": status}
    for stages, slower in ((32, slowness), (1, 1)):
        of_stages = {**settings, "pipeline.stages": stages}
        write_experiment(folder, "similar", of_stages, slowness=slower, **options)


@pytest.fixture(scope="module")
def growing_folder(tmp_path_factory):
    """The three shorter lengths on the seeds 0 and 1.

    Of seed 2 there is basis rotation alone at 32,000 iterations, and Nesterov diverged. Runs at
    another rate have the best validation loss: they must not count."""
    folder = tmp_path_factory.mktemp("growing")
    for T, rung in list(GROWING.ladder.items())[:3]:
        for method in FACTORS:
            settings = {"training.iterations": T, **rung, **VARIANTS[method]}
            for seed in (0, 1):
                write_growing(folder, settings, method, T, seed)
            if T == 32000 and method == "basis-rotation":
                write_growing(folder, settings, method, T, seed=2)
            if T == 32000 and method == "nesterov":
                write_growing(folder, settings, method, T, seed=2, status="diverged")
            elsewhere = {**settings, "optimizer.lr": 0.5, "pipeline.stages": 32}
            write_experiment(folder, "similar", elsewhere, slowness=50, val_loss=0.0)
    return folder


@pytest.fixture(scope="module")
def growing(growing_folder):
    return Experiments.load(GROWING, growing_folder)


def test_growing_ladder_leaves_out_incomplete_seeds(growing):
    assert set(read_ladder(growing).slowdowns["of_seeds"]) == {"0", "1"}


def test_growing_ladder_has_slowdowns_of_each_seed(growing):
    rows = read_ladder(growing).slowdowns.to_dict("records")
    assert len(rows) == 3 * 3 * 2
    for row in rows:
        factor = FACTORS[row["method"]] * (1 + 0.1 * int(row["of_seeds"]))
        expected = factor * (31 / row["iterations_of_training"]) ** 0.4
        assert row["ratio"] == pytest.approx(expected, rel=0.02)


def test_a_diverged_seed_spoils_no_other_slowdown(growing_folder, tmp_path):
    folder = shutil.copytree(growing_folder, tmp_path / "complete")
    last = {"training.iterations": 32000, **GROWING.ladder[32000], **VARIANTS["pipedream-lr"]}
    for stages in (1, 32):
        of_stages = {**last, "pipeline.stages": stages}
        write_experiment(folder, "similar", of_stages, seeds=[2], slowness=stages)
    rows = read_ladder(Experiments.load(GROWING, folder)).slowdowns
    of_seed = rows[rows["of_seeds"] == "2"].set_index("method")["ratio"]
    assert of_seed.isna().to_dict() == {
        "basis-rotation": False,
        "nesterov": True,  # diverged: nothing bounds its slowdown
        "pipedream-lr": False,
    }


def test_growing_ladder_predicts_its_longest_length(growing):
    table = ladder_table(growing).set_index(["iterations", "method"])
    text = table.loc[("72000, predicted", "nesterov"), "slowdown"]
    value, low, high = map(float, re.findall(r"[0-9.]+", text))
    middle = FACTORS["nesterov"] * math.sqrt(1.1) * (31 / 72000) ** 0.4  # of the two seeds
    assert value == pytest.approx(middle, rel=0.02)
    assert low < middle / math.sqrt(1.1) < middle * math.sqrt(1.1) < high


def test_growing_ladder_is_extrapolated_to_the_paper(growing):
    table = ladder_table(growing).set_index(["iterations", "method"])
    assert ("244000, extrapolated", "nesterov") in table.index


def test_growing_ladder_names_its_missing_length(growing):
    asked = growing.fresh()
    read_ladder(asked)
    assert any("ladder.yaml" in line and "72000" in line for line in asked.missing)


@pytest.mark.parametrize("lengths", [(8000, 18000, 32000), (8000,)])
def test_figure_draws_any_number_of_lengths(growing, tmp_path, lengths):
    is_shown = growing.runs["training.iterations"].isin(lengths)
    experiments = Experiments(GROWING, growing.runs[is_shown], tmp_path)
    with new_figure() as figure:
        fill_ladder(experiments, figure)
        assert len(figure.axes) == 2


def test_power_law_is_the_line_through_logarithms():
    generator = np.random.default_rng(0)
    x = np.array([1e-4, 3e-4, 1e-3, 4e-3])
    y = 30 * x**0.7 * np.exp(0.1 * generator.standard_normal(4))
    law = fit_power_law(x.tolist(), y.tolist())
    slope, intercept = np.polyfit(np.log(x), np.log(y), 1)
    assert (law.slope, law.intercept) == (pytest.approx(slope), pytest.approx(intercept))
    assert law.at(2e-5)[0] == pytest.approx(math.exp(intercept + slope * math.log(2e-5)))


def test_exact_power_law_has_no_interval():
    x = np.array([1e-4, 3e-4, 1e-3, 4e-3])
    law = fit_power_law(x.tolist(), (30 * x**0.7).tolist())
    exact = 30 * PAPER_RELATIVE_DELAY**0.7
    assert law.at(PAPER_RELATIVE_DELAY) == pytest.approx((exact, exact, exact))


def test_two_lengths_give_no_law():
    assert fit_power_law([1e-3, 2e-3], [1.0, 2.0]) is None


def test_a_delay_without_cost_gives_no_law():
    assert fit_power_law([1e-3, 2e-3, 4e-3], [0.5, 0.0, 1.0]) is None


def test_prediction_says_how_many_bounds_it_leaves_out():
    rows = pd.DataFrame(
        {
            "relative_delay": [1e-4, 3e-4, 1e-3, 4e-3],
            "ratio": [1.1, 1.3, 2.0, 2.5],
            "is_censored": [False, False, False, True],
        }
    )
    known = rows[:3]
    text = SLOWDOWN.prediction_text(known)
    assert "without" not in text
    assert SLOWDOWN.prediction_text(rows) == f"{text} (without 1 bound)"
    assert SLOWDOWN.prediction_text(rows[2:]) == "no law (without 1 bound)"


def test_prediction_interval_covers_as_promised():
    generator = np.random.default_rng(1)
    x = np.array([2.4e-4, 4.8e-4, 1e-3, 2e-3, 4e-3])
    beyond = 1.3e-4
    covered = 0
    for _ in range(2000):
        noise = np.exp(0.2 * generator.standard_normal(6))
        _, low, high = fit_power_law(x.tolist(), (30 * x**0.7 * noise[:5]).tolist()).at(beyond)
        covered += low < 30 * beyond**0.7 * noise[5] < high
    assert 0.93 < covered / 2000 < 0.97


@pytest.fixture(scope="module")
def table(runs):
    return ladder_table(Experiments.load(LAPTOP, runs))


@pytest.fixture(scope="module")
def legend(runs):
    """The entries of both panels' legends."""
    with new_figure() as figure:
        fill_ladder(Experiments.load(LAPTOP, runs), figure)
        labels = []
        for axes in figure.axes:
            labels += [text.get_text() for text in axes.get_legend().get_texts()]
        return labels


def test_figure_reaches_the_papers_delay(runs):
    with new_figure() as figure:
        fill_ladder(Experiments.load(LAPTOP, runs), figure)
        for axes in figure.axes:
            assert axes.get_xscale() == "log"
            assert axes.get_xlim()[0] < PAPER_RELATIVE_DELAY < axes.get_xlim()[1]


def test_legend_states_every_extrapolation_with_its_interval(legend):
    assert all("[" in label for label in legend)


def test_legend_states_the_papers_slowdown(legend):
    of_method = [label for label in legend if label.startswith("PipeDream-LR: ")]
    assert of_method[0].endswith("/ 5.43")


@pytest.mark.parametrize(
    ("method", "name"), [("basis-rotation", "Basis rotation"), ("pipedream-lr", "PipeDream-LR")]
)
def test_legend_states_the_slowdown_of_the_table(legend, table, method, name):
    row = table[table["iterations"].str.endswith("extrapolated")].set_index("method").loc[method]
    assert any(label.startswith(f"{name}: {row['slowdown']} / ") for label in legend)


def test_legend_states_the_saving_of_the_table(legend, table):
    last = table[table["iterations"].str.endswith("extrapolated")].set_index("method")
    saved = last.loc["basis-rotation", "iterations saved at P"]
    assert f"Basis rotation: {saved} / 71.6%" in legend


def test_table_lists_every_method_at_every_length(table):
    measured = table[~table["iterations"].str.endswith("extrapolated")]
    places = list(zip(measured["iterations"], measured["method"], strict=True))
    lengths = [str(T) for T in LENGTHS]
    assert places == list(product(lengths, ("basis-rotation", "nesterov", "pipedream-lr")))


def test_each_length_has_its_own_target(table):
    measured = table[~table["iterations"].str.endswith("extrapolated")]
    assert measured["target loss"].nunique() == 3


def test_table_names_the_best_baseline_of_savings(table):
    measured = table[~table["iterations"].str.endswith("extrapolated")]
    names_baseline = measured["iterations saved at P"].str.contains("over pipedream-lr")
    assert names_baseline.tolist() == [True, False, False] * 3


def test_table_extrapolates_every_method(table):
    last = table[table["iterations"].str.endswith("extrapolated")]
    assert set(last["method"]) == set(LADDER_METHODS)
