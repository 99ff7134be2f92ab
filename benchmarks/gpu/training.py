"""Packet C: a training at the paper's size, as long as the time allows.

    python -m benchmarks.gpu.training paper-95m --out results/gpu [--iterations 3500] [--jobs 3]
        [--data SOURCE] [--more] [--seconds 460] [--set KEY=VALUE ...]

AdamW at P = 1 and P = 32 and basis rotation at P = 32 train on the corpus of installed packages,
with a warm-up of 10 % and one learning rate for all. The time is too short to choose rates, and the
table says so. --more adds Nesterov and Muon at P = 32 and basis rotation at P = 1.

With --jobs above 1, the runs share the GPU, and the table gives no seconds. A run that does not end
in time is stopped, and its row says how far it came. Curves and table go to --out, and the runs to
--out/runs. Each run leaves a checkpoint, which need not be kept.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.report import Table, parser_of
from brx.plot.any_runs import draw_curves
from brx.runs.aspects import differences
from brx.runs.comparison import passage
from brx.runs.frames import DEPTH, load

ROOT = Path(__file__).parents[2]
FIRST = (("pipedream", 1), ("pipedream", None), ("basis-rotation", None))
"""Pairs of a method and P. None stands for the deepest P (`--stages`)."""
MORE = (("nesterov", None), ("muon", None), ("basis-rotation", 1))


def main() -> None:
    """Train, draw and print."""
    parser = parser_of(__doc__, iterations=3500, jobs=3)
    parser.add_argument("config", help="a preset or a file")
    parser.add_argument("--stages", type=int, default=32, metavar="P", help="the deepest")
    parser.add_argument("--out", type=Path, required=True, help="folder of table, figure and runs")
    parser.add_argument("--data", default="packages", help="data.source: a token folder, say")
    parser.add_argument("--more", action="store_true", help="three more runs")
    parser.add_argument("--seconds", type=float, default=460, help="time for everything")
    parser.add_argument("--set", dest="overrides", nargs="+", default=[], metavar="KEY=VALUE")
    options = parser.parse_args()
    deadline = time.monotonic() + options.seconds
    settings = [
        f"data.source={options.data}",
        "data.tokens=null",
        "data.sample_fraction=1.0",
        "data.max_epochs=1000",
        f"training.iterations={options.iterations}",
        f"training.validation_every={max(1, options.iterations // 7)}",
        f"training.checkpoint_every={10 * options.iterations}",
        "training.warmup_fraction=0.1",
        *options.overrides,
    ]
    chosen = [(method, stages or options.stages) for method, stages in (*FIRST, *MORE)]
    if not options.more:
        chosen = chosen[: len(FIRST)]
    with ThreadPoolExecutor(options.jobs) as pool:
        folders = [options.out / "runs" / f"{method}-p{stages}" for method, stages in chosen]
        for folder, (method, stages) in zip(folders, chosen, strict=True):
            own = [f"optimizer.method={method}", f"pipeline.stages={stages}"]
            pool.submit(train, options.config, folder, [*settings, *own], deadline)
    trained = [folder for folder in folders if (folder / "summary.json").exists()]
    if trained:
        report(trained, options.out, timed=options.jobs == 1)


def train(config: str, folder: Path, settings: list[str], deadline: float) -> None:
    """Train one run in a process of its own. If it has not ended shortly before the deadline, it is
    interrupted as by Ctrl-C."""
    left = deadline - time.monotonic() - 30
    if left < 10:
        print(f"{folder.name}: not run, no time was left", flush=True)
        return
    command = [sys.executable, "-m", "brx", "train", config, "--out", str(folder)]
    process = subprocess.Popen([*command, "--set", *settings], cwd=ROOT, env=os.environ)
    watch = threading.Timer(left, process.send_signal, [signal.SIGINT])
    watch.start()
    code = process.wait()
    watch.cancel()
    print(f"{folder.name}: exit code {code}", flush=True)


def report(folders: list[Path], out: Path, *, timed: bool) -> None:
    """Draw the curves, and write a table with the iterations and seconds that each run takes to
    reach the last loss of AdamW under delay."""
    runs = load(folders)
    deepest = runs[DEPTH].max()
    delayed = runs[(runs["method"] == "pipedream") & (runs[DEPTH] == deepest)]
    target = float(delayed["train_loss"].iloc[0])
    draw_curves(runs, out / "curves", target=target)
    columns = ["method", "P", "iterations", "training loss", "validation loss"]
    table = Table("training", [*columns, f"iterations to {target:.3f}", "seconds to it"])
    for path, run in runs.iterrows():
        needed = passage(path, target)
        reached = "never" if needed is None else f"{needed:.0f}"
        seconds = ""
        if timed and needed is not None:
            seconds = f"{needed * run['seconds_per_iteration']:.0f}"
        table.add(
            str(run["method"]),
            str(run[DEPTH]),
            str(run["iteration"]),
            f"{run['train_loss']:.4f}",
            f"{run['val_loss']:.4f}",
            reached,
            seconds,
        )
    first = runs.iloc[0]
    iterations = first["training.iterations"]
    tokens = iterations * first["training.batch_size"] * first["model.sequence_length"]
    table.write(
        f"{first['architecture']}, {iterations:,} iterations, {tokens:,} tokens of "
        f"{first['data.source']}, learning rate {first['optimizer.lr']:g}, one seed: a short "
        f"schedule, not the paper's",
        "Losses are means over the last 2 % of the run. The target is AdamW's loss under delay.",
        *differences(runs),
        folder=out,
    )


if __name__ == "__main__":
    main()
