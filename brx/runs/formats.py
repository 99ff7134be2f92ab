"""One table, every way to write it: for the terminal, as Markdown, CSV, JSON or LaTeX.

A table is a frame of texts whose columns are its headings.
"""

from __future__ import annotations

from typing import Literal

import pandas as pd
from rich.console import Console
from rich.table import Table

Format = Literal["table", "markdown", "csv", "json", "latex"]
MIN_WIDTH = 142
"""Characters in which a table of the terminal is set at least: the leaderboard's rows just fit."""


def format_table(table: pd.DataFrame, form: Format) -> str:
    """Write a table of texts; `json` is a list of objects."""
    match form:
        case "json":
            return str(table.to_json(orient="records", indent=2, force_ascii=False))
        case "markdown":
            lines = [list(table.columns), ["---"] * len(table.columns), *table.to_numpy().tolist()]
            return "\n".join(f"| {' | '.join(line)} |" for line in lines)
        case "csv":
            return str(table.to_csv(index=False, lineterminator="\n")).rstrip("\n")
        case "latex":
            style = table.style.hide(axis="index").format(escape="latex")
            return str(style.format_index(escape="latex", axis="columns").to_latex(hrules=True)).rstrip("\n")
        case "table":
            console = Console(width=max(MIN_WIDTH, Console().width))
            with console.capture() as captured:
                console.print(terminal_table(table), highlight=False)
            return captured.get().rstrip("\n")


def terminal_table(table: pd.DataFrame, title: str | None = None) -> Table:
    """The table as `rich` draws it on a terminal."""
    drawn = Table(title=title, title_justify="left")
    for column in table.columns:
        longest_word = max(map(len, column.split()), default=0)
        drawn.add_column(column, no_wrap=column in ("model", "method", "lr"), min_width=longest_word)
    for row in table.to_numpy().tolist():
        drawn.add_row(*row)
    return drawn
