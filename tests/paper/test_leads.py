"""Leads and their two parts, from made-up final losses."""

import numpy as np
import pytest
from scipy.stats import ttest_1samp

from brx.errors import UserError
from brx.paper.leads import BEST_BASELINE, draw_leads, lead_parts, lead_table
from brx.paper.scales import Experiments
from brx.plot.style import new_figure
from brx.runs.comparison import BASELINES
from tests.paper.helpers import LAPTOP, write_method

# Final validation losses by seed, at P = 1 and 32.
FINALS = {
    "basis-rotation": {1: (1.30, 1.31, 1.33), 32: (1.35, 1.37, 1.36)},
    "soap": {1: (1.30, 1.32, 1.32), 32: (1.36, 1.36, 1.36)},
    "pipedream": {1: (1.50, 1.52, 1.49), 32: (1.90, 2.00, 1.80)},
    "pipedream-lr": {1: (1.50, 1.52, 1.49), 32: (1.80, 1.85, 1.82)},
    "nesterov": {1: (1.45, 1.44, 1.46), 32: (1.70, 1.95, 1.84)},
}


@pytest.fixture
def experiments(tmp_path):
    for method, by_depth in FINALS.items():
        for P, losses in by_depth.items():
            for seed, loss in enumerate(losses):
                write_method(tmp_path, method, P, seeds=(seed,), val_loss=loss)
    return Experiments.load(LAPTOP, tmp_path)


def lead(rival, P):
    return np.subtract(FINALS[rival][P], FINALS["basis-rotation"][P])


def parts_of(experiments, rival):
    (parts,) = [each for each in lead_parts(experiments) if each.rival == rival]
    return parts


def test_lead_is_the_rivals_loss_minus_ours(experiments):
    parts = parts_of(experiments, "soap")
    assert parts.total.to_numpy() == pytest.approx(lead("soap", 32))
    assert parts.without_delay.to_numpy() == pytest.approx(lead("soap", 1))


def test_part_from_delay_is_a_difference_in_differences(experiments):
    parts = parts_of(experiments, "nesterov")
    expected = lead("nesterov", 32) - lead("nesterov", 1)
    assert parts.from_delay.to_numpy() == pytest.approx(expected)


def test_best_baseline_is_chosen_on_each_seed(experiments):
    parts = parts_of(experiments, BEST_BASELINE)
    lowest = np.min([FINALS[name][32] for name in BASELINES], axis=0)
    expected = np.subtract(lowest, FINALS["basis-rotation"][32])
    assert parts.total.to_numpy() == pytest.approx(expected)


def test_table_has_the_intervals_of_the_parts(experiments):
    table = lead_table(experiments).set_index("rival")
    by_seed = lead("pipedream", 32) - lead("pipedream", 1)
    interval = ttest_1samp(by_seed, 0.0).confidence_interval(0.95)
    expected = f"{by_seed.mean():.3f} [{interval.low:.3f}, {interval.high:.3f}]"
    assert table.loc["pipedream", "from delay"] == expected


def test_table_says_what_is_within_chance(experiments):
    table = lead_table(experiments).set_index("rival")
    assert table.loc["soap", "at P = 32"] == "within chance"
    assert table.loc["pipedream-lr", "at P = 32"] == "ahead"


def test_leads_by_training_loss_choose_the_best_baseline_by_it(tmp_path):
    # The slower a run, the higher its training loss ends. By validation loss, Nesterov is best.
    slowness = {"basis-rotation": 1.0, "pipedream": 1.2, "pipedream-lr": 1.6, "nesterov": 1.4}
    for method, times_as_slow in slowness.items():
        for P in (1, 32):
            final = 1.0 if method == "nesterov" else 2.0
            write_method(tmp_path, method, P, val_loss=final, slowness=times_as_slow)
    experiments = Experiments.load(LAPTOP, tmp_path)
    by_rival = {parts.rival: parts for parts in lead_parts(experiments, loss="train_loss")}
    best = by_rival[BEST_BASELINE].total
    assert best.tolist() == by_rival["pipedream"].total.tolist()
    assert 0 < best.mean() < by_rival["nesterov"].total.mean()


