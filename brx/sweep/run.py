"""Runs the cells of a sweep: skips those that are done, resumes those that were interrupted, notes
those that fail, and goes on."""

from __future__ import annotations

import json
import signal
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from typing import Literal

import pandas as pd

from brx.data.prepare import PreparedData, prepare
from brx.environment import stop_signals
from brx.errors import UserError, counted
from brx.files import make_folder, write_text
from brx.progress import duration, tell
from brx.runs.folder import RunFolder
from brx.runs.formats import format_table
from brx.runs.trajectory import trajectory_of
from brx.sweep.cell import Cell, placed, with_present_folders
from brx.sweep.choice import SCORE, choice_table, choices_and_repetitions, tried_cells
from brx.sweep.display import SweepDisplay
from brx.sweep.launchers import Launcher, LocalLauncher, RayLauncher
from brx.sweep.remaining_time import remaining_time
from brx.sweep.spec import Sweep
from brx.sweep.state import State, check_same_run, failure_of, state_of
from brx.train.loop import check_enough_data

POLL_S = 0.5  # between two looks at the cells


def list_cells(sweep: Sweep, launcher: Launcher, *, retry_failed: bool) -> None:
    """Print every cell with its state, and about how long the rest will take.

    Args:
        sweep: the sweep.
        launcher: tells how many cells would run at a time; it is closed.
        retry_failed: count the time of failed cells, too.
    """
    cells = tried_cells(sweep)
    _, repetitions = choices_and_repetitions(sweep, cells)
    states = [state_of(cell) for cell in cells]
    for cell, state in zip(cells, states, strict=True):
        print(f"{state.value:12}{cell.name}")
    num_jobs = launcher.num_jobs
    launcher.close()
    left = remaining_time([*cells, *repetitions], num_jobs, tell, retry_failed=retry_failed)
    counts = ", ".join(f"{count} {state.value}" for state, count in Counter(states).items())
    estimate = "too large to time without a GPU"
    if left is not None:
        estimate = f"about {duration(left.seconds)} with {num_jobs} at a time"
    planned = counted(len(cells), "cell")
    if repetitions:
        planned += f" and {counted(len(repetitions), 'repetition')} of the chosen ones"
    print(f"{sweep.path}: {planned} in {sweep.out}: {counts}; {estimate}")
    if left is not None and left.seconds > 0:
        print(f"(estimated {left.basis})")


def make_launcher(
    kind: Literal["local", "ray"], sweep: Sweep, jobs: int | None, address: str | None
) -> Launcher:
    """The launcher for a sweep's cells.

    Args:
        kind: where the cells run: on this machine, or on a Ray cluster.
        sweep: the sweep, whose cells decide what a place needs.
        jobs: how many cells run at a time; None: as many as the machine or cluster has room for.
        address: the address of the Ray cluster; None: one is started on this machine.

    Raises:
        UserError: a cell needs more than the machine or cluster has.
    """
    if kind == "ray":
        return RayLauncher(jobs, sweep.cells, address)
    configs = [cell.config for cell in sweep.cells]
    on_gpus = any(config.runtime.device != "cpu" for config in configs)
    return LocalLauncher(jobs, max(config.pipeline.devices for config in configs), on_gpus=on_gpus)


