"""`brx tables`: the paper's tables from runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from brx.cli.options import ScaleName, ScaleRuns
from brx.cli.usage import Application, Command, print_note

EXAMPLES = """\
  brx tables slowdown                           print one
  brx tables all --out results/tables/laptop    write all of them as Markdown and CSV
  brx tables all --scale paper --runs runs/paper --out tables
  brx tables list                               which tables there are
"""

app = Application()


@app.command(cls=Command, epilog=EXAMPLES)
def tables(
    table: Annotated[str, typer.Argument(metavar="TABLE", help="all, list, or the name of one", show_default=False)],
    *,
    scale: ScaleName = "laptop",
    runs: ScaleRuns = None,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="write TABLE.md and TABLE.csv there")] = None,
) -> None:
    """Print or write the tables."""
    from brx.paper.publishing import make_tables, write_table
    from brx.paper.tables import TABLES
    from brx.runs.formats import format_table

    if table == "list":
        for entry in TABLES.values():
            print(f"{entry.name:20}{entry.place:13}{entry.title}")
        return
    for paper_table, texts in make_tables(table, scale, runs, print_note):
        if out is None:
            print(f"{paper_table.title}\n{format_table(texts, 'table')}")
        else:
            print(write_table(paper_table, texts, out))
