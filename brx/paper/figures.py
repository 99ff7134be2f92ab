"""The catalogue of the paper's figures: what each shows, as panels over the runs of a scale.

A figure is an entry of `FIGURES`: its name, place, caption and panels. What a panel draws is in `brx.paper.panels`.
Figures that need no sweep (timelines, toys, what was measured of the Hessian) have a function that draws them, as a
command of their own does (`brx schedule`, `brx toy`, ...), at the paper's settings.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from brx.curvature.effective_delay import (
    VARIANT_OF_SPACE,
    StrategySlowdowns,
    complete_measurements,
    effective_delay,
    slowdown_points,
    usual_stages,
)
from brx.curvature.norm_result import STRATEGY_SPACES, measured_norms, results_of
from brx.curvature.oscillation import Oscillation
from brx.errors import UserError
from brx.paper.claim_list import CLAIMS
from brx.paper.claims import judge
from brx.paper.claims_figure import fill_claims
from brx.paper.ladder import complete_lengths, fill_ladder
from brx.paper.panels import (
    Panel,
    beside_the_last,
    by_depth,
    by_method,
    by_setting,
    change,
    curves,
    deeper_models,
    final_losses,
    lines,
    rates,
    refresh_schedules,
    say_not_run,
    share_legend,
    slowdown,
)
from brx.paper.scales import (
    BASELINES_AND_STRATEGIES,
    COMPENSATIONS,
    FREQUENCIES,
    MAIN,
    STRATEGY_NAMES,
    Experiments,
    Scale,
)
from brx.paper.similarity import draw_study
from brx.paper.tables import PRECONDITIONED_TABLE
from brx.paper.toy_figures import run_toy
from brx.plot.curvature import draw_effective_delay, draw_norms, draw_oscillation, draw_strategy_norms
from brx.plot.losses import draw_against_time, draw_validation
from brx.plot.schedule import draw_schedules
from brx.plot.style import COLUMN_WIDTH_IN, look_of, new_figure, save
from brx.runs.comparison import BASELINES
from brx.runs.folder import find_runs
from brx.runs.frames import DEPTH, RATE, SMOOTHING, load
from brx.runs.tables import rate_text

PANEL_IN, HEIGHT_IN = 2.3, 2.5
ALONE_IN = (COLUMN_WIDTH_IN, 2.9)  # a figure of one panel
READING = (
    f"Training losses are means over {SMOOTHING:.0%} of the iterations, at the learning rate of the lowest final"
    " validation loss; bands: range over seeds, thin: one seed."
)
DEPTHS = (1, 2, 4, 8, 16, 32)


@dataclass(frozen=True)
class PaperFigure:
    """One figure: from runs, its `panels` or `fill` for the whole; or drawn by `draw_to` from no runs of a sweep."""

    name: str  # on the command line and of the files
    place: str  # in the paper, such as `Figure 5`; empty where it has no such figure
    caption: str
    panels: Sequence[Panel | None] = ()  # row by row; in the place of a None is the legend
    fill: Callable[[Experiments, Figure], None] | None = None  # draws the whole, where it is no grid of panels
    draw_to: Callable[[Path, Scale], list[Path]] | None = None  # at a path without suffix; the files written
    is_measured: bool = False  # `draw_to` draws what was measured at a scale, and not the same at all scales
    across: int = 1  # panels in a row
    height: float | None = None  # in inches; by default HEIGHT_IN per row
    shares_y: int | None = 0  # from which panel on panels have one vertical axis; None: each has its own
    legend: bool = True  # one under all panels, instead of one under each
    reading: str = READING  # the caption's second sentence: how to read it
    sweep: str = ""  # without runs of this one it would show other experiments alone; empty where any run will do


def draw_paper_figure(figure: PaperFigure, experiments: Experiments, folder: Path) -> tuple[list[Path], Experiments]:
    """Draw one of the figures that are from runs into a folder; a UserError where none of its runs exist.

    Returns:
        The files written, and the experiments with what was used and what was missing.
    """
    asked = experiments.fresh()
    down = -(-len(figure.panels) // figure.across) or 1
    size = ALONE_IN if len(figure.panels) == 1 else (PANEL_IN * figure.across, figure.height or HEIGHT_IN * down)
    with new_figure(*size) as drawn:
        if figure.fill is not None:
            figure.fill(asked, drawn)
        else:
            _fill_panels(figure, asked, drawn, down)
        if not asked.used or (figure.sweep and asked.scale.sweep(figure.sweep) not in asked.sweeps):
            raise UserError(f"none of its runs are in {asked.folder}; make them with {asked.what_to_run}")
        caption = f"{figure.caption} (The paper's {figure.place}.)" if figure.place else figure.caption
        command = f"brx plot {figure.name} --scale {asked.scale.name}"
        text = "\n".join(filter(None, (caption, figure.reading)))
        return save(drawn, folder / figure.name, text, command=command, details=_details(asked)), asked


def _details(asked: Experiments) -> dict[str, object]:
    """The runs by experiment, and what was not there."""
    runs = {}
    for seeds in asked.used.values():
        first = seeds.iloc[0]
        rate = rate_text(first[RATE], at_edge=first["lr_at_edge"])
        length = f"{first['architecture']}, {first['last_iteration']} iterations"
        runs[f"{first['variant']}, P = {first[DEPTH]}, lr {rate}, {length}"] = list(seeds["name"])
    return {"fingerprint": asked.fingerprint, "runs": runs, "not there": asked.missing}


def _fill_panels(figure: PaperFigure, experiments: Experiments, drawn: Figure, down: int) -> None:
    grid = drawn.subplots(down, figure.across, squeeze=False, sharey=figure.shares_y == 0).ravel()
    used: list[Axes] = []
    free = None
    for axes, panel in zip(grid, figure.panels, strict=True):
        if panel is None:
            free = axes
            continue
        if figure.shares_y and len(used) > figure.shares_y:
            axes.sharey(used[figure.shares_y])
        used.append(axes)
        panel(experiments, axes)
    if figure.legend:
        share_legend(drawn, used, figure.across, free)


def _ladder(experiments: Experiments, figure: Figure) -> None:
    ladder = complete_lengths(experiments)
    if ladder:
        fill_ladder(figure, ladder)
    else:
        for axes in figure.subplots(1, 2):
            say_not_run(axes, "")


def _oscillation(path: Path, scale: Scale) -> list[Path]:
    """Of the least and the largest P alone."""
    measured = [one for folder in find_runs([scale.curvature]) for one in Oscillation.all_of(folder)]
    if not measured:
        raise UserError(f"{scale.curvature}: no run of which oscillation was measured; run `brx oscillation RUN...`")
    depths = [result.num_stages for result in measured]
    return draw_oscillation([result for result in measured if result.num_stages in (min(depths), max(depths))], path)


def _hessian_norm(path: Path, scale: Scale) -> list[Path]:
    return draw_norms(measured_norms(find_runs([scale.curvature])), path)


def _strategy_norms(path: Path, scale: Scale) -> list[Path]:
    """Beside the slowdowns of the scale's runs to its target, as far as there are any."""
    norms = [norm for run in find_runs([scale.curvature]) for norm in results_of(run, STRATEGY_SPACES).values()]
    results = [norm for of_run in complete_measurements(norms).values() for norm in of_run]
    if not results:
        raise UserError(
            f"{scale.curvature}: no checkpoint was measured in all coordinates; run `brx hessian-norm RUN --strategies`"
        )
    delays = None
    if scale.runs.is_dir():
        experiments = Experiments.load(scale)
        present = experiments.find_all(*((name, P) for name in VARIANT_OF_SPACE.values() for P in scale.ends))
        target = experiments.slowdown_target()
        if present and target is not None:
            delays = StrategySlowdowns.at_ends(pd.concat(present), target)
    return draw_strategy_norms(results, delays, path)