def run_and_print(sweep: Sweep, launcher: Launcher, *, retry_failed: bool) -> bool:
    """Run the grid, the cells beyond it that its results ask for, and the repetitions of what is
    chosen. What was chosen and what failed is printed.

    Args:
        sweep: the sweep.
        launcher: runs the cells; it is closed.
        retry_failed: run cells that failed before once more.

    Returns:
        False if a cell failed.

    Raises:
        UserError, RunError: `_prepare_data` does; no cell has started then.
        KeyboardInterrupt: after every running cell has saved; the same call continues.
    """
    make_folder(sweep.out)
    sweep = sweep.with_present_folders()
    failures: list[tuple[Cell, str]] = []
    with closing(launcher), closing(SweepDisplay()) as display:
        # Signals from a terminal, a scheduler, or to a job in the background. They are handled
        # after the launcher was made: Ray has a handler of its own.
        for stop in stop_signals():
            signal.signal(stop, signal.default_int_handler)
        _prepare_data(sweep, retry_failed=retry_failed)
        # The whole list is made again after each round: a cell that is tried again may change what
        # is best, and with it any part of the list.
        have_run: set[str] = set()
        while True:
            cells = tried_cells(sweep)
            new = [cell for cell in cells if cell.trajectory_id not in have_run]
            if not new:
                break
            failures += _run_cells(new, launcher, display, retry_failed)
            have_run.update(cell.trajectory_id for cell in new)
            sweep = sweep.with_present_folders()
        choices, repetitions = choices_and_repetitions(sweep, cells)
        failures += _run_cells(repetitions, launcher, display, retry_failed)
    _note_other_data([*cells, *repetitions])
    if choices is not None:
        _tell_choices(sweep, choices)
    for cell, reason in failures:
        print(f"failed cell {cell.name}: {reason}")
    if failures:
        return False
    num_done = len(cells) + len(repetitions)
    done = "the only cell is done" if num_done == 1 else f"all {num_done} cells are done"
    print(f"{sweep.path}: {done}, in {sweep.out}")
    return True


def _prepare_data(sweep: Sweep, *, retry_failed: bool) -> None:
    """Make the token files of all cells that have not begun, before the first cell starts.

    Otherwise every cell would find out for itself that its data cannot be had, or do not suffice.
    A cell that was interrupted has had its data, and may go on without their source.

    Raises:
        UserError: a source or a token file is not as a cell says, or too small for it; or a
            cell's folder holds another run.
        RunError: the disk or the network failed.
    """
    begin = {State.WAITING}
    if retry_failed:
        begin.add(State.FAILED)
    cells = [cell for cell in sweep.cells if state_of(cell) in begin]
    for cell in cells:
        check_same_run(cell)  # at once; to prepare data may take hours
    prepared: dict[str, PreparedData] = {}
    trained_on = _fingerprints(sweep.cells)
    for cell in cells:
        section = cell.config.data
        key = section.model_dump_json()
        if key not in prepared:
            prepared[key] = prepare(section)
        check_enough_data(cell.config, prepared[key])
        fingerprint = prepared[key].fingerprint
        for other, trained in trained_on.get(_deciding_settings(cell), {}).items():
            if other != fingerprint:
                raise UserError(
                    f"{sweep.path}: data.source: {section.source}: has changed since cell "
                    f"{trained.name} was trained (fingerprint {other[:8]}, now {fingerprint[:8]}), "
                    f"so that the cells would not compare; restore it, or choose another folder "
                    f"(--out)"
                )


def _deciding_settings(cell: Cell) -> str:
    """The cell's settings that decide what its tokens are, as a text."""
    return json.dumps(trajectory_of(cell.config)["data"], sort_keys=True)


def _fingerprints(cells: Sequence[Cell]) -> dict[str, dict[str, Cell]]:
    """By data settings: each fingerprint of the data that cells have trained on, with the first of
    these cells. There is more than one if the source has changed meanwhile."""
    by_settings: dict[str, dict[str, Cell]] = {}
    for cell in cells:
        fingerprint = RunFolder(cell.folder).read_summary().get("data_fingerprint")
        if isinstance(fingerprint, str):
            cells_by_fingerprint = by_settings.setdefault(_deciding_settings(cell), {})
            cells_by_fingerprint.setdefault(fingerprint, cell)
    return by_settings


def _note_other_data(cells: Sequence[Cell]) -> None:
    """Say on stderr if the source of the data has changed while the sweep ran."""
    for by_fingerprint in _fingerprints(cells).values():
        if len(by_fingerprint) > 1:
            first, other = list(by_fingerprint.items())[:2]
            tell(
                f"brx: note: data.source: {first[1].config.data.source}: has changed meanwhile: "
                f"cell {first[1].name} trained on other data (fingerprint {first[0][:8]}) than "
                f"{other[1].name} ({other[0][:8]}), so they do not compare"
            )


