"""`brx effective-delay`: the effective delay from measured Hessian norms, beside the measured slowdown."""

from __future__ import annotations

import argparse
from pathlib import Path

HELP = "the effective delay tau' of runs from their hessian-norm results, and their measured slowdown"
EXAMPLES = """\
  brx hessian-norm runs/quick-basis-rotation-p8-s0                     first: measure
  brx effective-delay runs/quick-basis-rotation-p8-s0 --stages 1 2 4 8
  brx effective-delay runs/quick-* --out figures/effective-delay       with the slowdowns of all these runs
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folders of runs; at least one is measured")
    parser.add_argument(
        "--stages", nargs="+", type=int, metavar="P", help="numbers of stages (default: powers of two up to the blocks)"
    )
    parser.add_argument("--out", type=Path, help="draw the figure, at this path without suffix")


def run(args: argparse.Namespace) -> int:
    """Print the table, and draw."""
    import sys

    from rich.console import Console
    from rich.table import Table

    from brx.curvature.effective_delay import (
        EffectiveDelay,
        effective_delay,
        slowdown_points,
        uniform_effective_delay,
        usual_stages,
    )
    from brx.curvature.norm_result import NormResult, results_of
    from brx.errors import UserError
    from brx.runs.reading import Run, comparability

    runs = [Run.load(path) for path in args.runs]
    measured = [(path, result) for path in args.runs for result in results_of(path).values()]
    if not measured:
        raise UserError(f"{args.runs[0]}: has no measured norms; run `brx hessian-norm {args.runs[0]}` first")
    for line in comparability(runs):
        print(f"brx: note: {line}", file=sys.stderr)

    stages = args.stages or usual_stages([result for _, result in measured])
    table = Table()
    for column in ("tau'", *(f"P = {count}" for count in stages)):
        table.add_column(column, no_wrap=True)
    curves: list[tuple[NormResult, list[EffectiveDelay]]] = []
    for path, result in measured:
        delays = [effective_delay(result, count) for count in stages]
        curves.append((result, delays))
        cells = [f"{one.delay:.3g}±{one.standard_error:.1g}" for one in delays]
        table.add_row(f"{path.name}, {result.space}", *cells)
    table.add_row("equal stages", *(f"{uniform_effective_delay(count):.3g}" for count in stages))
    console = Console()
    console.print(table)

    points = slowdown_points(runs) if len(runs) > 1 else []
    if points:
        slowdowns = Table("run", "method", "P", "tau'", "slowdown in iterations")
        for point in points:
            shown = "never" if point.slowdown is None else f"{point.slowdown:.3g}"
            slowdowns.add_row(
                point.run.path.name, point.run.method, str(point.run.stages), f"{point.delay.delay:.3g}", shown
            )
        console.print(slowdowns)
    if args.out is not None:
        from brx.plot.curvature import draw_effective_delay

        for written in draw_effective_delay(curves, points, args.out):
            print(written)
    return 0
