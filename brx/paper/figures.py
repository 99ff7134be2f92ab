"""The paper's figures (`FIGURES`, at the end). Most are grids of panels; each panel asks for the
runs of a scale and draws them.

Figures that do not show the runs of a sweep (pipelines over time, toys, the Hessian) have a
function that draws them with the paper's settings."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from brx.errors import UserError
from brx.paper.architectures import RUNS as ARCHITECTURE_RUNS
from brx.paper.architectures import draw_architectures
from brx.paper.causes.figure import draw_causes
from brx.paper.causes.study import RUNS as CAUSES_RUNS
from brx.paper.claims import CLAIMS, fill_claims, judge
from brx.paper.ladder import fill_ladder
from brx.paper.leads import draw_leads
from brx.paper.measured_figures import (
    draw_effective_delays,
    draw_norms_of_runs,
    draw_norms_of_strategies,
    draw_oscillations,
)
from brx.paper.panel_titles import against_the_last, change, costs_of_delay
from brx.paper.panels import (
    Line,
    by_depth,
    by_frequency,
    by_method,
    by_strength,
    curves_panel,
    deeper_models,
    final_losses,
    rates,
    refresh_schedule,
    slowdown,
)
from brx.paper.paper_figure import PaperFigure, draw_paper_figure
from brx.paper.scales import (
    BASELINES_AND_STRATEGIES,
    DEPTHS,
    MAIN,
    PRECONDITIONED,
    SCALES,
    STRATEGY_NAMES,
)
from brx.paper.similarity import RUNS as STUDY_RUNS
from brx.paper.similarity import draw_similarity
from brx.paper.tables import PRECONDITIONED_TABLE, Note, entries, load_noting, made, note_missing
from brx.plot import losses
from brx.plot.planning import draw_schedules
from brx.plot.style import look_of
from brx.runs.comparison import BASELINES
from brx.toy.run import run_toy


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
            draw_to=draw_oscillations,
            is_measured=True,
        ),
        PaperFigure(
            "hessian-norm",
            "",
            "Norm of the Hessian in original and rotated coordinates.",
            draw_to=draw_norms_of_runs,
            is_measured=True,
        ),
        PaperFigure(
            "strategy-norms",
            "Theorem 3.1",
            "Norm of the Hessian in each strategy's coordinates, and its slowdown.",
            draw_to=draw_norms_of_strategies,
            is_measured=True,
        ),
        PaperFigure(
            "effective-delay",
            "",
            "The effective delay, and the slowdown.",
            draw_to=draw_effective_delays,
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
