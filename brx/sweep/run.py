"""Runs the cells of a sweep: skips those that are done, resumes those that were interrupted, notes
those that fail, and goes on."""

from __future__ import annotations

import errno
import json
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from brx.config.schema import CustomConfig, RunConfig
from brx.config.user_code import allowed
from brx.data.prepare import PreparedData, prepare
from brx.environment import stop_signals
from brx.errors import UserError
from brx.files import write_text
from brx.model.checks import check_model_of
from brx.model.sizes import count_parameters
from brx.progress import error_console, is_live
from brx.runs.checkpoint import checkpoint_folder
from brx.runs.folder import RunFolder, telling
from brx.runs.formats import format_table
from brx.sweep.choice import SCORE, choice_table, choices_and_repetitions, tried_cells
from brx.sweep.launchers import Launcher, LocalLauncher, RayLauncher
from brx.sweep.spec import (
    FAILURE,
    Cell,
    State,
    Sweep,
    check_same_run,
    iterations_done,
    placed,
    state_of,
    with_present_folders,
)
from brx.train.build import assemble, check_method
from brx.train.device import choose_device, set_up
from brx.train.loop import check_enough_data

POLL_S = 0.5  # between two looks at the cells
REFRESH_S = 2.0  # between two drawings of the live table
WARM_UP = 3  # iterations of a calibration that are not measured
MEASURED = 10  # iterations that are; one refresh of the default interval is among them
MOST_CALIBRATION_S = 3.0  # per kind of cell; a busy machine makes fewer iterations in it
# EILSEQ: characters that the file system lacks; EEXIST: two names that it takes for one.
BAD_NAME = {errno.ENAMETOOLONG, errno.EILSEQ, errno.EINVAL, errno.EEXIST}
LARGEST_ON_CPU = 20_000_000  # parameters up to which a calibration on a CPU takes seconds


def check_own_methods(sweeps: Sequence[Sweep]) -> None:
    """Refuse a user's own method or model that cannot train, before any run is paid for.

    The user's file is imported, after it was named on stderr.

    Raises:
        UserError: `check_method` or `check_model_of` refuses a cell.
    """
    configs: list[RunConfig] = []
    for sweep in sweeps:
        configs += [cell.config for cell in sweep.cells]
    _check_own_models(configs)
    to_check: dict[str, RunConfig] = {}  # one of each kind
    for config in configs:
        optimizer = config.optimizer
        if isinstance(optimizer, CustomConfig):
            kind = repr((optimizer.method, optimizer.arguments, config.pipeline))
            to_check[kind] = config
    for config in to_check.values():
        try:
            device = choose_device(config.runtime.device)[0]
        except UserError:  # the sweep may be started on a machine that lacks the cells' device
            device = torch.device("cpu")
        with allowed():
            check_method(config, device)


def _check_own_models(configs: Sequence[RunConfig]) -> None:
    checked = set()
    for config in configs:
        kind = repr((config.model, config.data.vocabulary_size, config.pipeline.stages))
        if kind in checked:
            continue
        checked.add(kind)
        with allowed():
            check_model_of(config)


def check_names(sweeps: Sequence[Sweep]) -> None:
    """Try the names of all cells and repetitions on the file system where they will be, before any
    run is paid for.

    A file system may limit the length of names, lack characters, or ignore case.

    Raises:
        UserError: a name cannot be used there; the line names the cell.
        RunError: the folder cannot be written to, or the disk is full.
    """
    for sweep in sweeps:
        cells = [*sweep.cells, *sweep.repetitions(sweep.cells)]
        names = dict.fromkeys(cell.folder.name for cell in cells)
        parent = next(place for place in (sweep.out, *sweep.out.parents) if place.is_dir())
        with telling(sweep.out), tempfile.TemporaryDirectory(prefix=".names-", dir=parent) as trial:
            for name in names:
                _try_name(Path(trial) / name, sweep)


