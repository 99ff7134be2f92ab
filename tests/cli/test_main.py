"""The command through its entry point: exit codes, help with examples, one line for each
mistake."""

import re
import shlex
import subprocess
import sys
from importlib import import_module

import pytest
import typer
import yaml
from typer.core import TyperGroup

from brx import __version__
from brx.cli.main import COMMANDS, app, main
from brx.config.loading import dump_config
from brx.environment import brx_command, child_environment
from tests.train.helpers import tiny_config


def commands_in(command, words=()):
    """The words of a command, and of the commands below it."""
    yield words
    for name in command.list_commands(None) if isinstance(command, TyperGroup) else ():
        yield from commands_in(command.get_command(None, name), (*words, name))


ALL_COMMANDS = list(commands_in(typer.main.get_command(app)))


def test_version_is_printed(printed):
    assert printed("--version") == f"brx {__version__}\n"


@pytest.mark.parametrize("panel", ["Options", "Train", "Compare", "Understand", "Plan"])
def test_overview_has_panels(panel, printed):
    assert f"\n{panel}:\n" in printed("--help")


def test_figures_need_no_backend_of_a_notebook(tmp_path):
    listed = subprocess.run(
        brx_command("plot", "list"),
        cwd=tmp_path,
        env={**child_environment(), "MPLBACKEND": "not-installed"},
        capture_output=True,
        text=True,
    )
    assert listed.returncode == 0, listed.stderr


def test_overview_names_every_command(printed):
    overview = printed("--help")
    assert all(re.search(rf"^  {command}  +\S", overview, flags=re.M) for command in COMMANDS)


@pytest.mark.parametrize("module", sorted({module for module, _ in COMMANDS.values()}))
def test_every_function_is_a_command(module):
    group = typer.main.get_group(import_module(f"brx.cli.{module}").app)
    assert [name for name in group.commands if name not in COMMANDS] == []


@pytest.mark.parametrize("words", ALL_COMMANDS, ids=" ".join)
def test_help_has_examples(words, printed):
    shown, _, examples = printed(*words, "--help").partition("Examples:")
    assert shown.startswith(" ".join(["Usage: brx", *words]))
    assert "  brx " in examples


@pytest.mark.parametrize("words", ALL_COMMANDS, ids=" ".join)
def test_help_fits_eighty_columns(words, printed, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    too_long = [line for line in printed(*words, "--help").splitlines() if len(line) > 80]
    assert not too_long


@pytest.mark.parametrize("words", ALL_COMMANDS, ids=" ".join)
def test_help_names_what_a_value_is(words, printed):
    assert not re.search(r"<(str|path|int|float)\b", printed(*words, "--help"))


@pytest.mark.parametrize("words", ALL_COMMANDS, ids=" ".join)
def test_examples_in_help_parse(words, printed):
    text = printed(*words, "--help").partition("Examples:")[2].replace("\\\n", " ")
    for line in text.splitlines():
        arguments = shlex.split(line, comments=True)
        if arguments[:1] == ["brx"] and "--help" not in arguments:
            parse(arguments[1:])


def parse(arguments):
    """Parse arguments as the command would, and run nothing."""
    command = typer.main.get_command(app)
    context = None
    while isinstance(command, TyperGroup) and arguments:
        name, *arguments = arguments
        command = command.get_command(None, name)
        context = command.make_context(name, list(arguments), parent=context)


@pytest.mark.parametrize(
    "arguments",
    [
        "quick --set pipeline.stages=4 training.iterations=70 --set optimizer.lr=-0.5e-1",
        "--set pipeline.stages=4 training.iterations=70 optimizer.lr=-0.5e-1 -- quick",
        "--set=pipeline.stages=4 quick --set training.iterations=70 optimizer.lr=-0.5e-1",
    ],
)
def test_one_flag_takes_several_settings(arguments, printed, refused):
    # A negative learning rate is refused by the configuration, after all three settings have
    # reached it.
    assert "optimizer.lr" in refused("config", "show", *arguments.split())
    shown = yaml.safe_load(printed("config", "show", *arguments.replace("=-", "=").split()))
    assert (
        shown["pipeline"]["stages"],
        shown["training"]["iterations"],
        shown["optimizer"]["lr"],
    ) == (4, 70, 0.05)


def test_no_import_swallows_ctrl_c(tmp_path):
    (tmp_path / "greedy.py").write_text(
        "import os, signal\ntry:\n    os.kill(os.getpid(), signal.SIGINT)\nexcept BaseException:\n "
        "   pass\n"
    )
    program = (
        "import signal; from brx import __main__ as b; signal.signal(signal.SIGINT, "
        "b._interrupt); import greedy"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True
    )
    assert (run.returncode, run.stdout, run.stderr) == (130, "", "brx: interrupted\n")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("brx hess", "hessian-norm"),
        ("brx train qu", "quick"),
        ("brx train quick --res", "--resume"),
        ("brx methods mu", "muon"),
        ("brx compare nesterov so", "soap"),
        ("brx plot block-scaling-", "block-scaling-all"),
        ("brx tables slo", "slowdown"),
    ],
)
def test_shell_completes_names(words, expected, capsys, monkeypatch):
    line = {
        "_BRX_COMPLETE": "complete_bash",
        "COMP_WORDS": words,
        "COMP_CWORD": str(words.count(" ")),
    }
    for name, value in line.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit):
        main([])
    assert expected in capsys.readouterr().out.split()


def test_small_demo_trains(tmp_path, printed, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = tiny_config(tmp_path, "training.iterations=8")
    small = [
        "model={blocks: 4, width: 8, heads: 2, sequence_length: 16}",
        f"data={{source: '{config.data.source}', directory: '{config.data.directory}', "
        f"validation_fraction: 0.3}}",
        "pipeline.stages=4",
        "training={iterations: 10, batch_size: 2, validation_examples: 4}",
    ]
    assert printed("demo", "--out", "demo", "--set", *small).count("basis-rotation") == 2
    assert (tmp_path / "demo" / "curves.png").stat().st_size > 0
    (tmp_path / "tiny.yaml").write_text(dump_config(config))
    assert printed("train", "tiny.yaml") == "runs/tiny-pipedream-p4-s0\n"
    printed("train", "runs/tiny-pipedream-p4-s0", "--resume")
    printed(
        "plot",
        "curves",
        "runs/tiny-pipedream-p4-s0",
        "demo/basis-rotation-p4",
        "--out",
        "figures/curves",
    )
    for suffix in (".png", ".pdf", ".svg", ".txt"):
        assert (tmp_path / "figures" / f"curves{suffix}").stat().st_size > 0
    assert "runs/tiny-pipedream-p4-s0" in (tmp_path / "figures" / "curves.json").read_text()


def test_tilde_of_an_option_is_the_home_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert main(["data", "list", "~/none"]) == 0
    assert f"{tmp_path}/none" in capsys.readouterr().out


def test_working_folder_that_is_gone_is_told(tmp_path, monkeypatch, refused):
    monkeypatch.chdir(tmp_path)
    tmp_path.rmdir()
    assert "the working folder is gone" in refused("plan", "quick")