def test_rivals_without_runs_are_left_out(experiments):
    assert "muon" not in lead_table(experiments)["rival"].tolist()


def test_rival_without_a_common_seed_is_said_to_have_none(experiments, tmp_path):
    write_method(tmp_path, "muon", 1, seeds=(0, 1, 2))
    write_method(tmp_path, "muon", 32, seeds=(3, 4))
    experiments = Experiments.load(LAPTOP, tmp_path)
    table = lead_table(experiments).set_index("rival")
    assert table.loc["muon", ["seeds", "at P = 32"]].tolist() == ["0", "no seed in common"]
    with new_figure() as figure:
        axes = figure.subplots()
        draw_leads(experiments, axes, ("pipedream", "muon"))
        labels = [label.get_text() for label in axes.get_yticklabels()]
    assert labels[1].endswith("(no seed in common)")


def test_share_is_a_bound_if_the_rivals_loss_is_never_reached(experiments, tmp_path):
    # The slower a run, the higher its training loss ends.
    for P in (1, 32):
        write_method(tmp_path, "muon", P, seeds=(0, 1, 2), slowness=0.2)
    table = lead_table(Experiments.load(LAPTOP, tmp_path)).set_index("rival")
    assert table.loc["muon", "iterations saved at P = 32"].startswith("< -")
    assert table.loc["pipedream", "iterations saved at P = 32"][0] != "<"


def test_bars_end_at_the_whole_lead(experiments):
    with new_figure() as figure:
        axes = figure.subplots()
        draw_leads(experiments, axes)
        # First the parts without delay, then those from delay, from top to bottom.
        count = len(axes.get_yticks())
        bars = sorted(axes.patches[count:], key=lambda bar: -bar.get_y())
        ends = [bar.get_x() + bar.get_width() for bar in bars]
    totals = [each.total.mean() for each in lead_parts(experiments)]
    assert ends == pytest.approx(totals)


def test_part_that_delay_takes_away_is_hatched(tmp_path, experiments):
    for seed in range(3):
        write_method(tmp_path, "scion", 1, seeds=(seed,), val_loss=1.43)
        write_method(tmp_path, "scion", 32, seeds=(seed,), val_loss=1.40)
    experiments = Experiments.load(LAPTOP, tmp_path)
    with new_figure() as figure:
        axes = figure.subplots()
        draw_leads(experiments, axes, ("pipedream", "scion"))
        gained, lost = axes.patches[2:]
        legend = axes.get_legend_handles_labels()[1]
    assert gained.get_width() > 0
    assert gained.get_hatch() is None
    assert lost.get_width() < 0
    assert lost.get_hatch()
    assert legend == ["without delay", "from delay", "lost to delay"]


def test_figure_without_rivals_says_so(tmp_path):
    write_method(tmp_path, "basis-rotation", 1)
    alone = Experiments.load(LAPTOP, tmp_path)
    with new_figure() as figure, pytest.raises(UserError, match="no rival"):
        draw_leads(alone, figure.subplots())


@pytest.fixture
def with_diverged(experiments, tmp_path):
    """The same runs and Muon's, of which one diverged under delay; the others end where ours
    do."""
    for P in (1, 32):
        for seed, loss in enumerate(FINALS["basis-rotation"][P]):
            status = "diverged" if (P, seed) == (32, 1) else "finished"
            write_method(tmp_path, "muon", P, seeds=(seed,), val_loss=loss, status=status)
    return Experiments.load(LAPTOP, tmp_path)


def test_three_seeds_of_which_one_diverged_are_not_too_few(with_diverged):
    table = lead_table(with_diverged).set_index("rival")
    assert table.loc["muon", "at P = 32"] == "within chance"


def test_rival_with_a_diverged_run_has_no_bar(with_diverged):
    with new_figure() as figure:
        axes = figure.subplots()
        draw_leads(with_diverged, axes)
        labels = [label.get_text() for label in axes.get_yticklabels()]
        widths = [bar.get_width() for bar in axes.patches]
    assert labels[-1] == "Muon (diverged)"
    assert not np.isinf(widths).any()
