"""How much longer an iteration takes with checkpoints, written while training waits or in the
background.

    python -m benchmarks.checkpoints [--rounds 3] [--every 10] [--device cpu]

Three variants of the same run take turns in one process: without checkpoints, and with
`checkpoint.background` off and on. The time of a turn is the mean over its iterations, without the
first ones; it includes waits for checkpoints."""

import logging
import os
import statistics
import tempfile
import time
from pathlib import Path

import torch

from benchmarks.report import Table, parser_of, ratio
from brx.config.loading import apply_overrides
from brx.config.schema import RunConfig
from brx.pipeline.world import World
from brx.runs.checkpoint import list_checkpoints, read_manifest
from brx.runs.folder import RunFolder
from brx.train.loop import Trainer

BLOCKS, WIDTH, SEQUENCE, BATCH, STAGES = 8, 128, 64, 8, 8
FIRST = 3  # iterations of a turn that are not timed
PERIODS = 5  # checkpoints in a turn, besides the one at its end


def main() -> None:
    """Measure and print."""
    parser = parser_of(__doc__, rounds=3, every=10)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    logging.disable()
    length = PERIODS * options.every + FIRST
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder)
        (base / "text.txt").write_text("\n".join(f"{n} small boats {n * n}" for n in range(60_000)))
        settings = {
            "no checkpoints": ["training.checkpoint_every=1000000"],
            "in turn with the training": ["checkpoint.background=false"],
            "beside the training": ["checkpoint.background=true"],
        }
        times: dict[str, list[float]] = {name: [] for name in settings}
        size = 0
        for turn in range(options.rounds):
            for name, overrides in settings.items():
                run = base / f"{turn}-{name}"
                config = config_of(base, options.device, length, options.every, overrides)
                times[name].append(seconds_per_iteration(config, run))
                manifest = read_manifest(list_checkpoints(run)[-1])
                size = sum(entry["bytes"] for entry in manifest["stages"])
    table = Table("checkpoints", ["variant", "ms / iteration (median)", "ratio to none"])
    for name, series in times.items():
        milliseconds = f"{1e3 * statistics.median(series):.1f}"
        table.add(name, milliseconds, f"{ratio(series, times['no checkpoints']):.3f}")
    shape = f"{BLOCKS} blocks, d {WIDTH}, sequence {SEQUENCE}, batch {BATCH}, P = {STAGES}"
    saved = f"a checkpoint of {size / 1e6:.0f} MB every {options.every} iterations"
    load = f"Load average at the end: {os.getloadavg()[0]:.1f}, of which this benchmark is 1 to 2."
    table.write(f"{shape}, fp32, AdamW, on {options.device}; {saved}", load)


def config_of(
    folder: Path, device: str, length: int, every: int, overrides: list[str]
) -> RunConfig:
    """A run of `length` iterations, with a checkpoint after each `every` of them."""
    content = {
        "model": {"blocks": BLOCKS, "width": WIDTH, "heads": 4, "sequence_length": SEQUENCE},
        "data": {"source": f"{folder}/text.txt", "directory": f"{folder}/data", "max_epochs": 99.0},
        "pipeline": {"stages": STAGES},
        "optimizer": {"method": "pipedream"},
        "training": {
            "iterations": length,
            "batch_size": BATCH,
            "validation_every": 1_000_000,
            "validation_examples": 8,
            "checkpoint_every": every,
        },
        "runtime": {"device": device, "threads": 1},
    }
    return apply_overrides(content, overrides, "benchmark")


def seconds_per_iteration(config: RunConfig, run: Path) -> float:
    """Train once; returns the mean time of an iteration after the first ones."""
    ended: list[float] = []
    trainer = Trainer(config, RunFolder(run), World())

    def note() -> None:
        if trainer.device.type == "cuda":
            torch.cuda.synchronize()
        ended.append(time.perf_counter())

    trainer._after_iteration = note
    trainer.run(resume=False)
    return (ended[-1] - ended[FIRST - 1]) / (len(ended) - FIRST)


if __name__ == "__main__":
    main()
