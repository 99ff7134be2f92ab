"""`brx plot`: loss curves of any runs, and the paper's figures."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from brx.cli.options import ScaleName, ScaleRuns
from brx.cli.usage import Application, Command, print_note
from brx.errors import UserError

EXAMPLES = """\
  brx plot curves runs/quick-*                          training loss of any runs
  brx plot staleness runs/mine                          what delay did to it (logging.staleness_every), into staleness
  brx plot profiles runs/profiles                       slowdown under delay profiles, beside tau' and the (1,1)-norm
  brx plot main                                         a figure of the paper, from results/laptop into figures/laptop
  brx plot all --scale paper --runs runs/paper --out figures/paper
  brx plot list                                         which figures there are
"""

OF_ANY_RUNS = ("curves", "staleness", "profiles")

app = Application()


@app.command(cls=Command, epilog=EXAMPLES)
def plot(
    figure: Annotated[
        str,
        typer.Argument(
            metavar="FIGURE",
            help="curves, staleness, profiles, all, list, or one of the paper's figures by name or number ('Figure 5')",
            show_default=False,
        ),
    ],
    curves: Annotated[
        list[Path] | None, typer.Argument(metavar="RUN", help="folders of runs (for curves, staleness and profiles)")
    ] = None,
    *,
    out: Annotated[
        Path | None,
        typer.Option(
            help="curves, staleness, profiles: the figure's path without suffix (default: its name); else: the folder"
            " (default: figures/SCALE; of figures that need no sweep: figures)"
        ),
    ] = None,
    scale: ScaleName = "laptop",
    runs: ScaleRuns = None,
) -> None:
    """Draw, and say what was written and what was missing."""
    from brx.paper.figures import FIGURES
    from brx.paper.publishing import draw_figures
    from brx.plot.curves import draw_curves
    from brx.runs.frames import comparable, differences, left_out, load

    if figure in OF_ANY_RUNS and not curves:
        raise UserError("RUN: name at least one run's folder")
    if figure == "staleness" and curves:
        from brx.plot.staleness import draw_staleness

        written: Iterable[Path] = draw_staleness(curves, out or Path("staleness"))
    elif figure == "profiles" and curves:
        from brx.curvature.effective_delay import profile_points
        from brx.plot.effective_delay import draw_profiles

        frame = load(curves)
        shown, *others = comparable(frame)
        for aspects, runs_of_another in left_out(shown, others).items():
            print_note(f"left out, since they differ from the rest in {aspects}: {', '.join(runs_of_another['name'])}")
        written = draw_profiles(profile_points(shown), out or Path("profiles"))
    elif figure == "curves" and curves:
        frame = load(curves)
        for line in differences(frame):
            print_note(line)
        written = draw_curves(frame, out or Path("curves"))
    elif curves:
        raise UserError(f"RUN: only {', '.join(OF_ANY_RUNS)} take runs; name the folder of {figure}'s with --runs")
    elif figure == "list":
        for entry in FIGURES.values():
            print(f"{entry.name:24}{entry.place:13}{entry.caption}")
        return
    else:
        written = draw_figures(figure, scale, runs, out, print_note)
    for path in written:
        print(path)
