"""One table, every way to write it: for the terminal, as Markdown, CSV, JSON or LaTeX.

A table is a frame of texts whose columns are its headings.
"""

import re
from typing import Literal

import pandas as pd
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

Format = Literal["table", "markdown", "csv", "json", "latex"]
DROPPED_FIRST = (
    "at delays",
    "its lr",
    "lr",
    "reference P",
    "its iterations",
    "iterations/s",
    "model",
    "logits",
    "update",
    "probe",
    "parameters",
    "gradients",
    "weights",
)
"""Columns that a terminal's table does without, in this order, where it is too narrow; then those
furthest right."""


def format_table(table: pd.DataFrame, form: Format) -> str:
    """Write a table of texts; `json` is a list of objects."""
    match form:
        case "json":
            return str(table.to_json(orient="records", indent=2, force_ascii=False))
        case "markdown":
            lines = [list(table.columns), ["---"] * len(table.columns), *table.to_numpy().tolist()]
            return "\n".join(
                "| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |"
                for line in lines
            )
        case "csv":
            return str(table.to_csv(index=False, lineterminator="\n")).rstrip("\n")
        case "latex":
            style = table.style.hide(axis="index").format(escape="latex")
            return str(
                style.format_index(escape="latex", axis="columns").to_latex(hrules=True)
            ).rstrip("\n")
        case "table":
            return terminal_text(table, Console().width)


def terminal_text(table: pd.DataFrame, width: int) -> str:
    """The table in at most `width` characters: its words wrapped, else upright (a column per row of
    it), else without some columns, by rank, which are named below."""
    shown = table
    upright = table.set_index(table.columns[0]).T  # a row may be called as the first column is
    upright = upright.reset_index(names=table.columns[0], allow_duplicates=True)
    if _width(table) > width and len(table) < len(table.columns) and _width(upright) <= width:
        shown = upright
    while _width(shown) > width and len(shown.columns) > 2:
        names = list(shown.columns[1:])
        shown = shown.drop(
            columns=next((name for name in DROPPED_FIRST if name in names), names[-1])
        )
    console = Console(width=width)
    with console.capture() as captured:
        console.print(_drawn(shown, width), highlight=False)
    missing = (
        [] if shown is upright else [name for name in table.columns if name not in shown.columns]
    )
    note = f"\nToo narrow for: {', '.join(missing)} (a wider terminal, or COLUMNS=200, has them)."
    return captured.get().rstrip("\n") + (note if missing else "")


def _width(table: pd.DataFrame) -> int:
    """The least width in which no word is broken: of a column, its longest word, two spaces and a
    line."""
    return 1 + sum(width + 3 for width in _longest_words(table))


def _longest_words(table: pd.DataFrame) -> list[int]:
    columns = [[heading, *table.iloc[:, place]] for place, heading in enumerate(table.columns)]
    return [max(map(cell_len, " ".join(column).split()), default=0) for column in columns]


def _drawn(table: pd.DataFrame, width: int) -> Table:
    """The table in at most `width` characters, which are at least `_width`; rich would rather break
    words than wrap."""
    places, widths = range(len(table.columns)), _longest_words(table)
    wanted = [max(map(cell_len, [table.columns[place], *table.iloc[:, place]])) for place in places]
    for _ in range(width - _width(table)):  # each further character goes where most is wrapped
        neediest = max(places, key=lambda place: wanted[place] / max(1, widths[place]))
        widths[neediest] += wanted[neediest] > widths[neediest]
    drawn = Table()
    for place, column in enumerate(table.columns):
        is_number = len(table) > 0 and all(map(_is_number, table.iloc[:, place]))
        drawn.add_column(column, justify="right" if is_number else "left", width=widths[place])
    for row in table.to_numpy().tolist():
        drawn.add_row(*map(Text, row))
    return drawn


def _is_number(cell: str) -> bool:
    """A number with its unit or interval; not words that begin with one."""
    return bool(re.match(r"[<>~ ]*-?[.\d]", cell)) and not re.search(
        "[a-z]{2}", re.sub(r"\(.*?\)", "", cell)
    )
