"""What the user sees of a sweep: a live table on a terminal, one line per change otherwise; at the end the choices."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pandas as pd
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from brx.files import write_text
from brx.runs.formats import format_table
from brx.sweep.cell_state import State, iterations_done
from brx.sweep.spec import Cell, Choice, Sweep

REFRESH_S = 2.0
EDGE = "at the edge: widen the grid"


class SweepDisplay:
    """Follows the cells of a sweep, `num_jobs` of which run at a time, on stderr; to be closed."""

    def __init__(self, num_jobs: int) -> None:
        self._console = Console(stderr=True, highlight=False)
        self._live = Live(console=self._console, auto_refresh=False)
        self._num_jobs = num_jobs
        self._states: dict[str, State] = {}
        self._cells: dict[str, Cell] = {}
        self._started: dict[str, tuple[float, int]] = {}
        self._seconds_per_iteration: list[float] = []
        self._last_refresh = 0.0
        if self._console.is_terminal:
            self._live.start()

    def begin(self, cells: Sequence[Cell]) -> None:
        """Add cells that wait or are done."""
        for cell in cells:
            self._cells[cell.name] = cell
            self._states.setdefault(cell.name, State.WAITING)

    def changed(self, cell: Cell, state: State, reason: str = "") -> None:
        """Note a cell's state, and say so where there is no live table."""
        was_running = self._states.get(cell.name) is State.RUNNING
        self._states[cell.name] = state
        if state is State.RUNNING:
            self._started[cell.name] = (time.monotonic(), iterations_done(cell.folder))
        elif state is State.DONE and was_running:
            self._seconds_per_iteration += filter(None, [self._pace(cell)])
        if not self._console.is_terminal and (state is not State.DONE or was_running):
            counts = Counter(self._states.values())
            self._console.print(
                f"{state.value}: {cell.name}{f' ({reason})' if reason else ''}"
                f"  [{counts[State.DONE]} of {len(self._states)} done{self._left()}]",
                soft_wrap=True,
                markup=False,
            )

    def refresh(self) -> None:
        """Draw the table anew, every few seconds."""
        now = time.monotonic()
        if self._console.is_terminal and now - self._last_refresh > REFRESH_S:
            self._last_refresh = now
            self._live.update(self._render(), refresh=True)

    def _render(self) -> Group:
        counts = Counter(self._states.values())
        table = Table("running", "iteration", "of", "s / iteration", box=None)
        for name, state in self._states.items():
            if state is State.RUNNING:
                cell = self._cells[name]
                pace = self._pace(cell)
                last = cell.config.training.last_iteration
                table.add_row(name, str(iterations_done(cell.folder)), str(last), f"{pace:.3f}" if pace else "")
        line = ", ".join(f"{counts[state]} {state.value}" for state in State if counts[state])
        return Group(Text(line + self._left()), table)

    def _pace(self, cell: Cell) -> float | None:
        """Seconds per iteration since the cell was started here."""
        if cell.name not in self._started:
            return None
        since, first = self._started[cell.name]
        done = iterations_done(cell.folder) - first
        return (time.monotonic() - since) / done if done > 0 else None

    def _left(self) -> str:
        paces = list(self._seconds_per_iteration)
        remaining = 0
        for name, state in self._states.items():
            cell = self._cells[name]
            if state in (State.RUNNING, State.WAITING):
                remaining += cell.config.training.last_iteration - iterations_done(cell.folder)
            if state is State.RUNNING and (pace := self._pace(cell)):
                paces.append(pace)
        if not paces or not remaining:
            return ""
        return f", {duration(sum(paces) / len(paces) * remaining / self._num_jobs)} left"

    def close(self) -> None:
        """Leave the table as it is now."""
        if self._console.is_terminal:
            self._live.update(self._render(), refresh=True)
            self._live.stop()


def duration(seconds: float) -> str:
    """A time span to read: 42 s, 7 min, 3.2 h, 2.1 days."""
    for unit, size in (("days", 86400.0), ("h", 3600.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds / 60:.0f} min" if seconds >= 120 else f"{seconds:.0f} s"


def choice_table(choices: pd.DataFrame, rule: Choice) -> Table:
    """A row per group of `choose`: the best value and what every value scored."""
    table = Table("cells", rule.over, "remark", f"{rule.by} of each", title=f"chosen by the lowest {rule.by}")
    for _, alike in choices.groupby("group", sort=False):
        scores = ", ".join(
            f"{value:g}: {_shown(score)}" for value, score in alike.set_index(rule.over)["score"].items()
        )
        best = alike[alike["is_best"]].iloc[0]
        has_one = math.isfinite(best["score"])
        chosen = f"{best[rule.over]:g}" if has_one else "none"
        table.add_row(best["cells"], chosen, EDGE if best["at_edge"] and has_one else "", scores)
    return table


def write_choices(choices: pd.DataFrame, sweep: Sweep) -> list[Path]:
    """Write the same as CSV into the sweep's folder, a line per value."""
    rule = sweep.spec.choose
    assert rule is not None
    is_chosen = choices["is_best"] & choices["score"].map(math.isfinite)
    texts = pd.DataFrame(
        {
            "cells": choices["cells"],
            rule.over: choices[rule.over].map("{:g}".format),
            rule.by: choices["score"].map(_shown),
            "chosen": is_chosen.map({True: "yes", False: ""}),
            "remark": (is_chosen & choices["at_edge"]).map({True: EDGE, False: ""}),
        }
    )
    path = sweep.out / f"choice-{sweep.path.stem}.csv"
    write_text(path, format_table(texts, "csv") + "\n")
    return [path]


def failure_table(failures: dict[str, str]) -> Table:
    """One row per failed cell, with its run's last line."""
    table = Table("failed cell", "why")
    for name, reason in failures.items():
        table.add_row(name, reason)
    return table


def _shown(score: float) -> str:
    return f"{score:.4f}" if math.isfinite(score) else "failed"
