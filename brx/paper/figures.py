"""The paper's figures, one function each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from brx.errors import UserError
from brx.paper.claim_list import CLAIMS
from brx.paper.claims import judge
from brx.paper.claims_figure import fill_claims
from brx.paper.ladder import rungs
from brx.paper.ladder_figure import fill_ladder
from brx.paper.scales import COMPENSATIONS, FREQUENCIES, MAIN, SEVEN, STRATEGY_NAMES, Experiments, sweep_of
from brx.paper.tables import PRECONDITIONED
from brx.plot.panels import (
    Curve,
    curve_of,
    draw_against_time,
    draw_final_losses,
    draw_rates,
    draw_slowdown,
    draw_training_losses,
    draw_validation,
    finish_panel,
    row_of_axes,
)
from brx.plot.style import COLUMN_WIDTH_IN, look_of, new_figure, save, sequence_color
from brx.runs.comparison import BASELINES
from brx.runs.experiments import tried_rates
from brx.runs.frames import DEPTH, RATE
from brx.runs.reading import SMOOTHING
from brx.runs.tables import rate_text

PANEL_IN = 2.3
PANEL_HEIGHT_IN = 2.3

Draw = Callable[[Experiments, Figure], None]


@dataclass(frozen=True)
class PaperFigure:
    """One figure.

    Attributes:
        name: on the command line and of the files.
        place: in the paper, such as `Figure 5`; empty where it has no such figure.
        caption: what it shows.
        size: panels across and down.
        draw: fills it; leaves panels without runs empty.
        sweep: without runs of this one the figure would show other experiments alone; empty where any run will do.
    """

    name: str
    place: str
    caption: str
    size: tuple[int, int]
    draw: Draw
    sweep: str = ""


FIGURES: dict[str, PaperFigure] = {}


def paper_figure(
    name: str, place: str, caption: str, *, across: int, down: int = 1, sweep: str = ""
) -> Callable[[Draw], Draw]:
    """Enter a drawing function into the catalogue."""

    def enter(draw: Draw) -> Draw:
        FIGURES[name] = PaperFigure(name, place, caption, (across, down), draw, sweep)
        return draw

    return enter


def draw_paper_figure(name: str, experiments: Experiments, folder: Path) -> tuple[list[Path], Experiments]:
    """Draw one of the paper's figures into a folder.

    Returns:
        The files written, and the experiments with what was used and what was missing.

    Raises:
        UserError: none of its runs exist.
    """
    paper = FIGURES[name]
    asked = experiments.fresh()
    across, down = paper.size
    with new_figure(width=PANEL_IN * across, height=PANEL_HEIGHT_IN * down) as figure:
        paper.draw(asked, figure)
        if not asked.used or (paper.sweep and asked.scale.sweep(paper.sweep) not in asked.sweeps):
            raise UserError(
                f"figure {name}: none of its runs are in {asked.folder}; make them with {asked.what_to_run}"
            )
        return save(figure, folder / name, _caption(paper, asked)), asked


def _caption(paper: PaperFigure, asked: Experiments) -> str:
    lines = [
        f"{paper.caption} (The paper's {paper.place}.)" if paper.place else paper.caption,
        f"Training losses are means over {SMOOTHING:.0%} of the iterations; bands: range over seeds;"
        " thin: one seed; learning rates: lowest final validation loss of the grid (* at its edge).",
    ]
    for seeds in asked.used.values():
        first = seeds.iloc[0]
        rate = rate_text(first[RATE], at_edge=first["lr_at_edge"])
        lines.append(f"{first['variant']}, P = {first[DEPTH]}, lr {rate}: {', '.join(seeds['name'])}")
    lines += [f"not there: {line}" for line in asked.missing]
    return "\n".join(lines)


def _present(experiments: Sequence[pd.DataFrame | None]) -> list[pd.DataFrame]:
    return [seeds for seeds in experiments if seeds is not None]


def _curves(
    experiments: Experiments, methods: Sequence[str], stages: int, sweep: str = "", **where: Any
) -> list[Curve]:
    """A curve per method at P stages."""
    asked = [experiments.find(method, stages, sweep or sweep_of(method), **where) for method in methods]
    return [curve_of(seeds) for seeds in _present(asked)]


def _shaded_curves(seeds_by_label: Mapping[str, pd.DataFrame | None]) -> list[Curve]:
    """A curve per experiment that is there, from light to dark in the order of all."""
    return [
        curve_of(seeds, label, color=sequence_color(index, len(seeds_by_label)))
        for index, (label, seeds) in enumerate(seeds_by_label.items())
        if seeds is not None
    ]


def _depth_curves(experiments: Experiments, method: str, depths: Sequence[int]) -> list[Curve]:
    """A curve per number of stages."""
    return _shaded_curves({f"P = {depth}": experiments.find(method, depth, sweep_of(method)) for depth in depths})


def _fill(axes: Any, curves: list[Curve], title: str, draw: Callable[..., None] = draw_training_losses) -> None:
    """Draw curves into a panel; say so in it where there are none."""
    if curves:
        draw(axes, curves, title=title)
    else:
        axes.set_title(title)
        axes.tick_params(bottom=False, left=False, labelbottom=False)
        axes.text(0.5, 0.5, "not run", ha="center", va="center", transform=axes.transAxes, color="grey")


def _share_legend(figure: Figure, *panels: Axes) -> None:
    """One legend under panels with the same curves, instead of one in each, which would lie on them."""
    handle_by_label: dict[str, Any] = {}
    for axes in panels:
        handle_by_label |= {label: handle for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
        if legend := axes.get_legend():
            legend.remove()
    if handle_by_label:
        grid = panels[0].get_gridspec()
        assert grid is not None  # panels come from `subplots`
        labels, handles = list(handle_by_label), list(handle_by_label.values())
        figure.legend(handles, labels, loc="outside lower center", ncols=max(2, 2 * grid.ncols - 1))


def _fill_alone(figure: Figure, curves: list[Curve], title: str) -> None:
    """One panel, a column wide, with the legend under it."""
    figure.set_size_inches(COLUMN_WIDTH_IN, 2.9)
    (axes,) = row_of_axes(figure, 1)
    _fill(axes, curves, title)
    _share_legend(figure, axes)


@paper_figure("teaser", "Figure 2", "Delay slows training down; basis rotation takes most of that back.", across=2)
def _teaser(experiments: Experiments, figure: Figure) -> None:
    figure.set_size_inches(PANEL_IN * 2, 2.9)
    left, right = row_of_axes(figure, 2, share_y=True)
    _fill(left, _depth_curves(experiments, "pipedream", experiments.scale.depths), "(a) PipeDream")
    deepest = experiments.scale.deepest
    _fill(right, _curves(experiments, ("pipedream", "basis-rotation"), deepest), f"(b) P = {deepest}")


@paper_figure(
    "main",
    "Figure 5",
    "Methods against the number of stages for one model; (c-e) slowdown, to the loss that they and the strategies of"
    " basis rotation all reach, with its 95 % interval where there are seeds enough for one.",
    across=3,
    down=2,
)
def _main(experiments: Experiments, figure: Figure) -> None:
    grid = figure.subplots(2, 3)
    panels = [grid[0, 0], grid[0, 1], *grid[1]]
    grid[0, 2].remove()
    for axes in panels[2:]:
        axes.sharey(panels[1])
    depths = experiments.scale.depths
    seeds = _present([experiments.find(method, P, sweep_of(method)) for method in MAIN for P in depths])
    if seeds:
        draw_final_losses(panels[0], pd.concat(seeds), title="(a) final loss")
    deepest = experiments.scale.deepest
    _fill(panels[1], _curves(experiments, MAIN, deepest), f"(b) P = {deepest}")
    _fill_slowdowns(experiments, MAIN[1:], panels[2:])
    _share_legend(figure, *panels)
    for axes, letter in zip(panels[2:], "cde", strict=True):
        axes.set_title(f"({letter}) {axes.get_title()}")


def _fill_slowdowns(experiments: Experiments, methods: Sequence[str], panels: Sequence[Any]) -> None:
    """Each method at P = 1 and at the deepest pipeline, to the target of the scale."""
    target = experiments.slowdown_target()
    for method, axes in zip(methods, panels, strict=True):
        undelayed, delayed = (experiments.find(method, P, sweep_of(method)) for P in experiments.ends)
        if undelayed is not None and delayed is not None and target is not None:
            draw_slowdown(axes, undelayed, delayed, target)
        else:
            _fill(axes, [], look_of(method).label)


@paper_figure(
    "block-scaling",
    "Figure 6",
    "Deeper models, one block per stage: (a) final loss, (b-d) by method.",
    across=2,
    down=2,
)
def _block_scaling(experiments: Experiments, figure: Figure) -> None:
    panels = list(figure.subplots(2, 2).ravel())
    for axes in panels[2:]:
        axes.sharey(panels[1])
    seeds = _present([_of_depth(experiments, method, blocks) for method in MAIN for blocks in experiments.scale.blocks])
    if seeds:
        draw_final_losses(panels[0], pd.concat(seeds), title="(a) final loss", x_label="blocks = stages P")
    else:
        _fill(panels[0], [], "(a) final loss")
    _fill_block_scaling(experiments, MAIN[1:], panels[1:])
    _share_legend(figure, *panels)


def _of_depth(experiments: Experiments, method: str, blocks: int) -> pd.DataFrame | None:
    sweep = experiments.sweep_of_depth(method, blocks)
    return experiments.find(method, blocks, sweep, settings={"model.blocks": blocks})


def _fill_block_scaling(experiments: Experiments, methods: Sequence[str], panels: Sequence[Any]) -> None:
    for method, axes in zip(methods, panels, strict=True):
        by_label = {
            f"{blocks} blocks, P = {blocks}": _of_depth(experiments, method, blocks)
            for blocks in experiments.scale.blocks
        }
        _fill(axes, _shaded_curves(by_label), look_of(method).label)


@paper_figure("width", "Figure 7", "P = 24, (a) the smaller and (b) the larger model.", across=2)
def _width(experiments: Experiments, figure: Figure) -> None:
    left, right = row_of_axes(figure, 2, share_y=True)
    scale = experiments.scale
    _fill(left, _curves(experiments, MAIN, 24, "width", settings=scale.narrow), "(a) smaller model")
    wide = _curves(experiments, MAIN, 24, scale.wide_sweep, preset=scale.wide_preset, settings=scale.wide)
    _fill(right, wide, "(b) larger model")
    _share_legend(figure, left, right)


@paper_figure(
    "strategies",
    "Figure 8",
    "Estimation strategies of basis rotation: (a) final loss, with the best baseline at each P, (b) at the largest.",
    across=2,
)
def _strategies(experiments: Experiments, figure: Figure) -> None:
    scale = experiments.scale
    left, right = row_of_axes(figure, 2)
    names = (*BASELINES, *STRATEGY_NAMES)
    seeds = _present([experiments.find(name, P, sweep_of(name)) for name in names for P in scale.depths])
    if seeds:
        draw_final_losses(left, pd.concat(seeds), title="(a) final loss", best_of=BASELINES)
    else:
        _fill(left, [], "(a) final loss")
    _fill(right, _curves(experiments, ("pipedream-lr", *STRATEGY_NAMES), scale.deepest), f"(b) P = {scale.deepest}")
    _share_legend(figure, left, right)


@paper_figure(
    "efficiency", "Figure 9",
    "(a) loss against training time, at the pace of the method's fastest seed while least disturbed (cells share a"
    " machine: an upper bound), (b) refresh intervals, (c) stage-aware.",
    across=3,
)  # fmt: skip
def _efficiency(experiments: Experiments, figure: Figure) -> None:
    figure.set_size_inches(PANEL_IN * 3, 3.1)
    panels = row_of_axes(figure, 3, share_y=True)
    deepest = experiments.scale.deepest
    _fill(panels[0], _curves(experiments, MAIN, deepest), f"(a) P = {deepest}", draw_against_time)
    _fill(panels[1], _frequency_curves(experiments), f"(b) P = {deepest}")
    _fill(panels[2], _refresh_schedule_curves(experiments, ("uniform", "stage-aware")), f"(c) P = {deepest}")


def _frequency_curves(experiments: Experiments) -> list[Curve]:
    deepest = experiments.scale.deepest
    plain = _curves(experiments, ("pipedream-lr",), deepest)
    by_label = {
        f"every {frequency} iterations": experiments.find(
            "basis-rotation", deepest, "frequency", settings={"optimizer.frequency": frequency}
        )
        for frequency in FREQUENCIES
    }
    return plain + _shaded_curves(by_label)


def _refresh_schedule_curves(experiments: Experiments, schedules: Sequence[str]) -> list[Curve]:
    asked = []
    for schedule in schedules:
        sweep = "main" if schedule == "uniform" else "stage-aware"
        settings = {"optimizer.refresh_schedule": schedule}
        asked.append(experiments.find("basis-rotation", experiments.scale.deepest, sweep, settings=settings))
    return [curve_of(seeds) for seeds in _present(asked)]


@paper_figure(
    "weight-stashing", "Figure 10",
    "Without weight stashing: (a) all methods, (b, c) with and without.", across=3, sweep="stashing",
)  # fmt: skip
def _weight_stashing(experiments: Experiments, figure: Figure) -> None:
    figure.set_size_inches(PANEL_IN * 3, 3.1)
    panels = row_of_axes(figure, 3, share_y=True)
    deepest = experiments.scale.deepest
    without = {"pipeline.stash": "none"}
    _fill(
        panels[0], _curves(experiments, MAIN, deepest, "stashing", settings=without), f"(a) no stashing, P = {deepest}"
    )
    for axes, method, letter in zip(panels[1:], ("pipedream-lr", "basis-rotation"), "bc", strict=True):
        curves = _curves(experiments, (method,), deepest)
        curves = [curve_of(curve.runs, "stashing") for curve in curves]
        seeds = experiments.find(method, deepest, "stashing", settings=without)
        curves += [curve_of(seeds, "no stashing", linestyle="--")] if seeds is not None else []
        _fill(axes, curves, f"({letter}) {look_of(method).label}")


@paper_figure("all-stages", "Figure 12", "All methods at every number of stages.", across=3, down=2)
def _all_stages(experiments: Experiments, figure: Figure) -> None:
    panels = figure.subplots(2, 3, squeeze=False, sharey=True).ravel()
    for axes, stages in zip(panels, experiments.scale.depths, strict=True):
        _fill(axes, _curves(experiments, MAIN, stages), f"P = {stages}")
    _share_legend(figure, *panels)


@paper_figure(
    "slowdown-all",
    "Figure 13",
    "Slowdown of seven methods, to the loss that all but PipeDream reach.",
    across=4,
    down=2,
)
def _slowdown_all(experiments: Experiments, figure: Figure) -> None:
    panels = list(figure.subplots(2, 4, squeeze=False, sharey=True).ravel())
    panels[-1].remove()
    _fill_slowdowns(experiments, SEVEN, panels[:-1])
    _share_legend(figure, *panels[:-1])


@paper_figure(
    "block-scaling-all", "Figure 14", "Deeper models, one block per stage, seven methods.",
    across=4, down=2,
)  # fmt: skip
def _block_scaling_all(experiments: Experiments, figure: Figure) -> None:
    panels = list(figure.subplots(2, 4, squeeze=False, sharey=True).ravel())
    panels[-1].remove()
    _fill_block_scaling(experiments, SEVEN, panels[:-1])
    _share_legend(figure, *panels[:-1])


@paper_figure("weight-prediction", "Figure 15", "With PipeMare's weight prediction.", across=1)
def _weight_prediction(experiments: Experiments, figure: Figure) -> None:
    deepest = experiments.scale.deepest
    settings = {"pipeline.stash": "predict"}
    _fill_alone(figure, _curves(experiments, MAIN, deepest, "prediction", settings=settings), f"P = {deepest}")


@paper_figure(
    "strategies-all-stages", "Figure 16", "Estimation strategies at every number of stages.",
    across=3, down=2,
)  # fmt: skip
def _strategies_all_stages(experiments: Experiments, figure: Figure) -> None:
    panels = figure.subplots(2, 3, squeeze=False, sharey=True).ravel()
    for axes, stages in zip(panels, experiments.scale.depths, strict=True):
        _fill(axes, _curves(experiments, ("pipedream-lr", *STRATEGY_NAMES), stages), f"P = {stages}")
    _share_legend(figure, *panels)


@paper_figure(
    "reversed",
    "Figure 17",
    "Refreshes shared by delay, evenly, and inversely.",
    across=1,
    sweep="stage-aware",
)
def _reversed(experiments: Experiments, figure: Figure) -> None:
    curves = _refresh_schedule_curves(experiments, ("uniform", "stage-aware", "reversed"))
    _fill_alone(figure, curves, f"P = {experiments.scale.deepest}")


@paper_figure("validation", "Figure 18", "(a) training and (b) validation loss.", across=2)
def _validation(experiments: Experiments, figure: Figure) -> None:
    left, right = row_of_axes(figure, 2, share_y=True)
    deepest = experiments.scale.deepest
    curves = _curves(experiments, SEVEN, deepest)
    _fill(left, curves, f"(a) training, P = {deepest}")
    _fill(right, curves, f"(b) validation, P = {deepest}", draw_validation)
    _share_legend(figure, left, right)


@paper_figure("delay-compensation", "Figure 19", "Delay compensation.", across=3, sweep="delay-compensation")
def _delay_compensation(experiments: Experiments, figure: Figure) -> None:
    panels = row_of_axes(figure, 3, share_y=True)
    for axes, stages in zip(panels, (8, 16, 32), strict=True):
        curves = _curves(experiments, MAIN, stages)
        by_label = {
            rf"DC, $\lambda$ = {strength:g}": experiments.find(
                "delay-compensation", stages, "delay-compensation", settings={"optimizer.compensation": strength}
            )
            for strength in COMPENSATIONS
        }
        _fill(axes, curves + _shaded_curves(by_label), f"P = {stages}")
    _share_legend(figure, *panels)


@paper_figure("preconditioned", "Table 3", "Preconditioned methods.", across=1, sweep="preconditioned")
def _preconditioned(experiments: Experiments, figure: Figure) -> None:
    deepest = experiments.scale.deepest
    _fill_alone(figure, _curves(experiments, PRECONDITIONED, deepest), f"P = {deepest}")


@paper_figure("3b", "Figure 20", "The 3B model.", across=1)
def _huge(experiments: Experiments, figure: Figure) -> None:
    preset = experiments.scale.huge_preset
    if preset is None:
        raise UserError("figure 3b: only at the paper's scale: brx sweep configs/sweeps/paper/3b.yaml")
    _fill_alone(figure, _curves(experiments, MAIN, 32, "3b", preset=preset), "3B, P = 32")


@paper_figure("moe", "Figure 21", "A mixture-of-experts model.", across=1)
def _moe(experiments: Experiments, figure: Figure) -> None:
    deepest = experiments.scale.deepest
    curves = _curves(experiments, MAIN, deepest, "moe", preset=experiments.scale.moe_preset)
    _fill_alone(figure, curves, f"mixture of experts, P = {deepest}")


@paper_figure(
    "learning-rates", "",
    "Final validation loss against the learning rate, by method and number of stages; filled: the chosen one; crosses:"
    " diverged or failed.",
    across=4,
)  # fmt: skip
def _learning_rates(experiments: Experiments, figure: Figure) -> None:
    panels = row_of_axes(figure, len(MAIN), share_y=True)
    tried = tried_rates(experiments.runs)
    for axes, method in zip(panels, MAIN, strict=True):
        is_empty = True
        for index, depth in enumerate(experiments.scale.depths):
            seeds = experiments.find(method, depth, sweep_of(method))
            if seeds is not None:
                scores = tried[tried["experiment"] == seeds["experiment"].iloc[0]]
                color = sequence_color(index, len(experiments.scale.depths))
                draw_rates(axes, scores, color=color, label=f"P = {depth}")
                is_empty = False
        if is_empty:
            _fill(axes, [], look_of(method).label)
        else:
            finish_panel(axes, "learning rate", "final validation loss (nats)", look_of(method).label)
    _share_legend(figure, *panels)


@paper_figure(
    "ladder", "",
    "What delay costs by the length of training T, each length to a target of its own: slowdown, and iterations that"
    " basis rotation saves over the best baseline. Hollow: one seed; triangle: a lower bound; bars: 95 %. Dashed: a"
    " power law of slowdown - 1, and of the share that is left, by least squares, with its 95 % prediction interval,"
    " extrapolated to the paper's relative delay. Stars: the paper's numbers.",
    across=3,
)  # fmt: skip
def _ladder(experiments: Experiments, figure: Figure) -> None:
    ladder = rungs(experiments)
    if ladder:
        fill_ladder(figure, ladder)
    else:
        for axes in row_of_axes(figure, 2):
            _fill(axes, [], "")


@paper_figure(
    "claims", "",
    "What the paper states beside what our runs say (brx claims): ours over the paper's number, where there is one, on"
    " a grey band within which it counts as reproduced; bars: 95 %; hollow: one seed; arrow: a bound, or beyond the"
    " axis.",
    across=3,
)  # fmt: skip
def _claims(experiments: Experiments, figure: Figure) -> None:
    fill_claims(figure, judge(experiments, CLAIMS))
