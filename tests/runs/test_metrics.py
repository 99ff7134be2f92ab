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


@pytest.mark.parametrize("line", [*(text.encode() for text in GARBLED), b"\xff\xfe\x00"])
def test_a_garbled_line_is_left_out_and_the_rest_is_read(line, path):
    path.write_bytes(
        (step(1) + step(2)).encode() + line + b"\n" + (step(4) + validation(4)).encode()
    )
    assert [record["iteration"] for record in read_metrics(path)] == [1, 2, 4, 4]
    assert garbled_lines(path) == [3]
    assert missing_iterations(path, 4, lambda t: t == 4) == [3]


def test_a_line_cut_by_a_crash_is_not_garbled_and_goes_with_a_cut(path):
    path.write_text(step(1) + step(2) + step(3)[:-1])
    assert (len(list(read_metrics(path))), garbled_lines(path)) == (2, [])
    assert missing_iterations(path, 3, lambda t: False) == [3]
    assert missing_iterations(path, 2, lambda t: t % 2 == 0) == [2]
    path.write_text(step(1) + "garbage\n" + step(3) + "garbage\n" + step(5) + "cut")
    truncate_metrics(path, 3)  # what is garbled before the cut stays
    assert path.read_text() == step(1) + "garbage\n" + step(3)


@pytest.mark.parametrize(
    ("lines", "number"),
    [
        ([step(1), step(2), step(2)], 3),
        ([step(1), step(2), step(3), step(2)], 4),
        ([step(1), step(2), validation(2), validation(2)], 4),
        ([step(1), step(2), step(3), validation(2)], 4),
    ],
)
def test_two_writers_are_noticed(lines, number, path):
    path.write_text("".join(lines))
    with pytest.raises(
        UserError, match=rf"metrics\.jsonl: line {number}: iteration 2 after .*: two processes have"
    ):
        read_curves(path.parent)
    with pytest.raises(UserError, match="two processes have written here"):
        truncate_metrics(path, 1)
    assert path.read_text() == "".join(lines)


def test_a_reader_tells_what_few_lines_lack_and_refuses_many(path, capsys):
    lines = [step(t) for t in range(1, 201)]
    path.write_text("".join([*lines[:99], "garbage\n", *lines[100:]]))
    assert len(read_curves(path.parent).iterations) == 199
    assert "damaged: lacks 1 of the 200 iterations" in capsys.readouterr().err
    path.write_text("".join([*lines[:99], "garbage\n" * 3, *lines[102:]]))
    with pytest.raises(
        UserError, match="lacks 3 of the 200 iterations that the run has made; restore it"
    ):
        read_curves(path.parent)