def _try_name(folder: Path, sweep: Sweep) -> None:
    """Make a folder with the name of a cell, and in it the folder of a checkpoint, which has the
    longest path in a run."""
    try:
        folder.mkdir()
        checkpoint_folder(folder, sweep.cells[0].config.training.iterations).mkdir(parents=True)
    except OSError as error:
        if error.errno not in BAD_NAME:
            raise
        raise UserError(
            f"{sweep.out}: this file system cannot hold the cell {folder.name}: {error.strerror}; "
            f"choose another folder (--out)"
        ) from None


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
    say = partial(print, file=sys.stderr, flush=True)
    left = remaining_seconds([*cells, *repetitions], num_jobs, say, retry_failed=retry_failed)
    counted = Counter(states).items()
    counts = ", ".join(f"{count} {state.value}" for state, count in counted)
    time = "too large to time without a GPU"
    if left is not None:
        time = f"about {duration(left)} with {num_jobs} at a time"
    more = f" and {len(repetitions)} repetitions of the chosen ones" if repetitions else ""
    print(f"{sweep.path}: {len(states)} cells{more} in {sweep.out}: {counts}; {time}")


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
    with telling(sweep.out):
        sweep.out.mkdir(parents=True, exist_ok=True)
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
            new = [cell for cell in cells if cell.identity not in have_run]
            if not new:
                break
            failures += _run_cells(new, launcher, display, retry_failed)
            have_run.update(cell.identity for cell in new)
            sweep = sweep.with_present_folders()
        choices, repetitions = choices_and_repetitions(sweep, cells)
        failures += _run_cells(repetitions, launcher, display, retry_failed)
    rule = sweep.spec.choose
    if rule is not None and choices is not None:
        table = choice_table(choices, rule)
        path = sweep.out / f"choice-{sweep.path.name.removesuffix('.yaml')}.csv"
        print(f"chosen by the lowest {SCORE}", format_table(table, "table"), path, sep="\n")
        write_text(path, format_table(table, "csv") + "\n")
    for cell, reason in failures:
        print(f"failed cell {cell.name}: {reason}")
    if failures:
        return False
    print(f"{sweep.path}: all {len(cells) + len(repetitions)} cells are done, in {sweep.out}")
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
    for cell in cells:
        section = cell.config.data
        key = section.model_dump_json()
        if key not in prepared:
            prepared[key] = prepare(section)
        check_enough_data(cell.config, prepared[key])


def remaining_seconds(
    cells: Sequence[Cell], num_jobs: int, say: Callable[[str], None], *, retry_failed: bool = False
) -> float | None:
    """About how long cells will take that are not done yet, in seconds.

    The pace comes from finished cells of the same kind (`cost_kind`), or else from a calibration.

    Args:
        cells: all cells.
        num_jobs: how many run at a time.
        say: is told which cell is calibrated.
        retry_failed: count failed cells, too.

    Returns:
        None if a cell cannot be calibrated here.
    """
    ended = (State.DONE,) if retry_failed else (State.DONE, State.FAILED)
    rates = _known_rates(cells)
    total = 0.0
    for cell in cells:
        if state_of(cell) in ended:
            continue
        kind = cost_kind(cell.config)
        if kind not in rates:
            say(f"calibrating {cell.name}, for at most about {MOST_CALIBRATION_S:g} s ...")
            rates[kind] = calibrate(cell.config)
        rate = rates[kind]
        if rate is None:
            return None
        total += (cell.config.training.last_iteration - iterations_done(cell.folder)) * rate
    return total / num_jobs


def _known_rates(cells: Sequence[Cell]) -> dict[str, float | None]:
    """The mean seconds per iteration of finished cells, by `cost_kind`."""
    seconds = defaultdict(list)
    for cell in cells:
        summary = RunFolder(cell.folder).read_summary()
        if summary.get("status") == "finished" and summary.get("training_seconds"):
            per_iteration = summary["training_seconds"] / summary["iteration"]
            seconds[cost_kind(cell.config)].append(per_iteration)
    return {kind: statistics.fmean(values) for kind, values in seconds.items()}


def cost_kind(config: RunConfig) -> str:
    """A text that is equal for runs whose iterations take equally long.

    Their settings may differ in the number of stages, the learning rate, the seed and the budget.
    """
    content = config.model_dump(mode="json", include={"model", "optimizer", "runtime"})
    content["optimizer"].pop("lr")
    batch = config.training.batch_size, config.pipeline.accumulation
    return json.dumps(
        [content, batch, config.data.vocabulary_size, config.pipeline.stash], sort_keys=True
    )


def calibrate(config: RunConfig) -> float | None:
    """Measure the seconds per iteration of a run on this machine, with random tokens.

    After `MOST_CALIBRATION_S` it stops at the end of an iteration. Then fewer iterations are
    measured, or iterations of the warm-up if there are no others. Nothing is compiled, because that
    would take longer than all that is measured. No graph is recorded, because not every machine can
    do so. A run that is compiled, or has graphs, is faster than measured.

    Returns:
        None if one iteration would take too long, or the run's device is not on this machine.
    """
    runtime = config.runtime.model_copy(update={"compile": False, "graphs": False})
    config = config.model_copy(update={"runtime": runtime})
    try:
        device, _ = choose_device(config.runtime.device, 0)
    except UserError:  # the sweep may be meant for another machine
        return None
    num_parameters, _ = count_parameters(config.model, config.data.vocabulary_size)
    if device.type == "cpu" and num_parameters > LARGEST_ON_CPU:
        return None
    set_up(config.runtime, device, 1)
    shape = (config.training.batch_size, config.model.sequence_length + 1)
    tokens = torch.randint(config.data.vocabulary_size, shape, device=device)

    def batch(iteration: int) -> tuple[torch.Tensor, torch.Tensor]:
        return tokens[:, :-1], tokens[:, 1:]

    with allowed():
        engine = assemble(config, batch, device=device).engine
    begun = time.perf_counter()
    started = begun  # when the iterations that are measured began
    num_before = 0  # iterations before `started`
    for result in engine.run(1, lambda: WARM_UP + MEASURED):
        is_out_of_time = time.perf_counter() - begun > MOST_CALIBRATION_S
        is_last = is_out_of_time or result.iteration == WARM_UP + MEASURED
        if is_last or result.iteration == WARM_UP:
            assert result.loss is not None
            result.loss.item()  # waits for a GPU
            now = time.perf_counter()
            seconds = (now - started) / (result.iteration - num_before)
            started = now
            num_before = result.iteration
        if is_last:
            break
    return seconds


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
            is_to_be_retried = self._retry_failed and cell.identity not in self._elsewhere
            if state is State.DONE or (has_failed and not is_to_be_retried):
                self._note_end(cell, state)
            elif self._num_running < self._launcher.num_jobs and self._start(cell):
                self._num_running += 1
                self._display.changed(cell, State.RUNNING)
            else:
                still_waiting.append(cell)
                if state is State.RUNNING:
                    self._elsewhere.add(cell.identity)
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
            reason = reason or (cell.folder / FAILURE).read_text(encoding="utf-8").strip()
            self.failures.append((cell, reason))
        self._display.changed(cell, state, reason)


