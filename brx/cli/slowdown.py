"""`brx slowdown`: what delay costs each method, in iterations."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from brx.cli.options import Format, RunsOrFolders
from brx.cli.usage import Application, Command
from brx.errors import UserError

EXAMPLES = """\
  brx slowdown results/cpu                                  every method and P found there, relative to P = 1
  brx slowdown runs/a runs/b --target 2.5 --format csv
  brx slowdown results/cpu --all-targets figures/slowdown-all-targets
"""

app = Application()


@app.command(cls=Command, epilog=EXAMPLES)
def slowdown(
    runs: RunsOrFolders,
    *,
    target: Annotated[
        float | None, typer.Option(metavar="LOSS", help="training loss to reach, in nats (instead of a rule)")
    ] = None,
    target_rule: Annotated[
        Literal["slowest-final"] | None,
        typer.Option(help="slowest-final (the default): the loss that all of them reach in the end"),
    ] = None,
    reference_stages: Annotated[int, typer.Option(metavar="P", help="stages to compare to")] = 1,
    format: Format = "table",
    all_targets: Annotated[
        Path | None, typer.Option(metavar="FIGURE", help="draw slowdown against target, too")
    ] = None,
) -> None:
    """Print the slowdowns, and the iterations saved over the best baseline."""
    from brx.plot.slowdown import draw_all_targets
    from brx.runs.comparison import compare
    from brx.runs.experiments import at_best_rates, notes
    from brx.runs.formats import format_table
    from brx.runs.frames import load
    from brx.runs.reading import SMOOTHING
    from brx.runs.tables import reduction_table, slowdown_table

    if target is not None and target_rule is not None:
        raise UserError("--target and --target-rule: give one of the two")
    if target is not None and not 0 < target < math.inf:
        raise UserError(f"--target {target:g}: must be a loss above 0, in nats")
    all_runs = load(runs)
    chosen = at_best_rates(all_runs)
    comparison = compare(chosen, target, reference_stages)
    slowdowns, reductions = comparison.slowdowns, comparison.reductions
    for note in [*notes(all_runs, chosen), *comparison.notes]:
        print(f"brx: note: {note}", file=sys.stderr)
    if slowdowns.empty:
        raise UserError(f"RUNS: nothing to compare: no method has runs at P = {reference_stages} and at another P")

    if format == "json":
        both = {"slowdowns": slowdowns, "reductions": reductions}
        print(json.dumps({key: json.loads(frame.to_json(orient="records")) for key, frame in both.items()}, indent=2))
    elif format == "table":
        how = "given" if target is not None else "slowest-final: all runs of the set reach it"
        print(
            f"Iterations until the training loss, a centred mean over {SMOOTHING:.0%} of the iterations, stays at or"
            f" below the target ({how})"
        )
        print(format_table(slowdown_table(slowdowns), format))
        if slowdowns[["lr_at_edge", "reference_lr_at_edge"]].any(axis=None):
            print("*: at the edge of the rates that were tried")
        if len(reductions):
            print("Iterations saved over the best of PipeDream, PipeDream-LR and Nesterov, at its final loss")
            print(format_table(reduction_table(reductions), format))
    else:
        print(format_table(slowdown_table(slowdowns), format))
    if all_targets is not None:
        for path in draw_all_targets(comparison.sets[0], all_targets, reference_stages, target):
            print(path, file=sys.stderr)
