"""`brx sweep`: skips what is done, resumes what was interrupted, records what fails, and goes
on."""

from __future__ import annotations

import errno
import json
import signal
import statistics
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Literal

import torch
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from brx.config.schema import CustomConfig, RunConfig
from brx.config.user_code import allowed
from brx.environment import stop_signals
from brx.errors import UserError
from brx.files import write_text
from brx.model.checks import check_model_of
from brx.model.sizes import count_parameters
from brx.runs.checkpoint import checkpoint_folder
from brx.runs.folder import RunFolder, telling
from brx.runs.formats import format_table
from brx.sweep.choice import SCORE, choice_table, choices_and_repetitions, tried_cells
from brx.sweep.launchers import Launcher, LocalLauncher, RayLauncher
from brx.sweep.spec import FAILURE, Cell, State, Sweep, iterations_done, state_of
from brx.train.build import assemble, check_method
from brx.train.device import choose_device, set_up

POLL_S, REFRESH_S = 0.5, 2.0
WARM_UP, MEASURED = 3, 10  # one refresh of the default interval is among them
MOST_CALIBRATION_S = 3.0  # per kind of cell; a busy machine gets through fewer iterations
# EILSEQ: characters that the file system lacks; EEXIST: two names that it takes for one.
BAD_NAME = {errno.ENAMETOOLONG, errno.EILSEQ, errno.EINVAL, errno.EEXIST}
LARGEST_ON_CPU = 20_000_000  # parameters up to which a calibration on a CPU takes seconds


def check_own_methods(sweeps: Sequence[Sweep]) -> None:
    """Refuse a user's own method or model that cannot train (`check_method`, `check_model_of`),
    before anything is paid for any run. It is imported, and named on stderr before."""
    _check_own_models([cell.config for sweep in sweeps for cell in sweep.cells])
    asked = {}
    for config in (cell.config for sweep in sweeps for cell in sweep.cells):
        if isinstance(config.optimizer, CustomConfig):
            asked[repr((config.optimizer.method, config.optimizer.arguments, config.pipeline))] = (
                config
            )
    for config in asked.values():
        try:
            device = choose_device(config.runtime.device)[0]
        except UserError:  # a machine without it may start the sweep of others
            device = torch.device("cpu")
        with allowed():
            check_method(config, device)


def _check_own_models(configs: Sequence[RunConfig]) -> None:
    checked = set()
    for config in configs:
        vocabulary_size, num_stages = config.data.vocabulary_size, config.pipeline.stages
        key = repr((config.model, vocabulary_size, num_stages))
        if key not in checked:
            checked.add(key)
            with allowed():
                check_model_of(config)


def check_names(sweeps: Sequence[Sweep]) -> None:
    """Try the names of all cells and repetitions on the file system that they will be on, before
    anything is paid for any run. It may have a limit on lengths, fewer characters, or no case.

    Raises:
        UserError: a name cannot be used there; the line names the cell.
        RunError: the folder cannot be written to, or the disk is full.
    """
    for sweep in sweeps:
        cells = [*sweep.cells, *sweep.repetitions(sweep.cells)]
        names = dict.fromkeys(cell.folder.name for cell in cells)
        around = next(place for place in (sweep.out, *sweep.out.parents) if place.is_dir())
        with telling(sweep.out), tempfile.TemporaryDirectory(prefix=".names-", dir=around) as trial:
            for name in names:
                _try_name(Path(trial) / name, sweep)


def _try_name(folder: Path, sweep: Sweep) -> None:
    """Make a cell's folder, and one that is as deep as a run's deepest."""
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
    """Print every cell with its state, and about how long the rest will take in the launcher's
    places."""
    cells = tried_cells(sweep)
    _, repetitions = choices_and_repetitions(sweep, cells)
    states = {cell.name: state_of(cell) for cell in cells}
    for name, state in states.items():
        print(f"{state.value:12}{name}")
    num_jobs = launcher.num_jobs
    launcher.close()
    say = Console(stderr=True, highlight=False).print
    left = remaining_seconds([*cells, *repetitions], num_jobs, say, retry_failed=retry_failed)
    counts = ", ".join(
        f"{count} {state.value}" for state, count in Counter(states.values()).items()
    )
    time = (
        "too large to time without a GPU"
        if left is None
        else f"about {duration(left)} with {num_jobs} at a time"
    )
    more = f" and {len(repetitions)} repetitions of the chosen ones" if repetitions else ""
    print(f"{sweep.path}: {len(states)} cells{more} in {sweep.out}: {counts}; {time}")


