"""What the paper's figures are made of: a panel asks for experiments of a scale and draws them."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from brx.config.loading import Settings
from brx.paper.scales import Experiments
from brx.plot.panels import (
    Curve,
    curve_of,
    draw_final_losses,
    draw_rates,
    draw_slowdown,
    draw_training_losses,
    finish_panel,
)
from brx.plot.style import look_of, shade
from brx.runs.frames import DEPTH, SEED

TITLE_CHARACTERS = 37

Panel = Callable[[Experiments, Axes], None]
Series = Callable[[Experiments], list[Curve]]
"""The curves of some experiments; those that are not there are left out."""


def by_method(methods: Sequence[str], stages: int | None = None, **options: Any) -> Series:
    """A curve per method; options as of `Experiments.find`."""
    wanted = [(method, stages) for method in methods]
    return lambda experiments: [curve_of(seeds) for seeds in experiments.find_all(*wanted, **options)]


def by_depth(method: str) -> Series:
    """A curve per number of stages, from light to dark."""
    return lambda experiments: _shaded(
        {f"P = {depth}": experiments.find(method, depth) for depth in experiments.scale.depths}
    )


def by_setting(
    method: str, key: str, values: Sequence[float], sweep: str, label: Callable[[float], str], stages: int | None = None
) -> Series:
    """A curve per value of a setting, from light to dark."""
    return lambda experiments: _shaded(
        {label(value): experiments.find(method, stages, sweep, settings={key: value}) for value in values}
    )


def refresh_schedules(*schedules: str) -> Series:
    """A curve per schedule of basis rotation's refreshes."""

    def series(experiments: Experiments) -> list[Curve]:
        by_schedule = [
            experiments.find(
                "basis-rotation",
                sweep="" if schedule == "uniform" else "stage-aware",
                settings={"optimizer.refresh_schedule": schedule},
            )
            for schedule in schedules
        ]
        return [curve_of(seeds) for seeds in by_schedule if seeds is not None]

    return series


def with_and_without_stashing(method: str, without: Settings) -> Series:
    """A method as usual, and dashed without weight stashing."""

    def series(experiments: Experiments) -> list[Curve]:
        usual = experiments.find_all((method, None))
        unstashed = experiments.find_all((method, None), sweep="stashing", settings=without)
        return [
            *(curve_of(seeds, "stashing") for seeds in usual),
            *(curve_of(seeds, "no stashing", linestyle="--") for seeds in unstashed),
        ]

    return series


def without_delay(experiments: Experiments) -> list[Curve]:
    """AdamW at P = 1, dotted: what all methods under delay are to be measured by."""
    found = experiments.find_all(("pipedream", 1))
    return [curve_of(seeds, "AdamW without delay", color="black", linestyle=":") for seeds in found]


def find_model_depth(experiments: Experiments, method: str, blocks: int) -> pd.DataFrame | None:
    """The runs of a method on so many blocks, one per stage."""
    return experiments.find(method, blocks, settings={"model.blocks": blocks})


def _shaded(seeds_by_label: Mapping[str, pd.DataFrame | None]) -> list[Curve]:
    """A curve per experiment that is there, from light to dark in the order of all."""
    return [
        curve_of(seeds, label, color=shade(look_of(seeds["method"].iloc[0]).color, index, len(seeds_by_label)))
        for index, (label, seeds) in enumerate(seeds_by_label.items())
        if seeds is not None
    ]


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
    return {
        curve.label: float(runs[loss].mean())
        for curve in shown
        for runs in [curve.runs[curve.runs[SEED].isin(shared)] if shared else curve.runs]
    }


def curves(
    title: str,
    *series: Series,
    draw: Callable[..., None] = draw_training_losses,
    says: Says = lowest,
    loss: str = "train_loss",
) -> Panel:
    """Loss curves; `{P}` in the title is the largest number of stages, its second line what they say."""

    def panel(experiments: Experiments, axes: Axes) -> None:
        shown = [curve for each in series for curve in each(experiments)]
        full_title = title.format(P=experiments.scale.deepest)
        if shown:
            finding = says(shown, loss) if len(shown) > 1 else ""
            draw(axes, shown, title=f"{full_title}\n{textwrap.fill(finding, TITLE_CHARACTERS)}")
        else:
            say_not_run(axes, full_title)

    return panel


