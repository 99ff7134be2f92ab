"""What reading many runs costs: processor time and memory of the commands that read them all.

    python -m benchmarks.many_runs [--runs 2000] [--iterations 400] [--keep FOLDER]

Makes run folders as trainings leave them: four methods at several depths, rates and seeds, with
losses from a formula. Then each command runs in a process of its own: `none` neither reads nor
writes the cache of parsed runs, `written` writes it, `read` finds it. Processor time includes the
start of the process and its imports."""

import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice, product
from pathlib import Path

from benchmarks.report import Table, parser_of
from brx.config.loading import apply_overrides, dump_config
from brx.config.schema import RunConfig
from brx.files import write_json
from brx.runs.folder import CACHE

METHODS = ("pipedream", "pipedream-lr", "nesterov", "basis-rotation")
DEPTHS = (1, 2, 4, 8, 16)
RATES = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2)
VALIDATION_EVERY = 50
COMMANDS = {
    "slowdown": "slowdown {runs}",
    "plot curves": "plot curves {runs} --out {out}/curves",
    "report": "report --runs {runs} --out {out}/report.html",
}

WITHOUT = """
import sys
from brx.runs import cache
cache._read = lambda run, states: None
cache._write = lambda run, states, parsed: None
from brx.cli.main import main
sys.exit(main(sys.argv[1:]))
"""
"""A program: the command line, which neither reads nor writes parsed runs."""


@dataclass(frozen=True)
class Cost:
    """What a process took."""

    seconds: float  # of processor time
    peak_bytes: int  # resident


def main() -> None:
    """Measure and print."""
    parser = parser_of(__doc__, runs=2000, iterations=400)
    parser.add_argument("--keep", type=Path, help="folder for the runs, which are kept")
    options = parser.parse_args()
    table = Table("many_runs", ["command", "parsed runs", "processor time (s)", "peak memory (MB)"])
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.keep or Path(scratch)
        write_runs(folder / "runs", options.runs, options.iterations)
        forget(folder / "runs")
        measured = [(name, "none") for name in COMMANDS]
        measured += [("slowdown", "written"), *((name, "read") for name in COMMANDS)]
        for name, kept in measured:
            arguments = COMMANDS[name].format(runs=folder / "runs", out=folder / "out").split()
            cost = run(arguments, is_kept=kept != "none")
            table.add(f"`brx {name}`", kept, f"{cost.seconds:.1f}", f"{cost.peak_bytes / 1e6:.0f}")
    table.write(f"{options.runs} runs of {options.iterations} iterations")


def write_runs(folder: Path, num_runs: int, iterations: int) -> None:
    """Make the folders of runs, where there are none yet."""
    for index, config in enumerate(islice(configs(iterations), num_runs)):
        path = folder / f"run-{index:04d}"
        if path.exists():
            continue
        path.mkdir(parents=True)
        (path / "config.yaml").write_text(dump_config(config), encoding="utf-8")
        lines = [json.dumps(record) + "\n" for record in records(config, index)]
        (path / "metrics.jsonl").write_text("".join(lines), encoding="utf-8")
        summary = {
            "status": "finished",
            "iteration": iterations,
            "last_iteration": iterations,
            "trajectory_version": 5,
            "data_fingerprint": "f" * 64,
            "versions": {"torch": "2.9"},
        }
        write_json(path / "summary.json", summary)


def configs(iterations: int) -> Iterator[RunConfig]:
    """Settings of runs, all of them different, without an end."""
    seed = -1
    while True:
        seed += 1
        for method, depth, rate in product(METHODS, DEPTHS, RATES):
            content = {
                "model": {"blocks": 16, "width": 32, "heads": 2, "sequence_length": 32},
                "data": {"source": "packages"},
                "pipeline": {"stages": depth},
                "optimizer": {"method": method, "lr": rate},
                "training": {
                    "iterations": iterations,
                    "batch_size": 4,
                    "seed": seed,
                    "validation_every": VALIDATION_EVERY,
                },
            }
            yield apply_overrides(content, [], "benchmark")


def records(config: RunConfig, index: int) -> Iterator[dict[str, object]]:
    """The lines of metrics.jsonl: a loss that falls, more slowly with delay, with some noise."""
    delay = config.pipeline.stages - 1
    for t in range(1, config.training.iterations + 1):
        noise = 0.05 * math.sin(12.9898 * t + 78.233 * index)
        loss = 2.0 + 3.5 * math.exp(-t / (60.0 + 10.0 * delay)) + noise
        record: dict[str, object] = {
            "iteration": t,
            "train_loss": loss,
            "lr": config.optimizer.lr,
            "grad_norm": 0.5 + noise,
            "tokens": 128 * t,
            "seconds": 0.01 * t,
        }
        if t % config.training.log_every == 0:
            record["stage_grad_norms"] = [0.25] * config.pipeline.stages
            record["tokens_per_second"] = 12_800.0
        yield record
        if t % VALIDATION_EVERY == 0:
            yield {"iteration": t, "val_loss": loss + 0.1}


def forget(folder: Path) -> None:
    """Remove brx's cache of parsed runs."""
    for path in folder.glob(f"*/{CACHE}"):
        path.unlink()


def run(arguments: list[str], *, is_kept: bool) -> Cost:
    """Run a brx command to its end; with `is_kept`, it uses the cache of parsed runs."""
    program = ["-m", "brx"] if is_kept else ["-c", WITHOUT]
    environment = dict(os.environ)
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # so that modules are compiled only once
    process = subprocess.Popen(
        [sys.executable, *program, *arguments],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    assert process.stderr is not None
    errors = process.stderr.read().decode()
    _, status, usage = os.wait4(process.pid, 0)
    if os.waitstatus_to_exitcode(status) != 0:
        raise SystemExit(f"brx {' '.join(arguments)}: {errors}")
    return Cost(usage.ru_utime + usage.ru_stime, 1024 * usage.ru_maxrss)


if __name__ == "__main__":
    main()
