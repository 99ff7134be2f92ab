"""`brx stages`: its formats, models and devices of one's own, and mistakes."""

import csv
import io

import pytest

from brx.cli.main import main

OWN = ["--hidden", "4096", "--heads", "32", "--params-per-block", "202e6", "--blocks", "32"]


def test_csv_is_the_papers_table(capsys):
    assert main(["stages", "--format", "csv"]) == 0
    output = capsys.readouterr()
    rows = list(csv.reader(io.StringIO(output.out)))
    assert rows[0][5:] == ["8 GB", "16 GB", "24 GB", "48 GB", "80 GB"]
    assert rows[3] == ["LLaMA 1-7B", "4096", "32", "202M", "32", "32", "16", "11", "5", "3"]
    assert len(rows) == 8
    assert "the paper prints >= 512" in output.err


def test_markdown_of_an_own_model_on_own_devices(capsys):
    assert main(["stages", *OWN, "--memory", "16", "80", "--format", "markdown"]) == 0
    output = capsys.readouterr()
    assert output.out.splitlines() == [
        "| model | h | a | W | L | 16 GB | 80 GB |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        "| model | 4096 | 32 | 202M | 32 | 16 | 3 |",
    ]
    assert output.err == ""


def test_longer_sequences_need_more_stages(capsys):
    assert main(["stages", *OWN, "--memory", "8", "80", "--sequence-length", "8192", "--format", "csv"]) == 0
    output = capsys.readouterr()
    assert output.out.splitlines()[1].endswith(",>= 64,7")
    assert "does not hold a whole block" in output.err


def test_table(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    assert main(["stages"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(len(line) for line in lines) <= 100
    assert next(line for line in lines if "405B" in line).split()[-2] == "126"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--hidden", "4096"], "a model of your own needs --heads, --params-per-block, --blocks too"),
        ([*OWN[:-1], "0"], "--blocks must be more than 0, got 0"),
        (["--memory", "-8"], "--memory must be more than 0"),
        (["--sequence-length", "0"], "--sequence-length must be more than 0"),
    ],
)
def test_mistakes_exit_2_with_one_line(arguments, expected, capsys):
    assert main(["stages", *arguments]) == 2
    error = capsys.readouterr().err
    assert expected in error
    assert error.count("\n") == 1
