"""What the delay lab costs: methods, delay profiles, micro-batches, staleness measures, and `brx
verdict`'s answer.

- the time of an iteration with every method, divided by AdamW's (`brx verdict --cost-from
  benchmarks/results/methods.json` reads it);
- the time of an iteration with M micro-batches per update divided by M times the time with one,
  with a delay profile divided by the pipeline's, and with staleness measures divided by the time
  without;
- the seconds in which `brx verdict` answers from the committed results.

Variants take turns in one process, so that the ratios hold when the machine's speed drifts.

    python -m benchmarks.lab [--threads 1] [--rounds 12] [--iterations 20] [--turns 10]
        [--blocks 8] [--out FOLDER]
"""

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import torch

from benchmarks.engine import BATCH, SEQUENCE, config_for, micro_batch
from benchmarks.report import RESULTS, Table, parser_of, ratio, runner, take_turns
from brx.config.loading import Settings
from brx.methods.table import CUSTOM, METHODS
from brx.pipeline.engine import Engine
from brx.train.build import assemble

WIDTH, STAGES = 32, 8
ACCUMULATION, MEASURE_EVERY, WITHOUT_MEASURES, FREQUENCY = 4, 100, 80, 10
VERDICT = ("verdict", "--stages", "32", "--micro-batches", "8")


def main() -> None:
    """Measure, print and write."""
    parser = parser_of(__doc__, threads=1, rounds=12, iterations=20, blocks=8)
    parser.add_argument(
        "--turns",
        type=int,
        default=10,
        help=f"of {MEASURE_EVERY} iterations, for staleness measures",
    )
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the tables")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model = (
        f"{options.blocks} blocks, d {WIDTH}, sequence {SEQUENCE}, batch {BATCH}, P = "
        f"{STAGES}, fp32"
    )
    title = f"{model}, {options.threads} thread(s)"
    write_methods(options, title)
    write_delays(options, title)


def write_methods(options: argparse.Namespace, title: str) -> None:
    """Write the table with a row per built-in method."""
    variants: dict[str, Settings] = {
        name: {"optimizer.method": name} for name in METHODS if name != CUSTOM
    }
    times = measure(variants, options)
    table = Table("methods", ["method", "ms / iteration (median)", "ratio to pipedream"])
    for name, turns in times.items():
        table.add(
            name, f"{1e3 * statistics.median(turns):.3f}", f"{ratio(turns, times['pipedream']):.3f}"
        )
    table.write(title, folder=options.out)


def write_delays(options: argparse.Namespace, title: str) -> None:
    """Write the table with a row per requirement: the measured ratio, and the largest allowed."""
    table = Table("lab", ["what", "over", "ratio (median)", "at most"])
    several = {"pipeline.accumulation": ACCUMULATION}
    variants: dict[str, Settings] = {
        "pipeline": {},
        "delay 4": {"pipeline.delay": 4},
        "delay like 32": {"pipeline.delay.like": 32},
        "pipeline's delays": several,
        "2BW": {**several, "pipeline.delay": "2bw"},
        "no stashing": {**several, "pipeline.stash": "none"},
    }
    times = measure(variants, options)
    for name, settings in variants.items():
        if settings.get("pipeline.accumulation"):
            per_micro_batch = [turn / ACCUMULATION for turn in times[name]]
            share = ratio(per_micro_batch, times["pipeline"])
            table.add(
                f"M = {ACCUMULATION}, {name}", f"{ACCUMULATION} x M = 1", f"{share:.3f}", "1.05"
            )
        elif settings:
            table.add(
                name,
                "the pipeline's delays",
                f"{ratio(times[name], times['pipeline']):.3f}",
                "1.05",
            )
    for method in ("pipedream", "basis-rotation"):
        share = measures_share({"optimizer.method": method}, options.blocks, options.turns)
        table.add(
            f"staleness_every {MEASURE_EVERY}, {method}",
            "iterations without",
            f"{share:.3f}",
            "1.02",
        )
    table.add("brx " + " ".join(VERDICT), "", f"{verdict_seconds():.2f} s", "2 s")
    table.write(title, folder=options.out)


def measure(
    variants: Mapping[str, Settings], options: argparse.Namespace
) -> dict[str, list[float]]:
    """Seconds per iteration of each variant, turn by turn."""
    runners = {
        name: runner(make_engine(settings, options.blocks)) for name, settings in variants.items()
    }
    return take_turns(runners, options.rounds, options.iterations)


def measures_share(settings: Settings, blocks: int, turns: int) -> float:
    """Seconds of MEASURE_EVERY iterations with a staleness measure in the last one, divided by the
    seconds without it: the median over turns.

    Both are measured within one run, because two engines with the same settings differ by more
    than the 2 % in question. The first 80 of every 100 iterations keep nothing for the measures
    (delays are less than 20), so they show the time without. Each of the last 20 is compared with
    the median of those at the same place between two refreshes of the basis."""
    run = runner(make_engine({**settings, "logging.staleness_every": MEASURE_EVERY}, blocks))
    seconds = np.reshape(
        [seconds_of(lambda: run(1)) for _ in range((turns + 1) * MEASURE_EVERY)],
        (turns + 1, -1, FREQUENCY),
    )
    # (turns, refresh intervals per turn, FREQUENCY); the first turn warms up
    seconds = seconds[1:]
    without = np.median(seconds[:, : WITHOUT_MEASURES // FREQUENCY], axis=1, keepdims=True)
    extra = (seconds[:, WITHOUT_MEASURES // FREQUENCY :] - without).sum(axis=(1, 2))
    return float(np.median(1.0 + extra / (without.sum(axis=(1, 2)) * MEASURE_EVERY / FREQUENCY)))


def verdict_seconds() -> float:
    """Seconds until `brx verdict` has answered, in a process of its own: the fastest of three."""
    command = [sys.executable, "-m", "brx", *VERDICT]
    return min(
        seconds_of(lambda: subprocess.run(command, check=True, stdout=subprocess.DEVNULL))
        for _ in range(3)
    )


def seconds_of(work: Callable[[], object]) -> float:
    """Seconds of one call."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def make_engine(settings: Settings, blocks: int) -> Engine:
    """A small model under delay on one device."""
    return assemble(
        config_for(STAGES, {"model.blocks": blocks, "model.width": WIDTH, **settings}), micro_batch
    ).engine


if __name__ == "__main__":
    main()
