"""`brx sweep` on the terminal: a dry run's list, and a sweep with its live display and what it leaves."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from typing import Literal

import torch
from rich.console import Console

from brx.config.schema import CustomConfig, RunConfig
from brx.errors import UserError
from brx.sweep.cell_state import state_of
from brx.sweep.choice import tried_cells
from brx.sweep.display import SweepDisplay, choice_table, duration, failure_table, write_choices
from brx.sweep.estimate import remaining_seconds
from brx.sweep.local import LocalLauncher
from brx.sweep.ray_cluster import RayLauncher
from brx.sweep.run import Launcher, choices_and_repetitions, run_sweep
from brx.sweep.spec import Sweep
from brx.train.device import choose_device
from brx.train.method_check import check_method


def check_own_methods(sweeps: Sequence[Sweep]) -> None:
    """Refuse a user's own method that cannot train, before anything is paid for any run of any sweep.

    Raises:
        UserError: see `brx.train.method_check.check_method`.
    """
    checked = []
    for cell in (cell for sweep in sweeps for cell in sweep.cells):
        optimizer = cell.config.optimizer
        if isinstance(optimizer, CustomConfig):
            asked = (optimizer.method, optimizer.arguments, cell.config.pipeline)
            if asked not in checked:
                check_method(cell.config, _trial_device(cell.config))
                checked.append(asked)


def _trial_device(config: RunConfig) -> torch.device:
    """The cell's, or the CPU where a machine without it starts the sweep of others."""
    try:
        return choose_device(config.runtime.device)[0]
    except UserError:
        return torch.device("cpu")


def list_cells(sweep: Sweep, jobs: int | None, *, retry_failed: bool) -> None:
    """Print every cell with its state, and about how long the rest will take with so many jobs at a time."""
    console = Console(highlight=False)
    cells = tried_cells(sweep)
    _, repetitions = choices_and_repetitions(sweep, cells)
    states = {cell.name: state_of(cell) for cell in cells}
    for name, state in states.items():
        console.print(f"{state.value:12}{name}", soft_wrap=True, markup=False)
    num_jobs = _local(sweep, jobs).num_jobs
    left = remaining_seconds(
        [*cells, *repetitions],
        num_jobs,
        lambda line: Console(stderr=True).print(line, highlight=False),
        retry_failed=retry_failed,
    )
    counts = ", ".join(f"{count} {state.value}" for state, count in Counter(states.values()).items())
    time = (
        f"about {duration(left)} with {num_jobs} at a time" if left is not None else "too large to time without a GPU"
    )
    more = f" and {len(repetitions)} repetitions of the chosen ones" if repetitions else ""
    console.print(f"{sweep.path}: {len(states)} cells{more} in {sweep.out}: {counts}; {time}", soft_wrap=True)


def make_launcher(
    kind: Literal["local", "ray"], sweep: Sweep, jobs: int | None, address: str | None
) -> AbstractContextManager[Launcher]:
    """Where the cells run, `jobs` at a time; a Ray cluster is left at the end of the context."""
    if kind == "ray":
        return closing(RayLauncher(jobs, sweep.cells, address))
    return nullcontext(_local(sweep, jobs))


def run_and_print(sweep: Sweep, launching: AbstractContextManager[Launcher], *, retry_failed: bool) -> bool:
    """Run the cells; print what was chosen and what failed. False if a cell failed."""
    with launching as launcher, SweepDisplay(launcher.num_jobs) as display:
        # From a terminal, a scheduler, or to a job in the background. After the launcher: Ray has a handler of its own.
        for stop in (signal.SIGINT, signal.SIGTERM):
            signal.signal(stop, signal.default_int_handler)
        outcome = run_sweep(sweep, launcher, display, retry_failed=retry_failed)
    console = Console(highlight=False)
    if outcome.choices is not None:
        assert sweep.spec.choose is not None
        console.print(choice_table(outcome.choices, sweep.spec.choose))
        for path in write_choices(outcome.choices, sweep):
            console.print(path, soft_wrap=True)
    if outcome.failures:
        console.print(failure_table(outcome.failures))
        return False
    console.print(f"{sweep.path}: all {len(outcome.cells)} cells are done, in {sweep.out}", soft_wrap=True)
    return True


def _local(sweep: Sweep, jobs: int | None) -> LocalLauncher:
    configs = [cell.config for cell in sweep.cells]
    on_gpus = any(config.runtime.device != "cpu" for config in configs)
    return LocalLauncher(jobs, max(config.pipeline.devices for config in configs), on_gpus=on_gpus)
