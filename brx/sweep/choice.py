"""The choice of a learning rate as the paper makes it: per combination of everything else, the best of the grid."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pandas as pd

from brx.runs.experiments import score_values
from brx.runs.folder import RunFolder, settings_key
from brx.runs.frames import SEED
from brx.sweep.cell_state import State, state_of
from brx.sweep.spec import Cell, Choice, Sweep, cell_name, value_at


def choose(cells: Sequence[Cell], rule: Choice) -> pd.DataFrame:
    """A row per group of cells that differ only in the chosen key and the seed, and value of that key.

    As `score_values` gives them; `cells` names the group by what varies beside the two.
    """
    rows = [
        {
            "group": _group(cell, rule),
            rule.over: _value(cell, rule),
            SEED: cell.config.training.seed,
            "score": score(cell, rule.by),
        }
        for cell in cells
    ]
    scored = score_values(pd.DataFrame(rows), "group", rule.over)
    names: dict[str, str] = {}
    for row, cell in zip(rows, cells, strict=True):
        others = {key: value for key, value in cell.varied.items() if key not in (rule.over, SEED)}
        names.setdefault(row["group"], cell_name(others))
    return scored.assign(cells=scored["group"].map(names))


def tried_cells(sweep: Sweep) -> list[Cell]:
    """The cells of the grid, and those beyond it that `choose.further` asks for after the ones that are done.

    Where the best value of a group is the lowest or highest that was tried, the next one of `further` in that direction
    is tried, too: the same rule for every group, so that none is tuned more than another.
    """
    cells = list(sweep.cells)
    while more := _beyond(sweep, cells):
        cells += more
    return cells


def _beyond(sweep: Sweep, cells: Sequence[Cell]) -> list[Cell]:
    """The next cells beyond those tried; none for a group that still has cells to run."""
    rule = sweep.spec.choose
    if rule is None or not rule.further:
        return []
    scored = choose(cells, rule)
    is_open = scored["at_edge"] & scored["is_best"] & scored["score"].map(math.isfinite)
    waiting = {_group(cell, rule) for cell in cells if state_of(cell) not in (State.DONE, State.FAILED)}
    tried = scored.groupby("group")[rule.over].agg(["min", "max"]).loc[list(set(scored["group"][is_open]) - waiting)]
    variations = []
    for cell in chosen_cells(cells, scored, rule):
        if _group(cell, rule) in tried.index:
            low, high = tried.loc[_group(cell, rule)]
            higher = [value for value in rule.further if value > high] if _value(cell, rule) == high else []
            lower = [value for value in rule.further if value < low] if _value(cell, rule) == low else []
            nearest = [*sorted(higher)[:1], *sorted(lower)[-1:]]
            variations += [(cell, {rule.over: value}) for value in nearest]
    return sweep.varied_further(variations)


def chosen_cells(cells: Sequence[Cell], scored: pd.DataFrame, rule: Choice) -> list[Cell]:
    """The cells with the best value of their group, from `choose`; none of a group of which all cells have failed."""
    best = scored[scored["is_best"]].set_index("group")[rule.over]
    hopeful = {_group(cell, rule) for cell in cells if state_of(cell) is not State.FAILED}
    return [cell for cell in cells if (group := _group(cell, rule)) in hopeful and best[group] == _value(cell, rule)]


def _group(cell: Cell, rule: Choice) -> str:
    """What cells share that are compared with one another: all settings but the chosen one and the seed."""
    return settings_key(cell.config, without=(rule.over, SEED))


def _value(cell: Cell, rule: Choice) -> Any:
    return value_at(cell.config.model_dump(mode="json"), rule.over)


def score(cell: Cell, key: str) -> float:
    """A finished cell's value in its summary; infinite for one that failed, as it does when the loss diverges."""
    summary = RunFolder(cell.folder).read_summary()
    value = summary.get(key) if summary.get("status") == "finished" else None
    return value if isinstance(value, float) and math.isfinite(value) else math.inf
