"""`brx demo`: the paper's point in a few minutes, with two methods, with and without delay."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from brx.config.loading import load_config
from brx.plot.any_runs import draw_curves
from brx.runs.comparison import common_target
from brx.runs.formats import format_table
from brx.runs.frames import load
from brx.runs.tables import loss_table
from brx.train.loop import train

COMPARED = ("pipedream", "basis-rotation")


def run_demo(out: Path, overrides: Sequence[str]) -> Literal["finished", "interrupted"]:
    """Train the preset `quick` with each method at P = 1 and at the preset's P; draw the curves and
    print the table.

    Finished runs are not trained again.

    Args:
        out: the folder of the runs and the figure.
        overrides: settings in place of the preset's, `KEY=VALUE`.
    """
    delayed = load_config("quick", overrides).pipeline.stages
    folders = []
    for stages in (1, delayed):
        for method in COMPARED:
            settings = [*overrides, f"optimizer.method={method}", f"pipeline.stages={stages}"]
            folder = out / f"{method}-p{stages}"
            if train(load_config("quick", settings), folder, resume=True) == "interrupted":
                return "interrupted"
            folders.append(folder)
    runs = load(folders)
    target = common_target(runs)
    written = draw_curves(runs, out / "curves", target=target)
    print(format_table(loss_table(runs, target), "table"))
    print(written[0])
    return "finished"
