"""Evidence that no kill loses or changes anything: runs are killed with SIGKILL at random times,
continued, and compared.

    python -m benchmarks.kills --count 100

Each case is trained once without interruption. Then it is trained again, and one of its ranks,
drawn at random, is killed at a time that is uniform over the run's length, start and end included.
It is killed and resumed up to four times, and then ends by itself. Every metric except the measured
ones (times, rates, memory) must be equal: to the last bit if the number of devices R stays the
same, within `TOLERANCE` if it changes between kills (1, 2, 4, 1), because products of other batches
of matrices round differently.

Ranks are forked from this process, which has loaded torch once; every tenth run is the real `brx
train --devices R`. Results are appended to benchmarks/results/kills.jsonl as they come, so that the
command can be stopped and repeated; kills.md is the table."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytorch_optimizer  # noqa: F401  (loaded once, before the forks)
import torch

from benchmarks.report import RESULTS, parser_of
from brx.config.loading import dump_config
from brx.config.schema import RunConfig
from brx.data.prepare import prepare
from brx.distributed.processes import DistributedWorld
from brx.pipeline.world import World
from brx.runs.metrics import MEASURED, read_metrics
from brx.train.loop import train
from tests.processes import free_port
from tests.train.helpers import tiny_config

TOLERANCE = 1e-4
ITERATIONS = 60
REAL_EVERY = 10
SWITCHING = (1, 2, 4, 1)

MIXTURE = "model.moe={experts: 4, top_k: 2, every: 2}"
CASES: dict[str, tuple[str, ...]] = {
    "pipedream": (),
    "pipedream-lr": ("optimizer.method=pipedream-lr",),
    "nesterov": ("optimizer.method=nesterov",),
    "basis-rotation": ("optimizer.method=basis-rotation", "optimizer.frequency=3"),
    "basis-rotation 1st unilateral": (
        "optimizer.method=basis-rotation",
        "optimizer.source=1st",
        "optimizer.geometry=unilateral",
        "optimizer.frequency=3",
    ),
    "basis-rotation stage-aware": (
        "optimizer.method=basis-rotation",
        "optimizer.refresh_schedule=stage-aware",
    ),
    "delay-compensation": ("optimizer.method=delay-compensation",),
    "soap": ("optimizer.method=soap", "optimizer.frequency=3"),
    "muon": ("optimizer.method=muon",),
    "scion": ("optimizer.method=scion", "optimizer.lr=0.001"),
    "torch.optim:Adagrad": ("optimizer.method=torch.optim:Adagrad",),
    "basis-rotation mixture": ("optimizer.method=basis-rotation", "optimizer.frequency=3", MIXTURE),
    "muon mixture": ("optimizer.method=muon", MIXTURE),
    "pipedream rings host": ("pipeline.rings=host",),
    "basis-rotation rings host, recompute": (
        "optimizer.method=basis-rotation",
        "pipeline.rings=host",
        "pipeline.recompute=true",
    ),
    "nesterov recompute, mixture": (
        "optimizer.method=nesterov",
        "pipeline.recompute=true",
        MIXTURE,
    ),
    "pipedream without stashing": ("pipeline.stash=none",),
    "basis-rotation, weight prediction": (
        "optimizer.method=basis-rotation",
        "pipeline.stash=predict",
    ),
    "delay-compensation bf16": ("optimizer.method=delay-compensation", "runtime.precision=bf16"),
}


def tiny(folder: Path, overrides: Sequence[str]) -> RunConfig:
    """The small run of the tests (4 blocks and 4 stages, on made-up text), but twice as long."""
    return tiny_config(
        folder, f"training.iterations={ITERATIONS}", "pipeline.timeout_s=120.0", *overrides
    )


class Forked:
    """A run whose ranks are forks of this process."""

    def __init__(self, config: RunConfig, out: Path, num_ranks: int) -> None:
        port = str(free_port())
        self.ranks = [_fork(config, out, rank, num_ranks, port) for rank in range(num_ranks)]

    def wait(self) -> bool:
        """Wait for all ranks; returns whether the run finished."""
        codes = [os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1]) for rank in self.ranks]
        return codes == [0] * len(codes)

    def poll(self) -> bool:
        """Whether all ranks are still running."""
        return all(
            os.waitid(os.P_PID, rank, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
            for rank in self.ranks
        )

    def kill(self, rank: int) -> None:
        """Send SIGKILL to a rank."""
        os.kill(self.ranks[rank], signal.SIGKILL)


class Real:
    """A run as the command line starts it."""

    def __init__(self, config: RunConfig, out: Path, num_ranks: int) -> None:
        path = out.parent / "config.yaml"
        path.write_text(dump_config(config))
        command = [sys.executable, "-m", "brx", "train", str(path), "--out", str(out), "--resume"]
        self._num_ranks = num_ranks
        self._process = subprocess.Popen(
            [*command, "--devices", str(num_ranks)],
            stderr=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )

    def wait(self) -> bool:
        """Wait for its end; returns whether the run finished."""
        return self._process.wait() == 0

    def poll(self) -> bool:
        """Whether it is still running."""
        return self._process.poll() is None

    def kill(self, rank: int) -> None:
        """Send SIGKILL to a rank, or to the launcher if the rank has not been started yet."""
        pid = self._process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        os.kill(
            int(children[rank]) if self._num_ranks > 1 and rank < len(children) else pid,
            signal.SIGKILL,
        )


def _fork(config: RunConfig, out: Path, rank: int, num_ranks: int, port: str) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        world: Any = World()
        if num_ranks > 1:
            os.environ |= {
                "RANK": str(rank),
                "WORLD_SIZE": str(num_ranks),
                "MASTER_ADDR": "127.0.0.1",
            }
            os.environ["MASTER_PORT"] = port
            world = DistributedWorld(config.pipeline.timeout_s)
        train(config, out, resume=True, world=world)
        world.close()
        code = 0
    finally:
        os._exit(code)


def with_devices(config: RunConfig, num_ranks: int) -> RunConfig:
    """The same run on another number of devices."""
    return config.model_copy(
        update={"pipeline": config.pipeline.model_copy(update={"devices": num_ranks})}
    )


def records(out: Path) -> list[dict[str, Any]]:
    """The metrics without measured values (times, rates, memory)."""
    return [
        {key: value for key, value in record.items() if key not in MEASURED}
        for record in read_metrics(out / "metrics.jsonl")
    ]


def largest_difference(expected: list[dict[str, Any]], seen: list[dict[str, Any]]) -> float:
    """Largest relative difference of any value; infinite if records or keys differ."""
    if [list(record) for record in expected] != [list(record) for record in seen]:
        return float("inf")
    largest = 0.0
    for one, other in zip(expected, seen, strict=True):
        for key, value in one.items():
            pairs = (
                zip(value, other[key], strict=True)
                if isinstance(value, list)
                else [(value, other[key])]
            )
            largest = max([largest, *(abs(a - b) / max(abs(a), 1e-12) for a, b in pairs)])
    return largest


def kill_and_compare(
    folder: Path, index: int, references: dict[tuple[str, int], tuple[Path, float]]
) -> dict[str, Any]:
    """Kill one run up to four times, resume it to its end and compare it with its reference.

    Args:
        folder: the folder of all runs.
        index: the number of the run, which decides its case, devices and kills.
        references: the folders of runs without kills and their seconds, by case and number of
            devices. A missing one is trained and added.

    Returns:
        What was done and seen: a row of the results.
    """
    choose = random.Random(index)
    name = list(CASES)[index % len(CASES)]
    devices = [SWITCHING, (1,) * 4, (2,) * 4, (1,) * 4][index // len(CASES) % 4]
    is_real = index % REAL_EVERY == REAL_EVERY - 1
    config = tiny(folder, CASES[name])
    key = (name, 1 if devices == SWITCHING else devices[0])
    if key not in references:
        out = folder / f"reference-{len(references)}"
        started = time.monotonic()
        assert Forked(with_devices(config, key[1]), out, key[1]).wait(), (
            f"{name}: the run without kills failed"
        )
        references[key] = out, time.monotonic() - started
    reference, length = references[key]
    out = folder / f"run-{index}"
    kills = []
    for num_ranks in devices:
        start = Real if is_real else Forked
        # A real process loads torch first, so it lives longer.
        moment = choose.uniform(0.0, length + (6.0 if is_real else 0.0))
        run = start(with_devices(config, num_ranks), out, num_ranks)
        deadline = time.monotonic() + moment
        while time.monotonic() < deadline and run.poll():
            time.sleep(0.002)
        if not run.poll():
            run.wait()
            break
        rank = choose.randrange(num_ranks)
        run.kill(rank)
        run.wait()
        metrics = out / "metrics.jsonl"
        lines = metrics.read_bytes().count(b"\n") if metrics.exists() else 0
        kills.append(
            {"devices": num_ranks, "rank": rank, "seconds": round(moment, 3), "lines": lines}
        )
    last = devices[-1]
    is_finished = Forked(with_devices(config, last), out, last).wait()
    difference = (
        largest_difference(records(reference), records(out)) if is_finished else float("inf")
    )
    shutil.rmtree(out, ignore_errors=True)
    return {
        "index": index,
        "case": name,
        "devices": "1, 2, 4, 1" if devices == SWITCHING else str(devices[0]),
        "real": is_real,
        "kills": kills,
        "difference": difference,
        "passed": difference <= (TOLERANCE if devices == SWITCHING else 0.0),
    }


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown: a row per case."""
    num_kills = sum(len(row["kills"]) for row in rows)
    ranks = sum(kill["rank"] > 0 for row in rows for kill in row["kills"])
    early = sum(kill["lines"] == 0 for row in rows for kill in row["kills"])
    lines = [
        "# Kills",
        "",
        f"{num_kills} kills with SIGKILL in {len(rows)} runs of {ITERATIONS} iterations, P = 4 "
        f"({ranks} of a rank other"
        f" than 0, {early} before the first iteration was written), at times uniform over the "
        f"run's length; every"
        f" {REAL_EVERY}th run by the real command. Largest relative difference of any metric to "
        f"the run without kills:"
        f" 0 is required where R stays, at most {TOLERANCE:g} where it changes (1, 2, 4, 1).",
        "",
        "| case | runs | kills | R constant: difference | R changing: difference | passed |",
        "|---|---|---|---|---|---|",
    ]
    for name in CASES:
        mine = [row for row in rows if row["case"] == name]
        if not mine:
            continue
        constant = [row["difference"] for row in mine if row["devices"] != "1, 2, 4, 1"]
        changing = [row["difference"] for row in mine if row["devices"] == "1, 2, 4, 1"]
        shown = [
            f"{max(values):.1e}" if values and max(values) else "0" if values else ""
            for values in (constant, changing)
        ]
        passed = "yes" if all(row["passed"] for row in mine) else "**no**"
        lines.append(
            f"| {name} | {len(mine)} | {sum(len(row['kills']) for row in mine)} | {shown[0]} | "
            f"{shown[1]} | {passed} |"
        )
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = parser_of(__doc__, count=100)
    parser.add_argument("--out", type=Path, default=RESULTS / "kills.jsonl")
    args = parser.parse_args()
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    rows = (
        [json.loads(line) for line in args.out.read_text().splitlines()]
        if args.out.exists()
        else []
    )
    with tempfile.TemporaryDirectory(prefix="brx-kills-") as name:
        folder = Path(name)
        prepare(tiny(folder, ()).data, quiet=True)
        references: dict[tuple[str, int], tuple[Path, float]] = {}
        while sum(len(row["kills"]) for row in rows) < args.count:
            row = kill_and_compare(folder, len(rows), references)
            rows.append(row)
            with args.out.open("a") as file:
                file.write(json.dumps(row) + "\n")
            args.out.with_suffix(".md").write_text(table(rows))
            print(
                f"{row['index']}: {row['case']}, R = {row['devices']}: {len(row['kills'])} kills,"
                f" difference "
                f"{row['difference']:.1e}{'' if row['passed'] else '  FAILED'}",
                flush=True,
            )
    return 0 if all(row["passed"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