class SweepDisplay:
    """Follows the cells of a sweep on stderr: a live table on a terminal, a line per change
    otherwise."""

    def __init__(self) -> None:
        self._console = error_console()
        self._is_live = is_live(self._console)
        self._live = Live(console=self._console, auto_refresh=False)
        # By identity: cells beyond the grid may have the name of another one.
        self._states: dict[str, State] = {}
        self._cells: dict[str, Cell] = {}
        self._started: dict[str, tuple[float, int]] = {}  # when, and at which iteration
        self._begun = time.monotonic()
        self._last_refresh = 0.0
        if self._is_live:
            self._live.start()

    def begin(self, cells: Sequence[Cell]) -> None:
        """Follow further cells."""
        self._cells |= {cell.identity: cell for cell in cells}
        waiting = dict.fromkeys((cell.identity for cell in cells), State.WAITING)
        self._states = waiting | self._states

    def changed(self, cell: Cell, state: State, reason: str = "") -> None:
        """Note a cell's state, and print it if there is no live table."""
        was_running = self._states[cell.identity] is State.RUNNING
        self._states[cell.identity] = state
        self._cells[cell.identity] = cell  # its folder may be another one by now
        if state is State.RUNNING:
            self._started[cell.identity] = (time.monotonic(), iterations_done(cell.folder))
        if not self._is_live and (state is not State.DONE or was_running):
            num_done = Counter(self._states.values())[State.DONE]
            what = f"{state.value}: {cell.name}{f' ({reason})' if reason else ''}"
            line = f"{what}  [{num_done} of {len(self._states)} done{self._left()}]"
            self._console.print(line, soft_wrap=True)

    def refresh(self) -> None:
        """Draw the live table again, every `REFRESH_S` at most."""
        now = time.monotonic()
        if self._is_live and now - self._last_refresh > REFRESH_S:
            self._last_refresh = now
            self._live.update(self._render(), refresh=True)

    def close(self) -> None:
        """Leave the table as it is now on the terminal."""
        if self._is_live:
            self._live.update(self._render(), refresh=True)
            self._live.stop()

    def _render(self) -> Group:
        counts = Counter(self._states.values())
        table = Table("running", "iteration", "of", "s / iteration", box=None)
        for key, cell in self._cells.items():
            if self._states[key] is State.RUNNING:
                since, first = self._started[key]
                done = iterations_done(cell.folder)
                pace = ""
                if done > first:
                    pace = f"{(time.monotonic() - since) / (done - first):.3f}"
                table.add_row(cell.name, str(done), str(cell.config.training.last_iteration), pace)
        line = ", ".join(f"{counts[state]} {state.value}" for state in State if counts[state])
        return Group(Text(line + self._left()), table)

    def _left(self) -> str:
        """The time that is left at the pace of all cells together so far, as `, 12 min left`; empty
        if there is no pace yet."""
        done = {key: iterations_done(cell.folder) for key, cell in self._cells.items()}
        done_here = sum(done[key] - first for key, (_, first) in self._started.items())
        remaining = 0
        for key, state in self._states.items():
            if state in (State.RUNNING, State.WAITING):
                remaining += self._cells[key].config.training.last_iteration - done[key]
        if done_here <= 0 or not remaining:
            return ""
        per_iteration = (time.monotonic() - self._begun) / done_here
        return f", {duration(per_iteration * remaining)} left"


def duration(seconds: float) -> str:
    """A time as people write it: `40 s`, `12 min`, `3.5 h` or `2.1 days`."""
    for unit, size in (("days", 86400.0), ("h", 3600.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds / 60:.0f} min" if seconds >= 120 else f"{seconds:.0f} s"
