"""The choice of a learning rate, and of a second setting: per combination of everything else, the
best of those tried."""

import math
from collections.abc import Sequence
from typing import Any

import pandas as pd

from brx.runs.experiments import score_values
from brx.runs.folder import RunFolder, settings_key
from brx.runs.frames import SEED
from brx.sweep.spec import Cell, Choice, State, Sweep, cell_name, state_of, value_at

SCORE = "final_val_loss"


SECOND = "second"  # the column of the values of a second key; NaN where a cell has none
NO_SECOND = math.nan


def choose(cells: Sequence[Cell], rule: Choice) -> pd.DataFrame:
    """Score the values of the chosen keys among cells that otherwise differ only in the seed.

    A row per value of `rule.over` and of the second key (column `second`): those of `score_values`,
    where `at_edge` is of the values of `rule.over` that were tried with one second value, and
    `is_best` is true for one combination of a group."""
    rows = []
    names: dict[str, str] = {}
    for cell in cells:
        group, second = _group(cell, rule), _second_value(cell, rule)
        # Values of `over` compare where the second value is the same.
        alike = f"{group} {second}"
        seed, value = cell.config.training.seed, _value(cell, rule)
        rows.append({"alike": alike, rule.over: value, SEED: seed, "score": score(cell)})
        names.setdefault(alike, _name_of_group(cell, rule))
    by_alike = {f"{_group(cell, rule)} {_second_value(cell, rule)}": cell for cell in cells}
    groups = {alike: _group(cell, rule) for alike, cell in by_alike.items()}
    seconds = {alike: _second_value(cell, rule) for alike, cell in by_alike.items()}
    scored = score_values(pd.DataFrame(rows), "alike", rule.over)
    scored = scored.assign(
        group=scored["alike"].map(groups),
        cells=scored["alike"].map(names),
        **{SECOND: scored["alike"].map(seconds)},
    )
    best_of_alike = scored[scored["is_best"]]
    best = best_of_alike.loc[best_of_alike.groupby("group")["score"].idxmin()]
    return scored.assign(is_best=scored.index.isin(best.index))


def tried_cells(sweep: Sweep) -> list[Cell]:
    """The cells of the grid, and those beyond it that the search asks for after the ones that are
    done: `choose.further` and `choose.second`."""
    cells = list(sweep.cells)
    while more := _beyond(sweep, cells):
        cells += more
    return cells


def _beyond(sweep: Sweep, cells: Sequence[Cell]) -> list[Cell]:
    """The next cells beyond those tried; none for a group that still has cells to run."""
    rule = sweep.spec.choose
    if rule is None or not (rule.further or rule.second):
        return []
    waiting = {
        _group(cell, rule) for cell in cells if state_of(cell) not in (State.DONE, State.FAILED)
    }
    scored = choose(cells, rule)
    tried_folders = {cell.folder for cell in cells}  # one that failed is not tried twice
    more: list[Cell] = []
    for best in _best_cells(cells, scored, rule):
        if _group(best, rule) in waiting or not math.isfinite(score(best)):
            continue
        for settings in _neighbours(best, scored, rule):
            beyond = [
                cell
                for cell in sweep.varied_further((best, each) for each in settings)
                if cell.folder not in tried_folders
            ]
            if beyond:
                more += beyond
                break
    return more


def _best_cells(cells: Sequence[Cell], scored: pd.DataFrame, rule: Choice) -> list[Cell]:
    """One cell of the best combination of each group."""
    by_group = {_group(cell, rule): cell for cell in chosen_cells(cells, scored, rule)}
    return list(by_group.values())


def _neighbours(best: Cell, scored: pd.DataFrame, rule: Choice) -> list[list[dict[str, Any]]]:
    """The neighbours of a group's best combination, in the order in which they are tried: the next
    values of `over` where the best is the lowest or highest, then the other second values."""
    value, second_value = _value(best, rule), _second_value(best, rule)
    of_group = scored[scored["group"] == _group(best, rule)]
    tried = of_group.loc[_is_second(of_group, second_value), rule.over]
    ladder = sorted({*rule.further, *of_group[rule.over]})
    nearest: list[dict[str, Any]] = []
    if value == tried.max():
        nearest += [{rule.over: step} for step in ladder if step > value][:1]
    if value == tried.min():
        nearest += [{rule.over: step} for step in ladder if step < value][-1:]
    second = rule.second_of(best.config)
    if second is None:
        return [nearest]
    others = sorted({*second.values, *of_group[SECOND]} - {second_value})
    return [nearest, [{second.over: other} for other in others]]


def chosen_cells(cells: Sequence[Cell], scored: pd.DataFrame, rule: Choice) -> list[Cell]:
    """The cells with the best combination of their group, from `choose`. A group whose cells have
    all failed has none."""
    best = scored[scored["is_best"]].set_index("group")
    not_failed = {_group(cell, rule) for cell in cells if state_of(cell) is not State.FAILED}
    chosen = []
    for cell in cells:
        group = _group(cell, rule)
        if group not in not_failed or group not in best.index:
            continue
        is_chosen = best.loc[group, rule.over] == _value(cell, rule)
        if is_chosen and _same(best.loc[group, SECOND], _second_value(cell, rule)):
            chosen.append(cell)
    return chosen


def _same(one: float, other: float) -> bool:
    return one == other or (math.isnan(one) and math.isnan(other))


def _is_second(scored: pd.DataFrame, value: float) -> pd.Series:
    return scored[SECOND].isna() if math.isnan(value) else scored[SECOND] == value


def _group(cell: Cell, rule: Choice) -> str:
    """Equal for the cells among which one combination is chosen."""
    second = rule.second_of(cell.config)
    chosen = (rule.over, SEED) if second is None else (rule.over, SEED, second.over)
    return settings_key(cell.config, without=chosen)


def _name_of_group(cell: Cell, rule: Choice) -> str:
    """The settings that the cell varies, without the keys that are chosen; and its second value."""
    chosen = (rule.over, SEED)
    return cell_name({key: value for key, value in cell.varied.items() if key not in chosen})


def _value(cell: Cell, rule: Choice) -> Any:
    return value_at(cell.config.model_dump(mode="json"), rule.over)


def _second_value(cell: Cell, rule: Choice) -> float:
    second = rule.second_of(cell.config)
    if second is None:
        return NO_SECOND
    return float(value_at(cell.config.model_dump(mode="json"), second.over))


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
    table = pd.DataFrame(columns)
    if rule.second:
        shown = choices[SECOND].map("{:g}".format).where(choices[SECOND].notna(), "")
        table.insert(2, "second value", shown)
    return table
