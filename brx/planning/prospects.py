"""A plan in sentences: whether a run fits, and how long it takes."""

from __future__ import annotations

from brx.config.quantities import parse_flops
from brx.config.schema import RunConfig
from brx.errors import UserError
from brx.model.sizes import training_flops
from brx.model.stage import partition
from brx.planning.device_peaks import PEAKS, peak_flops
from brx.planning.idle import Idle, synchronous_idle
from brx.planning.plan import (
    RankMemory,
    fits,
    most_ranks,
    plan_memory,
    rank_flops,
    smallest_num_ranks,
    what_would_fit,
)

UTILIZATION = 0.4
"""Assumed share of a data sheet's peak."""


def parse_throughput(text: str, precision: str) -> float:
    """FLOP/s from a number, or from a device's name.

    Raises:
        UserError: it is neither.
    """
    peak = peak_flops(text, precision)
    if peak is not None:
        return UTILIZATION * peak
    if text[:1].isdigit():
        return parse_flops(text, "--throughput")
    raise UserError(f"--throughput {text}: write FLOP/s as a number, for example 120T, or one of: {', '.join(PEAKS)}")


def fit_line(config: RunConfig, ranks: list[RankMemory], device_type: str, memory: float) -> str:
    """Whether it fits into `memory` bytes per device, on how few devices it would, and otherwise what would."""
    smallest = smallest_num_ranks(config, device_type, memory)
    least = f"the smallest R that fits is {smallest}"
    if smallest is None:
        most = most_ranks(config)
        finest = max(
            plan_memory(config, device_type, partition(config.pipeline.stages, most)), key=lambda rank: rank.peak
        )
        least = f"even R = {most} needs {finest.peak / 1e9:.1f} GB on rank {finest.rank}"
    if fits(ranks, memory):
        return f"Fits into {memory / 1e9:.1f} GB per device; {least}."
    remedies = what_would_fit(config, device_type, memory)
    would = f" Would fit: {' or '.join(remedies)}." if remedies else ""
    return f"Does not fit into {memory / 1e9:.1f} GB per device; {least}.{would}"


def time_lines(config: RunConfig, throughput: float | None) -> list[str]:
    """Multiplications, time at `throughput` FLOP/s per device, and what a synchronous pipeline would lose."""
    training, num_ranks = config.training, config.pipeline.devices
    ranges = partition(config.pipeline.stages, num_ranks)
    by_rank = [rank_flops(config, own) for own in ranges]
    examples = config.pipeline.accumulation * training.batch_size
    model = training_flops(config.model, config.data.vocabulary_size, examples)
    lines = [
        f"FLOPs per iteration: {model / 1e12:.3g} T for the model, {(sum(by_rank) - model) / 1e12:.3g} T for"
        f" recomputation and the method's matrix products; the busiest rank does {max(by_rank) / sum(by_rank):.0%}."
    ]
    if num_ranks > 1:
        # Its own micro-batches per update have this trajectory's data; more of them are smaller, or a larger batch.
        counts = sorted({config.pipeline.accumulation, 1, 2, 4, training.batch_size})
        shares = ", ".join(f"{_flushed(num_ranks, count).share:.0%} with {count}" for count in counts)
        lines.append(f"A synchronous pipeline would idle {shares} micro-batches per update; this one does not.")
    if throughput is None:
        lines.append("For the time, give --throughput (FLOP/s per device as measured, or a device's name).")
        return lines
    seconds = max(by_rank) / throughput
    hours = seconds * training.last_iteration / 3600
    factor = _flushed(num_ranks, config.pipeline.accumulation).time_factor
    lines.append(
        f"At {throughput / 1e12:.4g} TFLOP/s per device: {seconds:.3g} s per iteration,"
        f" {training.last_iteration:,} iterations in {hours:.3g} h on {num_ranks} device(s)"
        + (f"; synchronously {hours * factor:.3g} h." if num_ranks > 1 else ".")
    )
    return lines


def _flushed(num_ranks: int, num_micro_batches: int) -> Idle:
    """Of GPipe and 1F1B, which wait equally long and exist for any number of micro-batches."""
    idle = synchronous_idle("1F1B", num_ranks, num_micro_batches)
    assert idle is not None
    return idle
