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
        help="curves: the figure's path without suffix (default: curves); else: the folder (figures/SCALE)",
    )
    parser.add_argument("--scale", choices=["cpu", "paper"], default="cpu", help="which experiments (default: cpu)")
    parser.add_argument("--runs", type=Path, dest="folder", metavar="DIR", help="their folder (default: the scale's)")


def run(args: argparse.Namespace) -> int:
    """Draw, and say what was written and what was missing."""
    from brx.errors import UserError
    from brx.figures.paper import FIGURES

    if args.figure == "curves":
        return _plot_curves(args.runs, args.out or Path("curves"))
    if args.runs:
        raise UserError(f"RUN: only `curves` takes runs; give {args.figure} the folder of its runs with --runs")
    if args.figure == "list":
        for figure in FIGURES.values():
            print(f"{figure.name:24}{figure.label:40}{figure.caption}")
        return 0
    by_label = {figure.label: figure.name for figure in FIGURES.values()}
    args.figure = by_label.get(args.figure, args.figure)
    if args.figure not in (*FIGURES, "all"):
        raise UserError(f"FIGURE: unknown figure '{args.figure}' (known: curves, all, list, {', '.join(FIGURES)})")
    return _plot_paper(args)


def _plot_curves(paths: list[Path], out: Path) -> int:
    import sys

    from brx.analysis.runs import Run, comparability
    from brx.errors import UserError
    from brx.figures.curves import draw_curves

    if not paths:
        raise UserError("RUN: name at least one run's folder")
    runs = [Run.load(path) for path in paths]
    for line in comparability(runs):
        print(f"brx: note: {line}", file=sys.stderr)
    for path in draw_curves(runs, out):
        print(path)
    return 0


def _plot_paper(args: argparse.Namespace) -> int:
    import sys

    from brx.analysis.scales import SCALES, Experiments
    from brx.errors import UserError
    from brx.figures.paper import FIGURES, draw_paper_figure

    experiments = Experiments(SCALES[args.scale], args.folder)
    for note in experiments.results.notes:
        print(f"brx: note: {note}", file=sys.stderr)
    folder = args.out or Path("figures") / args.scale
    for name in FIGURES if args.figure == "all" else [args.figure]:
        try:
            written, found = draw_paper_figure(name, experiments, folder)
        except UserError as error:
            if args.figure != "all":
                raise
            print(f"brx: note: {error}", file=sys.stderr)
            continue
        print(written[0])
        if found.missing:
            number = len(found.missing)
            print(f"brx: note: figure {name}: {number} experiments not there: {found.makers}", file=sys.stderr)
    return 0
