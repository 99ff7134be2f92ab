"""The `brx` command: finds the subcommand, runs it, and turns what goes wrong into one line and an exit code."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

import brx
from brx.errors import RunError, UserError

COMMANDS = (
    "demo",
    "train",
    "sweep",
    "slowdown",
    "config",
    "data",
    "plan",
    "methods",
    "memory",
    "plot",
    "tables",
    "report",
    "export",
    "hessian-norm",
    "effective-delay",
    "oscillation",
    "toy",
    "schedule",
    "stages",
)

DONE, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code (0 done, 1 failed run, 2 usage, 130 interrupted)."""
    options = build_parser().parse_args(arguments)
    try:
        return int(options.run(options))
    except (UserError, RunError) as error:
        from brx.distributed.launch import report_error

        if not report_error(error):
            print(f"brx: {error}", file=sys.stderr)
        return USAGE if isinstance(error, UserError) else FAILED
    except BrokenPipeError:  # the reader, `head` for example, has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except OSError as error:
        if error.filename is None:
            raise
        print(f"brx: {error.filename}: {error.strerror}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        print("brx: interrupted", file=sys.stderr)
        return INTERRUPTED


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands; each lives in a module of its name."""
    parser = argparse.ArgumentParser(prog="brx", description=brx.__doc__)
    parser.add_argument("--version", action="version", version=f"brx {brx.__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name in COMMANDS:
        module = importlib.import_module(f"brx.cli.{name.replace('-', '_')}")
        subparser = subparsers.add_parser(
            name,
            help=module.HELP,
            description=module.HELP,
            epilog=f"examples:\n{module.EXAMPLES}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.configure(subparser)
        subparser.set_defaults(run=module.run)
    return parser


if __name__ == "__main__":
    sys.exit(main())
