"""`brx plot`: loss curves of any runs, and the paper's figures."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from brx.cli.options import ScaleName, ScaleRuns
from brx.cli.usage import Application, Command
from brx.errors import UserError

EXAMPLES = """\
  brx plot curves runs/quick-*                          training loss of any runs
  brx plot main                                         a figure of the paper, from results/cpu into figures/cpu
  brx plot all --scale paper --runs runs/paper --out figures/paper
  brx plot list                                         which figures there are
"""

app = Application()


@app.command(cls=Command, epilog=EXAMPLES)
def plot(
    figure: Annotated[
        str,
        typer.Argument(
            metavar="FIGURE",
            help="curves, all, list, or one of the paper's figures by name or label",
            show_default=False,
        ),
    ],
    curves: Annotated[list[Path] | None, typer.Argument(metavar="RUN", help="folders of runs (for `curves`)")] = None,
    *,
    out: Annotated[
        Path | None,
        typer.Option(
            help="curves: the figure's path without suffix (default: curves); else: the folder (default: figures/SCALE;"
            " of figures that need no sweep: figures)"
        ),
    ] = None,
    scale: ScaleName = "cpu",
    runs: ScaleRuns = None,
) -> None:
    """Draw, and say what was written and what was missing."""
    from brx.paper.figures import FIGURES, PaperFigure
    from brx.paper.standalone_figures import STANDALONE, StandaloneFigure

    if figure == "curves":
        _plot_curves(curves or [], out or Path("curves"))
        return
    if curves:
        raise UserError(f"RUN: only `curves` takes runs; give {figure} the folder of its runs with --runs")
    catalogue: list[PaperFigure | StandaloneFigure] = [*STANDALONE.values(), *FIGURES.values()]
    if figure == "list":
        for entry in catalogue:
            print(f"{entry.name:24}{entry.label:40}{entry.caption}")
        return
    by_label = {entry.label: entry.name for entry in catalogue}
    wanted = by_label.get(figure, figure)
    if wanted not in (*STANDALONE, *FIGURES, "all"):
        known = ", ".join(("curves", "all", "list", *STANDALONE, *FIGURES))
        raise UserError(f"FIGURE: unknown figure '{wanted}' (known: {known})")
    if wanted in FIGURES or wanted == "all":
        _plot_paper(list(FIGURES) if wanted == "all" else [wanted], scale, runs, out or Path("figures") / scale)
    if wanted in STANDALONE or wanted == "all":
        _plot_standalone(list(STANDALONE) if wanted == "all" else [wanted], out or Path("figures"))


def _plot_curves(paths: list[Path], out: Path) -> None:
    from brx.plot.curves import draw_curves
    from brx.runs.frames import differences, load

    if not paths:
        raise UserError("RUN: name at least one run's folder")
    runs = load(paths)
    for line in differences(runs):
        print(f"brx: note: {line}", file=sys.stderr)
    for path in draw_curves(runs, out):
        print(path)


def _plot_paper(names: list[str], scale: str, runs: Path | None, folder: Path) -> None:
    """Draw figures from runs; of several, those that have any."""
    from brx.paper.figures import draw_paper_figure
    from brx.paper.scales import SCALES, Experiments

    experiments = Experiments.load(SCALES[scale], runs)
    for note in experiments.notes:
        print(f"brx: note: {note}", file=sys.stderr)
    for name in names:
        try:
            written, own = draw_paper_figure(name, experiments, folder)
        except UserError as error:
            if len(names) == 1:
                raise
            print(f"brx: note: {error}", file=sys.stderr)
            continue
        print(written[0])
        if own.missing:
            number = len(own.missing)
            print(f"brx: note: figure {name}: {number} experiments not there: {own.makers}", file=sys.stderr)


def _plot_standalone(names: list[str], folder: Path) -> None:
    """Draw figures that need no sweep; of several, those whose measurements are there."""
    from brx.paper.standalone_figures import STANDALONE

    for name in names:
        try:
            print(STANDALONE[name].draw(folder / name)[0])
        except UserError as error:
            if len(names) == 1:
                raise
            print(f"brx: note: figure {name}: {error}", file=sys.stderr)
