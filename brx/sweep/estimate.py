"""How long a sweep will take: from its finished runs where there are any, else from a short calibration."""

from __future__ import annotations

import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence

import torch

from brx.config.schema import RunConfig
from brx.model.stage import Stage, count_parameters
from brx.runs.folder import RunFolder
from brx.sweep.cell_state import State, iterations_done, state_of
from brx.sweep.spec import Cell
from brx.train.build import assemble
from brx.train.device import choose_device, set_up

WARM_UP, MEASURED = 3, 10  # one refresh of the default interval is among them
LARGEST_ON_CPU = 20_000_000
"""Parameters up to which a calibration on a CPU takes seconds."""


def remaining_seconds(
    cells: Sequence[Cell], num_jobs: int, say: Callable[[str], None], *, retry_failed: bool = False
) -> float | None:
    """Expected time of what is left, with `num_jobs` cells at a time; None if it cannot be told here."""
    ended = (State.DONE,) if retry_failed else (State.DONE, State.FAILED)
    rates = measured_rates(cells)
    total = 0.0
    for cell in cells:
        if state_of(cell) in ended:
            continue
        kind = cost_kind(cell.config)
        if kind not in rates:
            say(f"calibrating {cell.name} ...")
            rates[kind] = calibrate(cell.config)
        rate = rates[kind]
        if rate is None:
            return None
        total += (cell.config.training.last_iteration - iterations_done(cell.folder)) * rate
    return total / num_jobs


def measured_rates(cells: Sequence[Cell]) -> dict[str, float | None]:
    """Seconds per iteration of the finished cells, by kind."""
    seconds = defaultdict(list)
    for cell in cells:
        summary = RunFolder(cell.folder).read_summary()
        if summary.get("status") == "finished" and summary.get("training_seconds"):
            seconds[cost_kind(cell.config)].append(summary["training_seconds"] / summary["iteration"])
    return {kind: statistics.fmean(values) for kind, values in seconds.items()}


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
