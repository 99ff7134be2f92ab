"""Chooses the best of the learning rates tried (and maybe of a second setting) for each combination
of all other settings."""

import itertools
import math
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import pandas as pd

from brx.runs.experiments import score_values
from brx.runs.folder import RunFolder
from brx.runs.trajectory import SEED, settings_key
from brx.sweep.cell import Cell, cell_name
from brx.sweep.conditions import value_at
from brx.sweep.spec import Choice, Sweep
from brx.sweep.state import State, state_of

SCORE = "final_val_loss"  # the key of summary.json that decides

SECOND = "second"  # the column with the values of a second key
NO_SECOND = math.nan  # its entry for a cell without a second key


def choose(cells: Sequence[Cell], rule: Choice) -> pd.DataFrame:
    """Score the values of the keys to choose, and mark the best ones.

    The cells of a group differ only in these keys and in the seed. One combination of values is
    chosen for each group.

    Args:
        cells: cells that are done, failed or still to run.
        rule: the keys to choose, `over` and maybe a second one.

    Returns:
        A row per group and combination of values, with the columns of `score_values` (`over`,
        `score`, `is_best`, `at_edge`) and:

        - `second`: the value of the second key; NaN if there is none.
        - `group`: the group; `cells`: its name.

        `is_best` is true for one combination of each group. `at_edge` compares the values of `over`
        with one second value.
    """
    rows = []
    groups: dict[str, str] = {}
    second_values: dict[str, float] = {}
    names: dict[str, str] = {}
    for cell in cells:
        group = _group(cell, rule)
        second = _second_value(cell, rule)
        # Values of `over` are compared among cells with the same second value.
        alike = f"{group} {second}"
        groups[alike] = group
        second_values[alike] = second
        names.setdefault(alike, _name_of_group(cell, rule))
        row = {
            "alike": alike,
            rule.over: _value(cell, rule),
            SEED: cell.config.training.seed,
            "score": score(cell),
        }
        rows.append(row)
    scored = score_values(pd.DataFrame(rows), "alike", rule.over)
    scored = scored.assign(
        group=scored["alike"].map(groups),
        cells=scored["alike"].map(names),
        **{SECOND: scored["alike"].map(second_values)},
    )
    best_of_alike = scored[scored["is_best"]]
    best = best_of_alike.loc[best_of_alike.groupby("group")["score"].idxmin()]
    return scored.assign(is_best=scored.index.isin(best.index))


def tried_cells(sweep: Sweep) -> list[Cell]:
    """The cells of the grid, and those beyond it (`choose.further`, `choose.second`) that follow
    from the results so far."""
    cells = list(sweep.cells)
    while more := _beyond(sweep, cells):
        cells += more
    return cells


def _beyond(sweep: Sweep, cells: Sequence[Cell]) -> list[Cell]:
    """The next cells to try beyond those tried so far; none for a group that still has cells to
    run."""
    rule = sweep.spec.choose
    if rule is None or not (rule.further or rule.second):
        return []
    unfinished = [cell for cell in cells if state_of(cell) not in (State.DONE, State.FAILED)]
    waiting = {_group(cell, rule) for cell in unfinished}
    scored = choose(cells, rule)
    known = {cell.trajectory_id for cell in cells}  # a cell that failed is not tried twice
    more: list[Cell] = []
    for group, best in _best_cells(cells, scored, rule).items():
        if group in waiting or not math.isfinite(_best_score(scored, group)):
            continue
        for neighbours in _neighbours(sweep, best, scored, rule):
            untried = [cell for cell in neighbours if cell.trajectory_id not in known]
            if untried:
                more += untried
                break
    return more


def _best_cells(cells: Sequence[Cell], scored: pd.DataFrame, rule: Choice) -> dict[str, list[Cell]]:
    """The cells of the best combination of each group, one per seed."""
    by_group: dict[str, list[Cell]] = {}
    for cell in chosen_cells(cells, scored, rule):
        by_group.setdefault(_group(cell, rule), []).append(cell)
    return by_group


def _best_score(scored: pd.DataFrame, group: str) -> float:
    """The score of the best combination of a group, over its seeds."""
    is_in_group = scored["group"] == group
    return float(scored.loc[is_in_group & scored["is_best"], "score"].iloc[0])


def _neighbours(
    sweep: Sweep, best: Sequence[Cell], scored: pd.DataFrame, rule: Choice
) -> Iterator[list[Cell]]:
    """The neighbours of a group's best combination, each on all seeds of the best: values are
    compared on the seeds that all of them have.

    Yields lists in the order in which they are to be tried: the next values of `over` on either
    side, if the best value is the highest or lowest tried; the other second values; the next second
    values, in the same way. Excluded values are skipped.

    Args:
        best: the cells of the best combination, one per seed.
        scored: the table that `choose` returns.
    """
    value = _value(best[0], rule)
    second_value = _second_value(best[0], rule)
    group_rows = scored[scored["group"] == _group(best[0], rule)]

    def with_values(key: str, values: Sequence[float]) -> list[Cell]:
        changes = [{key: changed} for changed in values]
        return sweep.varied_further(itertools.product(best, changes))

    def first_not_excluded(key: str, values: Sequence[float]) -> list[Cell]:
        for each in values:
            cells = with_values(key, [each])
            if cells:
                return cells
        return []

    def beyond(key: str, chosen: float, tried: pd.Series, known: Collection[float]) -> list[Cell]:
        higher, lower = _values_beyond(chosen, tried, known)
        return first_not_excluded(key, higher) + first_not_excluded(key, lower)

    has_second_value = _is_second(group_rows, second_value)
    tried = group_rows.loc[has_second_value, rule.over]
    known = {*rule.further, *group_rows[rule.over]}  # some only with other second values
    yield beyond(rule.over, value, tried, known)
    second = rule.second_of(best[0].config)
    if second is None:
        return
    others = sorted({*second.values, *group_rows[SECOND]} - {second_value})
    yield with_values(second.over, others)
    yield beyond(second.over, second_value, group_rows[SECOND], second.further)


