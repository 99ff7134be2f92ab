"""The paper's figures (`FIGURES`, at the end). Most are grids of panels; each panel asks for the
runs of a scale and draws them.

Figures that do not show the runs of a sweep (pipelines over time, toys, the Hessian) have a
function that draws them with the paper's settings."""

import math
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, product
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from brx.curvature.effective_delay import (
    VARIANT_OF_SPACE,
    complete_measurements,
    effective_delay,
    measured_points,
    slowdowns_at_ends,
    usual_stages,
)
from brx.curvature.norm_result import STRATEGY_SPACES, measured_norms
from brx.curvature.oscillation import oscillations_in, usual_only
from brx.errors import UserError
from brx.paper.architectures import RUNS as ARCHITECTURE_RUNS
from brx.paper.architectures import draw_architectures
from brx.paper.causes.figure import draw_causes
from brx.paper.causes.study import RUNS as CAUSES_RUNS
from brx.paper.claims import CLAIMS, fill_claims, judge
from brx.paper.ladder import fill_ladder
from brx.paper.leads import draw_leads
from brx.paper.scales import (
    BASELINES_AND_STRATEGIES,
    BLOCKS,
    COMPENSATIONS,
    DEPTHS,
    ENDS,
    FREQUENCIES,
    MAIN,
    PER_BLOCK,
    PRECONDITIONED,
    SCALES,
    STRATEGY_NAMES,
    Experiments,
    Scale,
)
from brx.paper.similarity import RUNS as STUDY_RUNS
from brx.paper.similarity import draw_similarity
from brx.paper.tables import (
    PRECONDITIONED_TABLE,
    Entry,
    Note,
    entries,
    load_noting,
    made,
    note_missing,
)
from brx.plot import losses
from brx.plot.curvature import (
    draw_effective_delay,
    draw_norms,
    draw_oscillation,
    draw_strategy_norms,
)
from brx.plot.planning import draw_schedules
from brx.plot.style import (
    COLUMN_WIDTH_IN,
    GREY,
    finish_panel,
    legend_below,
    look_of,
    new_figure,
    save,
    say_not_run,
    shade,
)
from brx.runs.comparison import BASELINES, slowdowns
from brx.runs.frames import DEPTH, RATE, SEED, SMOOTHING, load
from brx.runs.slowdown import geometric_mean
from brx.runs.tables import rate_text, slowdown_text
from brx.toy.run import run_toy

PANEL_IN = 2.3  # width of a panel
HEIGHT_IN = 2.5  # and its height
TITLE_CHARACTERS = 34  # most characters in a line of a panel's title
LEVEL = 0.005  # nats; smaller differences are 0.00 in a title
ALONE_IN = (COLUMN_WIDTH_IN, 2.9)  # width and height of a figure with one panel
READING = (
    f"Training losses are means over {SMOOTHING:.0%} of the iterations, at the learning rate of "
    "the lowest final validation loss; bands: range over seeds, thin: one seed. One rate: only one "
    "learning rate was tried, for all curves or for so many of them."
)

Panel = Callable[[Experiments, Axes], None]
"""Finds its experiments and draws them, or says that they were not run."""


class Line(NamedTuple):
    """An experiment that a panel draws if it has runs."""

    wanted: Mapping[str, Any]  # arguments of `Experiments.find`
    label: str | None = None  # by default the method's
    # Keyword arguments of matplotlib's lines. The colour is the method's unless it is among them.
    style: Mapping[str, Any] = MappingProxyType({})


def by_method(
    methods: Sequence[str],
    stages: int | None = None,
    *,
    style: Mapping[str, Any] = MappingProxyType({}),
    **options: Any,
) -> list[Line]:
    """A line per method.

    Args:
        methods: labels in VARIANTS.
        stages: P, as in `Experiments.find`.
        style: keyword arguments of matplotlib's lines.
        options: further arguments of `Experiments.find`.
    """
    return [
        Line({"method": method, "stages": stages, **options}, style=style) for method in methods
    ]


