"""What the paper's figures are made of: a panel asks for experiments of a scale and draws them."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from brx.paper.scales import Experiments, Scale
from brx.plot.losses import Curve, curve_of, draw_final_losses, draw_rates, draw_training_losses
from brx.plot.style import finish_panel, look_of, shade
from brx.runs.comparison import slowdowns
from brx.runs.frames import DEPTH, SEED
from brx.runs.slowdown import geometric_mean
from brx.runs.tables import slowdown_text

TITLE_CHARACTERS = 37
Panel = Callable[[Experiments, Axes], None]
Wanted = Mapping[str, Any]
"""Options of `Experiments.find`: one experiment."""


Series = Callable[[Experiments], list[Curve]]
"""The curves of some experiments; those that are not there are left out."""


def lines(wanted: Sequence[Wanted], label: str | None = None, **style: Any) -> Series:
    """A curve per experiment; by default in its method's name and colour."""
    return lambda experiments: [curve_of(seeds, label, **style) for seeds in _find_all(experiments, wanted)]


def by_method(methods: Sequence[str], stages: int | None = None, **options: Any) -> Series:
    """A curve per method; options as of `Experiments.find`."""
    return lines([{"method": method, "stages": stages, **options} for method in methods])


def refresh_schedules(*schedules: str) -> Series:
    """A curve per schedule of basis rotation's refreshes."""
    sweeps = {schedule: "" if schedule == "uniform" else "stage-aware" for schedule in schedules}
    return lines(
        [
            {"method": "basis-rotation", "sweep": sweep, "settings": {"optimizer.refresh_schedule": schedule}}
            for schedule, sweep in sweeps.items()
        ]
    )


def by_depth(method: str, *, per_block: bool = False) -> Series:
    """A curve per number of stages, or per depth of the model, from light to dark."""
    return lambda experiments: _shaded(experiments, _at_depths(method, experiments.scale, per_block))


def _at_depths(method: str, scale: Scale, per_block: bool) -> dict[str, Wanted]:
    """By label, a method at each number of stages, or on each depth of the model with one block per stage."""
    if per_block:
        return {
            f"{n} blocks, P = {n}": {"method": method, "stages": n, "settings": {"model.blocks": n}}
            for n in scale.blocks
        }
    return {f"P = {P}": {"method": method, "stages": P} for P in scale.depths}


def by_setting(
    method: str, key: str, values: Sequence[float], sweep: str, label: Callable[[float], str], stages: int | None = None
) -> Series:
    """A curve per value of a setting, from light to dark."""
    usual = {"method": method, "stages": stages, "sweep": sweep}
    return lambda experiments: _shaded(
        experiments, {label(value): {**usual, "settings": {key: value}} for value in values}
    )


def _shaded(experiments: Experiments, wanted_by_label: Mapping[str, Wanted]) -> list[Curve]:
    """A curve per experiment that is there, from light to dark in the order of all."""
    found = [(label, experiments.find(**options)) for label, options in wanted_by_label.items()]
    return [
        curve_of(seeds, label, color=shade(look_of(seeds["method"].iloc[0]).color, index, len(found)))
        for index, (label, seeds) in enumerate(found)
        if seeds is not None
    ]


def _find_all(experiments: Experiments, wanted: Sequence[Wanted]) -> list[pd.DataFrame]:
    found = [experiments.find(**options) for options in wanted]
    return [seeds for seeds in found if seeds is not None]


Says = Callable[[Sequence[Curve], str], str]
"""What curves come to: from them and the column of their final loss to a line of the title."""


def lowest(shown: Sequence[Curve], loss: str) -> str:
    """Which curve ends lowest, and by how much."""
    finals = finals_of(shown, loss)
    best, second = sorted(finals, key=finals.__getitem__)[:2]
    return f"{best} lowest by {finals[second] - finals[best]:.2f} nats"


def change(shown: Sequence[Curve], loss: str) -> str:
    """How much higher the last of some ordered curves ends than the first."""
    (first, before), (last, after) = finals_of([shown[0], shown[-1]], loss).items()
    return f"{first.partition(',')[0]} to {last.partition(',')[0]}: {after - before:+.2f} nats"


def beside_the_last(shown: Sequence[Curve], loss: str) -> str:
    """How the last curve but one ends beside the last."""
    (ours, own), (last, other) = finals_of(shown[-2:], loss).items()
    return f"{ours} ends {abs(own - other):.2f} nats {'below' if own < other else 'above'} {last}"


def finals_of(shown: Sequence[Curve], loss: str) -> dict[str, float]:
    """The final loss of each curve, over the seeds that all have, or else over its own."""
    shared = set[int].intersection(*(set(curve.runs[SEED]) for curve in shown))
    finals = {}
    for curve in shown:
        seeds = curve.runs[curve.runs[SEED].isin(shared)] if shared else curve.runs
        finals[curve.label] = float(seeds[loss].mean())
    return finals