def _values_beyond(
    best: float, tried: pd.Series, known: Collection[float]
) -> tuple[list[float], list[float]]:
    """The known values above the best one if it is the highest tried, and those below it if it is
    the lowest; the nearest ones first."""
    higher = sorted(value for value in known if value > best) if best == tried.max() else []
    lower = sorted(value for value in known if value < best) if best == tried.min() else []
    return higher, lower[::-1]


def chosen_cells(cells: Sequence[Cell], scored: pd.DataFrame, rule: Choice) -> list[Cell]:
    """The cells with the best combination of their group, one per seed and group.

    There are none for a group whose cells have all failed.

    Args:
        cells: the cells that were scored.
        scored: the table that `choose` returns.
        rule: the keys that were chosen.
    """
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
    """Whether two second values are equal; NaN, for none, equals NaN."""
    return one == other or (math.isnan(one) and math.isnan(other))


def _is_second(scored: pd.DataFrame, value: float) -> pd.Series:
    """Which rows have this second value."""
    return scored[SECOND].isna() if math.isnan(value) else scored[SECOND] == value


def _group(cell: Cell, rule: Choice) -> str:
    """A text that is equal for the cells of a group, among which one combination is chosen."""
    second = rule.second_of(cell.config)
    chosen = (rule.over, SEED) if second is None else (rule.over, SEED, second.over)
    return settings_key(cell.config, without=chosen)


def _name_of_group(cell: Cell, rule: Choice) -> str:
    """The settings that the cell varies, in one word, without the seed and the chosen keys."""
    second = rule.second_of(cell.config)
    chosen = (rule.over, SEED, None if second is None else second.over)
    return cell_name({key: value for key, value in cell.varied.items() if key not in chosen})


def _value(cell: Cell, rule: Choice) -> Any:
    return value_at(cell.config.model_dump(mode="json"), rule.over)


def _second_value(cell: Cell, rule: Choice) -> float:
    second = rule.second_of(cell.config)
    if second is None:
        return NO_SECOND
    return float(value_at(cell.config.model_dump(mode="json"), second.over))


def score(cell: Cell) -> float:
    """The final validation loss of a cell, in nats.

    Infinite if the cell diverged or is still to run. NaN, which decides nothing, if it failed for
    another reason.
    """
    summary = RunFolder(cell.folder).read_summary()
    status = summary.get("status")
    if status != "diverged" and state_of(cell) is State.FAILED:
        return math.nan
    value = summary.get(SCORE) if status == "finished" else None
    return value if isinstance(value, float) and math.isfinite(value) else math.inf


def choices_and_repetitions(
    sweep: Sweep, tried: Sequence[Cell]
) -> tuple[pd.DataFrame | None, list[Cell]]:
    """Choose among the cells tried so far.

    Returns:
        The rows of `choose`, or None if the sweep chooses nothing; and the cells that repeat what
        was chosen.
    """
    if sweep.spec.choose is None:
        return None, sweep.repetitions(tried)
    choices = choose(tried, sweep.spec.choose)
    return choices, sweep.repetitions(chosen_cells(tried, choices, sweep.spec.choose))


def choice_table(choices: pd.DataFrame, rule: Choice) -> pd.DataFrame:
    """A row per combination that was tried, as texts.

    Args:
        choices: the table that `choose` returns.
        rule: the keys that were chosen.
    """
    is_finite = choices["score"].map(math.isfinite)
    is_chosen = choices["is_best"] & is_finite
    is_at_edge = is_chosen & choices["at_edge"]
    columns = {
        "cells": choices["cells"],
        rule.over: choices[rule.over].map("{:g}".format),
        SCORE: choices["score"].map("{:.4f}".format).where(is_finite, "failed"),
        "chosen": is_chosen.map({True: "yes", False: ""}),
        "remark": is_at_edge.map({True: "at the edge: widen the grid", False: ""}),
    }
    table = pd.DataFrame(columns)
    if rule.second:
        second_at_edge = is_chosen & _is_second_at_edge(choices)
        table.loc[second_at_edge & ~is_at_edge, "remark"] = "second value at the edge"
        table.loc[second_at_edge & is_at_edge, "remark"] = "both at the edge: widen the grid"
        shown = choices[SECOND].map("{:g}".format).where(choices[SECOND].notna(), "")
        table.insert(2, "second value", shown)
    return table


def _is_second_at_edge(choices: pd.DataFrame) -> pd.Series:
    """Which rows have the lowest or highest of several second values of their group."""
    of_group = choices.groupby("group")[SECOND]
    is_lowest = choices[SECOND] == of_group.transform("min")
    is_highest = choices[SECOND] == of_group.transform("max")
    return (is_lowest | is_highest) & (of_group.transform("nunique") > 1)
