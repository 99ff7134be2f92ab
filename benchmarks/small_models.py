"""What basis rotation costs where the model is small: an iteration over AdamW's, at the sizes of laptop runs.

The smaller size is the preset `laptop`'s: by its times `brx claims` turns iterations saved into time.
Nesterov is timed as its fastest implementation has it, so that nobody gains by a slow baseline. All take turns in one
process, so that the ratios hold when the machine's speed drifts.

    python -m benchmarks.small_models [--threads 1] [--rounds 12] [--iterations 20]
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from torch.optim import NAdam

from benchmarks.report import Table
from brx.config.loading import apply_overrides
from brx.pipeline.engine import Engine, MicroBatch
from brx.train.build import assemble

WIDTH, SEQUENCE, BATCH, VOCABULARY = 32, 32, 4, 256
SIZES = ((8, 1), (8, 8), (32, 1), (32, 32))
"""(blocks, stages)."""
VARIANTS = {
    "pipedream": {"method": "pipedream"},
    "pipedream-lr": {"method": "pipedream-lr"},
    "nesterov": {"method": "nesterov"},
    "basis-rotation": {"method": "basis-rotation"},
    "basis-rotation, covariance at refreshes": {"method": "basis-rotation", "covariance": "refresh"},
    "basis-rotation 2nd/unilateral": {"method": "basis-rotation", "geometry": "unilateral"},
}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=12, help="turns of each variant")
    parser.add_argument("--iterations", type=int, default=20, help="iterations in a turn (a multiple of 10)")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    table = Table("small_models", ["blocks", "stages", "method", "ms / iteration (median)", "ratio to AdamW"])
    for blocks, stages in SIZES:
        times = measure(blocks, stages, options.rounds, options.iterations)
        for name, turns in times.items():
            ratio = statistics.median(a / b for a, b in zip(turns, times["pipedream"], strict=True))
            table.add(str(blocks), str(stages), name, f"{1e3 * statistics.median(turns):.2f}", f"{ratio:.2f}")
    table.write(
        f"d {WIDTH}, sequence {SEQUENCE}, batch {BATCH}, fp32, frequency 10, {options.threads} thread(s)",
        "nesterov: torch's NAdam over all parameters at once (foreach), the fastest that torch has on a CPU; brx's runs"
        " there go parameter by parameter, torch's default, which rounds otherwise.",
    )


def measure(blocks: int, stages: int, rounds: int, iterations: int) -> dict[str, list[float]]:
    """Seconds per iteration of each variant, turn by turn; the first turn warms up and is left out."""
    engines = {name: make_engine(blocks, stages, optimizer) for name, optimizer in VARIANTS.items()}
    times: dict[str, list[float]] = {name: [] for name in VARIANTS}
    for turn in range(rounds + 1):
        for name, engine in engines.items():
            first, last = turn * iterations + 1, (turn + 1) * iterations
            started = time.perf_counter()
            for _ in engine.run(first, lambda last=last: last):  # type: ignore[misc]
                pass
            if turn:
                times[name].append((time.perf_counter() - started) / iterations)
    return times


def make_engine(blocks: int, stages: int, optimizer: dict[str, str]) -> Engine:
    """A small model under delay on one device."""
    content = {
        "model": {"blocks": blocks, "width": WIDTH, "heads": 2, "sequence_length": SEQUENCE},
        "pipeline": {"stages": stages},
        "optimizer": optimizer,
        "training": {"iterations": 100_000, "batch_size": BATCH},
    }
    assembly = assemble(apply_overrides(content, [], "benchmark"), micro_batch)
    for optimizer_of_all in assembly.updater.optimizers:
        if isinstance(optimizer_of_all, NAdam):
            for group in optimizer_of_all.param_groups:
                group["foreach"] = True
    return assembly.engine


def micro_batch(t: int) -> MicroBatch:
    """Random tokens."""
    tokens = torch.randint(VOCABULARY, (BATCH, SEQUENCE + 1), generator=torch.Generator().manual_seed(t))
    return tokens[:, :-1], tokens[:, 1:]


if __name__ == "__main__":
    main()
