"""Reading runs: what a crash leaves is tolerated, and iterations to a target follow their rule."""

import json

import numpy as np
import pytest

from brx.analysis.runs import Run, common_target, comparability, iterations_to_target, trailing_mean
from brx.config.loading import apply_overrides, dump_config
from brx.errors import UserError


def write_run(folder, train_losses, val_losses=(), iterations=None, **summary):
    folder.mkdir()
    content = {"training": {"iterations": iterations or len(train_losses)}}
    (folder / "config.yaml").write_text(dump_config(apply_overrides(content, [], "test")))
    records = [{"iteration": t, "train_loss": loss, "seconds": 0.5 * t} for t, loss in enumerate(train_losses, start=1)]
    records += [{"iteration": t, "val_loss": loss} for t, loss in val_losses]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (folder / "summary.json").write_text(json.dumps(summary))
    return folder


def test_run_is_read_up_to_a_line_that_was_cut(tmp_path):
    folder = write_run(tmp_path / "run", [3.0, 2.0], [(2, 2.5)])
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"iteration": 3, "train_lo')
    run = Run.load(folder)
    assert run.train_loss.tolist() == [3.0, 2.0]
    assert (run.val_iterations.tolist(), run.val_loss.tolist()) == ([2.0], [2.5])
    assert run.iterations_per_second == 2.0


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        ("config.yaml", "not a run's folder"),
        ("metrics.jsonl", "holds no training loss yet"),
        ("summary.json", "not readable"),
    ],
)
def test_what_is_no_run_is_one_line(damage, expected, tmp_path):
    folder = write_run(tmp_path / "run", [1.0])
    if damage == "summary.json":
        (folder / damage).write_text("{")
    else:
        (folder / damage).unlink()
    with pytest.raises(UserError, match=expected):
        Run.load(folder)


def test_trailing_mean_against_its_definition():
    values = np.random.default_rng(0).normal(size=30)
    expected = [values[max(0, place - 6) : place + 1].mean() for place in range(30)]
    np.testing.assert_allclose(trailing_mean(values, 7), expected)


def test_target_is_reached_when_the_loss_stays_below(tmp_path):
    # With 20 iterations the window of 2 % is a single one: nothing is smoothed.
    losses = [5, 4, 3, 2, 3.5, 3, 2.5, 2, 1.5, 1] + [1.0] * 10
    run = Run.load(write_run(tmp_path / "run", losses))
    assert iterations_to_target(run, 3.0) == 6.0  # reached at 3, lost again at 5
    assert iterations_to_target(run, 2.25) == 7.5  # between 2.5 at iteration 7 and 2.0 at iteration 8
    assert iterations_to_target(run, 0.5) is None
    assert iterations_to_target(run, 9.0) == 1.0


def test_common_target_is_the_highest_final_loss(tmp_path):
    runs = [Run.load(write_run(tmp_path / str(final), [4.0, float(final)])) for final in (1, 3, 2)]
    assert common_target(runs) == 3.0


def test_runs_on_other_data_or_budget_are_not_silently_compared(tmp_path):
    one = Run.load(write_run(tmp_path / "one", [1.0], data_fingerprint="a"))
    same = Run.load(write_run(tmp_path / "same", [2.0], data_fingerprint="a"))
    other = Run.load(write_run(tmp_path / "other", [2.0], data_fingerprint="b", iterations=7))
    assert comparability([one, same]) == []
    (line,) = comparability([one, other])
    assert "data fingerprint, iterations" in line
