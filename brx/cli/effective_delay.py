"""`brx effective-delay`: the effective delay from measured Hessian norms, beside the measured slowdown."""

from __future__ import annotations

from typing import Annotated

import typer

from brx.cli.options import FigurePath, RunsOrFolders
from brx.cli.usage import Application, Command, print_note
from brx.errors import UserError

EXAMPLES = """\
  brx hessian-norm runs/quick-basis-rotation-p8-s0                     first: measure
  brx effective-delay runs/quick-basis-rotation-p8-s0 --stages 1 2 4 8
  brx effective-delay runs/quick-* --out figures/effective-delay       with the slowdowns of all these runs
"""

app = Application()


@app.command(cls=Command, epilog=EXAMPLES)
def effective_delay(
    runs: RunsOrFolders,
    *,
    stages: Annotated[
        list[int] | None,
        typer.Option(metavar="P...", help="numbers of stages (default: powers of two up to the blocks)"),
    ] = None,
    out: FigurePath = None,
) -> None:
    """Print the table, and draw; at least one of the runs must have been measured."""
    from brx.curvature import effective_delay as delays
    from brx.curvature.checkpoints import runs_in_place
    from brx.curvature.norm_result import results_of
    from brx.plot.curvature import draw_effective_delay
    from brx.runs.formats import format_table
    from brx.runs.frames import differences, load

    loaded = load(runs)
    measured = [(path, result) for path in runs_in_place(runs) for result in results_of(path).values()]
    if not measured:
        raise UserError(f"{runs[0]}: has no measured norms; run `brx hessian-norm {runs[0]}` first")
    for line in differences(loaded):
        print_note(line)
    counts = stages or delays.usual_stages([result for _, result in measured])
    curves = [(result, [delays.effective_delay(result, count) for count in counts]) for _, result in measured]
    points = delays.slowdown_points(loaded) if len(loaded) > 1 else []
    print(format_table(delays.delay_table([path.name for path, _ in measured], curves), "table"))
    if points:
        print(format_table(delays.slowdown_table(points), "table"))
    if out is not None:
        for path in draw_effective_delay(curves, points, out):
            print(path)
