"""`brx oscillation`: how a run's updates move along the Hessian's dominant eigenvector."""

from __future__ import annotations

import argparse
from pathlib import Path

HELP = "project a run's updates on the Hessian's dominant eigenvector and on a random direction"
EXAMPLES = """\
  brx oscillation runs/quick-pipedream-p8-s0 runs/quick-basis-rotation-p8-s0 --out figures/oscillation
  brx oscillation runs/quick-pipedream-p8-s0 --checkpoint 1000 --iterations 200
  brx oscillation results/curvature/*-p[18] --measured --out figures/oscillation     what was measured before
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "runs", nargs="+", type=Path, metavar="RUN", help="folders of runs, each from its own checkpoint"
    )
    parser.add_argument(
        "--checkpoint", type=int, metavar="ITERATION", help="which one (default: the nearest to the middle of the run)"
    )
    parser.add_argument("--iterations", type=int, default=100, help="training iterations to follow (default: 100)")
    parser.add_argument(
        "--batches", type=int, default=64, help="batches whose mean loss the Hessian is of (default: 64)"
    )
    parser.add_argument(
        "--tolerance", type=float, default=1e-2, help="residual at which the power iteration stops (default: 0.01)"
    )
    parser.add_argument(
        "--power-iterations", type=int, default=200, metavar="N", help="or stops after N iterations (default: 200)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of start vector and random direction (default: 0)")
    parser.add_argument(
        "--measured", action="store_true", help="measure nothing: show what lies in RUN/analysis (needs no checkpoint)"
    )
    parser.add_argument("--out", type=Path, help="draw the figure, at this path without suffix")


def run(args: argparse.Namespace) -> int:
    """Measure each run, print, and draw."""
    from rich.console import Console
    from rich.table import Table

    from brx.curvature.oscillation import measure_oscillation, measured_oscillation
    from brx.errors import UserError

    for name in ("iterations", "batches", "power_iterations"):
        if getattr(args, name) < (least := 2 if name == "iterations" else 1):
            raise UserError(f"--{name.replace('_', '-')} {getattr(args, name)}: must be at least {least}")
    console = Console()
    notes = Console(stderr=True, highlight=False)
    found = [
        measured_oscillation(path)
        if args.measured
        else measure_oscillation(
            path,
            iteration=args.checkpoint,
            num_iterations=args.iterations,
            num_batches=args.batches,
            tolerance=args.tolerance,
            max_power_iterations=args.power_iterations,
            seed=args.seed,
            report=notes.print,
        )
        for path in args.runs
    ]
    table = Table("run", "direction", "eigenvalue", "sign changes", "variance", "share")
    for one in found:
        for direction, track, value in (
            ("dominant", one.dominant, f"{one.eigenvalue:.4g}"),
            ("random", one.random, ""),
        ):
            numbers = (f"{track.sign_changes:.0%}", f"{track.variance:.3g}", f"{track.share:.2g}")
            table.add_row(Path(one.run).name, direction, value, *numbers)
    console.print(table)
    console.print("share: of the updates' squared norms, along the direction", highlight=False)
    if args.out is not None:
        from brx.plot.curvature import draw_oscillation

        for written in draw_oscillation(found, args.out):
            print(written)
    return 0
