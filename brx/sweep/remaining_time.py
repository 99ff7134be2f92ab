"""How long the cells of a sweep will still take."""

from __future__ import annotations

import json
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from brx.config.schema import RunConfig
from brx.config.user_code import allowed
from brx.environment import num_cores
from brx.errors import UserError, counted
from brx.model.sizes import count_parameters
from brx.runs.folder import RunFolder
from brx.sweep.cell import Cell
from brx.sweep.state import State, iterations_done, state_of
from brx.train.build import assemble
from brx.train.device import choose_device, set_up

WARM_UP = 3  # iterations of a calibration that are not measured
MEASURED = 10  # iterations that are; one refresh of the default interval is among them
MOST_CALIBRATION_S = 3.0  # per kind of cell; a busy machine makes fewer iterations in it
LOADED = 0.5  # from this load on, a calibration is disturbed
LARGEST_ON_CPU = 20_000_000  # parameters up to which a calibration on a CPU takes seconds


@dataclass(frozen=True)
class Estimate:
    """About how long cells will take."""

    seconds: float
    is_calibrated: bool
    """Whether the pace of some cells was measured just now; else all come from finished cells."""
    load: float
    """How many processes wanted a core before the measurement: the mean of the last minute."""

    @property
    def basis(self) -> str:
        """What the estimate rests on, in words."""
        if not self.is_calibrated:
            return "by the times of finished cells, without starts, validations and checkpoints"
        text = (
            "by a few seconds of training just now, one cell alone; starts, validations and "
            "checkpoints come on top"
        )
        if self.load >= LOADED:
            text += (
                f"; the machine was busy meanwhile (load {self.load:.1f} on "
                f"{counted(num_cores(), 'core')}), so the estimate holds only if it stays so"
            )
        return text


def remaining_time(
    cells: Sequence[Cell], num_jobs: int, say: Callable[[str], None], *, retry_failed: bool = False
) -> Estimate | None:
    """About how long cells will take that are not done yet.

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
    load = os.getloadavg()[0]  # before the calibrations add to it
    is_calibrated = False
    total = 0.0
    for cell in cells:
        if state_of(cell) in ended:
            continue
        kind = cost_kind(cell.config)
        if kind not in rates:
            say(f"calibrating {cell.name}, for at most about {MOST_CALIBRATION_S:g} s ...")
            rates[kind] = calibrate(cell.config)
            is_calibrated = True
        rate = rates[kind]
        if rate is None:
            return None
        total += (cell.config.training.last_iteration - iterations_done(cell.folder)) * rate
    return Estimate(total / num_jobs, is_calibrated, load)


def _known_rates(cells: Sequence[Cell]) -> dict[str, float | None]:
    """The mean seconds per iteration of finished cells, by `cost_kind`."""
    rates = defaultdict(list)
    for cell in cells:
        rate = _rate_of_finished(RunFolder(cell.folder).read_summary())
        if rate is not None:
            rates[cost_kind(cell.config)].append(rate)
    return {kind: statistics.fmean(values) for kind, values in rates.items()}


def _rate_of_finished(summary: Mapping[str, Any]) -> float | None:
    """The seconds per iteration of a finished run; None for others, and if they are not known."""
    seconds = summary.get("training_seconds")
    iterations = summary.get("iteration", 0)
    is_measured = isinstance(seconds, int | float) and seconds > 0 and iterations > 0
    if summary.get("status") != "finished" or not is_measured:
        return None
    return float(seconds / iterations)


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
