"""Tables of memory, as texts: for basis rotation of any matrices, and for a run's stages and
devices."""

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from decimal import ROUND_HALF_UP, Decimal

import pandas as pd

from brx.config.schema import RunConfig
from brx.errors import UserError
from brx.methods.trial import trial_of
from brx.model.sizes import FP32, stage_sizes
from brx.pipeline.delay import stage_delays
from brx.planning.margin import usable
from brx.planning.placement import present
from brx.planning.plan import (
    CHANNEL_BYTES,
    NUM_COMMUNICATORS,
    OPTIONAL_PARTS,
    P2P_CHANNELS,
    RANK_PARTS,
    STAGE_PARTS,
    STRATEGIES,
    RankMemory,
    overhead_elements,
)
from brx.planning.update_memory import matrices

DECIMAL_UNITS = {"GB": 10**9, "MB": 10**6, "kB": 10**3}
BINARY_UNITS = {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10}
Shape = tuple[int, int]  # m rows, n columns


def overhead_texts(
    shapes: Mapping[Shape, int], names: Mapping[Shape, str]
) -> tuple[str, pd.DataFrame]:
    """A title, and a table of the memory that each strategy keeps beyond Adam's moments, in fp32
    (the paper's appendix "Memory Overhead Analysis").

    Args:
        shapes: how many matrices there are of each shape.
        names: the names of shapes that have one.
    """
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
            row[_heading(shape, count, names)] = _two_decimals(size, unit_bytes)
        if max(shapes.values()) > 1:
            row[f"all, {unit}"] = _two_decimals(total, unit_bytes)
        row["share of Adam's moments"] = f"{total / moments:.1%}"
        rows.append(row)
    return f"Memory beyond Adam's moments, {unit} per matrix (fp32)", pd.DataFrame(rows)


def _heading(shape: Shape, count: int, names: Mapping[Shape, str]) -> str:
    name = f"{names[shape]} " if shape in names else ""
    times = f" ({count} of them)" if count > 1 else ""
    return f"{name}{shape[0]}x{shape[1]}{times}"


def _two_decimals(num_bytes: int, unit_bytes: int) -> str:
    """A size in a unit, with two decimals. Halves are rounded up, as in the paper's table."""
    number = Decimal(num_bytes) / Decimal(unit_bytes)
    return str(number.quantize(Decimal("0.01"), ROUND_HALF_UP))


def matrix_counts(config: RunConfig) -> Counter[Shape]:
    """How often each shape of rotated matrix is in a configuration's model; experts count one by
    one."""
    counts: Counter[Shape] = Counter()
    blocks = range(config.model.blocks)
    for *lead, m, n in matrices(stage_sizes(config.model, config.data.vocabulary_size, blocks)):
        counts[m, n] += math.prod(lead)
    return counts


def parse_matrix(text: str) -> Shape:
    """Rows and columns of `4096x14336`.

    Raises:
        UserError: it has no such form.
    """
    match = re.fullmatch(r"0*([1-9]\d{0,8})x0*([1-9]\d{0,8})", text.lower())
    if match is None:
        raise UserError(f"--matrix {text}: write rows x columns, for example 4096x14336")
    return int(match[1]), int(match[2])


def rank_table(
    config: RunConfig, ranks: Sequence[RankMemory], device_memory: float | None = None
) -> tuple[str, pd.DataFrame]:
    """Title, and a row per rank; with the memory of a device, whether the rank fits into it."""
    unit, unit_bytes = _unit(max(rank.peak for rank in ranks))
    optional = [part for part in OPTIONAL_PARTS if any(getattr(rank, part) for rank in ranks)]
    rows = []
    for number, rank in enumerate(ranks):
        row = {"rank": str(number), "stages": f"{rank.stages[0]}-{rank.stages[-1]}"}
        row["parameters"] = _millions(rank.num_parameters)
        for part in (*RANK_PARTS, *optional, "peak"):
            row[_part_heading(part, rank)] = f"{getattr(rank, part) / unit_bytes:.2f}"
        if device_memory is not None:
            row["fits"] = "yes" if rank.peak <= usable(device_memory) else "no"
        rows.append(row)
    num_parameters = sum(rank.num_parameters for rank in ranks)
    title = f"{_run(config, ranks)}: {num_parameters:,} parameters; {unit} per rank"
    return title, pd.DataFrame(rows)