def refresh_schedule(schedule: str, label: str) -> Line:
    """A line for basis rotation with one schedule of refreshes: `uniform`, `stage-aware` or
    `reversed`."""
    wanted = {
        "method": "basis-rotation",
        "sweep": "" if schedule == "uniform" else "stage-aware",
        "settings": {"optimizer.refresh_schedule": schedule},
    }
    looks = {"uniform": "basis-rotation", "stage-aware": "basis-rotation stage-aware"}
    name = looks.get(schedule, "basis-rotation reversed")
    return Line(wanted, label, {"color": look_of(name).color})


def ordered(method: str, wanted_by_label: Mapping[str, Mapping[str, Any]]) -> list[Line]:
    """A line per experiment of a method, from light to dark."""
    lines = []
    for index, (label, wanted) in enumerate(wanted_by_label.items()):
        color = shade(look_of(method).color, index, len(wanted_by_label))
        lines.append(Line({"method": method, **wanted}, label, {"color": color}))
    return lines


def by_frequency() -> list[Line]:
    """The lines of basis rotation, one per number of iterations between refreshes."""
    wanted = {}
    for n in FREQUENCIES:
        label = f"refresh every {n}" if n > 1 else "refresh in each"
        wanted[label] = {"sweep": "frequency", "settings": {"optimizer.frequency": n}}
    return ordered("basis-rotation", wanted)


def by_strength(stages: int) -> list[Line]:
    """The lines of delay compensation at P stages, one per strength."""
    wanted = {}
    for strength in COMPENSATIONS:
        wanted[rf"DC, $\lambda$ = {strength:g}"] = {
            "stages": stages,
            "sweep": "delay-compensation",
            "settings": {"optimizer.compensation": strength},
        }
    return ordered("delay-compensation", wanted)


def by_depth(method: str, *, per_block: bool = False) -> list[Line]:
    """A method's lines, one per number of stages P; or, if `per_block`, one per depth of the model,
    with one block per stage."""
    if not per_block:
        return ordered(method, {f"P = {P}": {"stages": P} for P in DEPTHS})
    wanted = {}
    for n in BLOCKS:
        label = f"{n} blocks, P = {n}"
        wanted[label] = {"stages": n, "model": PER_BLOCK, "settings": {"model.blocks": n}}
    return ordered(method, wanted)


def in_even_lines(text: str) -> str:
    """The text, broken into as few lines as fit over a panel, all of about the same length."""
    num_lines = len(textwrap.wrap(text, TITLE_CHARACTERS))
    width = TITLE_CHARACTERS
    while width > 1 and len(textwrap.wrap(text, width - 1)) == num_lines:
        width -= 1
    return textwrap.fill(text, width)


def lowest(shown: Sequence[losses.Curve], loss: str) -> str:
    """A title: the curve that ends lowest, and its lead over the next one in nats.

    Args:
        shown: two curves or more.
        loss: the column of the final losses.
    """
    finals = finals_of(shown, loss)
    best, second = sorted(finals, key=finals.__getitem__)[:2]
    lead = finals[second] - finals[best]
    if lead < LEVEL:
        return f"{best} and {second} end level"
    return f"{best} lowest by {lead:.2f} nats"


def change(shown: Sequence[losses.Curve], loss: str) -> str:
    """A title: the final loss of the last curve minus that of the first, for example
    `P = 1 to 32: +0.40 nats`."""
    (first, before), (last, after) = finals_of([shown[0], shown[-1]], loss).items()
    start = _first_part(first)
    end = _first_part(last)
    unit = end.rpartition(" ")[2]
    # `4 blocks to 32 blocks` becomes `4 to 32 blocks`.
    return f"{start.removesuffix(f' {unit}')} to {end}: {after - before:+.2f} nats"


def _first_part(label: str) -> str:
    """A label up to its comma, without the underscore that keeps it out of the legend."""
    return label.lstrip("_").partition(",")[0]


