"""Runs a sweep: skips what is done, resumes what was interrupted, records what fails, and goes on."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import pandas as pd

from brx.sweep.cell_state import FAILURE, State, state_of
from brx.sweep.choice import choose, chosen_cells, tried_cells
from brx.sweep.display import SweepDisplay
from brx.sweep.spec import Cell, Sweep

POLL_S = 0.5


class Launcher(Protocol):
    """Where cells run, `num_jobs` of them at a time."""

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
    """What a sweep came to: its cells with the repetitions, failures by name, and what `choose` says if asked."""

    cells: list[Cell]
    failures: dict[str, str] = field(default_factory=dict)
    choices: pd.DataFrame | None = None


def run_sweep(sweep: Sweep, launcher: Launcher, display: SweepDisplay, *, retry_failed: bool = False) -> Outcome:
    """Run the grid and what lies beyond it where the choice falls on an end, make the choice, run the repetitions.

    Raises:
        KeyboardInterrupt: after every running cell has saved; the same call continues.
    """
    sweep.out.mkdir(parents=True, exist_ok=True)
    outcome = Outcome(list(sweep.cells))
    _run_cells(sweep.cells, launcher, display, outcome, retry_failed)
    while len(cells := tried_cells(sweep)) > len(outcome.cells):
        more, outcome.cells = cells[len(outcome.cells) :], cells
        _run_cells(more, launcher, display, outcome, retry_failed)
    outcome.choices, repetitions = choices_and_repetitions(sweep, outcome.cells)
    outcome.cells += repetitions
    _run_cells(repetitions, launcher, display, outcome, retry_failed)
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
    cells: Sequence[Cell], launcher: Launcher, display: SweepDisplay, outcome: Outcome, retry_failed: bool
) -> None:
    def ended(cell: Cell, state: State, reason: str = "") -> None:
        if state is State.FAILED:
            reason = outcome.failures[cell.name] = reason or (cell.folder / FAILURE).read_text(encoding="utf-8").strip()
        display.changed(cell, state, reason)

    display.begin(cells)
    waiting: list[Cell] = []
    for cell in cells:
        state = state_of(cell)
        if state is State.DONE or (state is State.FAILED and not retry_failed):
            ended(cell, state)
        else:
            waiting.append(cell)
    elsewhere: list[Cell] = []  # run by another sweep
    running = 0
    try:
        while waiting or running or elsewhere:
            while waiting and not launcher.is_full:
                cell = waiting.pop(0)
                if launcher.start(cell):
                    running += 1
                    display.changed(cell, State.RUNNING)
                else:
                    elsewhere.append(cell)
            for cell, state, reason in launcher.collect():
                running -= 1
                if state is State.INTERRUPTED:
                    raise KeyboardInterrupt  # somebody has asked the cell itself to stop
                ended(cell, state, reason)
            for cell in list(elsewhere):
                state = state_of(cell)
                if state is not State.RUNNING:
                    elsewhere.remove(cell)
                    if state in (State.DONE, State.FAILED):
                        ended(cell, state)
                    else:  # left unfinished there
                        waiting.append(cell)
            display.refresh()
            time.sleep(POLL_S)
    except BaseException:  # Ctrl-C, or a folder that cannot be written to: leave nothing running unseen
        launcher.interrupt()
        raise
