"""The panels of the paper's figures. Each asks for runs of a scale and draws them."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import pandas as pd
from matplotlib.axes import Axes

from brx.paper.panel_titles import change, in_even_lines, lowest, lowest_by_depth
from brx.paper.scales import (
    BLOCKS,
    COMPENSATIONS,
    DEPTHS,
    ENDS,
    FREQUENCIES,
    PER_BLOCK,
    Experiments,
)
from brx.plot import losses
from brx.plot.style import GREY, finish_panel, legend_below, look_of, say_not_run, shade
from brx.runs.comparison import slowdowns
from brx.runs.frames import DEPTH
from brx.runs.slowdown import geometric_mean
from brx.runs.tables import slowdown_text

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
    name = "basis-rotation" if schedule == "uniform" else f"basis-rotation {schedule}"
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
