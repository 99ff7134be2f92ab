"""Packet B: what things cost on a GPU.

    python -m benchmarks.gpu.table paper-95m --out results/gpu [--seconds 460] [--tiny]

The parts run one after the other, each in a process of its own, as long as there is time:

1. `ceilings`: rates of copies and products;
2. `bases`: the first basis and a refresh, by size of the matrix;
3. `iterations`: whole iterations of AdamW and of basis rotation at P = 1 and 32;
4. `optimizers`: the step alone, against SOAP from two libraries and a plain transcription of the
   paper's algorithms.

Goals: basis rotation with refreshes costs at most 1.25 times AdamW's iteration, and any method at
P = 32 at most 1.05 times its iteration at P = 1, both in wall-clock time. The report says whether
they are met.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import torch

from benchmarks.report import parser_of

OVER_ADAMW, OVER_UNDELAYED = 1.25, 1.05


def main() -> None:
    """Run the parts, then judge."""
    parser = parser_of(__doc__)
    parser.add_argument("config", help="a preset or a file")
    parser.add_argument("--stages", type=int, nargs="+", default=[1, 32], metavar="P")
    parser.add_argument("--out", type=Path, required=True, help="folder of the tables")
    parser.add_argument("--seconds", type=float, default=460, help="time for everything")
    parser.add_argument("--tiny", action="store_true", help="in small, on any machine")
    options = parser.parse_args()
    deadline = time.monotonic() + options.seconds
    device = "cuda" if torch.cuda.is_available() else "cpu"
    out = ["--out", str(options.out)]
    stages = [str(number) for number in options.stages]
    seconds = str(0.6 * options.seconds)
    iterations = [options.config, "--stages", *stages, *out, "--seconds", seconds]
    parts = {
        "ceilings": ["gpu.ceilings", "--device", device, *out],
        "bases": ["gpu.bases", "--device", device, *out],
        "iterations": ["gpu.iterations", *iterations],
        "optimizers": ["optimizers", "--device", device, *out],
    }
    if options.tiny:
        parts["ceilings"] += ["--size", "64"]
        parts["bases"] += ["--sizes", "16x64"]
        parts["iterations"] += ["--iterations", "10", "--only", "pipedream", "TF32 rotations"]
        parts["iterations"] += ["--set", "model.width=16", "model.heads=2", "training.batch_size=1"]
        parts["optimizers"] += ["--blocks", "1", "--width", "32", "--steps", "10"]
        parts["optimizers"] += ["--threads", "1", "--only", "AdamW", "SOAP"]
    for name, arguments in parts.items():
        left = deadline - time.monotonic()
        if left < 5:
            print(f"{name}: not run, no time was left", flush=True)
            continue
        run_part(name, arguments, left)
    judge(options.out / "iterations.json")


def run_part(name: str, arguments: list[str], seconds: float) -> None:
    """Run one part. When the time is over, it is interrupted, and writes what it has measured."""
    module, *rest = arguments
    process = subprocess.Popen(
        [sys.executable, "-m", f"benchmarks.{module}", *rest],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    try:
        code = process.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.send_signal(2)  # SIGINT
        try:
            code = process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            # The parts after this one still get their time.
            process.kill()
            code = process.wait()
    print(f"{name}: exit code {code}", flush=True)


def judge(path: Path) -> None:
    """Print which goals are met, from the table of iterations."""
    if not path.exists():
        print("goals: no iterations were measured")
        return
    content = json.loads(path.read_text(encoding="utf-8"))
    for values in content["rows"]:
        row = dict(zip(content["columns"], values, strict=True))
        name = f"{row['variant']}, P = {row['P']}"
        if row["variant"].startswith("basis-rotation") and row["over AdamW"]:
            say(f"{name}: times AdamW", float(row["over AdamW"]), OVER_ADAMW)
        if row["P"] != "1" and row["over own P = 1"]:
            say(f"{name}: times its own P = 1", float(row["over own P = 1"]), OVER_UNDELAYED)


def say(what: str, value: float, goal: float) -> None:
    """Print a line about one goal."""
    verdict = "met" if value <= goal else "MISSED"
    print(f"{what}: {value:.2f}, goal at most {goal:.2f}: {verdict}")


if __name__ == "__main__":
    main()
