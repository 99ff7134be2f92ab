"""The command through its entry point: exit codes, help with examples, one line for each mistake."""

import subprocess
import sys

import pytest
import torch

from brx.cli.main import COMMANDS, main
from brx.config.loading import dump_config
from tests.train.helpers import tiny_config


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_examples(command, capsys):
    with pytest.raises(SystemExit) as caught:
        main([command, "--help"])
    assert caught.value.code == 0
    _, _, examples = capsys.readouterr().out.partition("examples:")
    assert f"  brx {command}" in examples


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["train", "quik"], "did you mean 'quick'"),
        (["train", "missing.yaml"], "no such file or preset"),
        (["train", "quick", "--set", "model.bloks=3"], "did you mean 'blocks'"),
        (["train", "quick", "--set", "pipeline.stages=9"], "must be at most model.blocks (8)"),
        (["train", "quick", "--set", "runtime.device=cuda"], "cuda is not available on this machine"),
        (["train", "quick", "--set", "data.source=missing.txt"], "missing.txt: no such file"),
        (["config", "show", "quik"], "did you mean 'quick'"),
        (["data", "prepare", "--workers", "-1"], "--workers must be at least 0"),
        (["plot", "curves", "nowhere"], "not a run's folder"),
    ],
)
def test_mistakes_exit_2_with_one_line(arguments, expected, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert expected in error
    assert error.count("\n") == 1


def test_unknown_command_exits_2():
    with pytest.raises(SystemExit) as caught:
        main(["trian"])
    assert caught.value.code == 2


def test_entry_point_runs_as_a_process():
    found = subprocess.run([sys.executable, "-m", "brx", "--version"], capture_output=True, text=True, check=True)
    assert found.stdout.startswith("brx ")


def test_train_then_plot(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.yaml").write_text(dump_config(tiny_config(tmp_path)))
    for method in ("pipedream", "basis-rotation"):
        assert main(["train", "tiny.yaml", "--set", f"optimizer.method={method}", "training.iterations=8"]) == 0
    assert capsys.readouterr().out.split() == ["runs/tiny-pipedream-p4-s0", "runs/tiny-basis-rotation-p4-s0"]
    assert main(["train", "runs/tiny-pipedream-p4-s0", "--resume"]) == 0
    runs = [str(path) for path in sorted((tmp_path / "runs").iterdir())]
    assert main(["plot", "curves", *runs, "--out", "figures/curves"]) == 0
    for suffix in (".png", ".pdf", ".txt"):
        assert (tmp_path / "figures" / f"curves{suffix}").stat().st_size > 0
    assert "runs/tiny-pipedream-p4-s0" in (tmp_path / "figures" / "curves.txt").read_text()


def test_plot_says_when_runs_do_not_compare(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.yaml").write_text(dump_config(tiny_config(tmp_path)))
    main(["train", "tiny.yaml", "--set", "training.iterations=4", "--out", "a"])
    main(["train", "tiny.yaml", "--set", "training.iterations=5", "--out", "b"])
    capsys.readouterr()
    assert main(["plot", "curves", "a", "b", "--out", "c"]) == 0
    assert "b and a differ in iterations" in capsys.readouterr().err


def test_demo_in_small(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = tiny_config(tmp_path)
    small = [
        "model={blocks: 4, width: 8, heads: 2, sequence_length: 16}",
        f"data={{source: '{config.data.source}', directory: '{config.data.directory}', validation_fraction: 0.3}}",
        "pipeline.stages=4",
        "training={iterations: 10, batch_size: 2, validation_examples: 4}",
    ]
    assert main(["demo", "--out", "demo", "--set", *small]) == 0
    output = capsys.readouterr().out
    assert output.count("basis-rotation") == 2
    assert (tmp_path / "demo" / "curves.png").stat().st_size > 0