def against_the_last(shown: Sequence[losses.Curve], loss: str) -> str:
    """A title: whether the second to last curve ends above or below the last curve, and by how
    much."""
    (ours, own), (last, other) = finals_of(shown[-2:], loss).items()
    side = "below" if own < other else "above"
    return f"{ours} ends {abs(own - other):.2f} nats {side} {last}"


def costs_of_delay(shown: Sequence[losses.Curve], loss: str) -> str:
    """A title: the cost of delay for two methods. `shown` has the curves of both methods with
    delay, then of both without, in the same order; with fewer than four the title is empty."""
    if len(shown) < 4:
        return ""
    costs = []
    for curve, undelayed in zip(shown[:2], shown[2:4], strict=True):
        before, after = finals_of([undelayed, curve], loss).values()
        costs.append(f"{curve.label} {after - before:.2f}")
    return f"delay costs {' and '.join(costs)} nats"


def finals_of(shown: Sequence[losses.Curve], loss: str) -> dict[str, float]:
    """The mean final loss of each curve, by label, over the seeds that all curves have; if they
    share none, over each curve's own seeds."""
    shared = set[int].intersection(*(set(curve.runs[SEED]) for curve in shown))
    finals = {}
    for curve in shown:
        seeds = curve.runs[curve.runs[SEED].isin(shared)] if shared else curve.runs
        finals[curve.label] = float(seeds[loss].mean())
    return finals


def curves_panel(
    title: str,
    *lines: Line,
    draw: Callable[[Axes, Sequence[losses.Curve], str], None] = losses.draw_training_losses,
    says: Callable[[Sequence[losses.Curve], str], str] = lowest,
    loss: str = "train_loss",
) -> Panel:
    """Make a panel of loss curves.

    Args:
        title: the first line of the panel's title.
        lines: the experiments; ones without runs are left out.
        draw: draws curves under a title.
        says: returns the title's second line for the curves and `loss`; called if there are several
            curves.
        loss: the column of the final losses.
    """

    def panel(experiments: Experiments, axes: Axes) -> None:
        shown = []
        for line in lines:
            seeds = experiments.find(**line.wanted)
            if seeds is not None:
                shown.append(losses.curve_of(seeds, line.label, **line.style))
        if not shown:
            say_not_run(axes, title)
            return
        finding = says(shown, loss) if len(shown) > 1 else ""
        draw(axes, shown, f"{title}\n{in_even_lines(finding)}")

    return panel


def deeper_models(method: str) -> Panel:
    """Make a panel with a method's curves by depth of the model, from light to dark.

    Panels of several methods share a legend, so its lines are grey."""
    lines = by_depth(method, per_block=True)
    # Labels that begin with an underscore stay out of the legend.
    hidden = [line._replace(label=f"_{line.label}") for line in lines]
    draw_curves = curves_panel(look_of(method).label, *hidden, says=change)

    def panel(experiments: Experiments, axes: Axes) -> None:
        draw_curves(experiments, axes)
        if axes.lines:
            label_shades(axes, [line.label or "" for line in lines])
            legend_below(axes)

    return panel


def label_shades(axes: Axes, labels: Sequence[str]) -> None:
    """Put grey lines from light to dark into the legend, in place of the shades of each method."""
    for index, label in enumerate(labels):
        axes.plot([], [], color=shade(GREY, index, len(labels)), label=label)


def final_losses(
    experiments: Experiments,
    axes: Axes,
    methods: Sequence[str],
    per_block: bool = False,
    best_of: Sequence[str] = (),
) -> None:
    """Draw a panel: the final training losses of methods against the number of stages.

    Args:
        experiments: the runs.
        axes: the panel.
        methods: labels in VARIANTS.
        per_block: whether to draw against the model's depth instead, with one block per stage.
        best_of: methods that are drawn as one line: at each P, the best of them on each seed.
    """
    wanted = []
    for method in methods:
        wanted += [line.wanted for line in by_depth(method, per_block=per_block)]
    present = experiments.find_all(wanted)
    if not present:
        say_not_run(axes, "(a) final loss")
        return
    runs = pd.concat(present)
    losses.draw_final_losses(axes, runs, best_of)
    title = f"(a) final loss\n{lowest_by_depth(runs)}"
    x_label = "blocks = stages P" if per_block else "stages P"
    finish_panel(axes, x_label, "final training loss (nats)", title)


