"""`brx schedule`: text and picture."""

import pytest

from brx.cli.main import main


def test_text_shows_the_engines_actions_and_the_delays(capsys):
    assert main(["schedule", "--stages", "4", "--devices", "2", "--micro-batches", "3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "GPipe, one step: idle 25.0% of the time shown" in lines
    assert "  0F1 0F2 0F3 0B1 0B2 0B3 0U3" in lines
    assert "  1F1 1B1 1F2 1B2 1F3 1B3 1U3" in lines
    assert any(line.startswith("  0F1 0F2 0B1 0U1 0F3 0B2 0U2") for line in lines)
    assert any(line.endswith("0.0% once the pipeline is full") for line in lines)
    assert lines[-2:] == ["  0: 3 2", "  1: 1 0"]


def test_figure_is_written(tmp_path, capsys):
    assert main(["schedule", "--stages", "3", "--figure", str(tmp_path / "schedule")]) == 0
    assert (tmp_path / "schedule.png").stat().st_size > 0
    assert "3 devices" in (tmp_path / "schedule.txt").read_text()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--stages", "2", "--devices", "3"], "--devices must be from 1 to --stages (2), got 3"),
        (["--stages", "0"], "must be at least 1"),
        (["--stages", "4", "--devices", "2", "--figure", "x"], "--figure shows one stage per device"),
    ],
)
def test_mistakes_exit_2(arguments, expected, capsys):
    assert main(["schedule", *arguments]) == 2
    assert expected in capsys.readouterr().err
