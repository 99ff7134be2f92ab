"""The command through its entry point: exit codes, help with examples, one line for each mistake."""

import os
import re
import subprocess
import sys

import pytest
import torch
import yaml

from brx import __version__
from brx.cli.main import COMMANDS, main
from brx.config.loading import dump_config
from tests.train.helpers import tiny_config


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_examples(command, capsys):
    assert main([command, "--help"]) == 0
    shown, _, examples = capsys.readouterr().out.partition("Examples:")
    assert f"Usage: brx {command}" in shown
    assert f"  brx {command}" in examples


def test_help_groups_the_commands_and_leaves_none_out(capsys):
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    panels = [line.removesuffix(":") for line in shown.splitlines() if line.endswith(":") and line[0] != " "]
    assert panels == ["Options", "Train", "Compare", "Understand", "Plan", "Examples"]
    for command in COMMANDS:
        assert re.search(rf"^  {command}  +\S", shown, flags=re.M)


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
        (["data", "prepare", "--workers", "-1"], "--workers: input should be greater than or equal to 0"),
        (["plot", "curves", "nowhere"], "nowhere: no such folder"),
    ],
)
def test_mistakes_exit_2_with_one_line(arguments, expected, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert expected in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "brx: Missing command (known: demo, train, "),
        (["trian"], "brx: No such command 'trian'. Did you mean 'train'? (known: demo, "),
        (["--bogus"], "brx: No such option: --bogus; see brx --help"),
        (["train"], "brx train: CONFIG is missing: a YAML file or a preset's name; see brx train --help"),
        (["train", "quick", "extra"], "brx train: Got unexpected extra argument(s) (extra)"),
        (["train", "quick", "--devcies", "2"], "No such option: --devcies (Possible options: --devices)"),
        (["train", "quick", "--devices", "two"], "brx train: --devices: input should be a valid integer"),
        (["train", "quick", "--devices", "two"], "got 'two'"),
        (["train", "quick", "--out", "--resume"], "brx train: --out needs a value: the run's folder"),
        (["train", "quick", "--set"], "brx train: --set needs a value: override settings"),
        (["train", "quick", "--resume=3"], "--resume"),
        (["data"], "brx data: Missing command (known: prepare, info)"),
        (["config", "hide"], "brx config: No such command 'hide' (known: show)"),
        (
            ["toy", "circle"],
            "brx toy: LANDSCAPE: 'circle' is not one of 'quadratic', 'spiral', 'sweep'; see",
        ),
        (["schedule"], "brx schedule: --stages is missing: virtual stages"),
        (["tables", "main", "--scale", "huge"], "--scale: 'huge' is not one of 'laptop', "),
    ],
)
def test_wrong_usage_exits_2_with_one_line(arguments, expected, capsys):
    assert main(arguments) == 2
    output = capsys.readouterr()
    assert expected in output.err
    assert output.err.count("\n") == 1
    assert output.out == ""


@pytest.mark.parametrize(
    "arguments",
    [
        ["quick", "--set", "pipeline.stages=4", "training.iterations=70", "--set", "optimizer.lr=-0.5e-1"],
        ["--set", "pipeline.stages=4", "training.iterations=70", "optimizer.lr=-0.5e-1", "--", "quick"],
        ["--set=pipeline.stages=4", "quick", "--set", "training.iterations=70", "optimizer.lr=-0.5e-1"],
    ],
)
def test_one_flag_takes_several_settings(arguments, capsys):
    # A negative learning rate is refused by the configuration, after all three settings have reached it.
    assert main(["config", "show", *arguments]) == 2
    assert "optimizer.lr" in capsys.readouterr().err
    assert main(["config", "show", *(word.replace("=-", "=") for word in arguments)]) == 0
    shown = yaml.safe_load(capsys.readouterr().out)
    assert shown["pipeline"]["stages"] == 4
    assert shown["training"]["iterations"] == 70
    assert shown["optimizer"]["lr"] == 0.05


def brx(*arguments, **environment):
    """A real process; through `python -m brx`, as torchrun starts it."""
    return subprocess.run(
        [sys.executable, "-m", "brx", *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )


def test_help_loads_none_of_the_large_packages():
    program = (
        "import sys; from brx.cli.main import COMMANDS, main; main(['--help']);"
        "[main([command, '--help']) for command in COMMANDS];"
        "large = {'torch', 'numpy', 'pandas', 'scipy', 'matplotlib', 'yaml', 'datasets'};"
        "sys.exit(' '.join(large & set(sys.modules)) or 0)"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=100)
    assert (ended.returncode, ended.stderr) == (0, "")


@pytest.mark.parametrize(
    ("command", "told"),
    [
        (["config", "show", "quik"], "brx: quik: no such file or preset"),
        (["train", "quick", "--set", "pipeline.stages=9"], "pipeline.stages must be at most model.blocks (8), got 9"),
    ],
)
def test_a_mistake_is_told_without_loading_torch(command, told):
    program = f"import sys; from brx.cli.main import main; main({command!r}); print('torch' in sys.modules)"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=100)
    assert ended.stdout == "False\n"
    assert told in ended.stderr


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_starts_as_a_process(command):
    shown = brx(command, "--help")
    assert (shown.returncode, shown.stderr) == (0, "")
    assert shown.stdout.startswith(f"Usage: brx {command} ")


def test_processes_end_with_the_exit_code():
    assert brx("--version").stdout == f"brx {__version__}\n"
    assert brx("tran").returncode == 2


@pytest.mark.parametrize(
    ("words", "expected"),
    [("brx hess", "hessian-norm"), ("brx train qu", "quick"), ("brx train quick --res", "--resume")],
)
def test_the_shell_completes_commands_presets_and_options(words, expected):
    found = brx(_BRX_COMPLETE="complete_bash", COMP_WORDS=words, COMP_CWORD=str(words.count(" ")))
    assert expected in found.stdout.split()


def test_ctrl_c_is_one_line_and_exit_code_130(monkeypatch, capsys):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("brx.methods.description.all_methods", interrupted)
    assert main(["methods"]) == 130
    assert capsys.readouterr().err == "brx: interrupted\n"


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