def _tell_choices(sweep: Sweep, choices: pd.DataFrame) -> None:
    """Print what was chosen, and write it to a file in the sweep's folder."""
    assert sweep.spec.choose is not None
    if choices.empty:
        print("nothing is chosen: every cell failed")
        return
    table = choice_table(choices, sweep.spec.choose)
    path = sweep.out / f"choice-{sweep.path.name.removesuffix('.yaml')}.csv"
    print(f"chosen by the lowest {SCORE}", format_table(table, "table"), path, sep="\n")
    write_text(path, format_table(table, "csv") + "\n")


def _run_cells(
    cells: Sequence[Cell], launcher: Launcher, display: SweepDisplay, retry_failed: bool
) -> list[tuple[Cell, str]]:
    """Run the cells that are not done yet. Returns those that failed, each with the reason."""
    display.begin(cells)
    in_progress = _CellsInProgress(cells, launcher, display, retry_failed=retry_failed)
    try:
        while not in_progress.are_done:
            in_progress.start_waiting()
            in_progress.collect_ended()
            display.refresh()
            if not in_progress.are_done:
                time.sleep(POLL_S)
    except BaseException:
        # Ctrl-C, or a folder that cannot be written to: leave no process running unnoticed.
        launcher.interrupt()
        raise
    return in_progress.failures


class _CellsInProgress:
    """Which cells wait, run and have failed."""

    def __init__(
        self,
        cells: Sequence[Cell],
        launcher: Launcher,
        display: SweepDisplay,
        *,
        retry_failed: bool,
    ) -> None:
        self._launcher = launcher
        self._display = display
        self._retry_failed = retry_failed
        self._waiting = list(cells)
        self._num_running = 0
        self._elsewhere: set[str] = set()  # identities of cells that another sweep has run
        self.failures: list[tuple[Cell, str]] = []

    @property
    def are_done(self) -> bool:
        return not self._waiting and not self._num_running

    def start_waiting(self) -> None:
        """Start the waiting cells for which there is room; take out those that have ended."""
        still_waiting = []
        # Another sweep may have made a cell's folder meanwhile, under another name.
        for cell in with_present_folders(self._waiting):
            state = state_of(cell)
            has_failed = state is State.FAILED
            is_to_be_retried = self._retry_failed and cell.trajectory_id not in self._elsewhere
            if state is State.DONE or (has_failed and not is_to_be_retried):
                self._note_end(cell, state)
            elif self._num_running < self._launcher.num_jobs and self._start(cell):
                self._num_running += 1
                self._display.changed(cell, State.RUNNING)
            else:
                still_waiting.append(cell)
                if state is State.RUNNING:
                    self._elsewhere.add(cell.trajectory_id)
        self._waiting = still_waiting

    def _start(self, cell: Cell) -> bool:
        """Start a cell in its folder.

        Returns:
            False if another sweep runs the cell or has finished it meanwhile. Also if another sweep
            has just made the cell's folder: then the state of that folder has to be read first.
        """
        return placed(cell).folder == cell.folder and self._launcher.start(cell)

    def collect_ended(self) -> None:
        """Note the cells that have ended since the last call.

        Raises:
            KeyboardInterrupt: somebody has asked a cell itself to stop.
        """
        for cell, state, reason in self._launcher.collect():
            self._num_running -= 1
            if state is State.INTERRUPTED:
                raise KeyboardInterrupt
            self._note_end(cell, state, reason)

    def _note_end(self, cell: Cell, state: State, reason: str = "") -> None:
        if state is State.FAILED:
            reason = reason or failure_of(cell)
            self.failures.append((cell, reason))
        self._display.changed(cell, state, reason)