def make_launcher(
    kind: Literal["local", "ray"], sweep: Sweep, jobs: int | None, address: str | None
) -> Launcher:
    if kind == "ray":
        return RayLauncher(jobs, sweep.cells, address)
    configs = [cell.config for cell in sweep.cells]
    on_gpus = any(config.runtime.device != "cpu" for config in configs)
    return LocalLauncher(jobs, max(config.pipeline.devices for config in configs), on_gpus=on_gpus)


def run_and_print(sweep: Sweep, launcher: Launcher, *, retry_failed: bool) -> bool:
    """Run the grid, what lies beyond it where the choice falls on an end, and the repetitions of
    what is chosen.

    What was chosen and what failed is printed; False if a cell failed. KeyboardInterrupt comes
    after every running cell has saved; the same call continues."""
    with telling(sweep.out):
        sweep.out.mkdir(parents=True, exist_ok=True)
    failures: dict[str, str] = {}
    with closing(launcher), closing(SweepDisplay()) as display:
        # From a terminal, a scheduler, or to a job in the background. After the launcher: Ray has a
        # handler of its own.
        for stop in stop_signals():
            signal.signal(stop, signal.default_int_handler)
        cells: list[Cell] = []
        while len(tried := tried_cells(sweep)) > len(cells):
            more, cells = tried[len(cells) :], tried
            failures |= _run_cells(more, launcher, display, retry_failed)
        choices, repetitions = choices_and_repetitions(sweep, cells)
        failures |= _run_cells(repetitions, launcher, display, retry_failed)
    if (rule := sweep.spec.choose) is not None and choices is not None:
        table, path = (
            choice_table(choices, rule),
            sweep.out / f"choice-{sweep.path.name.removesuffix('.yaml')}.csv",
        )
        print(f"chosen by the lowest {SCORE}", format_table(table, "table"), path, sep="\n")
        write_text(path, format_table(table, "csv") + "\n")
    for name, reason in failures.items():
        print(f"failed cell {name}: {reason}")
    if failures:
        return False
    print(f"{sweep.path}: all {len(cells) + len(repetitions)} cells are done, in {sweep.out}")
    return True


def remaining_seconds(
    cells: Sequence[Cell], num_jobs: int, say: Callable[[str], None], *, retry_failed: bool = False
) -> float | None:  # None if it cannot be told here
    ended = (State.DONE,) if retry_failed else (State.DONE, State.FAILED)
    seconds = defaultdict(list)  # per iteration of the finished cells, by kind
    for cell in cells:
        summary = RunFolder(cell.folder).read_summary()
        if summary.get("status") == "finished" and summary.get("training_seconds"):
            seconds[cost_kind(cell.config)].append(
                summary["training_seconds"] / summary["iteration"]
            )
    rates: dict[str, float | None] = {
        kind: statistics.fmean(values) for kind, values in seconds.items()
    }
    total = 0.0
    for cell in cells:
        if state_of(cell) in ended:
            continue
        kind = cost_kind(cell.config)
        if kind not in rates:
            say(f"calibrating {cell.name}, for at most about {MOST_CALIBRATION_S:g} s ...")
            rates[kind] = calibrate(cell.config)
        if (rate := rates[kind]) is None:
            return None
        total += (cell.config.training.last_iteration - iterations_done(cell.folder)) * rate
    return total / num_jobs


def cost_kind(config: RunConfig) -> str:
    """What an iteration's time depends on: everything but the number of stages, rates, seeds and
    budget."""
    content = config.model_dump(mode="json", include={"model", "optimizer", "runtime"})
    content["optimizer"].pop("lr")
    batch = config.training.batch_size, config.pipeline.accumulation
    return json.dumps(
        [content, batch, config.data.vocabulary_size, config.pipeline.stash], sort_keys=True
    )


