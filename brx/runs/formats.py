"""Writes a table for the terminal, or as Markdown, CSV, JSON or LaTeX.

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
    "final_val_loss",
    # In a leaderboard, the longest delay decides.
    "with 8 stages",
    "slowdown, 8 stages",
    "ms",
    "model",
    "logits",
    "update",
    "probe",
    "parameters",
    "gradients",
    "weights",
)
"""The columns that are dropped first, in this order, if a terminal is too narrow. After them, the
rightmost column is dropped, again and again."""


def format_table(table: pd.DataFrame, form: Format) -> str:
    """Write a table of texts; `json` is a list of objects."""
    match form:
        case "json":
            return str(table.to_json(orient="records", indent=2, force_ascii=False))
        case "markdown":
            lines = [list(table.columns), ["---"] * len(table.columns), *table.to_numpy().tolist()]
            return "\n".join(map(_markdown_line, lines))
        case "csv":
            return str(table.to_csv(index=False, lineterminator="\n")).rstrip("\n")
        case "latex":
            style = table.style.hide(axis="index").format(escape="latex")
            return str(
                style.format_index(escape="latex", axis="columns").to_latex(hrules=True)
            ).rstrip("\n")
        case "table":
            return terminal_text(table, Console().width)


def _markdown_line(cells: list[str]) -> str:
    escaped = [cell.replace("|", "\\|") for cell in cells]
    return f"| {' | '.join(escaped)} |"


def terminal_text(table: pd.DataFrame, width: int) -> str:
    """Draw a table in at most `width` characters without breaking words.

    If wrapping the cells is not enough, the table is turned on its side; if that is still too wide,
    columns are left out (`DROPPED_FIRST`) and named below the table.
    """
    if _width(table) <= width:
        return _text_of(table, width)
    on_side = _on_side(table)
    if len(table) < len(table.columns) and _width(on_side) <= width:
        return _text_of(on_side, width)
    shown = table
    while _width(shown) > width and len(shown.columns) > 2:
        names = list(shown.columns[1:])  # the first column stays
        dropped = next((name for name in DROPPED_FIRST if name in names), names[-1])
        shown = shown.drop(columns=dropped)
    text = _text_of(shown, width)
    missing = [name for name in table.columns if name not in shown.columns]
    if missing:
        lacking = ", ".join(missing)
        text += f"\nToo narrow for: {lacking} (a wider terminal, or COLUMNS=200, has them)."
    return text


def _on_side(table: pd.DataFrame) -> pd.DataFrame:
    """The table with its rows as columns: the headings become the first column, and the first
    column becomes the headings."""
    heading = table.columns[0]
    turned = table.set_index(heading).T
    # A row of the table may have the heading of its first column as its name.
    return turned.reset_index(names=heading, allow_duplicates=True)


def _text_of(table: pd.DataFrame, width: int) -> str:
    # Headings may be names that a user chose, with brackets that rich would take for markup.
    console = Console(width=width, markup=False, emoji=False)
    with console.capture() as captured:
        console.print(_drawn(table, width), highlight=False)
    return captured.get().rstrip("\n")


def _width(table: pd.DataFrame) -> int:
    """The least width in which no word is broken.

    A column takes the width of its longest word, two spaces and a line; one more line closes the
    table.
    """
    return 1 + sum(width + 3 for width in _longest_words(table))


def _cells(table: pd.DataFrame) -> list[list[str]]:
    """Heading and cells of each column."""
    return [[heading, *table.iloc[:, index]] for index, heading in enumerate(table.columns)]


def _longest_words(table: pd.DataFrame) -> list[int]:
    """The width of the longest word of each column."""
    words = [" ".join(cells).split() for cells in _cells(table)]
    return [max(map(cell_len, column_words), default=0) for column_words in words]


def _drawn(table: pd.DataFrame, width: int) -> Table:
    """The table in at most `width` characters; `width` is at least `_width` of the table."""
    widths = _column_widths(table, width)
    drawn = Table()
    for index, column in enumerate(table.columns):
        is_number = len(table) > 0 and all(map(_is_number, table.iloc[:, index]))
        drawn.add_column(column, justify="right" if is_number else "left", width=widths[index])
    for row in table.to_numpy().tolist():
        drawn.add_row(*map(Text, row))
    return drawn


def _column_widths(table: pd.DataFrame, width: int) -> list[int]:
    """Widths in which no word is broken; rich itself would break words rather than wrap cells.

    Each character that is left over goes to the column whose longest cell wraps into most lines.
    """
    widths = _longest_words(table)
    longest_cells = [max(map(cell_len, cells)) for cells in _cells(table)]
    for _ in range(width - _width(table)):
        num_lines = [
            longest / max(1, own) for longest, own in zip(longest_cells, widths, strict=True)
        ]
        neediest = num_lines.index(max(num_lines))
        if widths[neediest] < longest_cells[neediest]:
            widths[neediest] += 1
    return widths


def _is_number(cell: str) -> bool:
    """Whether a cell is a number, maybe with a unit or an interval, and not a text that begins with
    one."""
    without_remarks = re.sub(r"\(.*?\)", "", cell)
    begins_with_number = re.match(r"[<>~ ]*-?[.\d]", cell) is not None
    has_word = re.search("[a-z]{2}", without_remarks) is not None
    return begins_with_number and not has_word
