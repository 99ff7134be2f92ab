"""How long a sweep is said to take: what is left, the repetitions included, at the pace of what is done."""

import json

import pytest

from brx.methods.trajectory_version import TRAJECTORY_VERSION
from brx.sweep.cell_state import FAILURE, prepare_folder
from brx.sweep.command import remaining_seconds
from brx.sweep.run import choices_and_repetitions
from brx.sweep.spec import Sweep
from tests.sweep.helpers import write_sweep

GRID = {"pipeline.stages": [4, 1], "optimizer.lr": [1e-3, 1e-2]}
REPEAT = {"set": {"training.seed": [1, 2]}, "where": {"pipeline.stages": 4}}


def finish(cell, seconds, val_loss=1.0):
    """A made-up summary."""
    prepare_folder(cell)
    iterations = cell.config.training.last_iteration
    summary = {"status": "finished", "iteration": iterations, "training_seconds": seconds, "final_val_loss": val_loss}
    (cell.folder / "summary.json").write_text(json.dumps(summary | {"trajectory_version": TRAJECTORY_VERSION}))


def test_repetitions_count_and_follow_the_choice(tmp_path):
    sweep = Sweep.load(write_sweep(tmp_path, grid=GRID, choose={"over": "optimizer.lr"}, repeat=REPEAT))
    finish(sweep.cells[0], 40.0, val_loss=2.0)
    finish(sweep.cells[1], 60.0, val_loss=1.0)
    _, repetitions = choices_and_repetitions(sweep, sweep.cells)
    assert [cell.name for cell in repetitions] == ["p4-lr0.01-s1", "p4-lr0.01-s2"]
    cells = [*sweep.cells, *repetitions]
    # Two cells of the grid and two repetitions, 50 s each, two at a time; nothing needs to be calibrated.
    assert remaining_seconds(cells, 2, pytest.fail) == pytest.approx(100.0)
    finish(repetitions[0], 50.0)
    assert remaining_seconds(cells, 2, pytest.fail) == pytest.approx(75.0)


def test_failed_cells_count_only_if_they_run_again(tmp_path):
    sweep = Sweep.load(write_sweep(tmp_path))
    for cell in sweep.cells[:3]:
        finish(cell, 10.0)
    failed = sweep.cells[3]
    failed.folder.mkdir(parents=True)
    (failed.folder / FAILURE).write_text("the loss diverged")
    assert remaining_seconds(sweep.cells, 1, pytest.fail) == 0.0
    assert remaining_seconds(sweep.cells, 1, pytest.fail, retry_failed=True) == pytest.approx(10.0)
