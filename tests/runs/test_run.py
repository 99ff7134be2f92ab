"""One run's folder, read."""

import json

import numpy as np
import pytest

import brx.runs
from brx.config.loading import load_config
from brx.errors import UserError
from brx.runs.run import Run, _quantile
from brx.train.own_loop import record
from tests.runs.helpers import ITERATIONS, write_run


def test_run_that_has_changed_is_read_again(tmp_path):
    run = write_run(tmp_path, "a").path
    brx.runs.load(run)
    record = {"iteration": ITERATIONS + 1, "train_loss": 0.5, "seconds": 999.5}
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(record) + "\n")
    assert brx.runs.load(run)["iteration"].item() == ITERATIONS + 1


def test_settings_that_were_cut_off_are_refused(tmp_path):
    config = write_run(tmp_path, "a", "training.seed=3").path / "config.yaml"
    lines = config.read_text().splitlines(keepends=True)
    for end in range(1, lines.index("logging:\n")):  # at the end of every line
        config.write_text("".join(lines[:end]))
        with pytest.raises(UserError, match=r"config\.yaml: "):
            load_config(config.parent)
        with pytest.raises(UserError, match=r"config\.yaml: "):
            Run.load(config.parent)
        with pytest.raises(UserError, match=r"config\.yaml: "):
            load_config(config, is_new=True)


def test_settings_of_a_recorded_run_that_were_cut_off_are_refused(tmp_path):
    with record(tmp_path / "a", method="mine", lr=0.1, seed=3, batch_size=2) as run:
        run.log(1, 2.0)
    config = tmp_path / "a" / "config.yaml"
    lines = config.read_text().splitlines(keepends=True)
    assert Run.load(tmp_path / "a").config.training.seed == 3
    for end in range(1, len(lines)):
        config.write_text("".join(lines[:end]))
        with pytest.raises(UserError, match=r"config\.yaml: "):
            Run.load(tmp_path / "a")


def test_a_new_run_may_begin_next_to_checkpoints_of_other_programs(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "config.yaml").write_text("training: {seed: 3}\n")
    assert load_config(tmp_path, is_new=True).training.seed == 3


@pytest.mark.parametrize("size", [1, 2, 3, 20, 41])
@pytest.mark.parametrize("share", [0.0, 0.05, 0.3, 0.5, 0.95, 1.0])
def test_quantile_is_numpys(size, share):
    values = np.random.default_rng(size).exponential(size=size)
    assert _quantile(values, share) == float(np.quantile(values, share))


def test_quantile_with_a_damaged_time_is_nan():
    assert np.isnan(_quantile(np.array([0.1, np.nan, 0.2, 0.3]), 0.5))
