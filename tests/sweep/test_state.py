"""The state of a cell, by its folder."""

import re
from unittest.mock import Mock

import pytest

from brx.errors import RunError, UserError
from brx.sweep import state
from brx.sweep.spec import Sweep
from tests.sweep.helpers import end, write_sweep


@pytest.fixture
def done(tmp_path):
    """A cell that is done."""
    cell = Sweep.load(write_sweep(tmp_path)).cells[0]
    end(cell)
    return cell


def test_configuration_of_a_cell_is_parsed_once(done, monkeypatch):
    parsed = Mock(side_effect=state.load_config)
    monkeypatch.setattr(state, "load_config", parsed)
    assert [state.state_of(done), state.state_of(done)] == [state.State.DONE] * 2
    parsed.assert_called_once()


@pytest.mark.parametrize("number", ["Infinity", "NaN", "[]", '"x"'])
def test_iteration_that_is_no_number_is_passed_over(number, done):
    lines = f'{{"iteration": 3, "train_loss": 4.0}}\n{{"iteration": {number}}}\n'
    (done.folder / "metrics.jsonl").write_text(lines)
    assert state.iterations_done(done.folder) == 3


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"killed by SIGKILL: out of memory\n", "killed by SIGKILL: out of memory"),
        (b"\xff\xfe", "failed.txt: not UTF-8 text"),
    ],
)
def test_reason_of_a_failure_is_read_back(content, expected, done):
    (done.folder / "failed.txt").write_bytes(content)
    assert state.failure_of(done) == expected


def test_log_that_cannot_be_written_is_told_before_the_cell_starts(done):
    (done.folder / "log.txt").unlink()
    (done.folder / "log.txt").mkdir()
    with pytest.raises(RunError, match=r"log\.txt: cannot be written: Is a directory"):
        state.prepare_folder(done)


def test_log_keeps_what_earlier_starts_wrote(done):
    log = done.folder / "log.txt"
    earlier = log.read_text() + "brx: error: no room\n"
    log.write_text(earlier)
    state.prepare_folder(done)
    later = log.read_text().removeprefix(earlier)
    assert later.startswith("==== started ")
    assert later.count("\n") == 1


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("", "killed by SIGKILL"),
        ("loading\n", "killed by SIGKILL: loading"),
        ("brx: error: no room\nbye\n", "killed by SIGKILL: error: no room"),
    ],
)
def test_failure_is_explained_by_its_own_start_alone(written, expected, done):
    log = done.folder / "log.txt"
    log.write_text("brx: error: of an earlier start\n")
    state.prepare_folder(done)
    with log.open("a") as file:
        file.write(written)
    assert state.outcome_of(done, -9) == (state.State.FAILED, expected)


def test_changed_configuration_of_a_cell_is_seen(done):
    state.state_of(done)
    config = done.folder / "config.yaml"
    config.write_text(config.read_text().replace(" seed: 0", " seed: 1"))
    with pytest.raises(UserError, match=r"training\.seed was 1 and is now 0 in the sweep"):
        state.state_of(done)


@pytest.mark.parametrize("lost", ["config.yaml", "metrics.jsonl"])
def test_cell_that_lost_a_file_is_named_not_done(lost, done):
    (done.folder / lost).unlink()
    told = f"{done.folder}: the run has finished, but lacks {lost}; restore"
    with pytest.raises(UserError, match=re.escape(told)):
        state.state_of(done)


def test_cell_that_was_exported_is_done(done):
    (done.folder / "metrics.jsonl").rename(done.folder / "curves.npz")
    assert state.state_of(done) is state.State.DONE
