"""`brx demo`: the paper's point in a few minutes on a laptop."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from brx.cli.options import Overrides
from brx.cli.usage import Application, Command

EXAMPLES = """\
  brx demo
  brx demo --out runs/demo --set training.iterations=300      a shorter one
"""

app = Application()


@app.command(cls=Command, epilog=EXAMPLES)
def demo(
    *,
    out: Annotated[Path, typer.Option(metavar="DIR", help="folder of the runs and the figure")] = Path("runs/demo"),
    overrides: Overrides,
) -> None:
    """Train what is not trained yet, then draw the figure and print the table."""
    from brx.paper.demo import run_demo

    if run_demo(out, overrides) == "interrupted":
        raise typer.Exit(130)
