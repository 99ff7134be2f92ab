"""Memory as tables of texts: of basis rotation for any matrices, of a run's stages and devices."""

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from decimal import ROUND_HALF_UP, Decimal

import pandas as pd

from brx.config.schema import RunConfig
from brx.errors import UserError
from brx.model.sizes import FP32, stage_sizes
from brx.pipeline.delay import stage_delays
from brx.planning.margin import usable
from brx.planning.plan import (
    RANK_PARTS,
    STAGE_PARTS,
    STRATEGIES,
    Memory,
    matrices,
    overhead_elements,
)

UNITS = {"GB": 10**9, "MB": 10**6, "kB": 10**3}
BINARY_UNITS = {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10}


def overhead_texts(
    shapes: Mapping[tuple[int, int], int], names: Mapping[tuple[int, int], str]
) -> tuple[str, pd.DataFrame]:
    """What each strategy keeps beyond Adam's moments, in fp32, for a number of matrices by shape
    (m, n)."""
    largest = max(FP32 * overhead_elements(shape, *STRATEGIES[0]) for shape in shapes)
    unit, unit_bytes = _unit(20 * largest, BINARY_UNITS)
    moments = 2 * FP32 * sum(math.prod(shape) * count for shape, count in shapes.items())
    rows = []
    for source, geometry in STRATEGIES:
        formula = "m^2 + n^2" if geometry == "bilateral" else "min(m, n)^2"
        row = {"source": source, "geometry": geometry, "rotation": formula}
        row["covariances"] = formula if source == "2nd" else "--"
        total = 0
        for shape, count in shapes.items():
            size = FP32 * overhead_elements(shape, source, geometry)
            total += size * count
            name = f"{names[shape]} " if shape in names else ""
            heading = f"{name}{shape[0]}x{shape[1]}" + (f" ({count} of them)" if count > 1 else "")
            row[heading] = _two_decimals(size, unit_bytes)
        if max(shapes.values()) > 1:
            row[f"all, {unit}"] = _two_decimals(total, unit_bytes)
        rows.append(row | {"share of Adam's moments": f"{total / moments:.1%}"})
    return f"Memory beyond Adam's moments, {unit} per matrix (fp32)", pd.DataFrame(rows)


def _two_decimals(num_bytes: int, unit_bytes: int) -> str:  # halves up, as in the paper's table
    return str((Decimal(num_bytes) / Decimal(unit_bytes)).quantize(Decimal("0.01"), ROUND_HALF_UP))


def matrices_of(config: RunConfig) -> Counter[tuple[int, int]]:
    """How often each shape of rotated matrix (experts counted one by one) is in a configuration's
    model."""
    counts: Counter[tuple[int, int]] = Counter()
    for *lead, m, n in matrices(
        stage_sizes(config.model, config.data.vocabulary_size, range(config.model.blocks))
    ):
        counts[m, n] += math.prod(lead)
    return counts


def parse_matrix(text: str) -> tuple[int, int]:  # rows, columns
    match = re.fullmatch(r"0*([1-9]\d{0,8})x0*([1-9]\d{0,8})", text.lower())
    if match is None:
        raise UserError(f"--matrix {text}: write rows x columns, for example 4096x14336")
    return int(match[1]), int(match[2])


def rank_table(
    config: RunConfig, ranks: Sequence[Memory], device_memory: float | None = None
) -> tuple[str, pd.DataFrame]:
    """Title, and a row per rank; with the memory of a device, whether the rank fits into it."""
    unit, unit_bytes = _unit(max(rank.peak for rank in ranks))
    parts = [
        part
        for part in (*RANK_PARTS, "peak")
        if part != "probe" or config.logging.staleness_every is not None
    ]
    rows = []
    for number, rank in enumerate(ranks):
        row = {"rank": str(number), "stages": f"{rank.stages[0]}-{rank.stages[-1]}"}
        row["parameters"] = _millions(rank.num_parameters)
        row |= {part: f"{getattr(rank, part) / unit_bytes:.2f}" for part in parts}
        if device_memory is not None:
            row["fits"] = "yes" if rank.peak <= usable(device_memory) else "no"
        rows.append(row)
    title = (
        f"{_run(config, ranks)}: {sum(rank.num_parameters for rank in ranks):,} parameters; "
        f"{unit} per rank"
    )
    return title, pd.DataFrame(rows)


def rank_notes(config: RunConfig) -> list[str]:
    notes = [
        "Peak: weights, gradients, moments, rotation and rings, with the larger of activations + "
        "logits and what an update takes beside the activations of the micro-batches that are "
        "under way then."
    ]
    if config.logging.staleness_every is not None:
        notes.append(
            "Probe: what logging.staleness_every keeps; its second pass comes beside the update's "
            "gradients."
        )
    if config.runtime.compile:
        notes.append(
            "Activations are those of uncompiled blocks; compiled ones (runtime.compile) keep less."
        )
    return notes


def stage_table(config: RunConfig, ranks: Sequence[Memory]) -> tuple[str, pd.DataFrame]:
    """Title, and a row per stage, with its delay and its rank."""
    unit, unit_bytes = _unit(min(stage.weights for rank in ranks for stage in rank.by_stage))
    delays, rows = stage_delays(config.pipeline), []
    for number, rank in enumerate(ranks):
        for index, stage in zip(rank.stages, rank.by_stage, strict=True):
            row = {"stage": str(index), "rank": str(number), "delay": str(delays[index].tau)}
            row["parameters"] = _millions(stage.num_parameters)
            rows.append(
                row | {part: f"{getattr(stage, part) / unit_bytes:,.1f}" for part in STAGE_PARTS}
            )
    return f"{_run(config, ranks)}; {unit} per stage", pd.DataFrame(rows)


def _run(config: RunConfig, ranks: Sequence[Memory]) -> str:
    return f"{config.optimizer.method}, P = {config.pipeline.stages}, R = {len(ranks)}"


def _millions(count: int) -> str:
    return f"{count / 1e6:,.1f} M" if count >= 1e6 else f"{count / 1e3:,.1f} k"


def _unit(
    num_bytes: int, units: Mapping[str, int] = UNITS
) -> tuple[str, int]:  # the largest of which there is one
    return next(((unit, size) for unit, size in units.items() if num_bytes >= size), ("bytes", 1))
