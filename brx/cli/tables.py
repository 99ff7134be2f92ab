"""`brx tables`: the paper's tables from runs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from brx.cli.options import ScaleName, ScaleRuns
from brx.cli.usage import Application, Command
from brx.errors import UserError

EXAMPLES = """\
  brx tables slowdown                         print one
  brx tables all --out results/cpu/tables     write all of them as Markdown and CSV
  brx tables all --scale paper --runs runs/paper --out tables
  brx tables list                             which tables there are
"""

app = Application()


@app.command(cls=Command, epilog=EXAMPLES)
def tables(
    table: Annotated[str, typer.Argument(metavar="TABLE", help="all, list, or the name of one", show_default=False)],
    *,
    scale: ScaleName = "cpu",
    runs: ScaleRuns = None,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="write TABLE.md and TABLE.csv there")] = None,
) -> None:
    """Print or write the tables."""
    from brx.files import write_text
    from brx.paper.scales import SCALES, Experiments
    from brx.paper.tables import TABLES
    from brx.runs.formats import format_table

    if table == "list":
        for entry in TABLES.values():
            print(f"{entry.name:20}{entry.label:38}{entry.title}")
        return
    if table not in (*TABLES, "all"):
        raise UserError(f"TABLE: unknown table '{table}' (known: all, list, {', '.join(TABLES)})")
    experiments = Experiments.load(SCALES[scale], runs)
    for note in experiments.notes:
        print(f"brx: note: {note}", file=sys.stderr)
    for name in TABLES if table == "all" else [table]:
        own = experiments.fresh()
        try:
            texts = TABLES[name].make(own)
        except UserError as error:
            if table != "all":
                raise
            print(f"brx: note: table {name}: {error}", file=sys.stderr)
            continue
        if texts.empty and table != "all":
            raise UserError(f"table {name}: none of its runs are in {own.folder}; make them with {own.makers}")
        if own.missing:
            number = len(own.missing)
            print(f"brx: note: table {name}: {number} experiments not there: {own.makers}", file=sys.stderr)
        if texts.empty:
            continue
        if out is None:
            print(f"{TABLES[name].title}\n{format_table(texts, 'table')}")
            continue
        out.mkdir(parents=True, exist_ok=True)
        write_text(out / f"{name}.csv", format_table(texts, "csv") + "\n")
        title = f"# {TABLES[name].title}\n\n"
        write_text(out / f"{name}.md", title + format_table(texts, "markdown") + "\n")
        print(out / f"{name}.md")
