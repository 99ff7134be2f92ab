"""One table, four ways to write it: for the terminal, as Markdown, CSV, or JSON."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from typing import Literal

from rich.console import Console
from rich.table import Table

Format = Literal["table", "markdown", "csv", "json"]
FORMATS: tuple[Format, ...] = ("table", "markdown", "csv", "json")


def format_table(columns: Sequence[str], rows: Sequence[Sequence[str]], form: Format) -> str:
    """Write a table of texts.

    Args:
        columns: their headings.
        rows: of as many cells.
        form: `table` (for the terminal), `markdown`, `csv` or `json` (a list of objects).
    """
    if form == "json":
        return json.dumps([dict(zip(columns, row, strict=True)) for row in rows], indent=2)
    if form == "markdown":
        lines = [list(columns), ["---"] * len(columns), *rows]
        return "\n".join(f"| {' | '.join(line)} |" for line in lines)
    if form == "csv":
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows([columns, *rows])
        return text.getvalue().rstrip("\n")
    table = Table()
    for column in columns:
        table.add_column(column, no_wrap=column in ("model", "method"))
    for row in rows:
        table.add_row(*row)
    console = Console(width=max(120, Console().width))
    with console.capture() as captured:
        console.print(table, highlight=False)
    return captured.get().rstrip("\n")
