"""`brx config`: look at configurations."""

from __future__ import annotations

import argparse

from brx.cli.arguments import add_overrides

HELP = "show the complete settings of a preset or file"
EXAMPLES = """\
  brx config show quick
  brx config show my.yaml --set pipeline.stages=16
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("action", choices=["show"], help="show: print the resolved configuration as YAML")
    parser.add_argument("config", metavar="CONFIG", help="a YAML file or a preset's name")
    add_overrides(parser)


def run(args: argparse.Namespace) -> int:
    """Print the configuration."""
    from brx.config import dump_config, load_config

    print(dump_config(load_config(args.config, args.overrides)), end="")
    return 0
