"""Figures of any runs: none is left out in silence."""

import json

import pandas as pd
import pytest

from brx.cli.main import main
from brx.errors import UserError
from brx.plot.any_runs import draw_curves, draw_leaderboard, draw_staleness
from brx.plot.style import save
from brx.runs.frames import load
from tests.runs.helpers import ITERATIONS, write_run


@pytest.fixture
def runs(tmp_path):
    """A finished run, one that diverged before its first loss, and one that diverged later."""
    write_run(tmp_path, "finished")
    write_run(tmp_path, "at-once", "training.seed=1", crosses_3_at=None, status="diverged")
    write_run(tmp_path, "later", "optimizer.lr=3", status="diverged")
    return tmp_path / "runs"


@pytest.fixture
def legend(runs, tmp_path, capsys):
    """The labels of the runs in the figure, by name; and what was printed on stderr."""
    assert main(["plot", "curves", str(runs), "--out", str(tmp_path / "figure")]) == 0
    labels = json.loads((tmp_path / "figure.json").read_text())["runs"]
    return {run.rpartition("/")[2]: label for run, label in labels.items()}, capsys.readouterr().err


def test_run_without_losses_is_named_and_left_out(legend):
    labels, told = legend
    assert set(labels) == {"finished", "later"}
    assert "left out, since no loss of theirs was written" in told
    assert "at-once" in told


def test_legend_says_where_a_run_diverged(legend):
    labels, _ = legend
    assert labels["later"].endswith(f", diverged after iteration {ITERATIONS}")
    assert "diverged" not in labels["finished"]


def add_staleness(folder, **metrics):
    """Give the last training step of a run metrics of staleness."""
    path = folder / "metrics.jsonl"
    *before, step, validation = path.read_text().splitlines(keepends=True)
    step = json.dumps(json.loads(step) | metrics) + "\n"
    path.write_text("".join([*before, step, validation]))


@pytest.fixture
def drawn(monkeypatch):
    """The figures that were drawn, still open."""
    figures = []

    def save_and_keep(figure, *rest, **settings):
        figures.append(figure)
        return save(figure, *rest, **settings)

    monkeypatch.setattr("brx.plot.any_runs.save", save_and_keep)
    return figures


@pytest.mark.parametrize("length", [30, 110, 200])
def test_long_names_leave_room_for_the_curves(length, drawn, tmp_path, recwarn):
    for seed in range(3):
        name = f"s{seed}-".ljust(length, "x")
        write_run(tmp_path, name, f"training.seed={seed}", crosses_3_at=50 + seed)
    draw_curves(load(tmp_path / "runs"), tmp_path / "figure")
    (figure,) = drawn
    (axes,) = figure.axes
    whole_figure = figure.bbox
    for artist in (axes.get_legend(), axes.title):
        box = artist.get_window_extent()
        assert box.x0 >= whole_figure.x0
        assert box.x1 <= whole_figure.x1
        assert box.y0 >= whole_figure.y0
    assert axes.get_window_extent().width > 0.7 * whole_figure.width
    assert [str(warning.message) for warning in recwarn] == []


@pytest.fixture
def measured(tmp_path):
    """A run of four stages with one metric of staleness, not the one of the first panel."""
    folder = write_run(tmp_path, "measured").path
    add_staleness(folder, stage_weight_distance=[0.3, 0.2, 0.1, None])
    return folder


def test_run_without_staleness_is_named_and_left_out(measured, tmp_path, capsys):
    write_run(tmp_path, "other", "training.seed=1")
    files = draw_staleness([tmp_path / "runs"], tmp_path / "figure")
    caption = files[3].read_text()
    assert "measured" in caption
    assert "other" not in caption
    assert "other: no staleness was measured" in capsys.readouterr().err


def test_legend_has_a_run_that_lacks_the_first_metric(measured, tmp_path):
    svg = draw_staleness([measured], tmp_path / "figure")[2]
    assert "PipeDream, P = 4" in svg.read_text()


def test_metric_that_no_shown_stage_has_is_not_drawn(tmp_path, recwarn):
    """The last stage has no delay, and is not shown."""
    folder = write_run(tmp_path, "last").path
    none_shown = [None, None, None, 0.5]
    add_staleness(folder, stage_weight_distance=[0.3, 0.2, 0.1, 0], stage_basis_angle=none_shown)
    draw_staleness([folder], tmp_path / "figure")
    assert [str(warning.message) for warning in recwarn] == []


@pytest.mark.parametrize("numbers", [[0.3, 0.2], "0.3", [0.3, 0.2, 0.1, "0"]])
def test_metric_that_is_no_number_per_stage_is_one_line(numbers, tmp_path):
    folder = write_run(tmp_path, "damaged").path
    add_staleness(folder, stage_weight_distance=numbers)
    told = f"stage_weight_distance of iteration {ITERATIONS} must be a list of 4 numbers"
    with pytest.raises(UserError, match=told):
        draw_staleness([folder], tmp_path / "figure")


def test_title_of_the_leaderboard_is_the_first_by_rank(tmp_path):
    """A run of Muon diverged: the mean over its other runs is lower, but its rank is not."""
    board = pd.DataFrame(
        [("soap", 1, 1.5), ("muon", 2, 1.4)], columns=["method", "rank", "loss"]
    ).assign(delay="none", num_seeds=2)
    svg = draw_leaderboard(board, ["none"], tmp_path / "figure")[2].read_text()
    assert "SOAP ends lowest under the longest delay, at 1.50 nats" in svg
