"""Runs a sweep: skips what is done, resumes what was interrupted, records what fails, and goes on.

The user sees a live table on a terminal, one line per change otherwise.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import pandas as pd
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from brx.sweep.cell_state import FAILURE, State, iterations_done, state_of
from brx.sweep.choice import choices_and_repetitions, tried_cells
from brx.sweep.launchers import Launcher
from brx.sweep.spec import Cell, Sweep

POLL_S, REFRESH_S = 0.5, 2.0


@dataclass
class Outcome:
    """What a sweep came to: its cells with the repetitions, failures by name, and what `choose` says if asked."""

    cells: list[Cell]
    failures: dict[str, str] = field(default_factory=dict)
    choices: pd.DataFrame | None = None


def run_sweep(sweep: Sweep, launcher: Launcher, *, retry_failed: bool = False) -> Outcome:
    """Run the grid and what lies beyond it where the choice falls on an end, make the choice, run the repetitions.

    Raises:
        KeyboardInterrupt: after every running cell has saved; the same call continues.
    """
    sweep.out.mkdir(parents=True, exist_ok=True)
    outcome, display = Outcome(list(sweep.cells)), SweepDisplay(launcher.num_jobs)
    try:
        _run_cells(sweep.cells, launcher, display, outcome, retry_failed)
        while len(cells := tried_cells(sweep)) > len(outcome.cells):
            more, outcome.cells = cells[len(outcome.cells) :], cells
            _run_cells(more, launcher, display, outcome, retry_failed)
        outcome.choices, repetitions = choices_and_repetitions(sweep, outcome.cells)
        outcome.cells += repetitions
        _run_cells(repetitions, launcher, display, outcome, retry_failed)
    finally:
        display.close()
    return outcome


def _run_cells(
    cells: Sequence[Cell], launcher: Launcher, display: SweepDisplay, outcome: Outcome, retry_failed: bool
) -> None:
    def ended(cell: Cell, state: State, reason: str = "") -> None:
        if state is State.FAILED:
            reason = outcome.failures[cell.name] = reason or (cell.folder / FAILURE).read_text(encoding="utf-8").strip()
        display.changed(cell, state, reason)

    display.begin(cells)
    waiting, num_running = list(cells), 0
    elsewhere: set[str] = set()  # have been run by another sweep
    try:
        while waiting or num_running:
            for cell in list(waiting):
                state = state_of(cell)
                is_tried = cell.name in elsewhere or not retry_failed
                if state is State.DONE or (state is State.FAILED and is_tried):
                    waiting.remove(cell)
                    ended(cell, state)
                elif not launcher.is_full and launcher.start(cell):
                    waiting.remove(cell)
                    num_running += 1
                    display.changed(cell, State.RUNNING)
                elif state is State.RUNNING:
                    elsewhere.add(cell.name)
            for cell, state, reason in launcher.collect():
                num_running -= 1
                if state is State.INTERRUPTED:
                    raise KeyboardInterrupt  # somebody has asked the cell itself to stop
                ended(cell, state, reason)
            display.refresh()
            if waiting or num_running:
                time.sleep(POLL_S)
    except BaseException:  # Ctrl-C, or a folder that cannot be written to: leave nothing running unseen
        launcher.interrupt()
        raise


class SweepDisplay:
    """Follows the cells of a sweep, `num_jobs` of which run at a time, on stderr; to be closed."""

    def __init__(self, num_jobs: int) -> None:
        self._console = Console(stderr=True, highlight=False)
        self._live = Live(console=self._console, auto_refresh=False)
        self._num_jobs = num_jobs
        self._states: dict[str, State] = {}
        self._cells: dict[str, Cell] = {}
        self._started: dict[str, tuple[float, int]] = {}  # when, and at which iteration
        self._seconds_per_iteration: list[float] = []
        self._last_refresh = 0.0
        if self._console.is_terminal:
            self._live.start()

    def begin(self, cells: Sequence[Cell]) -> None:
        """Add cells that wait or are done."""
        self._cells |= {cell.name: cell for cell in cells}
        self._states = dict.fromkeys((cell.name for cell in cells), State.WAITING) | self._states

    def changed(self, cell: Cell, state: State, reason: str = "") -> None:
        """Note a cell's state, and say so where there is no live table."""
        was_running = self._states[cell.name] is State.RUNNING
        self._states[cell.name] = state
        if state is State.RUNNING:
            self._started[cell.name] = (time.monotonic(), iterations_done(cell.folder))
        elif state is State.DONE and was_running:
            self._seconds_per_iteration += filter(None, [self._pace(cell)])
        if not self._console.is_terminal and (state is not State.DONE or was_running):
            num_done = Counter(self._states.values())[State.DONE]
            what = f"{state.value}: {cell.name}{f' ({reason})' if reason else ''}"
            line = f"{what}  [{num_done} of {len(self._states)} done{self._left()}]"
            self._console.print(line, soft_wrap=True, markup=False)

    def refresh(self) -> None:
        now = time.monotonic()
        if self._console.is_terminal and now - self._last_refresh > REFRESH_S:
            self._last_refresh = now
            self._live.update(self._render(), refresh=True)

    def close(self) -> None:
        if self._console.is_terminal:
            self._live.update(self._render(), refresh=True)
            self._live.stop()

    def _render(self) -> Group:
        counts = Counter(self._states.values())
        table = Table("running", "iteration", "of", "s / iteration", box=None)
        for cell in self._cells.values():
            if self._states[cell.name] is State.RUNNING:
                pace, last = self._pace(cell), cell.config.training.last_iteration
                done = iterations_done(cell.folder)
                table.add_row(cell.name, str(done), str(last), f"{pace:.3f}" if pace else "")
        line = ", ".join(f"{counts[state]} {state.value}" for state in State if counts[state])
        return Group(Text(line + self._left()), table)

    def _pace(self, cell: Cell) -> float | None:
        """Seconds per iteration since the cell was started here."""
        since, first = self._started[cell.name]
        done = iterations_done(cell.folder) - first
        return (time.monotonic() - since) / done if done > 0 else None

    def _left(self) -> str:
        cells = [self._cells[name] for name, state in self._states.items() if state in (State.RUNNING, State.WAITING)]
        running = [cell for cell in cells if self._states[cell.name] is State.RUNNING]
        remaining = sum(cell.config.training.last_iteration - iterations_done(cell.folder) for cell in cells)
        paces = [*self._seconds_per_iteration, *filter(None, map(self._pace, running))]
        if not paces or not remaining:
            return ""
        return f", {duration(sum(paces) / len(paces) * remaining / self._num_jobs)} left"


def duration(seconds: float) -> str:
    """A time span to read: 42 s, 7 min, 3.2 h, 2.1 days."""
    for unit, size in (("days", 86400.0), ("h", 3600.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds / 60:.0f} min" if seconds >= 120 else f"{seconds:.0f} s"
