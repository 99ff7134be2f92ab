"""Memory as tables: of basis rotation for any matrices, of a run's stages and devices (`brx plan`, `brx memory`)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

from rich.table import Table

from brx.config.schema import RunConfig
from brx.errors import UserError
from brx.model.sizes import stage_shapes
from brx.model.stage import is_block_matrix
from brx.pipeline.delay import stage_delays
from brx.planning.plan import RANK_PARTS, STAGE_PARTS, RankMemory
from brx.planning.strategy_overhead import overhead_texts

UNITS = {"GB": 10**9, "MB": 10**6, "kB": 10**3}


def overhead_table(shapes: Mapping[tuple[int, int], int], names: Mapping[tuple[int, int], str]) -> Table:
    """What every strategy keeps beyond Adam's moments: one row per strategy.

    Args:
        shapes: how many matrices there are of each shape (m, n).
        names: of some shapes, for the headings.
    """
    title, texts = overhead_texts(shapes, names)
    table = Table(title=title, title_justify="left")
    for column in texts.columns:
        table.add_column(column, no_wrap=True, justify="left" if column in texts.columns[:4] else "right")
    for row in texts.to_numpy().tolist():
        table.add_row(*row)
    return table


def matrices_of(config: RunConfig) -> Counter[tuple[int, int]]:
    """How often each shape of rotated matrix (experts counted one by one) is in a configuration's model."""
    matrices: Counter[tuple[int, int]] = Counter()
    shapes = stage_shapes(config.model, config.data.vocabulary_size, range(config.model.blocks))
    for parameter, shape in shapes.items():
        if is_block_matrix(parameter):
            *lead, rows, columns = shape
            matrices[rows, columns] += math.prod(lead)
    return matrices


def parse_matrix(text: str) -> tuple[int, int]:
    """`4096x14336` as (rows, columns).

    Raises:
        UserError: it is not of this form.
    """
    sides = text.lower().split("x")
    if len(sides) != 2 or not all(side.isdecimal() and int(side) > 0 for side in sides):
        raise UserError(f"--matrix {text}: write rows x columns, for example 4096x14336")
    return int(sides[0]), int(sides[1])


def rank_table(config: RunConfig, ranks: Sequence[RankMemory], device_memory: float | None = None) -> Table:
    """One row per rank; with the memory of a device, whether the rank fits into it."""
    parts = [part for part in (*RANK_PARTS, "peak") if part != "probe" or config.logging.staleness_every is not None]
    unit, unit_bytes = _unit(max(rank.peak for rank in ranks))
    title = f"{_run(config, ranks)}: {sum(rank.num_parameters for rank in ranks):,} parameters; {unit} per rank"
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
    if config.logging.staleness_every is not None:
        notes.append("Probe: what logging.staleness_every keeps; its second pass comes beside the update's gradients.")
    if config.runtime.compile:
        notes.append("Activations are those of uncompiled blocks; compiled ones (runtime.compile) keep less.")
    return notes


def stage_table(config: RunConfig, ranks: Sequence[RankMemory]) -> Table:
    """One row per stage, with its delay and its rank."""
    stages = [(rank.rank, stage) for rank in ranks for stage in rank.by_stage]
    unit, unit_bytes = _unit(min(stage.weights for _, stage in stages))
    table = _table(f"{_run(config, ranks)}; {unit} per stage", ("stage", "rank", "delay", "parameters", *STAGE_PARTS))
    delays = stage_delays(config.pipeline)
    for rank, stage in stages:
        delay = delays[stage.stage].tau
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