def curves(
    title: str,
    *series: Series,
    draw: Callable[[Axes, Sequence[Curve], str], None] = draw_training_losses,
    says: Says = lowest,
    loss: str = "train_loss",
) -> Panel:
    """Loss curves; `{P}` in the title is the largest number of stages, its second line what they say."""

    def panel(experiments: Experiments, axes: Axes) -> None:
        shown = [curve for each in series for curve in each(experiments)]
        full_title = title.format(P=experiments.scale.deepest)
        if shown:
            finding = says(shown, loss) if len(shown) > 1 else ""
            draw(axes, shown, f"{full_title}\n{textwrap.fill(finding, TITLE_CHARACTERS)}")
        else:
            say_not_run(axes, full_title)

    return panel


def deeper_models(method: str) -> Panel:
    """A method's curves by the depth of the model, one block per stage."""
    return curves(look_of(method).label, by_depth(method, per_block=True), says=change)


def final_losses(methods: Sequence[str], *, per_block: bool = False, best_of: Sequence[str] = ()) -> Panel:
    """Final training loss against the number of stages, or against the model's depth, one block per stage."""

    def panel(experiments: Experiments, axes: Axes) -> None:
        wanted = [_at_depths(method, experiments.scale, per_block).values() for method in methods]
        present = _find_all(experiments, [options for of_method in wanted for options in of_method])
        if not present:
            say_not_run(axes, "(a) final loss")
            return
        runs = pd.concat(present)
        finals = runs.groupby([DEPTH, "variant"])["train_loss"].mean().unstack()
        (best, count), *_ = finals.idxmin(axis="columns").value_counts().items()
        draw_final_losses(axes, runs, best_of)
        title = f"(a) final loss\n{look_of(best).label} lowest at {count} of {len(finals)} P"
        finish_panel(axes, "blocks = stages P" if per_block else "stages P", "final training loss (nats)", title)

    return panel


def slowdown(method: str, letter: str = "") -> Panel:
    """A method at P = 1 and at the deepest pipeline, and the iterations of each to the target of the scale."""

    def panel(experiments: Experiments, axes: Axes) -> None:
        target, look = experiments.slowdown_target(), look_of(method)
        ends = experiments.find_all(*((method, P) for P in experiments.scale.ends))
        if len(ends) < 2 or target is None:
            say_not_run(axes, f"{letter}{look.label}")
            return
        shown = []
        for runs, style in zip(ends, ("-", "--"), strict=True):
            label = f"P = {runs[DEPTH].iloc[0]}"
            axes.plot([], [], color="black", linestyle=style, label=label)
            # Labels that begin with an underscore stay out of legends, in which either line is black.
            shown.append(curve_of(runs, f"_{label}", linestyle=style))
        (row,) = slowdowns(pd.concat(ends), target).to_dict("records")
        ratio = "" if pd.isna(row["ratio"]) else f"\nslowdown {slowdown_text(row)}"
        draw_training_losses(axes, shown, f"{letter}{look.label}{ratio}")
        axes.axhline(target, color="black", linewidth=0.6, linestyle=":")
        for iterations in (row["iterations"], row["reference_iterations"]):
            axes.axvline(geometric_mean(iterations), color=look.color, linewidth=0.6, linestyle=":")

    return panel


def rates(method: str) -> Panel:
    """Final validation loss against the learning rate, a line per number of stages."""

    def panel(experiments: Experiments, axes: Axes) -> None:
        depths, tried, label = experiments.scale.depths, experiments.tried, look_of(method).label
        at_edge = []
        for index, depth in enumerate(depths):
            seeds = experiments.find(method, depth)
            if seeds is not None:
                at_edge += [seeds["lr_at_edge"].iloc[0]] if seeds["num_rates"].iloc[0] > 1 else []
                scores = tried[tried["experiment"] == seeds["experiment"].iloc[0]]
                draw_rates(axes, scores, shade(look_of(method).color, index, len(depths)), f"P = {depth}")
        if axes.lines:
            title = f"{label}\nbest at the edge of the rates: {sum(at_edge)} of {len(at_edge)}"
            finish_panel(axes, "learning rate", "final validation loss (nats)", title)
        else:
            say_not_run(axes, label)

    return panel


def say_not_run(axes: Axes, title: str) -> None:
    """An empty panel that says why."""
    axes.set_title(title)
    axes.tick_params(bottom=False, left=False, labelbottom=False)
    axes.text(0.5, 0.5, "not run", ha="center", va="center", transform=axes.transAxes, color="grey")


def share_legend(figure: Figure, panels: Sequence[Axes], columns: int, free: Axes | None = None) -> None:
    """One legend in a free place, or under the panels with the same curves, instead of one in each."""
    handle_by_label: dict[str, Any] = {}
    for axes in panels:
        handle_by_label |= {label: handle for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
        if legend := axes.get_legend():
            legend.remove()
    entries = list(handle_by_label.values()), list(handle_by_label)
    if free is not None and handle_by_label:
        free.set_axis_off()
        free.legend(*entries, loc="center")
    elif handle_by_label:
        figure.legend(*entries, loc="outside lower center", ncols=max(2, 2 * columns - 1))
