"""`brx plot`: loss curves of any runs, and the paper's figures."""

from __future__ import annotations

import shutil
import tempfile
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
  brx plot "Figure 5" --out main.svg                    one file
  brx plot all --scale paper --runs runs/paper --out figures/paper
  brx plot list                                         which figures there are
"""

OF_ANY_RUNS = ("curves", "staleness", "profiles")
FORMATS = (".png", ".pdf", ".svg")

app = Application()


def complete_figure(incomplete: str) -> list[str]:
    """The figures' names."""
    from brx.paper.figures import FIGURES

    return [name for name in (*OF_ANY_RUNS, "all", "list", *FIGURES) if name.startswith(incomplete)]


@app.command(cls=Command, epilog=EXAMPLES)
def plot(
    figure: Annotated[
        str,
        typer.Argument(
            metavar="FIGURE",
            help="curves, staleness, profiles, all, list, or one of the paper's figures by name or number ('Figure 5')",
            show_default=False,
            autocompletion=complete_figure,
        ),
    ],
    folders: Annotated[
        list[Path] | None,
        typer.Argument(metavar="RUN", help="folders of runs (for curves, staleness and profiles)"),
    ] = None,
    *,
    out: Annotated[
        Path | None,
        typer.Option(
            help="a file (x.png, x.pdf, x.svg); or, for curves, staleness, profiles the figure's path without suffix"
            " (default: its name), else the folder (default: figures/SCALE; of figures that need no sweep: figures)"
        ),
    ] = None,
    scale: ScaleName = "laptop",
    runs: ScaleRuns = None,
) -> None:
    """Draw, and say what was written and what was missing."""
    from brx.paper.figures import FIGURES
    from brx.paper.publishing import draw_figures

    if figure in OF_ANY_RUNS and not folders:
        raise UserError("RUN: name at least one run's folder")
    if folders and figure not in OF_ANY_RUNS:
        raise UserError(f"RUN: only {', '.join(OF_ANY_RUNS)} take runs; name the folder of {figure}'s with --runs")
    if figure == "list":
        for entry in FIGURES.values():
            print(f"{entry.name:24}{entry.place:13}{entry.caption}")
        return
    if out is None or out.suffix not in FORMATS:
        for path in _of_runs(figure, folders, out) if folders else draw_figures(figure, scale, runs, out, print_note):
            print(path)
        return
    if figure == "all":
        raise UserError(f"--out {out}: a file holds one figure; name a folder for all")
    with tempfile.TemporaryDirectory() as scratch:
        drawn: Iterable[Path] = (
            _of_runs(figure, folders, Path(scratch) / "figure")
            if folders
            else draw_figures(figure, scale, runs, Path(scratch), print_note)
        )
        image = next(iter(drawn)).with_suffix(out.suffix)
        out.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(image, out)
    print(out)


def _of_runs(figure: str, folders: list[Path], out: Path | None) -> list[Path]:
    """Draw a figure of any runs."""
    from brx.runs.frames import comparable, differences, left_out, load

    if figure == "staleness":
        from brx.plot.any_runs import draw_staleness

        return draw_staleness(folders, out or Path("staleness"))
    frame = load(folders)
    if figure == "profiles":
        from brx.curvature.effective_delay import profile_points
        from brx.plot.curvature import draw_profiles

        shown, *others = comparable(frame)
        for aspects, runs_of_another in left_out(shown, others).items():
            print_note(f"left out, since they differ from the rest in {aspects}: {', '.join(runs_of_another['name'])}")
        return draw_profiles(profile_points(shown), out or Path("profiles"))
    from brx.plot.any_runs import draw_curves

    for line in differences(frame):
        print_note(line)
    return draw_curves(frame, out or Path("curves"))
