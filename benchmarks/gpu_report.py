"""What the trainings of gpu_suite.sh came to: curves, and a table with the slowdown by delay.

python -m benchmarks.gpu_report RUN... --out results/gpu
"""

from pathlib import Path

import pandas as pd

from benchmarks.report import Table, parser_of
from brx.plot.any_runs import draw_curves
from brx.runs.comparison import common_target, passage
from brx.runs.frames import DEPTH, differences, load


def main() -> None:
    """Draw and print."""
    parser = parser_of(__doc__)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, required=True, help="folder of table and figure")
    options = parser.parse_args()
    runs = load(options.runs)
    target = common_target(runs)
    draw_curves(runs, options.out / "curves", target=target)
    reached = {run: passage(run, target) for run in runs.index}
    columns = [
        "method",
        "P",
        "training loss",
        "validation loss",
        f"iterations to {target:.3f}",
        "slowdown",
    ]
    table = Table("training", [*columns, "tokens/s", "MFU"])
    for path, run in runs.iterrows():
        undelayed = runs.index[(runs["method"] == run["method"]) & (runs[DEPTH] == 1)]
        needed, base = reached[path], reached[undelayed[0]] if len(undelayed) else None
        table.add(
            run["method"],
            str(run[DEPTH]),
            f"{run['train_loss']:.4f}",
            f"{run['val_loss']:.4f}",
            "never" if needed is None else f"{needed:.0f}",
            "" if needed is None or base is None else f"{needed / base:.2f}",
            f"{run['tokens_per_second']:,.0f}",
            "" if pd.isna(run["mfu"]) else f"{run['mfu']:.1%}",
        )
    first = runs.iloc[0]
    iterations = first["training.iterations"]
    tokens = iterations * first["training.batch_size"] * first["model.sequence_length"]
    table.write(
        f"{first['architecture']}, {iterations:,} iterations, {tokens:,} tokens of "
        f"{first['data.source']}: a short"
        " schedule, not the paper's",
        "Losses are means over the last 2 % of the run; slowdown: iterations to the common loss "
        "over those at P = 1.",
        *differences(runs),
        folder=options.out,
    )


if __name__ == "__main__":
    main()
