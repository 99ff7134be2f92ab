"""The tables of a report: the paper's, and two of every experiment that has runs."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from brx.analysis.paper_tables import TABLES
from brx.analysis.results import Group
from brx.analysis.scales import Experiments
from brx.analysis.slowdown import slowdowns, slowest_final, without_reference
from brx.analysis.tables import Rows, slowdown_rows
from brx.config.schema import RunConfig
from brx.errors import UserError


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
    groups = [group for group in experiments.results.groups if all(run.is_finished for run in group.runs)]
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


def model_text(config: RunConfig) -> str:
    """A model in a few words."""
    model = config.model
    mixture = f", {model.moe.experts} experts" if model.moe else ""
    return f"{model.blocks} blocks, width {model.width}{mixture}"


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
    comparable: dict[str, list[Group]] = defaultdict(list)
    for group in groups:
        comparable[_comparison_key(group)].append(group)
    columns: list[str] = []
    rows: list[list[str]] = []
    for alike in comparable.values():
        alone = without_reference(alike, 1)
        compared = [group for group in alike if group not in alone]
        if not compared:
            continue
        target = slowest_final(compared)
        columns, found = slowdown_rows(slowdowns(compared, target))
        rows += [[model_text(alike[0].config), *row, f"{target:.3f}"] for row in found]
    return ["model", *columns, "target loss"], rows


def _comparison_key(group: Group) -> str:
    training, fingerprint = group.config.training, group.runs[0].summary.get("data_fingerprint")
    return json.dumps([group.config.model.model_dump(), training.iterations, training.batch_size, fingerprint])


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
