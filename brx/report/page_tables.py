"""The tables of a report: the paper's, and two of every experiment that has runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from brx.errors import UserError
from brx.paper.scales import Experiments
from brx.paper.tables import TABLES
from brx.runs.comparison import compare
from brx.runs.frames import DEPTH
from brx.runs.leaderboard import leaderboard_table
from brx.runs.tables import rate_table, slowdown_table
from brx.sweep.compare import DELAYS, read_board

KEPT_COMPARISON = Path("results") / "compare"
"""Runs that `brx compare --all-builtin` made, as `brx export` keeps them."""


@dataclass(frozen=True)
class PageTable:
    """A table on the page.

    Attributes:
        name: its anchor.
        title: what it shows.
        texts: its cells, by heading.
        missing: experiments that were not there.
    """

    name: str
    title: str
    texts: pd.DataFrame
    missing: Sequence[str]


def page_tables(experiments: Experiments) -> list[PageTable]:
    """All tables that have rows."""
    chosen = experiments.chosen
    tables = [_paper_table(name, experiments) for name in TABLES]
    tables += [
        PageTable(
            "all-slowdowns",
            "Slowdown of every experiment against P = 1 (target: the loss that all of the same model reach)",
            slowdown_table(compare(chosen).slowdowns),
            missing=(),
        ),
        PageTable(
            "all-learning-rates",
            "Learning rates of every experiment",
            rate_table(experiments.runs, chosen.sort_values(["architecture", "variant", DEPTH], kind="stable")),
            missing=(),
        ),
    ]
    if KEPT_COMPARISON.is_dir():
        board = read_board([KEPT_COMPARISON])
        title = f"How robust methods are against delay (brx compare): {board.runs}"
        tables.append(PageTable("leaderboard", title, leaderboard_table(board.rows, list(DELAYS)), missing=()))
    return [table for table in tables if len(table.texts)]


def _paper_table(name: str, experiments: Experiments) -> PageTable:
    asked = experiments.fresh()
    table = TABLES[name]
    try:
        texts = table.make(asked)
    except UserError as error:
        return PageTable(name, table.title, pd.DataFrame(), [str(error)])
    return PageTable(name, table.title, texts, asked.missing)
