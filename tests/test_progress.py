"""The progress bar's plain lines, as they are without a terminal."""

import sys

import pytest

from brx import progress as progress_module
from brx.progress import ProgressBar, tell


def test_plain_lines_tell_the_time_left(capsys, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(progress_module.time, "monotonic", lambda: now[0])
    with ProgressBar("run", "iteration", 4000, 1000) as progress:
        now[0] = 101.0
        progress.update(1100, "loss 3.0")  # too soon for a line
        now[0] = 110.0
        progress.update(2000, "loss 2.5")
        now[0] = 112.0
        progress.update(4000, "loss 2.0")
    assert capsys.readouterr().err.splitlines() == [
        "run: iteration 2,000/4,000  loss 2.5  20 s left",
        "run: iteration 4,000/4,000  loss 2.0  0 s left",
    ]


def test_line_is_told_on_stderr(capsys):
    tell("calibrating [lr=0.1]")
    assert capsys.readouterr() == ("", "calibrating [lr=0.1]\n")


@pytest.mark.parametrize(
    ("quiet", "lines"), [(False, ["preparing x: training tokens 5  1 document"]), (True, [])]
)
def test_plain_line_without_a_total(quiet, lines, capsys, monkeypatch):
    monkeypatch.setattr(progress_module, "PLAIN_LINE_EVERY_S", 0.0)
    with ProgressBar("preparing x", "training tokens", None, quiet=quiet) as progress:
        progress.update(5, "1 document")
    assert capsys.readouterr().err.splitlines() == lines


def be_terminal(monkeypatch, kind="xterm"):
    """Make stderr a terminal of 120 columns."""
    monkeypatch.setenv("TERM", kind)
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)


def test_terminal_has_a_bar(capsys, monkeypatch):
    be_terminal(monkeypatch)
    with ProgressBar("run", "iteration", 4000, 1000) as progress:
        progress.update(2000, "loss 2.5")
    assert "elapsed," in capsys.readouterr().err


def test_bar_has_the_label_as_it_is(capsys, monkeypatch):
    be_terminal(monkeypatch)
    with ProgressBar("x[lr=0.1]:b:", "iteration", 2) as progress:
        progress.update(1, "loss 2.5")
    assert "x[lr=0.1]:b:" in capsys.readouterr().err


def test_plain_line_has_the_label_as_it_is(capsys):
    ProgressBar("x[lr=0.1]:b:", "iteration", 1).say("saved")
    assert capsys.readouterr().err == "x[lr=0.1]:b:: saved\n"


def test_dumb_terminal_has_plain_lines(capsys, monkeypatch):
    be_terminal(monkeypatch, "dumb")
    with ProgressBar("run", "iteration", 1) as progress:
        progress.update(1, "loss 2.5")
    assert capsys.readouterr().err == "run: iteration 1/1  loss 2.5  0 s left\n"


def test_log_with_forced_colours_has_plain_lines(capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    with ProgressBar("run", "iteration", 1) as progress:
        progress.update(1, "loss 2.5")
    assert "elapsed," not in capsys.readouterr().err


def test_long_step_is_told_of_at_times(capsys, monkeypatch):
    clock = iter([0.0, 5.0, 11.0, 12.0, 22.0])
    monkeypatch.setattr("brx.progress.time.monotonic", lambda: next(clock))
    progress = ProgressBar("run", "iteration", 10)
    for count in range(4):
        progress.say_at_times(f"bases {count}")
    assert capsys.readouterr().err.split() == ["run:", "bases", "1", "run:", "bases", "3"]
