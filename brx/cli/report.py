"""`brx report`: everything on one page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from brx.cli.options import ScaleName, ScaleRuns
from brx.cli.usage import Application, Command
from brx.errors import UserError

EXAMPLES = """\
  brx report                                        report.html from the runs in results/laptop
  brx report --runs runs/laptop --out today.html    from runs under way
  brx report --scale paper --runs runs/paper --figures figures/paper
"""

app = Application()


@app.command(cls=Command, epilog=EXAMPLES)
def report(
    *,
    scale: ScaleName = "laptop",
    runs: ScaleRuns = None,
    figures: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="DIR...",
            help="show the figures of other commands that are there, too (default: figures and figures/SCALE)",
        ),
    ] = None,
    out: Annotated[Path, typer.Option(metavar="FILE", help="the page")] = Path("report.html"),
) -> None:
    """Write the page, and say where."""
    from brx.paper.scales import SCALES, Experiments
    from brx.report.page import write_report

    for folder in figures or []:
        if not folder.is_dir():
            raise UserError(f"--figures: {folder}: no such folder")
    write_report(Experiments.load(SCALES[scale], runs), figures or [Path("figures"), Path("figures") / scale], out)
    print(out)
