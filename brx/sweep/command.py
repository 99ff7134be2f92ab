"""`brx sweep` on the terminal: a dry run's list with the time it will take, and a sweep with its live display."""

from __future__ import annotations

import json
import signal
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Literal

import torch
from rich.console import Console
from rich.table import Table

from brx.config.schema import CustomConfig, RunConfig
from brx.errors import UserError
from brx.model.stage import Stage, count_parameters
from brx.runs.folder import RunFolder
from brx.sweep.cell_state import State, iterations_done, state_of
from brx.sweep.choice import choice_table, choices_and_repetitions, tried_cells, write_choices
from brx.sweep.launchers import Launcher, LocalLauncher, RayLauncher
from brx.sweep.run import duration, run_sweep
from brx.sweep.spec import Cell, Sweep
from brx.train.build import assemble, check_method
from brx.train.device import choose_device, set_up

WARM_UP, MEASURED = 3, 10  # one refresh of the default interval is among them
LARGEST_ON_CPU = 20_000_000
"""Parameters up to which a calibration on a CPU takes seconds."""


def check_own_methods(sweeps: Sequence[Sweep]) -> None:
    """Refuse a user's own method that cannot train (`check_method`), before anything is paid for any run."""
    asked = {}
    for config in (cell.config for sweep in sweeps for cell in sweep.cells):
        if isinstance(config.optimizer, CustomConfig):
            asked[repr((config.optimizer.method, config.optimizer.arguments, config.pipeline))] = config
    for config in asked.values():
        try:
            device = choose_device(config.runtime.device)[0]
        except UserError:  # a machine without it may start the sweep of others
            device = torch.device("cpu")
        check_method(config, device)


def list_cells(sweep: Sweep, jobs: int | None, *, retry_failed: bool) -> None:
    """Print every cell with its state, and about how long the rest will take with so many jobs at a time."""
    console = Console(highlight=False)
    cells = tried_cells(sweep)
    _, repetitions = choices_and_repetitions(sweep, cells)
    states = {cell.name: state_of(cell) for cell in cells}
    for name, state in states.items():
        console.print(f"{state.value:12}{name}", soft_wrap=True, markup=False)
    num_jobs = make_launcher("local", sweep, jobs, None).num_jobs
    say = Console(stderr=True, highlight=False).print
    left = remaining_seconds([*cells, *repetitions], num_jobs, say, retry_failed=retry_failed)
    counts = ", ".join(f"{count} {state.value}" for state, count in Counter(states.values()).items())
    time = "too large to time without a GPU" if left is None else f"about {duration(left)} with {num_jobs} at a time"
    more = f" and {len(repetitions)} repetitions of the chosen ones" if repetitions else ""
    console.print(f"{sweep.path}: {len(states)} cells{more} in {sweep.out}: {counts}; {time}", soft_wrap=True)


def make_launcher(kind: Literal["local", "ray"], sweep: Sweep, jobs: int | None, address: str | None) -> Launcher:
    if kind == "ray":
        return RayLauncher(jobs, sweep.cells, address)
    configs = [cell.config for cell in sweep.cells]
    on_gpus = any(config.runtime.device != "cpu" for config in configs)
    return LocalLauncher(jobs, max(config.pipeline.devices for config in configs), on_gpus=on_gpus)


def run_and_print(sweep: Sweep, launcher: Launcher, *, retry_failed: bool) -> bool:
    """Run the cells; print what was chosen and what failed. False if a cell failed."""
    with closing(launcher):
        # From a terminal, a scheduler, or to a job in the background. After the launcher: Ray has a handler of its own.
        for stop in (signal.SIGINT, signal.SIGTERM):
            signal.signal(stop, signal.default_int_handler)
        outcome = run_sweep(sweep, launcher, retry_failed=retry_failed)
    console = Console(highlight=False)
    if (rule := sweep.spec.choose) is not None and outcome.choices is not None:
        console.print(choice_table(outcome.choices, rule))
        path = sweep.out / f"choice-{sweep.path.stem}.csv"
        write_choices(outcome.choices, rule, path)
        console.print(path, soft_wrap=True)
    if outcome.failures:
        table = Table("failed cell", "why")
        for name, reason in outcome.failures.items():
            table.add_row(name, reason)
        console.print(table)
        return False
    console.print(f"{sweep.path}: all {len(outcome.cells)} cells are done, in {sweep.out}", soft_wrap=True)
    return True


def remaining_seconds(
    cells: Sequence[Cell], num_jobs: int, say: Callable[[str], None], *, retry_failed: bool = False
) -> float | None:
    """Expected time of what is left, with `num_jobs` cells at a time; None if it cannot be told here."""
    ended = (State.DONE,) if retry_failed else (State.DONE, State.FAILED)
    seconds = defaultdict(list)  # per iteration of the finished cells, by kind
    for cell in cells:
        summary = RunFolder(cell.folder).read_summary()
        if summary.get("status") == "finished" and summary.get("training_seconds"):
            seconds[cost_kind(cell.config)].append(summary["training_seconds"] / summary["iteration"])
    rates: dict[str, float | None] = {kind: statistics.fmean(values) for kind, values in seconds.items()}
    total = 0.0
    for cell in cells:
        if state_of(cell) in ended:
            continue
        kind = cost_kind(cell.config)
        if kind not in rates:
            say(f"calibrating {cell.name} ...")
            rates[kind] = calibrate(cell.config)
        if (rate := rates[kind]) is None:
            return None
        total += (cell.config.training.last_iteration - iterations_done(cell.folder)) * rate
    return total / num_jobs


def cost_kind(config: RunConfig) -> str:
    """What an iteration's time depends on: everything but the number of stages, rates, seeds and budget."""
    content = config.model_dump(mode="json", include={"model", "optimizer", "runtime"})
    content["optimizer"].pop("lr")
    content["batch"] = config.training.batch_size, config.pipeline.accumulation
    content["vocabulary"] = config.data.vocabulary_size
    content["stash"] = config.pipeline.stash
    return json.dumps(content, sort_keys=True)


def calibrate(config: RunConfig) -> float | None:
    """Seconds per iteration on this machine, with random tokens; None where that would take too long."""
    device, _ = choose_device(config.runtime.device, 0)
    with torch.device("meta"):
        model = Stage(config.model, config.data.vocabulary_size, range(config.model.blocks))
    if device.type == "cpu" and count_parameters([model]) > LARGEST_ON_CPU:
        return None
    set_up(config.runtime, device, 1)
    shape = (config.training.batch_size, config.model.sequence_length + 1)
    tokens = torch.randint(config.data.vocabulary_size, shape, device=device)
    engine = assemble(config, lambda iteration: (tokens[:, :-1], tokens[:, 1:]), device=device).engine
    started = 0.0
    for result in engine.run(1, lambda: WARM_UP + MEASURED):
        if result.iteration in (WARM_UP, WARM_UP + MEASURED):
            assert result.loss is not None
            result.loss.item()  # waits for a GPU
            elapsed, started = time.perf_counter() - started, time.perf_counter()
    return elapsed / MEASURED