def lowest_by_depth(runs: pd.DataFrame) -> str:
    """The variant that is lowest in final training loss, or level with the lowest, at the most
    numbers of stages P: for example `PipeDream lowest at 3 of 6 P`."""
    finals = runs.groupby([DEPTH, "variant"])["train_loss"].mean().unstack()
    leads = finals.sub(finals.min(axis="columns"), axis="index")
    is_level = leads < LEVEL
    counts = is_level.sum(axis="index")
    best = counts.idxmax()
    # Methods that were not run at a number of stages have NaN there, which is not level.
    is_shared = bool((is_level[best] & (is_level.sum(axis="columns") > 1)).any())
    verb = "lowest or level" if is_shared else "lowest"
    return f"{look_of(best).label} {verb} at {counts[best]} of {len(finals)} P"


def slowdown(experiments: Experiments, axes: Axes, method: str, letter: str = "") -> None:
    """Draw a panel: a method's curves at P = 1 and at the deepest pipeline, and the iterations that
    each needs to reach the scale's target. The title is `letter`, the method and its slowdown."""
    target = experiments.slowdown_target()
    look = look_of(method)
    ends = experiments.find_all({"method": method, "stages": P} for P in ENDS)
    if len(ends) < 2 or target is None:
        say_not_run(axes, f"{letter}{look.label}")
        return
    shown = []
    for runs, style in zip(ends, ("-", "--"), strict=True):
        label = f"P = {runs[DEPTH].iloc[0]}"
        # In the legend, which panels share, the lines are black. Labels that begin with an
        # underscore stay out of it.
        axes.plot([], [], color="black", linestyle=style, label=label)
        shown.append(losses.curve_of(runs, f"_{label}", linestyle=style))
    (row,) = slowdowns(pd.concat(ends), target).to_dict("records")
    ratio = "" if pd.isna(row["ratio"]) else f"\nslowdown {slowdown_text(row)}"
    losses.draw_training_losses(axes, shown, f"{letter}{look.label}{ratio}")
    axes.axhline(target, color="black", linewidth=0.6, linestyle=":")
    for iterations in (row["iterations"], row["reference_iterations"]):
        axes.axvline(geometric_mean(iterations), color=look.color, linewidth=0.6, linestyle=":")


def rates(experiments: Experiments, axes: Axes, method: str) -> None:
    """Draw a panel: a method's final validation loss against the learning rate, a line per number
    of stages P. The title names each P whose best rate is at an edge of the rates tried."""
    tried = experiments.tried
    title = look_of(method).label
    at_edge = []
    lines = by_depth(method)
    for line in lines:
        seeds = experiments.find(**line.wanted)
        if seeds is None:
            continue
        if seeds["lr_at_edge"].iloc[0]:
            at_edge.append(str(line.wanted["stages"]))
        scores = tried[tried["experiment"] == seeds["experiment"].iloc[0]]
        losses.draw_rates(axes, scores, line.style["color"])
    if not axes.lines:
        say_not_run(axes, title)
        return
    title += f"\nat an edge: P = {', '.join(at_edge)}" if at_edge else "\nno best rate at an edge"
    label_shades(axes, [line.label or "" for line in lines])
    finish_panel(axes, "learning rate", "final validation loss (nats)", title)


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
        length = f"{first['architecture']}, {first['last_iteration']} iterations"
        runs[f"{first['variant']}, P = {first[DEPTH]}, lr {rate}, {length}"] = list(seeds["name"])
    return runs


