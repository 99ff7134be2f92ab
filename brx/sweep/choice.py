"""The choice of a learning rate as the paper makes it: per combination of everything else, the best of the grid."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from brx.runs.best_value import best_value, is_at_edge
from brx.runs.folder import RunFolder, settings_key
from brx.sweep.spec import Cell, Choice, cell_name, value_at

SEED = "training.seed"


@dataclass(frozen=True)
class Chosen:
    """One group of cells that differ only in the chosen key and the seed.

    Attributes:
        group: the other varied values.
        scores: by value of the key, what it is judged by, averaged over seeds; infinite where a run diverged.
        best: the value with the lowest score.
        at_edge: whether a wider grid might do better.
        cells: those with the best value.
    """

    group: str
    scores: dict[float, float]
    best: float
    at_edge: bool
    cells: list[Cell]


def choose(cells: Sequence[Cell], rule: Choice) -> list[Chosen]:
    """Apply the rule to cells that are done or have failed."""
    groups: dict[str, list[Cell]] = defaultdict(list)
    for cell in cells:
        groups[settings_key(cell.config, without=(rule.over, SEED))].append(cell)
    return [_choose_in(group, rule) for group in groups.values()]


def _choose_in(group: list[Cell], rule: Choice) -> Chosen:
    by_value: dict[float, list[Cell]] = defaultdict(list)
    for cell in group:
        by_value[value_at(cell.config.model_dump(mode="json"), rule.over)].append(cell)
    losses = {
        value: {cell.config.training.seed: score(cell, rule.by) for cell in alike} for value, alike in by_value.items()
    }
    best, scores = best_value(losses)
    varied = {key: value for key, value in group[0].varied.items() if key not in (rule.over, SEED)}
    return Chosen(cell_name(varied), scores, best, is_at_edge(best, scores), by_value[best])


def score(cell: Cell, key: str) -> float:
    """A finished cell's value in its summary; infinite for one that failed, as it does when the loss diverges."""
    summary = RunFolder(cell.folder).read_summary()
    value = summary.get(key) if summary.get("status") == "finished" else None
    return value if isinstance(value, float) and math.isfinite(value) else math.inf
