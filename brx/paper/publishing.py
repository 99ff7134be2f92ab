"""The paper's figures and tables by name: one that was asked for, or all whose runs are there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pandas as pd

from brx.errors import UserError
from brx.files import write_text
from brx.paper.figures import FIGURES, PaperFigure, draw_paper_figure
from brx.paper.scales import SCALES, Experiments, Scale
from brx.paper.standalone_figures import STANDALONE, StandaloneFigure
from brx.paper.tables import TABLES, PaperTable
from brx.runs.formats import format_table

Note = Callable[[str], None]
"""Told what was left out, and why."""


def figure_catalogue() -> list[PaperFigure | StandaloneFigure]:
    """Those that need no sweep, then those of a scale's runs."""
    return [*STANDALONE.values(), *FIGURES.values()]


def draw_figures(wanted: str, scale: str, runs: Path | None, out: Path | None, note: Note) -> Iterator[Path]:
    """Draw one figure, or of `all` those that have runs or measurements; yields their images.

    Args:
        wanted: a figure's name, its place in the paper (`Figure 5`), or `all`.
        scale: whose experiments.
        runs: their folder; None for the scale's.
        out: folder of the figures; None for figures/SCALE, and figures for those that are the same at several scales.
        note: told what is missing.

    Raises:
        UserError: there is no such figure, or the one that was asked for has no runs.
    """
    by_place = {figure.place: figure.name for figure in figure_catalogue() if figure.place}
    name = by_place.get(wanted, wanted)
    if name not in (*STANDALONE, *FIGURES, "all"):
        known = ", ".join(("curves", "all", "list", *STANDALONE, *FIGURES))
        raise UserError(f"FIGURE: unknown figure '{name}' (known: {known})")
    if name in FIGURES or name == "all":
        yield from _from_runs(name, Experiments.load(SCALES[scale], runs), out or Path("figures") / scale, note)
    if name in STANDALONE or name == "all":
        yield from _standalone(name, SCALES[scale], out, note)


def make_tables(wanted: str, scale: str, runs: Path | None, note: Note) -> Iterator[tuple[PaperTable, pd.DataFrame]]:
    """Make one table, or of `all` those that have rows; yields each with its texts.

    Args:
        wanted: a table's name, or `all`.
        scale: whose experiments.
        runs: their folder; None for the scale's.
        note: told what is missing.

    Raises:
        UserError: there is no such table, or the one that was asked for has no rows.
    """
    if wanted not in (*TABLES, "all"):
        raise UserError(f"TABLE: unknown table '{wanted}' (known: all, list, {', '.join(TABLES)})")
    experiments = Experiments.load(SCALES[scale], runs)
    for line in experiments.notes:
        note(line)
    for table in TABLES.values() if wanted == "all" else [TABLES[wanted]]:
        asked = experiments.fresh()
        try:
            texts = table.make(asked)
        except UserError as error:
            if wanted != "all":
                raise
            note(f"table {table.name}: {error}")
            continue
        if texts.empty and wanted != "all":
            raise UserError(
                f"table {table.name}: none of its runs are in {asked.folder}; make them with {asked.what_to_run}"
            )
        _note_missing(f"table {table.name}", asked, note)
        if not texts.empty:
            yield table, texts


def write_table(table: PaperTable, texts: pd.DataFrame, folder: Path) -> Path:
    """Write a table as Markdown and CSV; returns the former."""
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / f"{table.name}.csv", format_table(texts, "csv") + "\n")
    path = folder / f"{table.name}.md"
    parts = (f"# {table.title}", table.legend, format_table(texts, "markdown"))
    write_text(path, "\n\n".join(filter(None, parts)) + "\n")
    return path


def _from_runs(wanted: str, experiments: Experiments, folder: Path, note: Note) -> Iterator[Path]:
    for line in experiments.notes:
        note(line)
    for name in FIGURES if wanted == "all" else [wanted]:
        try:
            written, asked = draw_paper_figure(name, experiments, folder)
        except UserError as error:
            if wanted != "all":
                raise
            note(str(error))
            continue
        yield written[0]
        _note_missing(f"figure {name}", asked, note)


def _standalone(wanted: str, scale: Scale, out: Path | None, note: Note) -> Iterator[Path]:
    for name in STANDALONE if wanted == "all" else [wanted]:
        figure = STANDALONE[name]
        folder = out or (Path("figures") / scale.name if figure.is_measured else Path("figures"))
        try:
            yield figure.draw(folder / name, scale)[0]
        except UserError as error:
            if wanted != "all":
                raise
            note(f"figure {name}: {error}")


def _note_missing(what: str, asked: Experiments, note: Note) -> None:
    if asked.missing:
        note(f"{what}: {len(asked.missing)} experiments not there: {asked.what_to_run}")