def draw_figures(
    wanted: str, scale: str, runs: Path | None, out: Path | None, note: Note
) -> Iterator[Path]:
    """Draw figures; yields the path of each image.

    Args:
        wanted: a name, a place in the paper (`Figure 5`), or `all`.
        scale: the name of the scale.
        runs: the folder of the runs, instead of the scale's.
        out: a folder; by default figures/SCALE, or figures/ if the figure is the same for all
            scales.
        note: tells the user which figures of several could not be drawn, or not completely.

    Raises:
        UserError: there is no such figure, or it is the only one and cannot be drawn.
    """
    chosen = entries(wanted, FIGURES, "figure", "curves, staleness, profiles")
    if runs is not None and all(figure.draw_to is not None for figure in chosen):
        raise UserError(f"--runs: figure {wanted} is not drawn from a folder of runs")
    needs_scale = any(figure.is_from_runs_of_scale for figure in chosen)
    experiments = load_noting(scale, runs, note) if needs_scale else None

    def draw(figure: PaperFigure) -> Path:
        is_of_scale = figure.is_from_runs_of_scale or figure.is_measured
        folder = out or (Path("figures") / scale if is_of_scale else Path("figures"))
        if figure.draw_to is not None:
            return figure.draw_to(folder / figure.name, SCALES[scale])[0]
        if figure.draw_study is not None and figure.study is not None:
            # If several figures are drawn, --runs names the scale's folder.
            named = runs if len(chosen) == 1 else None
            return figure.draw_study(named or figure.study, folder / figure.name)[0]
        assert experiments is not None
        written, asked = draw_paper_figure(figure, experiments, folder)
        note_missing(f"figure {figure.name}", asked, note)
        return written[0]

    return (path for _, path in made(chosen, draw, "figure", note))


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
    handle_by_label: dict[str, Any] = {}
    for axes in panels:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            handle_by_label[label] = handle
        legend = axes.get_legend()
        if legend is not None:
            legend.remove()
    if not handle_by_label:
        return
    labels = list(handle_by_label)
    handles = list(handle_by_label.values())
    if free is None:
        drawn.legend(handles, labels, loc="outside lower center", ncols=columns)
        return
    free.set_axis_off()
    free.legend(handles, labels, loc="center")


def _oscillation(path: Path, scale: Scale) -> list[Path]:
    """Draw the oscillation at the smallest and the largest P that were measured."""
    measured = usual_only(oscillations_in([scale.curvature]))
    depths = [result.num_stages for result in measured]
    ends = min(depths), max(depths)
    return draw_oscillation([result for result in measured if result.num_stages in ends], path)


def _strategy_norms(path: Path, scale: Scale) -> list[Path]:
    """Draw the norms in each strategy's coordinates, with the strategies' slowdowns if there are
    any."""
    norms = measured_norms([scale.curvature], STRATEGY_SPACES)
    results = list(chain.from_iterable(complete_measurements(norms)))
    if not results:
        raise UserError(
            f"{scale.curvature}: no checkpoint was measured in all coordinates; run `brx "
            f"hessian-norm RUN --strategies`"
        )
    costs = None
    if scale.runs.is_dir():
        experiments = Experiments.load(scale)
        wanted = product(VARIANT_OF_SPACE.values(), ENDS)
        present = experiments.find_all({"method": name, "stages": P} for name, P in wanted)
        target = experiments.slowdown_target()
        if present and target is not None:
            costs = slowdowns_at_ends(pd.concat(present), target)
    return draw_strategy_norms(results, costs, path)


def _effective_delays(path: Path, scale: Scale) -> list[Path]:
    """Draw the effective delay at every usual number of stages, and slowdowns against it."""
    measured = measured_norms([scale.curvature])
    stages = usual_stages(measured)
    curves_of_runs = []
    for result in measured:
        by_stages = [effective_delay(result, count) for count in stages]
        curves_of_runs.append((result, by_stages))
    points, _ = measured_points(load([scale.curvature]), measured)
    return draw_effective_delay(curves_of_runs, points, path)


