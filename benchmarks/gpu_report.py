"""What the trainings of gpu_suite.sh came to: curves, and a table with the slowdown by delay.

python -m benchmarks.gpu_report RUN... --out results/gpu
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.report import Table
from brx.plot.curves import draw_curves
from brx.runs.reading import Run, common_target, comparability, iterations_to_target


def main() -> None:
    """Draw and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, required=True, help="folder of table and figure")
    options = parser.parse_args()
    runs = [Run.load(path) for path in options.runs]
    target = common_target(runs)
    draw_curves(runs, options.out / "curves", target=target)
    reached = {(run.method, run.stages): iterations_to_target(run, target) for run in runs}
    columns = ["method", "P", "training loss", "validation loss", f"iterations to {target:.3f}", "slowdown"]
    table = Table("training", [*columns, "tokens/s", "MFU"])
    for run in runs:
        needed, base = reached[run.method, run.stages], reached.get((run.method, 1))
        mfu = run.summary.get("mfu")
        table.add(
            run.method,
            str(run.stages),
            f"{run.smoothed[-1]:.4f}",
            f"{run.val_loss[-1]:.4f}",
            "never" if needed is None else f"{needed:.0f}",
            "" if needed is None or base is None else f"{needed / base:.2f}",
            f"{run.summary['tokens_per_second']:,.0f}",
            "" if mfu is None else f"{mfu:.1%}",
        )
    config = runs[0].config
    tokens = config.training.iterations * config.training.batch_size * config.model.sequence_length
    table.write(
        f"{config.model.blocks} blocks, d {config.model.width}, {config.training.iterations:,} iterations,"
        f" {tokens:,} tokens of {config.data.source}: a short schedule, not the paper's",
        "Losses are means over the last 2 % of the run; slowdown: iterations to the common loss over those at P = 1.",
        *comparability(runs),
        folder=options.out,
    )


if __name__ == "__main__":
    main()
