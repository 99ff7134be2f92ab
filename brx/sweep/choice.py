"""The choice of a learning rate as the paper makes it: per combination of everything else, the best
of the grid."""

import math
from collections.abc import Sequence
from typing import Any

import pandas as pd

from brx.runs.experiments import score_values
from brx.runs.folder import RunFolder, settings_key
from brx.runs.frames import SEED
from brx.sweep.spec import Cell, Choice, State, Sweep, cell_name, state_of, value_at

SCORE = "final_val_loss"


def choose(cells: Sequence[Cell], rule: Choice) -> pd.DataFrame:
    """Score the values of the chosen key among cells that differ in nothing else but the seed:
    `score_values`."""
    rows = []
    names: dict[str, str] = {}
    for cell in cells:
        group = _group(cell, rule)
        seed, value = cell.config.training.seed, _value(cell, rule)
        rows.append({"group": group, rule.over: value, SEED: seed, "score": score(cell)})
        others = {key: value for key, value in cell.varied.items() if key not in (rule.over, SEED)}
        names.setdefault(group, cell_name(others))
    scored = score_values(pd.DataFrame(rows), "group", rule.over)
    return scored.assign(cells=scored["group"].map(names))


def tried_cells(sweep: Sweep) -> list[Cell]:
    """The cells of the grid, and those beyond it that `choose.further` asks for after the ones that
    are done.

    Where a group's best value is the lowest or highest tried, the next of `further` in that
    direction is tried, too."""
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
    waiting = {
        _group(cell, rule) for cell in cells if state_of(cell) not in (State.DONE, State.FAILED)
    }
    tried = (
        scored.groupby("group")[rule.over]
        .agg(["min", "max"])
        .loc[list(set(scored["group"][is_open]) - waiting)]
    )
    variations = []
    for cell in chosen_cells(cells, scored, rule):
        if _group(cell, rule) in tried.index:
            low, high = tried.loc[_group(cell, rule)]
            higher = (
                [value for value in rule.further if value > high]
                if _value(cell, rule) == high
                else []
            )
            lower = (
                [value for value in rule.further if value < low]
                if _value(cell, rule) == low
                else []
            )
            nearest = [*sorted(higher)[:1], *sorted(lower)[-1:]]
            variations += [(cell, {rule.over: value}) for value in nearest]
    tried_folders = {
        cell.folder for cell in cells
    }  # one that failed decides nothing, and is not tried twice
    return [cell for cell in sweep.varied_further(variations) if cell.folder not in tried_folders]


def chosen_cells(cells: Sequence[Cell], scored: pd.DataFrame, rule: Choice) -> list[Cell]:
    """The cells with the best value of their group, from `choose`; none of a group of which all
    cells have failed."""
    best = scored[scored["is_best"]].set_index("group")[rule.over]
    best = best[
        best.index.isin(
            {_group(cell, rule) for cell in cells if state_of(cell) is not State.FAILED}
        )
    ]
    return [cell for cell in cells if best.get(_group(cell, rule)) == _value(cell, rule)]


def _group(cell: Cell, rule: Choice) -> str:
    return settings_key(cell.config, without=(rule.over, SEED))


def _value(cell: Cell, rule: Choice) -> Any:
    return value_at(cell.config.model_dump(mode="json"), rule.over)


def score(cell: Cell) -> float:
    """Infinite where it diverged or is still to run; NaN, which decides nothing, where it failed
    otherwise."""
    summary = RunFolder(cell.folder).read_summary()
    if summary.get("status") != "diverged" and state_of(cell) is State.FAILED:
        return math.nan
    value = summary.get(SCORE) if summary.get("status") == "finished" else None
    return value if isinstance(value, float) and math.isfinite(value) else math.inf


def choices_and_repetitions(
    sweep: Sweep, tried: Sequence[Cell]
) -> tuple[pd.DataFrame | None, list[Cell]]:
    """What `choose` says of the cells tried so far, and the repetitions that the choices ask
    for."""
    if sweep.spec.choose is None:
        return None, sweep.repetitions(tried)
    choices = choose(tried, sweep.spec.choose)
    return choices, sweep.repetitions(chosen_cells(tried, choices, sweep.spec.choose))


def choice_table(choices: pd.DataFrame, rule: Choice) -> pd.DataFrame:
    """A row per value that was tried, as texts."""
    is_finite = choices["score"].map(math.isfinite)
    is_chosen = choices["is_best"] & is_finite
    columns = {
        "cells": choices["cells"],
        rule.over: choices[rule.over].map("{:g}".format),
        SCORE: choices["score"].map("{:.4f}".format).where(is_finite, "failed"),
        "chosen": is_chosen.map({True: "yes", False: ""}),
        "remark": (is_chosen & choices["at_edge"]).map(
            {True: "at the edge: widen the grid", False: ""}
        ),
    }
    return pd.DataFrame(columns)