def calibrate(config: RunConfig) -> float | None:
    """Seconds per iteration on this machine, with random tokens; None where one iteration would
    take too long.

    After MOST_CALIBRATION_S it stops at the end of an iteration. The estimate is then from fewer
    iterations, with those of the warm-up if no other was made."""
    device, _ = choose_device(config.runtime.device, 0)
    num_parameters, _ = count_parameters(config.model, config.data.vocabulary_size)
    if device.type == "cpu" and num_parameters > LARGEST_ON_CPU:
        return None
    set_up(config.runtime, device, 1)
    shape = (config.training.batch_size, config.model.sequence_length + 1)
    tokens = torch.randint(config.data.vocabulary_size, shape, device=device)
    with allowed():
        engine = assemble(
            config, lambda iteration: (tokens[:, :-1], tokens[:, 1:]), device=device
        ).engine
    begun = started = time.perf_counter()
    num_before = 0  # iterations before `started`
    for result in engine.run(1, lambda: WARM_UP + MEASURED):
        is_out_of_time = time.perf_counter() - begun > MOST_CALIBRATION_S
        is_last = is_out_of_time or result.iteration == WARM_UP + MEASURED
        if is_last or result.iteration == WARM_UP:
            assert result.loss is not None
            result.loss.item()  # waits for a GPU
            now = time.perf_counter()
            seconds = (now - started) / (result.iteration - num_before)
            started, num_before = now, result.iteration
        if is_last:
            break
    return seconds


def _run_cells(
    cells: Sequence[Cell], launcher: Launcher, display: SweepDisplay, retry_failed: bool
) -> dict[str, str]:
    """Run what is not done yet; returns why cells failed, by name."""
    failures = {}

    def ended(cell: Cell, state: State, reason: str = "") -> None:
        if state is State.FAILED:
            reason = failures[cell.name] = (
                reason or (cell.folder / FAILURE).read_text(encoding="utf-8").strip()
            )
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
                elif num_running < launcher.num_jobs and launcher.start(cell):
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
    except BaseException:
        # Ctrl-C, or a folder that cannot be written to: leave no process running unnoticed.
        launcher.interrupt()
        raise
    return failures


class SweepDisplay:
    """Follows the cells of a sweep on stderr: a live table on a terminal, a line per change
    otherwise."""

    def __init__(self) -> None:
        self._console = Console(stderr=True, highlight=False)
        self._live = Live(console=self._console, auto_refresh=False)
        self._states: dict[str, State] = {}
        self._cells: dict[str, Cell] = {}
        self._started: dict[str, tuple[float, int]] = {}  # when, and at which iteration
        self._begun, self._last_refresh = time.monotonic(), 0.0
        if self._console.is_terminal:
            self._live.start()

    def begin(self, cells: Sequence[Cell]) -> None:
        self._cells |= {cell.name: cell for cell in cells}
        self._states = dict.fromkeys((cell.name for cell in cells), State.WAITING) | self._states

    def changed(self, cell: Cell, state: State, reason: str = "") -> None:
        """Note a cell's state, and say so where there is no live table."""
        was_running = self._states[cell.name] is State.RUNNING
        self._states[cell.name] = state
        if state is State.RUNNING:
            self._started[cell.name] = (time.monotonic(), iterations_done(cell.folder))
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
                (since, first), done = self._started[cell.name], iterations_done(cell.folder)
                pace = f"{(time.monotonic() - since) / (done - first):.3f}" if done > first else ""
                table.add_row(cell.name, str(done), str(cell.config.training.last_iteration), pace)
        line = ", ".join(f"{counts[state]} {state.value}" for state in State if counts[state])
        return Group(Text(line + self._left()), table)

    def _left(self) -> str:
        """The time that is left at the pace of all cells together so far."""
        done = {name: iterations_done(cell.folder) for name, cell in self._cells.items()}
        done_here = sum(done[name] - first for name, (_, first) in self._started.items())
        remaining = sum(
            self._cells[name].config.training.last_iteration - done[name]
            for name, state in self._states.items()
            if state in (State.RUNNING, State.WAITING)
        )
        if done_here <= 0 or not remaining:
            return ""
        return f", {duration((time.monotonic() - self._begun) / done_here * remaining)} left"


def duration(seconds: float) -> str:
    for unit, size in (("days", 86400.0), ("h", 3600.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds / 60:.0f} min" if seconds >= 120 else f"{seconds:.0f} s"
