"""`brx export`: runs in a form small enough to keep."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from brx.cli.options import RunsOrFolders
from brx.cli.usage import Application, Command

EXAMPLES = """\
  brx export runs/laptop --to results/laptop
  brx export runs/a runs/b --to results/mine
"""

app = Application()


@app.command(cls=Command, epilog=EXAMPLES)
def export(
    runs: RunsOrFolders,
    *,
    to: Annotated[Path, typer.Option(metavar="DIR", help="folder that gets one folder per run", show_default=False)],
    unfinished: Annotated[
        bool, typer.Option("--unfinished", help="runs that are unfinished, interrupted or failed, too")
    ] = False,
) -> None:
    """Copy, and say how many."""
    from brx.runs.metrics import export_runs

    num_exported, num_left_out = export_runs(runs, to, unfinished=unfinished)
    print(f"{to}: {num_exported} runs")
    if num_left_out:
        print(f"{num_left_out} left out: unfinished, interrupted or failed (--unfinished takes them)")
