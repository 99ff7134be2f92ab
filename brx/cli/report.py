"""`brx report`: everything on one page."""

from __future__ import annotations

import argparse
from pathlib import Path

HELP = "one HTML page with all figures, tables and runs; opens without a network"
EXAMPLES = """\
  brx report                                          report.html from the runs in results/cpu
  brx report --runs runs/cpu --out today.html         from runs under way
  brx report --scale paper --runs runs/paper --figures figures/paper
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("--scale", choices=["cpu", "paper"], default="cpu", help="which experiments (default: cpu)")
    parser.add_argument("--runs", type=Path, metavar="DIR", help="folder of the runs (default: the scale's)")
    parser.add_argument(
        "--figures",
        type=Path,
        action="append",
        metavar="DIR",
        help="show the figures of other commands that are there, too (default: figures and figures/SCALE)",
    )
    parser.add_argument("--out", type=Path, default=Path("report.html"), metavar="FILE", help="default: report.html")


def run(args: argparse.Namespace) -> int:
    """Write the page, and say where."""
    from brx.errors import UserError
    from brx.paper.scales import SCALES, Experiments
    from brx.report.page import write_report

    for folder in args.figures or []:
        if not folder.is_dir():
            raise UserError(f"--figures: {folder}: no such folder")
    folders = args.figures or [Path("figures"), Path("figures") / args.scale]
    write_report(Experiments(SCALES[args.scale], args.runs), folders, args.out)
    print(args.out)
    return 0
