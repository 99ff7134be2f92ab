"""The `brx` command: finds the subcommand, runs it, and turns what goes wrong into one line and an
exit code."""

import errno
import sys
from collections.abc import Sequence
from contextvars import copy_context
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

import brx
from brx.cli.usage import Application, CommandGroup, usage_line
from brx.environment import OutputStream
from brx.errors import DamagedRunError, RunError, UserError
from brx.names import shown

# By panel of the help: name, and module (imported when the command is used: `brx --help` reads this
#     alone), summary.
PANELS: dict[str, dict[str, tuple[str, str]]] = {
    "Train": {
        "demo": (
            "paper",
            "train the quick preset with and without delay, with two methods, and draw the loss "
            "curves",
        ),
        "train": ("train", "train a GPT under asynchronous-pipeline delay"),
        "sweep": ("train", "run a grid of runs, several at a time; continues where it was left"),
        "config": ("config", "show the complete settings of a preset or file"),
        "data": ("config", "tokenize a corpus into token files"),
    },
    "Compare": {
        "compare": (
            "train",
            "how robust methods are against delay: the same runs for each, and their leaderboard",
        ),
        "slowdown": (
            "runs",
            "how many times the iterations each method needs under delay to reach a loss",
        ),
        "plot": ("paper", "draw loss curves of runs, or the paper's figures"),
        "claims": (
            "paper",
            "every number and direction that the paper states, beside what the runs of a scale say",
        ),
        "tables": ("paper", "the paper's tables, from the runs of a scale"),
        "report": (
            "paper",
            "one HTML page with all figures, tables and runs; opens without a network",
        ),
        "weights": (
            "runs",
            "write a checkpoint's weights as safetensors, for PyTorch or Transformers",
        ),
        "export": (
            "runs",
            "copy runs in compact form (config, summary, loss curves), to be committed or shared",
        ),
    },
    "Understand": {
        "hessian-norm": (
            "curvature",
            "measure basis misalignment: the (1,1)-norm of the Hessian, per parameter",
        ),
        "effective-delay": (
            "curvature",
            "the effective delay tau' of measured runs, and their measured slowdown",
        ),
        "oscillation": (
            "curvature",
            "project updates on the Hessian's dominant eigenvector and a random direction",
        ),
        "toy": (
            "paper",
            "draw what delay does to Adam on a quadratic or in a spiral valley, aligned with axes "
            "or not",
        ),
        "methods": (
            "config",
            "list the methods: equation, source, defaults, which optimizer gets which parameters",
        ),
        "models": ("config", "list the models that can be trained, and their options"),
    },
    "Plan": {
        "verdict": (
            "planning",
            "synchronous or asynchronous: time to a loss for P stages, M micro-batches per update",
        ),
        "schedule": (
            "planning",
            "show who computes what when, synchronously and not, with idle times and delays",
        ),
        "plan": ("planning", "say what a run needs: memory of every device, FLOPs, time"),
        "similarity": (
            "planning",
            "how far a training resembles another: the dimensionless numbers of both",
        ),
        "memory": (
            "planning",
            "memory overhead of the basis-rotation strategies; of a run's stages and devices, too",
        ),
        "stages": (
            "planning",
            "the least number of pipeline stages that a model needs, by the memory of a device",
        ),
    },
}
COMMANDS = {name: entry for commands in PANELS.values() for name, entry in commands.items()}

# What these commands are for is in their folders; what they print decides nothing.
RESULT_IN_FILES = ("train", "sweep")

FAILED, USAGE, INTERRUPTED = 1, 2, 130


class _Brx(CommandGroup):
    """The group of all commands, each taken from the `app` of its module when somebody asks for
    it."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands = dict.fromkeys(COMMANDS)  # type: ignore[assignment]  # the names alone: see `get_command`

    def get_command(self, ctx: Any, cmd_name: str) -> TyperCommand | TyperGroup | None:
        if cmd_name not in COMMANDS:
            return None
        module, summary = COMMANDS[cmd_name]
        command = typer.main.get_group(import_module(f"brx.cli.{module}").app).commands[cmd_name]
        assert isinstance(command, TyperCommand | TyperGroup)
        command.name, command.help = cmd_name, summary
        return command

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """One panel per purpose, from the table alone."""
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
  brx demo  what delay costs, and what basis rotation saves, in minutes
  brx train quick --set pipeline.stages=8    train one run
  brx slowdown results/similar               compare many
  brx train --help                           options and examples of a command
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
            help="let commands that read runs execute the Python files that these runs name (only "
            "for runs that you trust)",
        ),
    ] = False,
) -> None:
    """Options of brx itself."""
    if run_code:
        from brx.config.user_code import allow_for_reading

        allow_for_reading()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code (0 done, 1 failed run, 2 usage, 130 interrupted)."""
    code = _run(arguments)
    command = next(iter(sys.argv[1:] if arguments is None else arguments), "")
    if code == 0 and command not in RESULT_IN_FILES and (problem := _lost_output()):
        print(f"brx: standard output: {problem}", file=sys.stderr)
        return FAILED
    return code


def _lost_output() -> str:
    """Why not all of the output has arrived; empty where it has, or its reader wanted no more."""
    if not isinstance(sys.stdout, OutputStream):  # of a caller of ours
        return ""
    sys.stdout.flush()
    error = sys.stdout.lost
    if error is None or error.errno == errno.EPIPE:
        return ""
    return error.strerror or str(error)


def _run(arguments: Sequence[str] | None) -> int:
    try:
        # Without Typer's standalone mode, errors come here, and a typer.Exit becomes the value that
        # is returned.
        # What a command allows of a user's code (brx.config.user_code) ends with it.
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
        print(f"brx: {error.filename}: {error.strerror}", file=sys.stderr)
        return FAILED
