"""What `runtime.compile` gains on a CPU: an iteration of the presets `similar` and `similar-llama`
under the delays of 32 stages, uncompiled, with compiled blocks, and with the whole model as one
graph.

All variants take turns in one process, so that the ratios hold when the machine's speed drifts.

    python -m benchmarks.compiled [--threads 1] [--rounds 8] [--iterations 20]
        (a multiple of 10)
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch._inductor.config

from benchmarks.report import Table, parser_of, random_tokens, ratio, runner, take_turns
from brx.config.loading import preset_with
from brx.paper.scales import VARIANTS
from brx.pipeline.engine import Engine
from brx.train.build import assemble

PRESETS = ("similar", "similar-llama")
METHODS = ("pipedream", "muon", "basis-rotation")
COMPILED: dict[str, Any] = {"as it is": False, "blocks": True, "whole": "whole"}
"""What is compiled, and the value of `runtime.compile`."""


def main() -> None:
    """Measure and print."""
    options = parser_of(__doc__, threads=1, rounds=8, iterations=20).parse_args()
    torch.set_num_threads(options.threads)
    torch._inductor.config.force_disable_caches = True  # else only the first run ever compiles
    table = Table(
        "compiled",
        [
            "preset",
            "method",
            "compiled",
            "ms / iteration (median)",
            "ratio to as it is",
            "compilation (s)",
        ],
    )
    for preset in PRESETS:
        for method in METHODS:
            variants = {
                name: runner(make_engine(preset, method, how)) for name, how in COMPILED.items()
            }
            first = {name: time_of_first(run) for name, run in variants.items()}
            times = take_turns(variants, options.rounds, options.iterations)
            for name, turns in times.items():
                # The passes are compiled for the first method only: the others use the same ones.
                is_first = method == METHODS[0] and COMPILED[name]
                numbers = (
                    f"{1e3 * statistics.median(turns):.2f}",
                    f"{ratio(turns, times['as it is']):.2f}",
                    f"{first[name]:.1f}" if is_first else "",
                )
                table.add(preset, method, name, *numbers)
    table.write(
        f"8 blocks, the delays of 32 stages; {options.threads} thread(s). Compilation: the first "
        "iteration, without torch's cache on disk."
    )


def make_engine(preset: str, method: str, compiled: bool | str) -> Engine:
    """A run of the preset on one device."""
    settings = {
        **VARIANTS[method],
        "pipeline.stages": 8,
        "pipeline.delay.like": 32,
        "training.iterations": 100_000,
        "runtime.compile": compiled,
    }
    config = preset_with(preset, settings)
    tokens = random_tokens(config.training.batch_size, config.model.sequence_length)
    return assemble(config, tokens).engine


def time_of_first(run: Callable[[int], object]) -> float:
    """Seconds of the first iteration."""
    started = time.perf_counter()
    run(1)
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
