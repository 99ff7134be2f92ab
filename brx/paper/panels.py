"""What the paper's figures are made of: a panel asks for experiments of a scale and draws them."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from brx.paper.scales import Experiments
from brx.plot.style import draw_points, finish_panel, look_of, shade, thin
from brx.runs.comparison import slowdowns
from brx.runs.frames import DEPTH, RATE, SEED, side_by_side, smoothed_loss, validation_loss
from brx.runs.slowdown import geometric_mean
from brx.runs.tables import slowdown_text

TITLE_CHARACTERS = 37
THIN, THICK = 0.8, 1.5
"""Widths of curves of one seed, and of several."""

Panel = Callable[[Experiments, Axes], None]
Wanted = Mapping[str, Any]
"""Options of `Experiments.find`: one experiment."""


class Curve(NamedTuple):
    """One experiment in a panel."""

    runs: pd.DataFrame  # its seeds, rows of `brx.runs.load`
    label: str
    style: dict[str, Any]  # of matplotlib's lines


Series = Callable[[Experiments], list[Curve]]
"""The curves of some experiments; those that are not there are left out."""


def curve_of(runs: pd.DataFrame, label: str | None = None, **style: Any) -> Curve:
    """A curve in its method's colour."""
    look = look_of(runs["method"].iloc[0])
    return Curve(runs, label or look.label, {"color": look.color, **style})


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


def by_depth(method: str) -> Series:
    """A curve per number of stages, from light to dark."""
    return lambda experiments: _shaded(
        experiments, {f"P = {P}": {"method": method, "stages": P} for P in experiments.scale.depths}
    )


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


def _one_block_per_stage(method: str, blocks: int) -> Wanted:
    return {"method": method, "stages": blocks, "settings": {"model.blocks": blocks}}


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


def draw_training_losses(axes: Axes, curves: Sequence[Curve], title: str = "") -> None:
    """Training loss against iterations: mean over seeds, and their range as a band; thin where there is one seed."""
    for runs, label, style in curves:
        losses = thin(side_by_side(runs))
        width = THIN if len(losses.columns) == 1 else THICK
        (line,) = axes.plot(losses.mean(axis="columns"), label=label, **{"linewidth": width, **style})
        if len(losses.columns) > 1:
            low, high = losses.min(axis="columns"), losses.max(axis="columns")
            axes.fill_between(losses.index, low, high, color=line.get_color(), alpha=0.2, linewidth=0)
    finish_panel(axes, "iteration", "training loss (nats)", title)
    _limit_losses(axes, curves)
    _note_evidence(axes, curves)


def _note_evidence(axes: Axes, curves: Sequence[Curve]) -> None:
    """Say in the panel which curves are of one seed, and which of one learning rate."""
    num_single = sum(len(curve.runs) == 1 for curve in curves)
    num_one_rate = sum((curve.runs["num_rates"] == 1).all() for curve in curves)
    notes = []
    if num_single:
        notes.append("one seed" if num_single == len(curves) else "thin: one seed")
    if num_one_rate:
        notes.append("one rate" + ("" if num_one_rate == len(curves) else f": {num_one_rate} of {len(curves)}"))
    axes.annotate("\n".join(notes), (1, 1), xycoords="axes fraction", ha="right", va="top", fontsize=6, color="dimgrey")


def draw_validation(axes: Axes, curves: Sequence[Curve], title: str) -> None:
    """Validation loss against iterations, mean over seeds."""
    for runs, label, style in curves:
        axes.plot(side_by_side(runs, validation_loss).mean(axis="columns"), label=label, **style)
    finish_panel(axes, "iteration", "validation loss (nats)", title)


def draw_against_time(axes: Axes, curves: Sequence[Curve], title: str) -> None:
    """The first seed's training loss against training time at the undisturbed pace of the method's fastest seed."""
    for runs, label, style in curves:
        losses = thin(smoothed_loss(runs.index[0]))
        minutes = losses.index * runs["seconds_per_iteration"].min() / 60.0
        axes.plot(minutes, losses, label=label, **style)
    finish_panel(axes, "training time (minutes)", "training loss (nats)", title)
    _limit_losses(axes, curves)


