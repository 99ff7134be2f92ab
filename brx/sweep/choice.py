"""The choice of a learning rate as the paper makes it: per combination of everything else, the best of the grid."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pandas as pd

from brx.runs.experiments import score_values
from brx.runs.folder import RunFolder, settings_key
from brx.runs.frames import SEED
from brx.sweep.spec import Cell, Choice, cell_name, value_at


def choose(cells: Sequence[Cell], rule: Choice) -> pd.DataFrame:
    """Apply the rule to cells that are done or have failed.

    Returns:
        A row per group of cells that differ only in the chosen key and the seed, and value of that key, as
        `score_values` gives them; `cells` names the group by what varies beside the two.
    """
    rows = [
        {
            "group": settings_key(cell.config, without=(rule.over, SEED)),
            rule.over: value_at(cell.config.model_dump(mode="json"), rule.over),
            SEED: cell.config.training.seed,
            "score": score(cell, rule.by),
        }
        for cell in cells
    ]
    scored = score_values(pd.DataFrame(rows), "group", rule.over)
    names = {row["group"]: _group_name(cell, rule) for row, cell in reversed(list(zip(rows, cells, strict=True)))}
    return scored.assign(cells=scored["group"].map(names))


def chosen_cells(cells: Sequence[Cell], scored: pd.DataFrame, rule: Choice) -> list[Cell]:
    """The cells with the best value of their group, from `choose`."""
    best = scored[scored["is_best"]].set_index("group")[rule.over]
    groups = (settings_key(cell.config, without=(rule.over, SEED)) for cell in cells)
    values = (value_at(cell.config.model_dump(mode="json"), rule.over) for cell in cells)
    return [cell for cell, group, value in zip(cells, groups, values, strict=True) if best[group] == value]


def _group_name(cell: Cell, rule: Choice) -> str:
    return cell_name({key: value for key, value in cell.varied.items() if key not in (rule.over, SEED)})


def score(cell: Cell, key: str) -> float:
    """A finished cell's value in its summary; infinite for one that failed, as it does when the loss diverges."""
    summary = RunFolder(cell.folder).read_summary()
    value = summary.get(key) if summary.get("status") == "finished" else None
    return value if isinstance(value, float) and math.isfinite(value) else math.inf
