"""A thousand stages in one process: memory, and the processor time of a start and a checkpoint.

    python -m benchmarks.many_stages [--stages 1000]

Trains two iterations of a model of width 16 with a block per stage, and writes a checkpoint: once
in turn with the training (`checkpoint.background` off), and once in the background, from a copy in
memory. Each run is a process of its own. Nearly all of its memory is older weight versions, whose
number grows with the square of the number of stages."""

import logging
import multiprocessing
import resource
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.report import Table, parser_of
from brx.config.loading import apply_overrides
from brx.config.schema import RunConfig
from brx.pipeline.world import World
from brx.runs.checkpoint import list_checkpoints, read_manifest
from brx.runs.folder import RunFolder
from brx.train.loop import Trainer

WIDTH, SEQUENCE, BATCH, ITERATIONS = 16, 16, 2, 2


@dataclass(frozen=True)
class Cost:
    """What a run took: bytes, and seconds of processor time."""

    planned: int
    peak: int  # resident, of the whole process
    before: int  # resident, before the run
    start: float
    iteration: float
    checkpoint: float
    saved: int  # size of the checkpoint


def main() -> None:
    """Measure and print."""
    options = parser_of(__doc__, stages=1000).parse_args()
    headings = ["checkpoint", "planned (GB)", "peak (GB)", "before the run (GB)"]
    headings += ["start (s)", "iteration (s)", "checkpoint (s)", "checkpoint (GB)"]
    table = Table("many_stages", headings)
    # A fresh process for each run: a forked or reused one would begin with memory of earlier work.
    context = multiprocessing.get_context("spawn")
    for name, background in (("in turn", "false"), ("in the background", "true")):
        with context.Pool(1) as pool:
            cost = pool.apply(measure, (options.stages, background))
        sizes = [f"{size / 1e9:.2f}" for size in (cost.planned, cost.peak, cost.before)]
        times = [f"{seconds:.1f}" for seconds in (cost.start, cost.iteration, cost.checkpoint)]
        table.add(name, *sizes, *times, f"{cost.saved / 1e9:.2f}")
    title = f"{options.stages} stages of a block of width {WIDTH}, fp32, AdamW, one thread"
    table.write(title, "Seconds are processor time; the start does not count imports.")


def measure(num_stages: int, background: str) -> Cost:
    """Train and save once."""
    logging.disable()
    before = peak()
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        config = config_of(num_stages, background, Path(folder))
        started = time.process_time()
        trainer = Trainer(config, RunFolder(run), World())
        start = time.process_time() - started
        ended: list[float] = []
        trainer._after_iteration = lambda: ended.append(time.process_time())
        trainer.run(resume=False)
        after_last = time.process_time() - ended[-1]  # the checkpoint at the end
        manifest = read_manifest(list_checkpoints(run)[-1])
        return Cost(
            planned=trainer.planned_memory.peak,
            peak=peak(),
            before=before,
            start=start,
            iteration=ended[1] - ended[0],
            checkpoint=after_last,
            saved=sum(entry["bytes"] for entry in manifest["stages"]),
        )


def config_of(num_stages: int, background: str, folder: Path) -> RunConfig:
    """A run of two iterations, with a checkpoint at its end."""
    text = folder / "text.txt"
    text.write_text(
        "\n".join(f"{number} small boats {number * number}" for number in range(60_000))
    )
    content = {
        "model": {"blocks": num_stages, "width": WIDTH, "heads": 2, "sequence_length": SEQUENCE},
        "data": {"source": str(text), "directory": f"{folder}/data"},
        "pipeline": {"stages": num_stages},
        "optimizer": {"method": "pipedream"},
        "training": {
            "iterations": ITERATIONS,
            "batch_size": BATCH,
            "validation_every": 1_000_000,
            "validation_examples": 2,
        },
        "runtime": {"device": "cpu", "threads": 1},
    }
    return apply_overrides(content, [f"checkpoint.background={background}"], "benchmark")


def peak() -> int:
    """The largest resident memory of this process so far."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


if __name__ == "__main__":
    main()
