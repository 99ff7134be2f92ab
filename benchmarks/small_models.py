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
from collections.abc import Callable

import torch
from torch.optim import NAdam

from benchmarks.report import Table
from brx.config.loading import Settings, preset_with
from brx.config.schema import RunConfig
from brx.paper.scales import MAIN, VARIANTS
from brx.pipeline.engine import Engine, MicroBatch
from brx.train.build import assemble

PRESET = "laptop"
SIZES = ((8, 1), (8, 8), (32, 1), (32, 32))
"""(blocks, stages)."""
TIMED: dict[str, Settings] = {
    **{name: VARIANTS[name] for name in (*MAIN, "basis-rotation 2nd/unilateral")},
    "basis-rotation, covariance at refreshes": {**VARIANTS["basis-rotation"], "optimizer.covariance": "refresh"},
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
        f"preset {PRESET}: d 32, sequence 32, batch 4, fp32, frequency 10; {options.threads} thread(s)",
        "nesterov: torch's NAdam over all parameters at once (foreach), the fastest that torch has on a CPU; brx's runs"
        " there go parameter by parameter, torch's default, which rounds otherwise.",
    )


def measure(blocks: int, stages: int, rounds: int, iterations: int) -> dict[str, list[float]]:
    """Seconds per iteration of each variant, turn by turn; the first turn warms up and is left out."""
    engines = {name: make_engine(blocks, stages, settings) for name, settings in TIMED.items()}
    times: dict[str, list[float]] = {name: [] for name in TIMED}
    for turn in range(rounds + 1):
        for name, engine in engines.items():
            first, last = turn * iterations + 1, (turn + 1) * iterations
            started = time.perf_counter()
            for _ in engine.run(first, lambda last=last: last):  # type: ignore[misc]
                pass
            if turn:
                times[name].append((time.perf_counter() - started) / iterations)
    return times


def make_engine(blocks: int, stages: int, settings: Settings) -> Engine:
    """The preset `laptop` at another size, on one device."""
    size = {"model.blocks": blocks, "pipeline.stages": stages, "training.iterations": 100_000}
    config = preset_with(PRESET, {**size, **settings})
    assembly = assemble(config, random_tokens(config))
    for optimizer in assembly.updater.optimizers:
        if isinstance(optimizer, NAdam):
            for group in optimizer.param_groups:
                group["foreach"] = True
    return assembly.engine


def random_tokens(config: RunConfig) -> Callable[[int], MicroBatch]:
    """Micro-batches of bytes drawn at random."""
    shape = (config.training.batch_size, config.model.sequence_length + 1)

    def micro_batch(t: int) -> MicroBatch:
        tokens = torch.randint(256, shape, generator=torch.Generator().manual_seed(t))
        return tokens[:, :-1], tokens[:, 1:]

    return micro_batch


if __name__ == "__main__":
    main()
