"""`brx schedule`: text and picture."""

import pytest

from brx.cli.main import main


def test_text_shows_the_engines_actions_and_the_delays(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["schedule", "--stages", "4", "--devices", "2", "--micro-batches", "3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "GPipe, one step: idle 25.0% of the time shown" in lines
    assert "  0F1 0F2 0F3 0B1 0B2 0B3 0U1" in lines
    assert "  1F1 1B1 1F2 1B2 1F3 1B3 1U1" in lines
    assert any(line.startswith("  0F1 0F2 0B1 0U1 0F3 0B2 0U2") for line in lines)
    assert any(line.endswith("0.0% once the pipeline is full") for line in lines)
    assert lines[-7:-5] == ["  0: 3 2", "  1: 1 0"]
    assert lines[-4] == "    0:   0   0   0   0   1   2   3   4 kept"


def test_rows_are_wrapped_at_the_terminals_width_and_letters_explained(capsys, monkeypatch):
    arguments = ["schedule", "--stages", "8", "--devices", "4", "--micro-batches", "9"]
    texts = {}
    for width in (60, 500):
        monkeypatch.setenv("COLUMNS", str(width))
        assert main(arguments) == 0
        texts[width] = capsys.readouterr().out
        assert max(map(len, texts[width].splitlines())) <= width
    assert "".join(texts[60].split()) == "".join(texts[500].split())
    assert "forward pass" in texts[60]


def test_2bw_keeps_two_versions(capsys):
    assert main(["schedule", "--stages", "3", "--delay", "2bw", "--accumulation", "2", "--micro-batches", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "    2:   0   0|  0   0|  1   1|  2   2   2 kept"
    assert any(line.startswith("  0F1 0F2 0F3 0B1 0F4 0B2 0U1 0F5") for line in lines)


def test_figure_is_written(tmp_path, capsys):
    assert main(["schedule", "--stages", "3", "--figure", str(tmp_path / "schedule")]) == 0
    assert (tmp_path / "schedule.png").stat().st_size > 0
    assert "3 devices" in (tmp_path / "schedule.txt").read_text()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--stages", "2", "--devices", "3"], "--devices must be from 1 to --stages (2), got 3"),
        (["--stages", "0"], "--stages: input should be greater than or equal to 1"),
        (["--stages", "4", "--devices", "2", "--figure", "x"], "--figure shows one stage per device"),
        (["--stages", "4", "--delay", "[1, 2]", "--devices", "1"], "delay must have one entry per stage (4), got 2"),
        (["--stages", "4", "--delay", "-1"], "delay must be pipeline, 2bw, a whole number from 0"),
        (["--stages", "4", "--delay", "2"], "rank 0 of 4 runs 3 forward passes ahead"),
        (["--stages", "4", "--accumulation", "0"], "--accumulation"),
        (["--stages", "2000"], "--micro-batches 4: 32,032,000 actions are more than can be shown (20,000)"),
        (["--stages", "2000", "--figure", "x"], "actions are more than can be shown"),
        (["--stages", "4", "--accumulation", "2", "--figure", "x"], "--figure shows one micro-batch per update"),
    ],
)
def test_mistakes_exit_2(arguments, expected, capsys):
    assert main(["schedule", *arguments]) == 2
    assert expected in capsys.readouterr().err
