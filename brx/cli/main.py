"""The `brx` command: find the subcommand and run it; errors become one line and an exit code."""

import errno
import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from contextvars import copy_context
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

import brx
from brx.cli.usage import Application, CommandGroup, usage_line
from brx.environment import OutputStream, rare_collections
from brx.errors import DamagedRunError, RunError, UserError
from brx.names import shown

# The panels of `brx --help`. Each command has its module in brx/cli, which is imported only when
# the command is used, and its summary. `brx --help` needs nothing but this table.
PANELS: dict[str, dict[str, tuple[str, str]]] = {
    "Train": {
        "demo": (
            "paper",
            "train two methods with and without delay, and draw their loss curves",
        ),
        "train": ("train", "train a model under asynchronous pipeline delay"),
        "sweep": ("train", "run a grid of runs, several at a time; continue where it stopped"),
        "config": ("config", "show all settings of a preset or file"),
        "data": ("config", "tokenize a corpus into token files"),
    },
    "Compare": {
        "compare": ("train", "rank methods by how robust they are to delay"),
        "slowdown": ("runs", "how many times more iterations a method needs under delay"),
        "plot": ("paper", "draw loss curves of runs, or the paper's figures"),
        "claims": ("paper", "compare the paper's claims with our runs"),
        "tables": ("paper", "print the paper's tables, computed from our runs"),
        "report": ("paper", "write one HTML page with all figures, tables and runs"),
        "evaluate": ("runs", "measure the loss of checkpoints on more validation data"),
        "weights": (
            "runs",
            "write a checkpoint's weights as safetensors, for PyTorch or Transformers",
        ),
        "export": (
            "runs",
            "copy runs in compact form (settings, summary, loss curves), to commit or share",
        ),
    },
    "Understand": {
        "hessian-norm": (
            "curvature",
            "measure basis misalignment: the (1,1)-norm of the Hessian, per parameter",
        ),
        "effective-delay": (
            "curvature",
            "compute the effective delay tau' of runs, and show their measured slowdown",
        ),
        "oscillation": (
            "curvature",
            "project updates onto the Hessian's dominant eigenvector and a random direction",
        ),
        "toy": ("paper", "draw what delay does to Adam on a quadratic and in a spiral valley"),
        "methods": ("config", "list the methods: equations, sources, defaults, parameter groups"),
        "models": ("config", "list the models that can be trained, and their options"),
    },
    "Plan": {
        "verdict": (
            "planning",
            "synchronous or asynchronous? the time to a loss, for P stages and M micro-batches",
        ),
        "schedule": (
            "planning",
            "show which device computes what and when, with idle times and delays",
        ),
        "plan": ("planning", "estimate the memory per device, the FLOPs and the time of a run"),
        "similarity": (
            "planning",
            "compare the dimensionless numbers of two training runs",
        ),
        "memory": (
            "planning",
            "show the memory overhead of basis rotation, by matrix, stage and device",
        ),
        "stages": (
            "planning",
            "show how many pipeline stages a model needs, for devices of different memory",
        ),
    },
}
COMMANDS: dict[str, tuple[str, str]] = {}
for _commands in PANELS.values():
    COMMANDS |= _commands

# The results of these commands are files: they succeed even if what they print is lost.
RESULT_IN_FILES = ("train", "sweep")
# These commands read many runs and train none.
READING = ("slowdown", "plot", "claims", "tables", "report")

FAILED, USAGE, INTERRUPTED = 1, 2, 130


class _Brx(CommandGroup):
    """The group of all commands. A command comes from the `app` of its module when it is used."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        # Click needs only the names here; `get_command` imports a command when it is used.
        self.commands = dict.fromkeys(COMMANDS)  # type: ignore[assignment]

    def get_command(self, ctx: Any, cmd_name: str) -> TyperCommand | TyperGroup | None:
        if cmd_name not in COMMANDS:
            return None
        module, summary = COMMANDS[cmd_name]
        command = typer.main.get_group(import_module(f"brx.cli.{module}").app).commands[cmd_name]
        assert isinstance(command, TyperCommand | TyperGroup)
        command.name = cmd_name
        command.help = summary
        return command

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write one panel per purpose, from `PANELS` and without importing any command."""
        for panel, commands in PANELS.items():
            with formatter.section(panel):
                formatter.write_dl([(name, summary) for name, (_, summary) in commands.items()])

    def invoke(self, ctx: Any) -> Any:
        """Run the command; where Typer would end silently on Ctrl-C, say so."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as stopped:
            print(f"brx: {str(stopped) or 'interrupted'}", file=sys.stderr)
            raise typer.Exit(INTERRUPTED) from None


app = Application(
    _Brx,
    add_completion=True,
    epilog="""\
  # what delay costs and what basis rotation saves, in minutes
  brx demo
  # train one run
  brx train quick --set pipeline.stages=8
  # compare many runs
  brx slowdown results/similar
  # options and examples of a command
  brx train --help
""",
)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"brx {brx.__version__}")
        raise typer.Exit()


@app.callback(help=brx.__doc__)
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, help="print the version and exit"
        ),
    ] = False,
    run_code: Annotated[
        bool,
        typer.Option(
            "--run-code",
            help="let commands that read runs import the Python files that these runs name (only "
            "for runs that you trust)",
        ),
    ] = False,
) -> None:
    """Options of brx itself."""
    try:
        os.getcwd()
    except OSError:
        raise UserError("the working folder is gone; change to another one (cd)") from None
    if run_code:
        from brx.config.user_code import allow_for_reading

        allow_for_reading()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        arguments: of the command line, without `brx`; by default those of this process.

    Returns:
        The exit code: 0 done, 1 failed run or lost output, 2 wrong usage, 130 interrupted.
    """
    command = next(iter(sys.argv[1:] if arguments is None else arguments), "")
    with rare_collections() if command in READING else nullcontext():
        code = _run(arguments)
    if code == 0 and command not in RESULT_IN_FILES and (problem := _lost_output()):
        print(f"brx: standard output: {problem}", file=sys.stderr)
        return FAILED
    return code


def _lost_output() -> str:
    """Why some output was lost; empty if none was, or if its reader ended early (`| head`)."""
    if not isinstance(sys.stdout, OutputStream):  # stdout belongs to a caller, such as a test
        return ""
    sys.stdout.flush()
    error = sys.stdout.lost
    if error is None or error.errno == errno.EPIPE:
        return ""
    return error.strerror or str(error)


def _run(arguments: Sequence[str] | None) -> int:
    try:
        # Without Typer's standalone mode, errors arrive here, and the code of a typer.Exit is
        # returned. Permissions for a user's code (brx.config.user_code) are context variables: in a
        # context of its own, a command's permissions end with it.
        context = copy_context()
        return int(context.run(app, arguments, prog_name="brx", standalone_mode=False) or 0)
    except typer.TyperException as error:
        print(usage_line(error), file=sys.stderr)
        return USAGE
    except (UserError, DamagedRunError, RunError) as error:
        from brx.distributed.launch import report_error

        if not report_error(error):
            print(f"brx: {shown(' '.join(str(error).splitlines()))}", file=sys.stderr)
        return FAILED if isinstance(error, RunError) else USAGE
    except OSError as error:
        if error.filename is None:
            raise
        from brx.files import reason

        path = os.fsdecode(error.filename)
        print(f"brx: {path}: {reason(error, Path(path))}", file=sys.stderr)
        return FAILED