def deeper_models(method: str) -> Panel:
    """A method's curves by the depth of the model, one block per stage."""
    return curves(
        look_of(method).label,
        lambda experiments: _shaded(
            {
                f"{count} blocks, P = {count}": find_model_depth(experiments, method, count)
                for count in experiments.scale.blocks
            }
        ),
        says=change,
    )


def final_losses(methods: Sequence[str], *, per_block: bool = False, best_of: Sequence[str] = ()) -> Panel:
    """Final losses against the number of stages, or against the depth of the model, one block per stage."""

    def panel(experiments: Experiments, axes: Axes) -> None:
        if per_block:
            asked = [
                find_model_depth(experiments, name, count) for name in methods for count in experiments.scale.blocks
            ]
        else:
            asked = [experiments.find(name, P) for name in methods for P in experiments.scale.depths]
        present = [seeds for seeds in asked if seeds is not None]
        if present:
            x_label = "blocks = stages P" if per_block else "stages P"
            runs = pd.concat(present)
            finals = runs.groupby([DEPTH, "variant"])["train_loss"].mean().unstack()
            (best, count), *_ = finals.idxmin(axis="columns").value_counts().items()
            title = f"(a) final loss\n{look_of(best).label} lowest at {count} of {len(finals)} P"
            draw_final_losses(axes, runs, title=title, x_label=x_label, best_of=best_of)
        else:
            say_not_run(axes, "(a) final loss")

    return panel


def slowdown(method: str, letter: str = "") -> Panel:
    """A method at P = 1 and at the deepest pipeline, to the target of the scale."""

    def panel(experiments: Experiments, axes: Axes) -> None:
        target = experiments.slowdown_target()
        ends = experiments.find_all(*((method, P) for P in experiments.scale.ends))
        if len(ends) == 2 and target is not None:
            draw_slowdown(axes, ends[0], ends[1], target)
        else:
            say_not_run(axes, look_of(method).label)
        axes.set_title(f"{letter}{axes.get_title()}")

    return panel


def rates(method: str) -> Panel:
    """Final validation loss against the learning rate, a line per number of stages."""

    def panel(experiments: Experiments, axes: Axes) -> None:
        depths, tried = experiments.scale.depths, experiments.tried
        at_edge = []
        for index, depth in enumerate(depths):
            seeds = experiments.find(method, depth)
            if seeds is not None:
                at_edge += [seeds["lr_at_edge"].iloc[0]] if seeds["num_rates"].iloc[0] > 1 else []
                scores = tried[tried["experiment"] == seeds["experiment"].iloc[0]]
                draw_rates(axes, scores, color=shade(look_of(method).color, index, len(depths)), label=f"P = {depth}")
        if axes.lines:
            title = f"{look_of(method).label}\nbest at the edge of the rates: {sum(at_edge)} of {len(at_edge)}"
            finish_panel(axes, "learning rate", "final validation loss (nats)", title)
        else:
            say_not_run(axes, look_of(method).label)

    return panel


def say_not_run(axes: Axes, title: str) -> None:
    """An empty panel that says why."""
    axes.set_title(title)
    axes.tick_params(bottom=False, left=False, labelbottom=False)
    axes.text(0.5, 0.5, "not run", ha="center", va="center", transform=axes.transAxes, color="grey")


def share_legend(figure: Figure, panels: Sequence[Axes], free: Axes | None = None) -> None:
    """One legend in a free place, or under the panels with the same curves, instead of one in each."""
    handle_by_label: dict[str, Any] = {}
    for axes in panels:
        handle_by_label |= {label: handle for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
        if legend := axes.get_legend():
            legend.remove()
    if handle_by_label:
        labels, handles = list(handle_by_label), list(handle_by_label.values())
        if free is not None:
            free.set_axis_off()
            free.legend(handles, labels, loc="center")
            return
        grid = panels[0].get_gridspec()
        assert grid is not None  # panels come from `subplots`
        figure.legend(handles, labels, loc="outside lower center", ncols=max(2, 2 * grid.ncols - 1))
