"""`brx demo`: the paper's point in a few minutes on a laptop."""

from __future__ import annotations

import argparse
from pathlib import Path

from brx.cli.arguments import add_overrides

HELP = "train the quick preset with and without delay, with two methods, and draw the four loss curves"
EXAMPLES = """\
  brx demo
  brx demo --out runs/demo --set training.iterations=300      a shorter one
"""

METHODS = ("pipedream", "basis-rotation")


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("--out", type=Path, default=Path("runs/demo"), metavar="DIR", help="default: runs/demo")
    add_overrides(parser)


def run(args: argparse.Namespace) -> int:
    """Train what is not trained yet, then draw the figure and print the table."""
    from rich.console import Console

    from brx.config import load_config
    from brx.plot.curves import draw_curves
    from brx.runs.reading import Run, common_target
    from brx.runs.tables import loss_table
    from brx.train.loop import train

    delayed = load_config("quick", args.overrides).pipeline.stages
    runs = []
    for stages in (1, delayed):
        for method in METHODS:
            overrides = [*args.overrides, f"optimizer.method={method}", f"pipeline.stages={stages}"]
            folder = args.out / f"{method}-p{stages}"
            if train(load_config("quick", overrides), folder, resume=True) == "interrupted":
                return 130
            runs.append(Run.load(folder))
    target = common_target(runs)
    written = draw_curves(runs, args.out / "curves", target=target)
    Console(width=110).print(loss_table(runs, target))
    print(written[0])
    return 0
