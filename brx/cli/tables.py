"""`brx tables`: the paper's tables from runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from brx.cli.options import Format, ScaleName, ScaleRuns
from brx.cli.usage import Application, Command, print_note

EXAMPLES = """\
  brx tables slowdown                           print one
  brx tables "Table 3" --format latex           for a paper
  brx tables all --out results/tables/laptop    write all of them as Markdown and CSV
  brx tables all --scale paper --runs runs/paper --out tables
  brx tables list                               which tables there are
"""

app = Application()


def complete_table(incomplete: str) -> list[str]:
    """The tables' names."""
    from brx.paper.tables import TABLES

    return [name for name in ("all", "list", *TABLES) if name.startswith(incomplete)]


@app.command(cls=Command, epilog=EXAMPLES)
def tables(
    table: Annotated[
        str,
        typer.Argument(
            metavar="TABLE",
            help="all, list, or one by name or number ('Table 3')",
            show_default=False,
            autocompletion=complete_table,
        ),
    ],
    *,
    scale: ScaleName = "laptop",
    runs: ScaleRuns = None,
    format: Format = "table",
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="write TABLE.md and TABLE.csv there (latex: TABLE.tex, too)")
    ] = None,
) -> None:
    """Print or write the tables."""
    from brx.files import write_text
    from brx.paper.publishing import make_tables, write_table
    from brx.paper.tables import TABLES
    from brx.runs.formats import format_table

    if table == "list":
        for entry in TABLES.values():
            print(f"{entry.name:20}{entry.place:13}{entry.title}")
        return
    for paper_table, texts in make_tables(table, scale, runs, print_note):
        if out is None:
            title = f"{paper_table.title}\n" if format == "table" else ""
            print(f"{title}{format_table(texts, format)}")
            continue
        print(write_table(paper_table, texts, out))
        if format == "latex":
            write_text(out / f"{paper_table.name}.tex", format_table(texts, "latex") + "\n")
