"""One figure: its panels or its function, its size and caption, and how it is drawn from runs."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from brx.errors import UserError, counted
from brx.paper.panels import Panel
from brx.paper.scales import Experiments, Scale
from brx.paper.tables import Entry
from brx.plot.style import COLUMN_WIDTH_IN, legend_entries, new_figure, save
from brx.runs.frames import DEPTH
from brx.runs.run import SMOOTHING
from brx.runs.tables import rate_text
from brx.runs.trajectory import RATE

PANEL_IN = 2.3  # width of a panel
HEIGHT_IN = 2.5  # and its height
ALONE_IN = (COLUMN_WIDTH_IN, 2.9)  # width and height of a figure with one panel

READING = (
    f"Training losses are means over {SMOOTHING:.0%} of the iterations, at the learning rate of "
    "the lowest final validation loss; bands: range over seeds, thin: one seed. One rate: only one "
    "learning rate was tried, for all curves or for so many of them."
)


@dataclass(frozen=True)
class PaperFigure(Entry):
    """One figure. It is drawn in one of four ways:

    - `panels` or `fill` draw the runs of a scale;
    - `draw_to` draws something else: a toy, a pipeline over time, a scale's measurements;
    - `draw_study` draws the runs of a study, which have a folder of their own.

    `draw_to` and `draw_study` take a path without suffix and return the files written."""

    caption: str
    # Row by row; the legend takes the place of a None.
    panels: Sequence[Panel | None] = ()
    # Draws the whole figure, if it is not a grid of panels.
    fill: Callable[[Experiments, Figure], None] | None = None
    draw_to: Callable[[Path, Scale], list[Path]] | None = None
    is_measured: bool = False  # `draw_to` draws a scale's measurements
    draw_study: Callable[[Path, Path], list[Path]] | None = None  # folder of runs, figure's path
    study: Path | None = None  # the study's folder, unless --runs names another
    across: int = 1  # panels in a row
    height: float | None = None  # in inches; by default HEIGHT_IN per row
    # From this panel on, all share one vertical axis; None: each has its own.
    shares_y: int | None = 0
    legend: bool = True  # one legend for all panels, instead of one under each
    reading: str = READING  # the caption's second sentence: how to read the figure
    # The figure is drawn only if there are runs of this sweep: without them it would show other
    # experiments only. Empty: any runs will do.
    sweep: str = ""

    @property
    def is_from_runs_of_scale(self) -> bool:
        """Whether it is drawn from the runs of a scale's sweeps."""
        return self.draw_to is None and self.draw_study is None

    @property
    def num_rows(self) -> int:
        """Rows of panels; 1 for a figure without panels."""
        return max(1, math.ceil(len(self.panels) / self.across))

    @property
    def size(self) -> tuple[float, float]:
        """Width and height in inches."""
        if len(self.panels) == 1:
            return ALONE_IN
        return PANEL_IN * self.across, self.height or HEIGHT_IN * self.num_rows


def draw_paper_figure(
    figure: PaperFigure, experiments: Experiments, folder: Path
) -> tuple[list[Path], Experiments]:
    """Draw a figure from the runs of a scale into a folder.

    Returns the files written, and a copy of the experiments whose `used` and `missing` are those
    that the figure asked for.

    Raises:
        UserError: none of its runs exist.
    """
    asked = experiments.fresh()
    with new_figure(*figure.size) as drawn:
        if figure.fill is not None:
            figure.fill(asked, drawn)
        else:
            _fill_panels(figure, asked, drawn)
        lacks_own_sweep = figure.sweep and asked.scale.sweep(figure.sweep) not in asked.sweeps
        if not asked.used or lacks_own_sweep:
            raise UserError(f"none of its runs are in {asked.folder}; {asked.advice}")
        caption = figure.caption
        if figure.place:
            caption += f" (The paper's {figure.place}.)"
        if figure.reading:
            caption += f"\n{figure.reading}"
        diverged = _diverged_texts(asked)
        if diverged:
            caption += f"\nDiverged, and in no curve or mean: {', '.join(diverged)}."
        details = {
            "fingerprint": asked.fingerprint,
            "runs": _runs_by_experiment(asked),
            "not there": list(asked.missing),
        }
        command = f"brx plot {figure.name} --scale {asked.scale.name}"
        written = save(drawn, folder / figure.name, caption, command=command, details=details)
        return written, asked


def _runs_by_experiment(asked: Experiments) -> dict[str, list[str]]:
    """The names of the runs used, by a text about their experiment."""
    runs = {}
    for seeds in asked.used.values():
        first = seeds.iloc[0]
        rate = rate_text(first[RATE], at_edge=first["lr_at_edge"])
        length = f"{first['architecture']}, {counted(first['last_iteration'], 'iteration')}"
        runs[f"{first['variant']}, P = {first[DEPTH]}, lr {rate}, {length}"] = list(seeds["name"])
    return runs


def _diverged_texts(asked: Experiments) -> list[str]:
    """A text about each experiment of which some seeds diverged, such as
    `nesterov at P = 32 (1 seed)`."""
    diverged = []
    for seeds in asked.used.values():
        first = seeds.iloc[0]
        if first["diverged_seeds"]:
            count = counted(len(first["diverged_seeds"]), "seed")
            diverged.append(f"{first['variant']} at P = {first[DEPTH]} ({count})")
    return diverged


def _fill_panels(figure: PaperFigure, experiments: Experiments, drawn: Figure) -> None:
    """Draw the panels of a figure into a grid."""
    grid = drawn.subplots(
        figure.num_rows, figure.across, squeeze=False, sharey=figure.shares_y == 0
    )
    used: list[Axes] = []
    free = None
    for axes, panel in zip(grid.ravel(), figure.panels, strict=True):
        if panel is None:
            free = axes
            continue
        if figure.shares_y and len(used) > figure.shares_y:
            axes.sharey(used[figure.shares_y])
        used.append(axes)
        panel(experiments, axes)
    if figure.legend:
        _join_legends(drawn, used, free, columns=max(2, 2 * figure.across - 1))


def _join_legends(
    drawn: Figure, panels: Sequence[Axes], free: Axes | None, *, columns: int
) -> None:
    """Replace the panels' legends by one, in the free place of the grid, or else under all
    panels."""
    for axes in panels:
        legend = axes.get_legend()
        if legend is not None:
            legend.remove()
    handles, labels = legend_entries(panels)
    if not labels:
        return
    if free is None:
        drawn.legend(handles, labels, loc="outside lower center", ncols=columns)
        return
    free.set_axis_off()
    free.legend(handles, labels, loc="center")
