"""Arguments that several commands share."""

from __future__ import annotations

import argparse


def add_overrides(parser: argparse.ArgumentParser) -> None:
    """`--set KEY=VALUE...`, as `overrides`."""
    parser.add_argument(
        "--set",
        dest="overrides",
        metavar="KEY=VALUE",
        nargs="+",
        action="extend",
        default=[],
        help="override settings, for example model.blocks=16 optimizer.lr=3e-4",
    )
