"""`brx slowdown`: what delay costs each method, in iterations."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

HELP = "how many times the iterations each method needs under delay to reach a loss"
EXAMPLES = """\
  brx slowdown results/cpu                                  every method and P found there, relative to P = 1
  brx slowdown runs/a runs/b --target 2.5 --format csv
  brx slowdown results/cpu --all-targets figures/slowdown-all-targets
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUNS", help="runs, or folders that hold runs")
    target = parser.add_mutually_exclusive_group()
    target.add_argument("--target", type=float, metavar="LOSS", help="training loss to reach, in nats")
    target.add_argument(
        "--target-rule",
        choices=["slowest-final"],
        default="slowest-final",
        help="slowest-final (default): the loss that all of them reach in the end",
    )
    parser.add_argument(
        "--reference-stages", type=int, default=1, metavar="P", help="stages to compare to (default: 1)"
    )
    parser.add_argument("--format", choices=["table", "csv", "json", "markdown"], default="table")
    parser.add_argument("--all-targets", type=Path, metavar="FIGURE", help="draw slowdown against target, too")


def run(args: argparse.Namespace) -> int:
    """Print the slowdowns, and the iterations saved over the best baseline."""
    import sys

    from brx.errors import UserError
    from brx.plot.slowdown import draw_all_targets
    from brx.runs.experiments import Results
    from brx.runs.formats import format_table
    from brx.runs.reading import SMOOTHING
    from brx.runs.slowdown import comparable_sets, reductions, slowdowns, slowest_final, with_reference
    from brx.runs.tables import reduction_numbers, reduction_rows, slowdown_numbers, slowdown_rows

    if args.target is not None and not 0 < args.target < math.inf:
        raise UserError(f"--target {args.target:g}: must be a loss above 0, in nats")
    found, saved = [], []
    results = Results(args.runs)
    for note in results.notes:
        print(f"brx: note: {note}", file=sys.stderr)
    sets = comparable_sets(results.groups)
    if len(sets) > 1:
        print(
            f"brx: note: {len(sets)} sets of runs that differ in data, trajectory version, model or budget, each alone",
            file=sys.stderr,
        )
    for groups in sets:
        compared = with_reference(groups, args.reference_stages)
        if any(group.stages != args.reference_stages for group in compared):
            target = args.target if args.target is not None else slowest_final(compared)
            found += slowdowns(compared, target, args.reference_stages)
        saved += reductions(groups)
        for group in groups:
            if group in compared:
                continue
            where = f"no run of the same settings at P = {args.reference_stages}"
            print(f"brx: note: {group.runs[0].path}: {where}: it has no slowdown", file=sys.stderr)
    if not found:
        raise UserError(f"RUNS: nothing to compare: no method has runs at P = {args.reference_stages} and at another P")
    how = "given" if args.target is not None else "slowest-final: all runs of the set reach it"
    if any(one.is_early for one in found):
        print(
            "brx: note: a reference reaches the target in its first 5 % of iterations: such a ratio is about the start"
            " of training, and a lower --target says more",
            file=sys.stderr,
        )
    if args.format == "table":
        print(
            f"Iterations until the training loss, a centred mean over {SMOOTHING:.0%} of the iterations, stays at or"
            f" below the target ({how})"
        )
    if args.format == "json":
        print(json.dumps({"slowdowns": slowdown_numbers(found), "reductions": reduction_numbers(saved)}, indent=2))
    else:
        print(format_table(*slowdown_rows(found), args.format))
    if args.format == "table" and any(group.is_at_edge for one in found for group in (one.group, one.reference)):
        print("*: at the edge of the rates that were tried")
    if saved and args.format == "table":
        print("Iterations saved over the best of PipeDream, PipeDream-LR and Nesterov, at its final loss")
        print(format_table(*reduction_rows(saved), args.format))
    if args.all_targets is not None:
        for path in draw_all_targets(sets[0], args.all_targets, args.reference_stages, args.target):
            print(path, file=sys.stderr)
    return 0
