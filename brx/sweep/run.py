"""Runs a sweep: skips what is done, resumes what was interrupted, records what fails, and goes on."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import pandas as pd

from brx.sweep.cell_state import FAILURE, State, state_of
from brx.sweep.choice import choose, chosen_cells, tried_cells
from brx.sweep.spec import Cell, Sweep

POLL_S = 0.5


class Launcher(Protocol):
    """Where cells run.

    Attributes:
        num_jobs: how many at a time.
    """

    num_jobs: int

    @property
    def is_full(self) -> bool:
        """Whether every place is taken."""

    def start(self, cell: Cell) -> bool:
        """Start or resume a cell; False if another sweep runs it, or has finished it meanwhile."""

    def collect(self) -> list[tuple[Cell, State, str]]:
        """Take the cells that have ended since the last call: each with its state and, if it failed, why."""

    def interrupt(self) -> None:
        """Ask all cells to save and end, and wait until they have."""


@dataclass
class Outcome:
    """What a sweep came to.

    Attributes:
        cells: all of them, repetitions included.
        failures: what failed, with the reason, by cell's name.
        choices: see `choose`; None if the sweep makes none.
    """

    cells: list[Cell]
    failures: dict[str, str] = field(default_factory=dict)
    choices: pd.DataFrame | None = None


class Observer(Protocol):
    """Is told how a sweep goes on."""

    def begin(self, cells: Sequence[Cell]) -> None:
        """These cells are to be run or are done."""

    def changed(self, cell: Cell, state: State, reason: str = "") -> None:
        """A cell has another state."""

    def refresh(self) -> None:
        """Some time has passed."""


def run_sweep(sweep: Sweep, launcher: Launcher, observer: Observer, *, retry_failed: bool = False) -> Outcome:
    """Run the grid and what lies beyond it where the choice falls on an end, make the choice, run the repetitions.

    Raises:
        KeyboardInterrupt: after every running cell has saved; the same call continues.
    """
    sweep.out.mkdir(parents=True, exist_ok=True)
    outcome = Outcome(list(sweep.cells))
    _run_cells(sweep.cells, launcher, observer, outcome, retry_failed)
    while len(cells := tried_cells(sweep)) > len(outcome.cells):
        more, outcome.cells = cells[len(outcome.cells) :], cells
        _run_cells(more, launcher, observer, outcome, retry_failed)
    outcome.choices, repetitions = choices_and_repetitions(sweep, outcome.cells)
    outcome.cells += repetitions
    _run_cells(repetitions, launcher, observer, outcome, retry_failed)
    return outcome


def choices_and_repetitions(sweep: Sweep, tried: Sequence[Cell]) -> tuple[pd.DataFrame | None, list[Cell]]:
    """The choices among the cells tried, if the sweep makes any, and the repetitions that they ask for.

    Before all cells of the grid are done, both are those that the finished ones would lead to.
    """
    if sweep.spec.choose is None:
        return None, sweep.repetitions(tried)
    choices = choose(tried, sweep.spec.choose)
    return choices, sweep.repetitions(chosen_cells(tried, choices, sweep.spec.choose))


def _run_cells(
    cells: Sequence[Cell], launcher: Launcher, observer: Observer, outcome: Outcome, retry_failed: bool
) -> None:
    observer.begin(cells)
    waiting: list[Cell] = []
    for cell in cells:
        state = state_of(cell)
        if state is State.FAILED and not retry_failed:
            outcome.failures[cell.name] = (cell.folder / FAILURE).read_text(encoding="utf-8").strip()
        elif state is not State.DONE:
            waiting.append(cell)
            continue
        observer.changed(cell, state, outcome.failures.get(cell.name, ""))
    elsewhere: list[Cell] = []
    running = 0
    try:
        while waiting or running or elsewhere:
            while waiting and not launcher.is_full:
                cell = waiting.pop(0)
                if launcher.start(cell):
                    running += 1
                    observer.changed(cell, State.RUNNING)
                else:
                    elsewhere.append(cell)
            for cell, state, reason in launcher.collect():
                running -= 1
                if state is State.INTERRUPTED:
                    raise KeyboardInterrupt  # somebody has asked the cell itself to stop
                if state is State.FAILED:
                    outcome.failures[cell.name] = reason
                observer.changed(cell, state, reason)
            elsewhere, free = _look_elsewhere(elsewhere, observer, outcome)
            waiting += free
            observer.refresh()
            time.sleep(POLL_S)
    except BaseException:  # Ctrl-C, or a folder that cannot be written to: leave nothing running unseen
        launcher.interrupt()
        raise


def _look_elsewhere(cells: list[Cell], observer: Observer, outcome: Outcome) -> tuple[list[Cell], list[Cell]]:
    """Those of the cells that another sweep still runs, and those that it has left unfinished."""
    still, free = [], []
    for cell in cells:
        state = state_of(cell)
        if state is State.RUNNING:
            still.append(cell)
        elif state in (State.DONE, State.FAILED):
            if state is State.FAILED:
                outcome.failures[cell.name] = (cell.folder / FAILURE).read_text(encoding="utf-8").strip()
            observer.changed(cell, state, outcome.failures.get(cell.name, ""))
        else:
            free.append(cell)
    return still, free
