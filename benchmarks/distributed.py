"""What several devices gain: the asynchronous pipeline on two processes, against one process and
against a synchronous pipeline.

The variants take turns on two worker processes (one thread each), so that the ratios hold when the
machine's speed drifts: R = 1 (on rank 0, while the other is idle), R = 2 at several P, and
torch.distributed.pipelining's synchronous 1F1B with several numbers of micro-batches for the same
tokens per update.

    python -m benchmarks.distributed [--rounds 5] [--iterations 40]
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from benchmarks.engine import VOCABULARY, config_for, micro_batch
from benchmarks.report import Table, parser_of, ratio, runner, take_turns
from brx.distributed.processes import DistributedWorld
from brx.model.stage import Stage, make_stage, partition
from brx.train.build import assemble

STAGES = (2, 4, 8, 16)
MICRO_BATCHES = (1, 2, 4, 8)
AUTHORS_MS = 168
"""Milliseconds per iteration of the authors' code at P = 16 on two cores: one process per stage,
with a recomputed forward pass (measured before this project)."""


def main() -> None:
    """Start the workers, and print what they measured."""
    parser = parser_of(__doc__, rounds=5, iterations=40)
    parser.add_argument("--out", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if "RANK" in os.environ:
        work(options.rounds, options.iterations, Path(options.out))
        return
    with TemporaryDirectory() as folder:
        out = Path(folder) / "times.json"
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--nproc-per-node=2",
            "-m",
            "benchmarks.distributed",
        ]
        given = [
            "--rounds",
            str(options.rounds),
            "--iterations",
            str(options.iterations),
            "--out",
            str(out),
        ]
        subprocess.run([*command, *given], check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        report(json.loads(out.read_text()))


def report(times: dict[str, list[float]]) -> None:
    """Print the table."""
    one = times["brx, P = 16, R = 1"]
    synchronous = {name: series for name, series in times.items() if name.startswith("synchronous")}
    best = min(synchronous.values(), key=statistics.median)
    table = Table(
        "distributed",
        ["variant", "ms / iteration (median)", "speed-up over R = 1", "over best synchronous"],
    )
    for name, series in times.items():
        table.add(
            name,
            f"{1e3 * statistics.median(series):.2f}",
            f"{ratio(one, series):.2f}",
            f"{ratio(best, series):.2f}",
        )
    table.write(
        "16 blocks, d 64, sequence 64, batch 8 per update, fp32, AdamW, one thread per process, "
        "gloo; the authors' way"
        f" (one process per stage, recomputed forward) took {AUTHORS_MS} ms at P = 16 on such a "
        f"machine"
    )


def work(rounds: int, iterations: int, out: Path) -> None:
    """The work of each of the two processes."""
    torch.set_num_threads(1)
    world = DistributedWorld(timeout_s=300)
    alone = runner(assemble(config_for(16), micro_batch).engine)  # on rank 0, the other one idle
    variants: dict[str, Callable[[int], object]] = {
        "brx, P = 16, R = 1": alone if world.rank == 0 else lambda _: None
    }
    for stages in STAGES:
        variants[f"brx, P = {stages}, R = 2"] = runner(
            assemble(config_for(stages), micro_batch, world=world).engine
        )
    for count in MICRO_BATCHES:
        variants[f"synchronous 1F1B, {count} micro-batches, R = 2"] = synchronous(count, world)
    times = take_turns(variants, rounds, iterations, wait=world.barrier)
    if world.rank == 0:
        out.write_text(json.dumps(times))
    world.close()


class Part(nn.Module):
    """A stage in the form that torch.distributed.pipelining needs: one tensor in, one tensor out,
    no loss."""

    def __init__(self, stage: Stage) -> None:
        super().__init__()
        self.stage = stage

    def forward(self, x: Tensor) -> Tensor:
        if self.stage.embedding is not None:
            x = self.stage.embedding(x)
        for block in self.stage.blocks.values():
            x, _ = block(x)
        return self.stage.head(x) if self.stage.head is not None else x


def synchronous(count: int, world: DistributedWorld) -> Callable[[int], None]:
    """torch's synchronous 1F1B over the same blocks, the batch split into `count` micro-batches."""
    config = config_for(2)
    own = partition(config.model.blocks, 2)[world.rank]
    stage = make_stage(config.model, VOCABULARY, own, seed=0)
    pipeline_stage = PipelineStage(
        Part(stage), world.rank, 2, torch.device("cpu"), group=dist.new_group()
    )
    # torch's 1F1B needs at least as many micro-batches as stages. With one micro-batch, both
    # schedules have the same order.
    kind = Schedule1F1B if count > 1 else ScheduleGPipe
    schedule = kind(pipeline_stage, count, loss_fn=loss)
    optimizer = torch.optim.AdamW(stage.parameters(), lr=1e-3, weight_decay=0.01, fused=True)

    def run(iterations: int) -> None:
        for t in range(iterations):
            inputs, targets = micro_batch(t)
            optimizer.zero_grad()
            if world.rank == 0:
                schedule.step(inputs)
            else:
                schedule.step(target=targets)
            torch.nn.utils.clip_grad_norm_(stage.parameters(), 1.0)
            optimizer.step()

    return run


def loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


if __name__ == "__main__":
    main()