def _effective_delays(path: Path, scale: Scale) -> list[Path]:
    folders = find_runs([scale.curvature])
    measured = measured_norms(folders)
    stages = usual_stages(measured)
    of_each = [(result, [effective_delay(result, count) for count in stages]) for result in measured]
    return draw_effective_delay(of_each, slowdown_points(load(folders)), path)


def every_iterations(frequency: float) -> str:
    """In words: every iteration, every 10 iterations."""
    return "every iteration" if frequency == 1 else f"every {frequency:g} iterations"


REFRESHES = refresh_schedules("uniform", "stage-aware", "reversed")
UNSTASHED: dict[str, Any] = {"sweep": "stashing", "settings": {"pipeline.stash": "none"}}
WITHOUT_DELAY = lines([{"method": "pipedream", "stages": 1}], "AdamW without delay", color="black", linestyle=":")
STRATEGIES = ("pipedream-lr", *STRATEGY_NAMES)

# Name, place in the paper, caption; then what is in it.
FIGURES = {figure.name: figure for figure in (
    PaperFigure("schedule", "Figure 1", "Synchronous and asynchronous pipelines, and the delay.",
                draw_to=lambda path, _: draw_schedules(4, 4, path)),
    PaperFigure("toy-quadratic", "Figure 3", "Delay on a quadratic, aligned or not.",
                draw_to=lambda path, _: run_toy("quadratic", path)),
    PaperFigure("toy-spiral", "Figure 4", "Delay in a valley that turns.",
                draw_to=lambda path, _: run_toy("spiral", path)),
    PaperFigure("oscillation", "Figure 11", "Updates along the Hessian's dominant eigenvector.",
                draw_to=_oscillation, is_measured=True),
    PaperFigure("hessian-norm", "", "Norm of the Hessian in original and rotated coordinates.",
                draw_to=_hessian_norm, is_measured=True),
    PaperFigure("strategy-norms", "Theorem 3.1",
                "Norm of the Hessian in each strategy's coordinates, and its slowdown.",
                draw_to=_strategy_norms, is_measured=True),
    PaperFigure("effective-delay", "", "The effective delay, and the slowdown.",
                draw_to=_effective_delays, is_measured=True),
    PaperFigure("similarity", "", "Which dimensionless numbers decide what delay costs.",
                draw_to=draw_study, is_measured=True),
    PaperFigure("teaser", "Figure 2", "Delay slows training down; basis rotation takes most of that back.",
                [curves("(a) PipeDream", by_depth("pipedream"), says=change),
                 curves("(b) P = {P}", by_method(("pipedream", "basis-rotation")), WITHOUT_DELAY,
                        says=beside_the_last)],
                across=2, height=3.1, legend=False),
    PaperFigure("main", "Figure 5",
                "Methods against the number of stages for one model; (c-e) slowdown, to the loss that they and the"
                " strategies of basis rotation all reach, with its 95 % interval where there are seeds enough for one.",
                [final_losses(MAIN), curves("(b) P = {P}", by_method(MAIN)), None,
                 *(slowdown(method, f"({letter}) ") for method, letter in zip(MAIN[1:], "cde", strict=True))],
                across=3, shares_y=1),
    PaperFigure("block-scaling", "Figure 6", "Deeper models, one block per stage: (a) final loss, (b-d) by method.",
                [final_losses(MAIN, per_block=True), *map(deeper_models, MAIN[1:])], across=2, shares_y=1),
    PaperFigure("width", "Figure 7", "P = 24, (a) the smaller and (b) the larger model.",
                [curves("(a) smaller model", by_method(MAIN, model="smaller")),
                 curves("(b) larger model", by_method(MAIN, model="larger"))],
                across=2),
    PaperFigure("strategies", "Figure 8",
                "Estimation strategies of basis rotation: (a) final loss, with the best baseline at each P, (b) at the"
                " largest.",
                [final_losses((*BASELINES, *STRATEGY_NAMES), best_of=BASELINES),
                 curves("(b) P = {P}", by_method(STRATEGIES))],
                across=2, shares_y=None),
    PaperFigure("efficiency", "Figure 9",
                "(a) loss against training time, at the pace of the method's fastest seed while least disturbed (cells"
                " share a machine: an upper bound), (b) refresh intervals, (c) stage-aware.",
                [curves("(a) P = {P}", by_method(MAIN), draw=draw_against_time),
                 curves("(b) P = {P}", by_method(("pipedream-lr",)),
                        by_setting("basis-rotation", "optimizer.frequency", FREQUENCIES, "frequency",
                                   every_iterations)),
                 curves("(c) P = {P}", refresh_schedules("uniform", "stage-aware"))],
                across=3, height=3.1, legend=False),
    PaperFigure("weight-stashing", "Figure 10", "Without weight stashing: (a) all methods, (b, c) with and without.",
                [curves("(a) no stashing, P = {P}", by_method(MAIN, **UNSTASHED)),
                 *(curves(f"({letter}) {look_of(method).label}", lines([{"method": method}], "stashing"),
                          lines([{"method": method, **UNSTASHED}], "no stashing", linestyle="--"))
                   for method, letter in (("pipedream-lr", "b"), ("basis-rotation", "c")))],
                across=3, height=3.1, legend=False, sweep="stashing"),
    PaperFigure("all-stages", "Figure 12", "All methods at every number of stages.",
                [curves(f"P = {P}", by_method(MAIN, P)) for P in DEPTHS], across=3),
    PaperFigure("slowdown-all", "Figure 13", "Slowdown of seven methods, to the loss that all but PipeDream reach.",
                [*map(slowdown, BASELINES_AND_STRATEGIES), None], across=4),
    PaperFigure("block-scaling-all", "Figure 14", "Deeper models, one block per stage, seven methods.",
                [*map(deeper_models, BASELINES_AND_STRATEGIES), None], across=4),
    PaperFigure("weight-prediction", "Figure 15", "With PipeMare's weight prediction.",
                [curves("P = {P}", by_method(MAIN, sweep="prediction", settings={"pipeline.stash": "predict"}))]),
    PaperFigure("strategies-all-stages", "Figure 16", "Estimation strategies at every number of stages.",
                [curves(f"P = {P}", by_method(STRATEGIES, P)) for P in DEPTHS], across=3),
    PaperFigure("reversed", "Figure 17", "Refreshes shared by delay, evenly, and inversely.",
                [curves("P = {P}", REFRESHES)], sweep="stage-aware"),
    PaperFigure("validation", "Figure 18", "(a) training and (b) validation loss.",
                [curves("(a) training, P = {P}", by_method(BASELINES_AND_STRATEGIES)),
                 curves("(b) validation, P = {P}", by_method(BASELINES_AND_STRATEGIES), draw=draw_validation,
                        loss="val_loss")],
                across=2),
    PaperFigure("delay-compensation", "Figure 19", "Delay compensation.",
                [curves(f"P = {P}", by_method(MAIN, P),
                        by_setting("delay-compensation", "optimizer.compensation", COMPENSATIONS,
                                   "delay-compensation", r"DC, $\lambda$ = {:g}".format, P))
                 for P in (8, 16, 32)],
                across=3, sweep="delay-compensation"),
    PaperFigure("preconditioned", "Table 3", "Preconditioned methods.",
                [curves("P = {P}", by_method(PRECONDITIONED_TABLE))], sweep="preconditioned"),
    PaperFigure("3b", "Figure 20", "The 3B model.", [curves("3B, P = {P}", by_method(MAIN, model="3B"))]),
    PaperFigure("moe", "Figure 21", "A mixture-of-experts model.",
                [curves("mixture of experts, P = {P}", by_method(MAIN, model="mixture of experts"))]),
    PaperFigure("learning-rates", "",
                "Final validation loss against the learning rate, by method and number of stages.",
                [rates(method) for method in MAIN], across=4, height=2.7,
                reading="Filled: the chosen one; crosses: diverged or failed."),
    PaperFigure("ladder", "",
                "What delay costs by the length of training T, each length to a target of its own: slowdown, and"
                " iterations that basis rotation saves over the best baseline.",
                reading="Hollow: one seed; arrow: a lower bound; bars: 95 %; dashed: a power law of slowdown - 1,"
                " and of the share that is left, by least squares, with its 95 % prediction interval, extrapolated to"
                " the paper's relative delay; stars: the paper's numbers.",
                fill=_ladder, across=3),
    PaperFigure("claims", "",
                "What the paper states beside what our runs say (brx claims).",
                reading="Points: ours over the paper's number, where there is one, on a grey band within which it"
                " counts as reproduced; bars: 95 %; hollow: one seed; arrow: a bound, or beyond the axis.",
                fill=lambda experiments, figure: fill_claims(figure, judge(experiments, CLAIMS)), across=3),
)}  # fmt: skip
