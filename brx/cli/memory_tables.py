"""The memory of a run's stages and devices as tables: `brx plan`, `brx memory`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.table import Table

from brx.planning.plan import RANK_PARTS, STAGE_PARTS

if TYPE_CHECKING:
    from brx.config.schema import RunConfig
    from brx.planning.plan import RankMemory

UNITS = {"GB": 10**9, "MB": 10**6, "kB": 10**3}


def rank_table(config: RunConfig, ranks: Sequence[RankMemory], device_memory: float | None = None) -> Table:
    """One row a rank; with the memory of a device, whether the rank fits into it."""
    parts = (*RANK_PARTS, "peak")
    unit, unit_bytes = _unit(max(rank.peak for rank in ranks))
    title = f"{_run(config, ranks)}: {sum(rank.num_parameters for rank in ranks):,} parameters; {unit} a rank"
    table = _table(title, ("rank", "stages", "parameters", *parts, *([] if device_memory is None else ["fits"])))
    for rank in ranks:
        cells = [f"{getattr(rank, part) / unit_bytes:.2f}" for part in parts]
        verdict = [] if device_memory is None else ["yes" if rank.peak <= device_memory else "no"]
        stages = f"{rank.stages.start}-{rank.stages.stop - 1}"
        table.add_row(str(rank.rank), stages, _millions(rank.num_parameters), *cells, *verdict)
    return table


def rank_notes(config: RunConfig) -> list[str]:
    """What to know to read a table of ranks."""
    notes = [
        "Peak: weights, moments, rotation and rings, with the larger of activations + logits and gradients + update,"
        " which are not there at one time."
    ]
    if config.runtime.compile:
        notes.append("Activations are those of uncompiled blocks; compiled ones (runtime.compile) keep less.")
    return notes


def stage_table(config: RunConfig, ranks: Sequence[RankMemory]) -> Table:
    """One row a stage, with its delay and its rank."""
    from brx.pipeline.delay import stage_delay

    stages = [(rank.rank, stage) for rank in ranks for stage in rank.by_stage]
    unit, unit_bytes = _unit(min(stage.weights for _, stage in stages))
    table = _table(f"{_run(config, ranks)}; {unit} a stage", ("stage", "rank", "delay", "parameters", *STAGE_PARTS))
    for rank, stage in stages:
        delay = stage_delay(stage.stage, config.pipeline.stages)
        cells = [f"{getattr(stage, part) / unit_bytes:,.1f}" for part in STAGE_PARTS]
        table.add_row(str(stage.stage), str(rank), str(delay), _millions(stage.num_parameters), *cells)
    return table


def _run(config: RunConfig, ranks: Sequence[RankMemory]) -> str:
    return f"{config.optimizer.method}, P = {config.pipeline.stages}, R = {len(ranks)}"


def _table(title: str, columns: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def _millions(count: int) -> str:
    return f"{count / 1e6:,.1f} M" if count >= 1e6 else f"{count / 1e3:,.1f} k"


def _unit(num_bytes: int) -> tuple[str, int]:
    """The largest unit of which there is at least one."""
    return next(((unit, size) for unit, size in UNITS.items() if num_bytes >= size), ("bytes", 1))