def _part_heading(part: str, rank: RankMemory) -> str:
    """The heading of a column. On a GPU, the copy for a checkpoint is in host memory, and not part
    of the peak."""
    return f"{part} (host)" if part == "checkpoint" and rank.host else part


def rank_notes(config: RunConfig, ranks: Sequence[RankMemory]) -> list[str]:
    """The items of the highest peak, and the assumptions behind them."""
    notes = [_peak_line(ranks)]
    notes += _host_lines(ranks)
    if any(rank.checkpoint for rank in ranks):
        notes.append(
            "Checkpoint: one copy of all that is saved, from which a thread writes "
            "(checkpoint.background)."
        )
    if any(rank.communicators for rank in ranks):
        notes.append(
            f"Communicators: {NUM_COMMUNICATORS} of NCCL, each with at most {P2P_CHANNELS} "
            f"channels of {CHANNEL_BYTES // 2**20} MiB per neighbour; assumed, not measured "
            f"(NCCL_MAX_P2P_NCHANNELS and NCCL_BUFFSIZE lower it)."
        )
    if any(rank.graphs for rank in ranks):
        notes.append(
            "Graphs: all CUDA graphs share a pool as large as the working memory of the largest; "
            "updates and validations outside of graphs need memory in addition."
        )
    if config.logging.staleness_every is not None:
        notes.append("Probe: the tensors that logging.staleness_every keeps.")
    if config.runtime.compile:
        notes.append(
            "Activations are counted for a model that is not compiled; a compiled one "
            "(runtime.compile) keeps less."
        )
    assumed = trial_of(config).assumed
    if assumed is not None:
        notes.append(f"Moments of {config.optimizer.method}: {assumed}.")
    return notes


def _host_lines(ranks: Sequence[RankMemory]) -> list[str]:
    """The host memory that ranks on GPUs take."""
    fullest = max(ranks, key=lambda rank: rank.host)
    if not fullest.host:
        return []
    unit, unit_bytes = _unit(fullest.host)
    rings = fullest.host - fullest.checkpoint
    items = []
    if fullest.checkpoint:
        items.append(f"the copy for a checkpoint {fullest.checkpoint / unit_bytes:.2f}")
    if rings:
        items.append(f"rings {rings / unit_bytes:.2f} (torch may pin twice as much)")
    total = f"{fullest.host / unit_bytes:.2f} {unit}"
    return [f"Host memory of a rank: up to {total}: {'; '.join(items)}."]


def _peak_line(ranks: Sequence[RankMemory]) -> str:
    """For example `Peak: 37.3 GB on rank 0, during an update: rings 14.9, update 8.4, ...`."""
    peaks = [rank.peak for rank in ranks]
    fullest = ranks[peaks.index(max(peaks))]
    unit, unit_bytes = _unit(fullest.peak)
    items = ", ".join(f"{name} {size / unit_bytes:.2f}" for name, size in present(fullest.fullest))
    number = peaks.index(max(peaks))
    total = f"{fullest.peak / unit_bytes:.2f} {unit}"
    return f"Peak: {total} on rank {number}, at {fullest.fullest.name}: {items}."


def stage_table(config: RunConfig, ranks: Sequence[RankMemory]) -> tuple[str, pd.DataFrame]:
    """Title, and a row per stage, with its delay and its rank."""
    unit, unit_bytes = _unit(min(stage.weights for rank in ranks for stage in rank.by_stage))
    delays = stage_delays(config.pipeline)
    rows = []
    for number, rank in enumerate(ranks):
        for stage in rank.by_stage:
            delay = delays[stage.index].tau
            row = {"stage": str(stage.index), "rank": str(number), "delay": str(delay)}
            row["parameters"] = _millions(stage.num_parameters)
            for part in STAGE_PARTS:
                row[part] = f"{getattr(stage, part) / unit_bytes:,.1f}"
            rows.append(row)
    return f"{_run(config, ranks)}; {unit} per stage", pd.DataFrame(rows)


def _run(config: RunConfig, ranks: Sequence[RankMemory]) -> str:
    return f"{config.optimizer.method}, P = {config.pipeline.stages}, R = {len(ranks)}"


def _millions(count: int) -> str:
    return f"{count / 1e6:,.1f} M" if count >= 1e6 else f"{count / 1e3:,.1f} k"


def _unit(num_bytes: int, units: Mapping[str, int] = DECIMAL_UNITS) -> tuple[str, int]:
    """The largest unit that gives a number of at least 1, with its bytes."""
    for unit, size in units.items():
        if num_bytes >= size:
            return unit, size
    return "bytes", 1
