"""The tables of a report: the paper's, and two of every experiment that has runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from brx.errors import UserError
from brx.paper.scales import Experiments
from brx.paper.tables import TABLES
from brx.runs.comparison import compare
from brx.runs.experiments import Group
from brx.runs.tables import Rows, model_text, slowdown_rows


@dataclass(frozen=True)
class PageTable:
    """A table on the page.

    Attributes:
        name: its anchor.
        title: what it shows.
        columns: their headings.
        rows: of as many cells.
        missing: experiments that were not there.
    """

    name: str
    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    missing: Sequence[str]


def page_tables(experiments: Experiments) -> list[PageTable]:
    """All tables that have rows."""
    found = [_paper_table(name, experiments) for name in TABLES]
    groups = experiments.results.groups
    found += [
        PageTable(
            "all-slowdowns",
            "Slowdown of every experiment against P = 1 (target: the loss that all of the same model reach)",
            *_all_slowdowns(groups),
            missing=(),
        ),
        PageTable(
            "all-learning-rates",
            "Learning rates of every experiment",
            *_all_rates(groups),
            missing=(),
        ),
    ]
    return [table for table in found if table.rows]


def _paper_table(name: str, experiments: Experiments) -> PageTable:
    found = experiments.fresh()
    table = TABLES[name]
    try:
        columns, rows = table.rows(found)
    except UserError as error:
        return PageTable(name, table.title, [], [], [str(error)])
    return PageTable(name, table.title, columns, rows, found.missing)


def _all_slowdowns(groups: Sequence[Group]) -> Rows:
    """As `brx slowdown` has them, separately for each set of experiments whose losses compare."""
    return slowdown_rows(compare(groups).slowdowns)


def _all_rates(groups: Sequence[Group]) -> Rows:
    columns = ["model", "method", "P", "chosen", "at the edge", "final validation loss of each"]
    rows = [
        [
            model_text(group.config),
            group.variant,
            str(group.stages),
            f"{group.lr:g}",
            "yes" if group.is_at_edge else "",
            ", ".join(f"{rate:g}: {score:.3f}" for rate, score in group.scores.items()),
        ]
        for group in sorted(groups, key=lambda one: (model_text(one.config), one.variant, one.stages))
    ]
    return columns, rows