UNSTASHED: dict[str, Any] = {"sweep": "stashing", "settings": {"pipeline.stash": "none"}}
WITHOUT_DELAY = tuple(
    Line({"method": method, "stages": 1}, f"{name} without delay", {"linestyle": ":"})
    for method, name in (("pipedream", "AdamW"), ("basis-rotation", "Basis rotation"))
)
STRATEGIES = ("pipedream-lr", *STRATEGY_NAMES)
SHORT_DASHES = (0, (1.0, 2.0))  # matplotlib's offset, then a dash and a gap in line widths
# Basis rotation's curve, and SOAP's on top of it, dashed because the two cover each other.
COVERING = (
    Line({"method": "basis-rotation"}),
    Line({"method": "soap"}, style={"linestyle": (0, (2, 2))}),
)

# Each has a name, its place in the paper and a caption; then its panels, or the function that draws
# it.
FIGURES = {
    figure.name: figure
    for figure in (
        PaperFigure(
            "schedule",
            "Figure 1",
            "Synchronous and asynchronous pipelines, and the delay.",
            draw_to=lambda path, _: draw_schedules(4, 4, path),
        ),
        PaperFigure(
            "toy-quadratic",
            "Figure 3",
            "Delay on a quadratic, aligned or not.",
            draw_to=lambda path, _: run_toy("quadratic", path),
        ),
        PaperFigure(
            "toy-spiral",
            "Figure 4",
            "Delay in a valley that turns.",
            draw_to=lambda path, _: run_toy("spiral", path),
        ),
        PaperFigure(
            "oscillation",
            "Figure 11",
            "Updates along the Hessian's dominant eigenvector.",
            draw_to=_oscillation,
            is_measured=True,
        ),
        PaperFigure(
            "hessian-norm",
            "",
            "Norm of the Hessian in original and rotated coordinates.",
            draw_to=lambda path, scale: draw_norms(measured_norms([scale.curvature]), path),
            is_measured=True,
        ),
        PaperFigure(
            "strategy-norms",
            "Theorem 3.1",
            "Norm of the Hessian in each strategy's coordinates, and its slowdown.",
            draw_to=_strategy_norms,
            is_measured=True,
        ),
        PaperFigure(
            "effective-delay",
            "",
            "The effective delay, and the slowdown.",
            draw_to=_effective_delays,
            is_measured=True,
        ),
        PaperFigure(
            "similarity",
            "",
            "Which dimensionless numbers decide what delay costs.",
            draw_study=draw_similarity,
            study=STUDY_RUNS,
        ),
        PaperFigure(
            "causes",
            "",
            "What makes an optimizer stand delay: bases, momentum, step geometry, corrections.",
            draw_study=draw_causes,
            study=CAUSES_RUNS,
        ),
        PaperFigure(
            "architectures",
            "",
            "What delay costs GPT's blocks and Llama's, and the leads of basis rotation in both.",
            draw_study=draw_architectures,
            study=ARCHITECTURE_RUNS,
        ),
        PaperFigure(
            "teaser",
            "Figure 2",
            "Delay slows training down; basis rotation takes most of that back.",
            [
                curves_panel("(a) PipeDream", *by_depth("pipedream"), says=change),
                curves_panel(
                    "(b) P = 32",
                    *by_method(("pipedream", "basis-rotation")),
                    *WITHOUT_DELAY,
                    says=costs_of_delay,
                ),
            ],
            across=2,
            height=3.1,
            legend=False,
        ),
        PaperFigure(
            "main",
            "Figure 5",
            "Methods against the number of stages for one model; (c-e) slowdown, to the loss "
            "that they and the strategies of basis rotation (those that are run) all reach, and "
            "its 95 % interval from 3 seeds on. SOAP is dotted in (b): its curve lies on basis "
            "rotation's.",
            [
                partial(final_losses, methods=(*MAIN, *PRECONDITIONED)),
                # Dashed, as P = 32 in (c-e). SOAP's curve lies on top of basis rotation's: between
                # its short dashes the longer ones show.
                curves_panel(
                    "(b) P = 32",
                    *by_method(MAIN, style={"linestyle": "--"}),
                    *by_method(("soap",), style={"linestyle": SHORT_DASHES}),
                    *by_method(("muon", "scion"), style={"linestyle": "--"}),
                ),
                None,
                *(
                    partial(slowdown, method=method, letter=f"({letter}) ")
                    for method, letter in zip(MAIN[1:], "cde", strict=True)
                ),
            ],
            across=3,
            shares_y=1,
        ),
        PaperFigure(
            "leads",
            "",
            "How far basis rotation ends below each rival under the delays of 32 stages: the part "
            "that is there without delay, and the part from delay.",
            [draw_leads],
            reading="Nats of final validation loss, means over seeds; lines: 95 % of the whole "
            "lead. The best baseline is the lowest of the three on each seed.",
        ),
        PaperFigure(
            "block-scaling",
            "Figure 6",
            "Deeper models, one block per stage: (a) final loss, (b-d) by method.",
            [partial(final_losses, methods=MAIN, per_block=True), *map(deeper_models, MAIN[1:])],
            across=2,
            shares_y=1,
        ),
        PaperFigure(
            "width",
            "Figure 7",
            "P = 24, (a) the smaller and (b) the larger model.",
            [
                curves_panel("(a) smaller model", *by_method(MAIN, model="smaller")),
                curves_panel("(b) larger model", *by_method(MAIN, model="larger")),
            ],
            across=2,
        ),
        PaperFigure(
            "strategies",
            "Figure 8",
            "Estimation strategies of basis rotation: (a) final loss, with the best baseline "
            "at each P, (b) at the largest.",
            [
                partial(final_losses, methods=(*BASELINES, *STRATEGY_NAMES), best_of=BASELINES),
                curves_panel("(b) P = 32", *by_method(STRATEGIES)),
            ],
            across=2,
            shares_y=None,
        ),
        PaperFigure(
            "efficiency",
            "Figure 9",
            "(a) mean loss over seeds against training time, at the pace of the method's fastest "
            "seed while least disturbed (cells share a machine: an upper bound), (b) iterations "
            "between refreshes, (c) intervals that depend on the stage.",
            [
                curves_panel("(a) P = 32", *by_method(MAIN), draw=losses.draw_against_time),
                curves_panel(
                    "(b) P = 32",
                    *by_method(("pipedream-lr",)),
                    *by_frequency(),
                ),
                curves_panel(
                    "(c) intervals, P = 32",
                    refresh_schedule("stage-aware", "stage-aware"),
                    refresh_schedule("uniform", "equal"),
                    says=against_the_last,
                ),
            ],
            across=3,
            height=3.1,
            legend=False,
        ),
        PaperFigure(
            "weight-stashing",
            "Figure 10",
            "Without weight stashing: (a) all methods, (b, c) with and without.",
            [
                curves_panel("(a) no stashing, P = 32", *by_method(MAIN, **UNSTASHED)),
                *(
                    curves_panel(
                        f"({letter}) {look_of(method).label}",
                        Line({"method": method}, "stashing"),
                        Line({"method": method, **UNSTASHED}, "no stashing", {"linestyle": "--"}),
                    )
                    for method, letter in (("pipedream-lr", "b"), ("basis-rotation", "c"))
                ),
            ],
            across=3,
            height=3.1,
            legend=False,
            sweep="stashing",
        ),
        PaperFigure(
            "all-stages",
            "Figure 12",
            "All methods at every number of stages.",
            [curves_panel(f"P = {P}", *by_method(MAIN, P)) for P in DEPTHS],
            across=3,
        ),
        PaperFigure(
            "slowdown-all",
            "Figure 13",
            "Slowdown of seven methods, to the loss that all but PipeDream reach.",
            [*(partial(slowdown, method=method) for method in BASELINES_AND_STRATEGIES), None],
            across=4,
        ),
        PaperFigure(
            "block-scaling-all",
            "Figure 14",
            "Deeper models, one block per stage, seven methods.",
            [*map(deeper_models, BASELINES_AND_STRATEGIES), None],
            across=4,
        ),
        PaperFigure(
            "weight-prediction",
            "Figure 15",
            "With PipeMare's weight prediction.",
            [
                curves_panel(
                    "P = 32",
                    *by_method(MAIN, sweep="prediction", settings={"pipeline.stash": "predict"}),
                )
            ],
        ),
        PaperFigure(
            "strategies-all-stages",
            "Figure 16",
            "Estimation strategies at every number of stages.",
            [curves_panel(f"P = {P}", *by_method(STRATEGIES, P)) for P in DEPTHS],
            across=3,
        ),
        PaperFigure(
            "reversed",
            "Figure 17",
            "Refreshes shared by delay, evenly, and inversely.",
            [
                curves_panel(
                    "intervals, P = 32",
                    refresh_schedule("stage-aware", "stage-aware"),
                    refresh_schedule("reversed", "reversed"),
                    refresh_schedule("uniform", "equal"),
                    says=against_the_last,
                )
            ],
            sweep="stage-aware",
        ),
        PaperFigure(
            "validation",
            "Figure 18",
            "(a) training and (b) validation loss.",
            [
                curves_panel("(a) training, P = 32", *by_method(BASELINES_AND_STRATEGIES)),
                curves_panel(
                    "(b) validation, P = 32",
                    *by_method(BASELINES_AND_STRATEGIES),
                    draw=losses.draw_validation,
                    loss="val_loss",
                ),
            ],
            across=2,
        ),
        PaperFigure(
            "delay-compensation",
            "Figure 19",
            "Delay compensation.",
            [
                curves_panel(
                    f"P = {P}",
                    *by_method(MAIN, P),
                    *by_strength(P),
                )
                for P in (8, 16, 32)
            ],
            across=3,
            sweep="delay-compensation",
        ),
        PaperFigure(
            "preconditioned",
            "Table 3",
            "Preconditioned methods.",
            [curves_panel("P = 32", *by_method(PRECONDITIONED_TABLE[:-2]), *COVERING)],
            sweep="preconditioned",
        ),
        PaperFigure(
            "3b",
            "Figure 20",
            "The 3B model.",
            [curves_panel("3B, P = 32", *by_method(MAIN, model="3B"))],
        ),
        PaperFigure(
            "moe",
            "Figure 21",
            "A mixture-of-experts model.",
            [
                curves_panel(
                    "mixture of experts, P = 32", *by_method(MAIN, model="mixture of experts")
                )
            ],
        ),
        PaperFigure(
            "learning-rates",
            "",
            "Final validation loss against the learning rate, by method and number of stages.",
            [partial(rates, method=method) for method in MAIN],
            across=4,
            height=2.7,
            reading="Filled: the chosen one; crosses: diverged. Between P = 1 and 32 each method "
            "ran at the rates that were chosen there, one or two.",
        ),
        PaperFigure(
            "ladder",
            "",
            "What delay costs by the length of training T, each length to a target of its own: "
            "slowdown, and iterations that basis rotation saves over the best baseline.",
            reading="Hollow: one seed; arrow: a lower bound; bars: 95 %; dashed: a power law "
            "of slowdown - 1 (of slowdown, where the model grows) and of the share that is left, "
            "by least squares, extrapolated to the paper's relative delay, where a bar is its 95 % "
            "prediction interval; stars: the paper's numbers.",
            fill=fill_ladder,
            across=3,
        ),
        PaperFigure(
            "claims",
            "",
            "The paper's claims, and what our runs say (brx claims).",
            reading="Above: strict verdicts by kind of claim. Below: ours over the paper's number, "
            "where there is one; bars: 95 %; hollow: one or two seeds; arrow: a bound, or beyond "
            "the axis; grey bands: a factor of 1.5 and of 2.",
            fill=lambda experiments, figure: fill_claims(figure, judge(experiments, CLAIMS)),
            across=3,
        ),
    )
}
