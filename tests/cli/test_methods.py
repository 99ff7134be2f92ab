"""`brx methods` and `brx memory`: what they print, and what they refuse in one line."""

import re

import pytest

from brx.cli.main import main
from brx.methods.table import METHODS


def printed(capsys, *arguments):
    assert main(list(arguments)) == 0
    return capsys.readouterr().out


def test_all_methods_with_equation_source_defaults_and_parameters(capsys):
    text = printed(capsys, "methods")
    for name, method in METHODS.items():
        entry = text.partition(f"{name}: {method.summary}\n")[2].partition("\n\n")[0]
        flat = " ".join(entry.split())
        assert f"equation {method.equation}" in flat
        assert f"source {method.source}" in flat
        assert all(optimizer in flat for optimizer in method.gets)
        assert "defaults lr=0.001" in flat
    assert max(map(len, text.splitlines())) <= 110


@pytest.mark.parametrize("name", [name for name in METHODS if ":" not in name])
def test_one_method_in_full_explains_every_option(name, capsys):
    text = printed(capsys, "methods", name)
    assert METHODS[name].why[:40] in text
    for key in METHODS[name].section.model_fields:
        if key != "method":
            # Every option has a default and an explanation.
            assert re.search(rf"^  {key} = \S+ +\S", text, flags=re.M), key


def test_any_optimizer_shows_its_arguments(capsys):
    text = printed(capsys, "methods", "torch.optim:SGD")
    assert "arguments of torch.optim:SGD" in text
    assert "  momentum: float = 0" in text


def test_refresh_intervals_are_printed_with_their_budget(capsys):
    lines = printed(capsys, "methods", "basis-rotation", "--stages", "32").splitlines()
    rows = {int(line.split()[1]): line.split()[2:] for line in lines if re.match(r"  +\d+ +\d+ ", line)}
    assert {tau: rows[tau][1] for tau in (31, 16, 15, 2, 1, 0)} == {
        31: "4", 16: "9", 15: "10", 2: "150", 1: "never", 0: "never"
    }  # fmt: skip
    assert next(line for line in lines if "sum of 1/f" in line).split()[3:] == [
        "3.2000", "3.4302", "3.4302", "3.2000", "3.2000"
    ]  # fmt: skip
    assert "+7.2% against the uniform 32/10 = 3.2" in "\n".join(lines)


def test_memory_is_the_papers_table(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    rows = [line.split("│")[1:] for line in printed(capsys, "memory").splitlines() if line.startswith("│")]
    assert [tuple(cell.strip() for cell in row[:6]) for row in rows] == [
        ("2nd", "bilateral", "m^2 + n^2", "m^2 + n^2", "0.25", "1.66"),
        ("2nd", "unilateral", "min(m, n)^2", "min(m, n)^2", "0.13", "0.13"),
        ("1st", "bilateral", "m^2 + n^2", "--", "0.13", "0.83"),
        ("1st", "unilateral", "min(m, n)^2", "--", "0.06", "0.06"),
    ]


def test_memory_of_a_model_counts_every_matrix_and_expert(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    text = printed(capsys, "memory", "paper-moe-100m")
    # 16 of 32 blocks are mixtures of 8 experts: 4 x 32 attention matrices, 16 + 16 x 8 of each kind in MLPs.
    assert "240x240 (128 of them)" in text
    assert "960x240 (144 of them)" in text
    assert "MiB" in text
    row = next(line for line in text.splitlines() if "1st" in line and "unilateral" in line).split("│")
    assert float(row[8]) == pytest.approx(4 * 240**2 * (128 + 2 * 144) / 2**20, abs=0.01)


def test_memory_of_a_run_is_shown_by_stage_and_by_device(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    deep = ["model.blocks=32", "pipeline.stages=32", "pipeline.devices=2"]
    text = printed(capsys, "memory", "laptop", "--set", *deep, "optimizer.method=basis-rotation")
    _, by_stage, by_rank = text.split("P = 32, R = 2")[0], *text.split("P = 32, R = 2")[1:]
    rows = [line.split("│")[1:-1] for line in by_stage.splitlines() if line.startswith("│")]
    assert [tuple(int(cell) for cell in row[:3]) for row in rows] == [(k, k // 16, 31 - k) for k in range(32)]
    # A block of width 32: 12 d^2 + 2 d weights; U, V, L and R of four (32, 32) and two (128, 32) matrices.
    assert [float(rows[1][4]), float(rows[1][7])] == [
        pytest.approx(4 * (12 * 32**2 + 10 * 32) / 1e3, abs=2),
        pytest.approx(4 * 2 * (4 * 2 * 32**2 + 2 * (128**2 + 32**2)) / 1e3, abs=0.1),
    ]
    assert sum(line.startswith("│") for line in by_rank.splitlines()) == 2
    assert "Peak: " in by_rank


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["methods", "muonn"], "muonn: no such method, did you mean 'muon'? (known: pipedream,"),
        (["methods", "torch.optim:Sgd"], "did you mean SGD?"),
        (["methods", "muon", "--stages", "4"], "--stages: only basis-rotation has refresh intervals"),
        (["methods", "basis-rotation", "--stages", "0"], "--stages: input should be greater than or equal to 1"),
        (["memory", "--matrix", "4096"], "--matrix 4096: write rows x columns"),
        (["memory", "--matrix", "0x3"], "--matrix 0x3: write rows x columns"),
        (["memory", "quick", "--matrix", "3x3"], "give one of the two"),
        (["memory", "--set", "model.width=3"], "--set: needs a CONFIG"),
        (["memory", "quik"], "did you mean 'quick'"),
    ],
)
def test_mistakes_are_one_line(arguments, message, capsys):
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
