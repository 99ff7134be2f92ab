"""The paper's figures and tables by name: one that was asked for, or all whose runs are there.

What is wanted is a name, a place in the paper (`Figure 5`), or `all`, from a folder of runs (None: the scale's). What
cannot be made, or not all of it, is noted; where it is all that was wanted, it is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TypeVar

import pandas as pd

from brx.errors import UserError, did_you_mean
from brx.files import write_text
from brx.paper.figures import FIGURES, PaperFigure, draw_paper_figure
from brx.paper.scales import SCALES, Experiments
from brx.paper.tables import TABLES, PaperTable
from brx.runs.formats import format_table

Note = Callable[[str], None]
Entry = TypeVar("Entry", PaperFigure, PaperTable)
Made = TypeVar("Made")


def draw_figures(wanted: str, scale: str, runs: Path | None, out: Path | None, note: Note) -> Iterator[Path]:
    """Draw figures that have runs or measurements; yields their images.

    `out` is their folder; by default figures/SCALE, and figures for those that are the same at several scales.

    Raises:
        UserError: there is no such figure, or the one that was asked for has no runs.
    """
    chosen = _entries(wanted, FIGURES, "figure", "curves, staleness, profiles")
    experiments = _load(scale, runs, note) if any(figure.draw_to is None for figure in chosen) else None

    def draw(figure: PaperFigure) -> Path:
        is_of_scale = figure.draw_to is None or figure.is_measured
        folder = out or (Path("figures") / scale if is_of_scale else Path("figures"))
        if figure.draw_to is not None:
            return figure.draw_to(folder / figure.name, SCALES[scale])[0]
        assert experiments is not None
        written, asked = draw_paper_figure(figure, experiments, folder)
        _note_missing(f"figure {figure.name}", asked, note)
        return written[0]

    return (path for _, path in _made(chosen, draw, "figure", note))


def make_tables(wanted: str, scale: str, runs: Path | None, note: Note) -> Iterator[tuple[PaperTable, pd.DataFrame]]:
    """Make tables that have rows; yields each with its texts.

    Raises:
        UserError: there is no such table, or the one that was asked for has no rows.
    """
    chosen = _entries(wanted, TABLES, "table")
    experiments = _load(scale, runs, note)

    def make(table: PaperTable) -> pd.DataFrame:
        asked = experiments.fresh()
        texts = table.make(asked)
        if texts.empty:
            raise UserError(f"none of its runs are in {asked.folder}; make them with {asked.what_to_run}")
        _note_missing(f"table {table.name}", asked, note)
        return texts

    return _made(chosen, make, "table", note)


def write_table(table: PaperTable, texts: pd.DataFrame, folder: Path) -> Path:
    """Write a table as Markdown and CSV; returns the former."""
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / f"{table.name}.csv", format_table(texts, "csv") + "\n")
    path = folder / f"{table.name}.md"
    parts = (f"# {table.title}", table.legend, format_table(texts, "markdown"))
    write_text(path, "\n\n".join(filter(None, parts)) + "\n")
    return path


def _entries(wanted: str, catalogue: Mapping[str, Entry], kind: str, others: str = "") -> list[Entry]:
    """All entries of a catalogue, or that of a name or of a place in the paper."""
    if wanted == "all":
        return list(catalogue.values())
    by_place = {entry.place.lower(): entry for entry in catalogue.values() if entry.place}
    entry = catalogue.get(wanted) or by_place.get(wanted.lower())
    if entry is None:
        known: list[str] = [*filter(None, others.split(", ")), "all", "list", *catalogue]
        places: list[str] = [entry.place for entry in catalogue.values() if entry.place]
        hint = did_you_mean(wanted, [*known, *places])
        raise UserError(f"{kind.upper()}: unknown {kind} '{wanted}'{hint} (known: {', '.join(known)})")
    return [entry]


def _made(chosen: list[Entry], make: Callable[[Entry], Made], kind: str, note: Note) -> Iterator[tuple[Entry, Made]]:
    for entry in chosen:
        try:
            yield entry, make(entry)
        except UserError as error:
            line = f"{kind} {entry.name}: {error}"
            if len(chosen) == 1:
                raise UserError(line) from None
            note(line)


def _load(scale: str, runs: Path | None, note: Note) -> Experiments:
    experiments = Experiments.load(SCALES[scale], runs)
    for line in experiments.notes:
        note(line)
    return experiments


def _note_missing(what: str, asked: Experiments, note: Note) -> None:
    if asked.missing:
        note(f"{what}: {len(asked.missing)} experiments not there: {asked.what_to_run}")
