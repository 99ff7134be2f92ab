"""A sweep that several tests ask for."""

import pytest

from brx.sweep.spec import Sweep
from tests.sweep.helpers import end, write_sweep


@pytest.fixture(scope="package", autouse=True)
def _frequent_looks():
    """Looks at the cells more often than every half second: here they take about a second."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("brx.sweep.run.POLL_S", 0.05)
        yield


@pytest.fixture
def half_done(tmp_path):
    """A sweep of two rates at P = 4, which are done, and two at P = 1, with further seeds of the
    better rate at P = 4."""
    grid = {"pipeline.stages": [4, 1], "optimizer.lr": [1e-3, 1e-2]}
    repeat = {"set": {"training.seed": [1, 2]}, "where": {"pipeline.stages": 4}}
    path = write_sweep(tmp_path, grid=grid, choose={"over": "optimizer.lr"}, repeat=repeat)
    sweep = Sweep.load(path)
    end(sweep.cells[0], 40.0, val_loss=2.0)
    end(sweep.cells[1], 60.0, val_loss=1.0)
    return sweep
