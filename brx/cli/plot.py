"""`brx plot`: figures of runs."""

from __future__ import annotations

import argparse
from pathlib import Path

HELP = "draw figures of runs"
EXAMPLES = """\
  brx plot curves runs/quick-pipedream-p8-s0 runs/quick-basis-rotation-p8-s0
  brx plot curves runs/quick-* --out figures/quick
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("figure", choices=["curves"], help="curves: training loss against iterations")
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folders of runs")
    parser.add_argument("--out", type=Path, default=Path("curves"), help="the figure's path without suffix")


def run(args: argparse.Namespace) -> int:
    """Draw, and say what was written."""
    import sys

    from brx.analysis.runs import Run, comparability
    from brx.figures.curves import draw_curves

    runs = [Run.load(path) for path in args.runs]
    for line in comparability(runs):
        print(f"brx: note: {line}", file=sys.stderr)
    for path in draw_curves(runs, args.out):
        print(path)
    return 0
