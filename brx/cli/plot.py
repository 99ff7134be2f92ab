"""`brx plot`: loss curves of any runs, and the paper's figures."""

from __future__ import annotations

import argparse
from pathlib import Path

HELP = "draw loss curves of runs, or the paper's figures"
EXAMPLES = """\
  brx plot curves runs/quick-*                          training loss of any runs
  brx plot main                                         a figure of the paper, from results/cpu into figures/cpu
  brx plot all --scale paper --runs runs/paper --out figures/paper
  brx plot list                                         which figures there are
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "figure", metavar="FIGURE", help="curves, all, list, or one of the paper's figures by name or label"
    )
    parser.add_argument("runs", nargs="*", type=Path, metavar="RUN", help="folders of runs (for `curves`)")
    parser.add_argument(
        "--out",
        type=Path,
        help="curves: the figure's path without suffix (default: curves); else: the folder (default: figures/SCALE;"
        " of figures that need no sweep: figures)",
    )
    parser.add_argument("--scale", choices=["cpu", "paper"], default="cpu", help="which experiments (default: cpu)")
    parser.add_argument("--runs", type=Path, dest="folder", metavar="DIR", help="their folder (default: the scale's)")


def run(args: argparse.Namespace) -> int:
    """Draw, and say what was written and what was missing."""
    from brx.errors import UserError
    from brx.paper.figures import FIGURES, PaperFigure
    from brx.paper.standalone_figures import STANDALONE, StandaloneFigure

    if args.figure == "curves":
        return _plot_curves(args.runs, args.out or Path("curves"))
    if args.runs:
        raise UserError(f"RUN: only `curves` takes runs; give {args.figure} the folder of its runs with --runs")
    catalogue: list[PaperFigure | StandaloneFigure] = [*STANDALONE.values(), *FIGURES.values()]
    if args.figure == "list":
        for figure in catalogue:
            print(f"{figure.name:24}{figure.label:40}{figure.caption}")
        return 0
    by_label = {figure.label: figure.name for figure in catalogue}
    wanted = by_label.get(args.figure, args.figure)
    if wanted not in (*STANDALONE, *FIGURES, "all"):
        known = ", ".join(("curves", "all", "list", *STANDALONE, *FIGURES))
        raise UserError(f"FIGURE: unknown figure '{wanted}' (known: {known})")
    if wanted in FIGURES or wanted == "all":
        _plot_paper(args, list(FIGURES) if wanted == "all" else [wanted])
    if wanted in STANDALONE or wanted == "all":
        _plot_standalone(list(STANDALONE) if wanted == "all" else [wanted], args.out or Path("figures"))
    return 0


def _plot_curves(paths: list[Path], out: Path) -> int:
    import sys

    from brx.errors import UserError
    from brx.plot.curves import draw_curves
    from brx.runs.reading import Run, comparability

    if not paths:
        raise UserError("RUN: name at least one run's folder")
    runs = [Run.load(path) for path in paths]
    for line in comparability(runs):
        print(f"brx: note: {line}", file=sys.stderr)
    for path in draw_curves(runs, out):
        print(path)
    return 0


def _plot_paper(args: argparse.Namespace, names: list[str]) -> None:
    """Draw figures from runs; of several, those that have any."""
    import sys

    from brx.errors import UserError
    from brx.paper.figures import draw_paper_figure
    from brx.paper.scales import SCALES, Experiments

    experiments = Experiments(SCALES[args.scale], args.folder)
    for note in experiments.results.notes:
        print(f"brx: note: {note}", file=sys.stderr)
    folder = args.out or Path("figures") / args.scale
    for name in names:
        try:
            written, found = draw_paper_figure(name, experiments, folder)
        except UserError as error:
            if len(names) == 1:
                raise
            print(f"brx: note: {error}", file=sys.stderr)
            continue
        print(written[0])
        if found.missing:
            number = len(found.missing)
            print(f"brx: note: figure {name}: {number} experiments not there: {found.makers}", file=sys.stderr)


def _plot_standalone(names: list[str], folder: Path) -> None:
    """Draw figures that need no sweep; of several, those whose measurements are there."""
    import sys

    from brx.errors import UserError
    from brx.paper.standalone_figures import STANDALONE

    for name in names:
        try:
            print(STANDALONE[name].draw(folder / name)[0])
        except UserError as error:
            if len(names) == 1:
                raise
            print(f"brx: note: figure {name}: {error}", file=sys.stderr)
