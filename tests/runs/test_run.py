"""One run's folder, read."""

import json

import numpy as np
import pytest

import brx.runs
from brx.runs.run import _quantile
from tests.runs.helpers import ITERATIONS, write_run


def test_run_that_has_changed_is_read_again(tmp_path):
    run = write_run(tmp_path, "a").path
    brx.runs.load(run)
    record = {"iteration": ITERATIONS + 1, "train_loss": 0.5, "seconds": 999.5}
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(record) + "\n")
    assert brx.runs.load(run)["iteration"].item() == ITERATIONS + 1


@pytest.mark.parametrize("size", [1, 2, 3, 20, 41])
@pytest.mark.parametrize("share", [0.0, 0.05, 0.3, 0.5, 0.95, 1.0])
def test_quantile_is_numpys(size, share):
    values = np.random.default_rng(size).exponential(size=size)
    assert _quantile(values, share) == float(np.quantile(values, share))


def test_quantile_with_a_damaged_time_is_nan():
    assert np.isnan(_quantile(np.array([0.1, np.nan, 0.2, 0.3]), 0.5))
