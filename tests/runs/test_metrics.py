"""metrics.jsonl read back: cut, garbled, and written by two."""

import json

import pytest

from brx.errors import UserError
from brx.runs.metrics import (
    garbled_lines,
    missing_iterations,
    read_curves,
    read_metrics,
    truncate_metrics,
)

GARBLED = [
    "[1,2]",
    '{"iteration": 3}',
    '{"iteration": "3", "train_loss": 1.0, "seconds": 1.0}',
    "\0\0\0",
    "{" * 99999,
    '{"iteration": 3, "train_loss": null, "seconds": 1.0}',
    '{"iteration": true, "val_loss": 1.0}',
]


def step(iteration):
    return (
        json.dumps(
            {
                "iteration": iteration,
                "train_loss": 4.0 - iteration / 100,
                "seconds": 0.5 * iteration,
            }
        )
        + "\n"
    )


def validation(iteration):
    return json.dumps({"iteration": iteration, "val_loss": 4.0}) + "\n"


@pytest.fixture
def path(tmp_path):
    return tmp_path / "metrics.jsonl"


@pytest.fixture(params=[*(text.encode() for text in GARBLED), b"\xff\xfe\x00"])
def garbled(request, path):
    """Metrics of four iterations, whose third line is no record."""
    before = step(1) + step(2)
    after = step(4) + validation(4)
    path.write_bytes(before.encode() + request.param + b"\n" + after.encode())
    return path


def test_garbled_line_is_left_out(garbled):
    assert [record["iteration"] for record in read_metrics(garbled)] == [1, 2, 4, 4]


def test_garbled_line_is_found_by_number(garbled):
    assert garbled_lines(garbled) == [3]


def test_iteration_of_a_garbled_line_is_missing(garbled):
    assert missing_iterations(garbled, 4, lambda t: t == 4) == [3]


@pytest.fixture
def cut(path):
    """Metrics whose third line was cut by a crash."""
    path.write_text(step(1) + step(2) + step(3)[:-1])
    return path


def test_byte_order_mark_is_no_damage(path):
    path.write_bytes(b"\xef\xbb\xbf" + step(1).encode() + step(2).encode())
    assert [record["iteration"] for record in read_metrics(path)] == [1, 2]
    assert garbled_lines(path) == []


def test_line_cut_by_a_crash_is_left_out(cut):
    assert len(list(read_metrics(cut))) == 2


def test_line_cut_by_a_crash_is_not_garbled(cut):
    assert garbled_lines(cut) == []


def test_iteration_of_a_cut_line_is_missing(cut):
    assert missing_iterations(cut, 3, lambda t: False) == [3]


def test_missing_validation_is_found(cut):
    assert missing_iterations(cut, 2, lambda t: t % 2 == 0) == [2]


def test_truncating_keeps_garbled_lines_before(path):
    path.write_text(step(1) + "garbage\n" + step(3) + "garbage\n" + step(5) + "cut")
    truncate_metrics(path, 3)
    assert path.read_text() == step(1) + "garbage\n" + step(3)


TWO_WRITERS = [
    ([step(1), step(2), step(2)], 3),
    ([step(1), step(2), step(3), step(2)], 4),
    ([step(1), step(2), validation(2), validation(2)], 4),
    ([step(1), step(2), step(3), validation(2)], 4),
]
"""Lines of a metrics file, and the number of the one that nobody wrote who knew those before."""


@pytest.mark.parametrize(("lines", "number"), TWO_WRITERS)
def test_two_writers_are_noticed(lines, number, path):
    path.write_text("".join(lines))
    told = rf"metrics\.jsonl: line {number}: iteration 2 after .*: two processes have"
    with pytest.raises(UserError, match=told):
        read_curves(path.parent)


def test_metrics_of_two_writers_are_not_cut(path):
    lines = "".join(TWO_WRITERS[0][0])
    path.write_text(lines)
    with pytest.raises(UserError, match="two processes have written here"):
        truncate_metrics(path, 1)
    assert path.read_text() == lines


def lacking(path, num_lines):
    """Metrics of 200 iterations, with this number of garbled lines."""
    lines = [step(t) for t in range(1, 201)]
    path.write_text("".join([*lines[:99], "garbage\n" * num_lines, *lines[99 + num_lines :]]))
    return path.parent


def test_few_lacking_lines_are_told(path, capsys):
    assert len(read_curves(lacking(path, 1)).iterations) == 199
    assert "damaged: lacks 1 of the 200 iterations" in capsys.readouterr().err


def test_many_lacking_lines_are_refused(path):
    told = "lacks 3 of the 200 iterations that the run has made; restore it"
    with pytest.raises(UserError, match=told):
        read_curves(lacking(path, 3))


@pytest.mark.parametrize("loss", ["NaN", "Infinity", "-Infinity"])
def test_loss_that_is_not_finite_is_damage_in_a_finished_run(loss, path):
    lines = [step(t) for t in range(1, 5)]
    lines[2] = f'{{"iteration": 3, "train_loss": {loss}, "seconds": 1.5}}\n'
    path.write_text("".join(lines))
    assert len(read_curves(path.parent).iterations) == 4  # the run is under way
    (path.parent / "summary.json").write_text('{"status": "finished", "iteration": 4}')
    with pytest.raises(UserError, match=r"the training loss of iteration 3 is -?(nan|inf), but"):
        read_curves(path.parent)


def test_validation_loss_of_nan_is_damage_in_a_finished_run(path):
    path.write_text(step(1) + step(2) + '{"iteration": 2, "val_loss": NaN}\n')
    (path.parent / "summary.json").write_text('{"status": "finished", "iteration": 2}')
    with pytest.raises(UserError, match="the validation loss of iteration 2 is nan, but"):
        read_curves(path.parent)
