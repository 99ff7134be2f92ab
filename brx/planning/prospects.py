"""A plan in sentences: whether a run fits, how long it takes, and how long the best synchronous one would."""

from __future__ import annotations

from brx.config.schema import RunConfig
from brx.model.sizes import training_flops
from brx.model.stage import partition
from brx.planning.cuts import first_that_fits
from brx.planning.plan import (
    RankMemory,
    fits,
    most_ranks,
    plan_memory,
    rank_flops,
    smallest_num_ranks,
    what_would_fit,
)
from brx.planning.planned_run import PlannedRun


def fit_line(config: RunConfig, ranks: list[RankMemory], device_type: str, memory: float) -> str:
    """Whether it fits into `memory` bytes per device, on how few devices it would, and otherwise what would."""
    smallest = smallest_num_ranks(config, device_type, memory)
    least = f"the smallest R that fits is {smallest}"
    if smallest is None:
        finest = partition(config.pipeline.stages, most_ranks(config))
        largest = max(plan_memory(config, device_type, finest), key=lambda rank: rank.peak)
        least = f"even R = {len(finest)} needs {largest.peak / 1e9:.1f} GB on rank {largest.rank}"
    if fits(ranks, memory):
        return f"Fits into {memory / 1e9:.1f} GB per device; {least}."
    remedies = what_would_fit(config, device_type, memory)
    would = f" Would fit: {' or '.join(remedies)}." if remedies else ""
    return f"Does not fit into {memory / 1e9:.1f} GB per device; {least}.{would}"


def time_lines(run: PlannedRun) -> list[str]:
    """Multiplications, the time of an iteration and of all, and those of the best synchronous cut of the same examples.

    The memory of the run's devices, where it is known, limits the synchronous cuts, too.
    """
    config, num_ranks = run.config, run.num_ranks
    training = config.training
    by_rank = [rank_flops(config, own) for own in partition(config.pipeline.stages, num_ranks)]
    examples = config.pipeline.accumulation * training.batch_size
    model = training_flops(config.model, config.data.vocabulary_size, examples)
    lines = [run.uneven] if run.uneven else []
    lines += [
        f"FLOPs per iteration: {model / 1e12:.3g} T for the model, {(sum(by_rank) - model) / 1e12:.3g} T for"
        f" recomputation and the method's matrix products; the busiest rank does {max(by_rank) / sum(by_rank):.0%}."
    ]
    ours = run.asynchronous({}, None)
    seconds = run.seconds(ours)
    if seconds is None or run.throughput is None:
        lines.append("For the time, give --throughput (FLOP/s per device as measured, or a device's name).")
    else:
        hours = seconds * training.last_iteration / 3600
        lines.append(
            f"At {run.throughput / 1e12:.4g} TFLOP/s per device: {seconds:.3g} s per iteration,"
            f" {training.last_iteration:,} iterations in {hours:.3g} h on {num_ranks} device(s)."
        )
    if num_ranks == 1:
        return lines
    best = first_that_fits(run.synchronous({}, None), run.memory)
    if best is None:
        return [*lines, "No synchronous cut of the same examples fits."]
    took = "" if seconds is None else f": {hours * best.time / ours.time:.3g} h"
    assert best.memory is not None
    lines.append(
        f"The best synchronous cut of the same {examples} examples, {best.schedule} with {best.num_micro_batches}"
        f" micro-batches, takes {best.time / ours.time:.2f} times the time per iteration{took}. Its devices wait for"
        f" {best.idle:.0%} of the passes' time, the busiest needs {best.memory / 1e9:.1f} GB."
    )
    return lines
