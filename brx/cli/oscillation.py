"""`brx oscillation`: how a run's updates move along the Hessian's dominant eigenvector."""

from __future__ import annotations

from typing import Annotated

import typer

from brx.cli.options import FigurePath, OnlyMeasured, RunsOrCheckpoints
from brx.cli.usage import Application, Command

EXAMPLES = """\
  brx oscillation runs/quick-pipedream-p8-s0 runs/quick-basis-rotation-p8-s0 --out figures/oscillation
  brx oscillation runs/quick-pipedream-p8-s0 --checkpoint 1000 --iterations 200
  brx oscillation runs/*-p32-*/checkpoints/00016000 --out figures/oscillation    several checkpoints, methods, seeds
  brx oscillation results/laptop-curvature --measured --out figures/oscillation      what was measured before
"""

app = Application()


@app.command(cls=Command, epilog=EXAMPLES)
def oscillation(
    checkpoints: RunsOrCheckpoints,
    *,
    checkpoint: Annotated[
        int | None,
        typer.Option(metavar="ITERATION", help="checkpoint of each run (default: the nearest to its middle)"),
    ] = None,
    iterations: Annotated[int, typer.Option(metavar="N", min=2, help="training iterations to follow")] = 100,
    batches: Annotated[int, typer.Option(metavar="N", min=1, help="batches whose mean loss the Hessian is of")] = 64,
    tolerance: Annotated[
        float, typer.Option(metavar="RESIDUAL", help="residual at which the power iteration stops")
    ] = 1e-2,
    power_iterations: Annotated[int, typer.Option(metavar="N", min=1, help="or stops after N iterations")] = 200,
    seed: Annotated[int, typer.Option(help="seed of the start vector and the random direction")] = 0,
    measured: OnlyMeasured = False,
    out: FigurePath = None,
) -> None:
    """Measure from each checkpoint; print, and draw."""
    from rich.console import Console

    from brx.curvature.checkpoints import refuse_two_checkpoints
    from brx.curvature.oscillation import measure_oscillation, oscillation_table, oscillations_in
    from brx.plot.curvature import draw_oscillation
    from brx.runs.checkpoint import run_and_iteration
    from brx.runs.formats import format_table

    refuse_two_checkpoints(checkpoints, checkpoint)
    if measured:
        results = oscillations_in(checkpoints, checkpoint)
    else:
        results = [
            measure_oscillation(
                run,
                iteration=iteration or checkpoint,
                num_iterations=iterations,
                num_batches=batches,
                tolerance=tolerance,
                max_power_iterations=power_iterations,
                seed=seed,
                report=Console(stderr=True, highlight=False).print,
            )
            for run, iteration in map(run_and_iteration, checkpoints)
        ]
    print(format_table(oscillation_table(results), "table"))
    print("share: of the updates' squared norms, along the direction")
    if out is not None:
        for path in draw_oscillation(results, out):
            print(path)