def _limit_losses(axes: Axes, curves: Sequence[Curve]) -> None:
    """Leave the first steep fall and spikes out of the range; panels that share theirs all fit in.

    The upper end lies above what each curve is below of for three quarters of the training: spikes are rarer.
    """
    losses = [side_by_side(curve.runs).to_numpy() for curve in curves]
    finite = [values[np.isfinite(values)] for values in losses]
    low = min(float(values.min()) for values in finite)
    usual = max(float(np.quantile(values, 0.75)) for values in finite)
    low, high = low - 0.05, usual + max(0.1, 0.4 * (usual - low))
    if not axes.get_autoscaley_on():  # a panel that shares this range has set it
        low, high = min(low, axes.get_ylim()[0]), max(high, axes.get_ylim()[1])
    axes.set_ylim(low, high)


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

    def series(experiments: Experiments) -> list[Curve]:
        counts = experiments.scale.blocks
        return _shaded(experiments, {f"{n} blocks, P = {n}": _one_block_per_stage(method, n) for n in counts})

    return curves(look_of(method).label, series, says=change)


def final_losses(methods: Sequence[str], *, per_block: bool = False, best_of: Sequence[str] = ()) -> Panel:
    """Final training loss against the number of stages, or against the model's depth, one block per stage.

    A line per method; bars: range over seeds. Of the methods in `best_of`, the best at each number of stages is drawn
    alone, as one line.
    """

    def panel(experiments: Experiments, axes: Axes) -> None:
        scale = experiments.scale
        if per_block:
            wanted = [_one_block_per_stage(name, count) for name in methods for count in scale.blocks]
        else:
            wanted = [{"method": name, "stages": P} for name in methods for P in scale.depths]
        present = _find_all(experiments, wanted)
        if not present:
            say_not_run(axes, "(a) final loss")
            return
        runs = pd.concat(present)
        finals = runs.groupby([DEPTH, "variant"])["train_loss"].mean().unstack()
        (best, count), *_ = finals.idxmin(axis="columns").value_counts().items()
        _draw_final_losses(axes, runs, best_of)
        title = f"(a) final loss\n{look_of(best).label} lowest at {count} of {len(finals)} P"
        finish_panel(axes, "blocks = stages P" if per_block else "stages P", "final training loss (nats)", title)

    return panel


def _draw_final_losses(axes: Axes, runs: pd.DataFrame, best_of: Sequence[str]) -> None:
    is_rival = runs["method"].isin(best_of)
    if is_rival.any():
        best = runs[is_rival].groupby(["method", DEPTH])["train_loss"].mean().groupby(DEPTH).min()
        axes.plot(best.index, best, color="black", linestyle="--", marker="o", markersize=3, label="best baseline")
    for method, of_method in runs[~is_rival].groupby("method", sort=False):
        look = look_of(method)
        finals = of_method.groupby(DEPTH)["train_loss"].agg(["mean", "min", "max"])
        ends = finals["min"], finals["max"]
        draw_points(axes, finals.index, finals["mean"], ends, look, label=look.label, linestyle="-")
    axes.set_xscale("log", base=2)
    ticks = sorted(runs.loc[~is_rival, DEPTH].unique())
    axes.set_xticks(ticks, [str(tick) for tick in ticks])


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
    """Final validation loss against the learning rate, a line per number of stages.

    The chosen rate is filled, crosses at the top diverged or failed.
    """

    def panel(experiments: Experiments, axes: Axes) -> None:
        depths, tried, label = experiments.scale.depths, experiments.tried, look_of(method).label
        at_edge = []
        for index, depth in enumerate(depths):
            seeds = experiments.find(method, depth)
            if seeds is not None:
                at_edge += [seeds["lr_at_edge"].iloc[0]] if seeds["num_rates"].iloc[0] > 1 else []
                scores = tried[tried["experiment"] == seeds["experiment"].iloc[0]]
                _draw_rates(axes, scores, shade(look_of(method).color, index, len(depths)), f"P = {depth}")
        if axes.lines:
            title = f"{label}\nbest at the edge of the rates: {sum(at_edge)} of {len(at_edge)}"
            finish_panel(axes, "learning rate", "final validation loss (nats)", title)
        else:
            say_not_run(axes, label)

    return panel


def _draw_rates(axes: Axes, scores: pd.DataFrame, color: Any, label: str) -> None:
    """`scores`: rows of `brx.runs.experiments.tried_rates`, of one experiment."""
    rates, failed, chosen = scores[RATE], np.isinf(scores["score"]), scores[scores["is_best"]]
    style: dict[str, Any] = {"color": color, "marker": "o", "markersize": 4}
    axes.plot(rates[~failed], scores["score"][~failed], fillstyle="none", label=label, **style)
    axes.plot(chosen[RATE], chosen["score"], **style)
    at_top = np.full(failed.sum(), 0.97)
    axes.plot(rates[failed], at_top, "x", color=color, transform=axes.get_xaxis_transform())
    axes.set_xscale("log")


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
