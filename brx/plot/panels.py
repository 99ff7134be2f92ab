"""What the paper's figures are made of: panels of loss curves of experiments, seeds as bands."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

from brx.plot.style import Look, legend_below, look_of
from brx.runs.comparison import slowdowns
from brx.runs.frames import DEPTH, RATE, side_by_side, smoothed_loss, validation_loss
from brx.runs.slowdown import geometric_mean
from brx.runs.tables import slowdown_text

MOST_POINTS = 300
"""Points of a drawn curve: losses are means over 2 % of a run, which 300 points resolve sixfold."""
THIN, THICK = 0.8, 1.5
"""Widths of curves of one seed, and of several."""
SHORT_LABEL = 10
"""Characters of a label that leave room for two columns under a panel."""


class Curve(NamedTuple):
    """One experiment in a panel."""

    runs: pd.DataFrame  # its seeds, rows of `brx.runs.load`
    label: str
    style: dict[str, Any]  # of matplotlib's lines


def curve_of(runs: pd.DataFrame, label: str | None = None, **style: Any) -> Curve:
    """A curve in its method's colour."""
    look = look_of(runs["method"].iloc[0])
    return Curve(runs, label or look.label, {"color": look.color, **style})


def draw_training_losses(axes: Axes, curves: Sequence[Curve], *, title: str = "", target: float | None = None) -> None:
    """Training loss against iterations: mean over seeds, and their range as a band; thin where there is one seed."""
    for curve in curves:
        losses = thin(side_by_side(curve.runs))
        width = THIN if len(losses.columns) == 1 else THICK
        (line,) = axes.plot(losses.mean(axis="columns"), label=curve.label, **{"linewidth": width, **curve.style})
        if len(losses.columns) > 1:
            low, high = losses.min(axis="columns"), losses.max(axis="columns")
            axes.fill_between(losses.index, low, high, color=line.get_color(), alpha=0.2, linewidth=0)
    if target is not None:
        axes.axhline(target, color="black", linewidth=0.6, linestyle=":")
    finish_panel(axes, "iteration", "training loss (nats)", title)
    limit_losses(axes, curves)
    note_evidence(axes, curves)


def note_evidence(axes: Axes, curves: Sequence[Curve]) -> None:
    """Say in the panel which curves are of one seed, and which of one learning rate."""
    single = [curve for curve in curves if len(curve.runs) == 1]
    one_rate = [curve for curve in curves if (curve.runs["num_rates"] == 1).all()]
    notes = []
    if single:
        notes.append("one seed" if len(single) == len(curves) else "thin: one seed")
    if len(one_rate) == len(curves):
        notes.append("one rate")
    elif one_rate:
        notes.append(f"one rate: {len(one_rate)} of {len(curves)}")
    axes.annotate("\n".join(notes), (1, 1), xycoords="axes fraction", ha="right", va="top", fontsize=6, color="dimgrey")


def draw_validation(axes: Axes, curves: Sequence[Curve], *, title: str = "") -> None:
    """Validation loss against iterations, mean over seeds."""
    for curve in curves:
        losses = side_by_side(curve.runs, validation_loss)
        axes.plot(losses.mean(axis="columns"), label=curve.label, **curve.style)
    finish_panel(axes, "iteration", "validation loss (nats)", title)


def draw_against_time(axes: Axes, curves: Sequence[Curve], *, title: str = "") -> None:
    """The first seed's training loss against training time at the undisturbed pace of the method's fastest seed."""
    for curve in curves:
        losses = thin(smoothed_loss(curve.runs.index[0]))
        minutes = losses.index * curve.runs["seconds_per_iteration"].min() / 60.0
        axes.plot(minutes, losses, label=curve.label, **curve.style)
    finish_panel(axes, "training time (minutes)", "training loss (nats)", title)
    limit_losses(axes, curves)


def draw_final_losses(
    axes: Axes, runs: pd.DataFrame, *, title: str = "", x_label: str = "stages P", best_of: Sequence[str] = ()
) -> None:
    """Final training loss against the number of stages, a line per method; bars: range over seeds.

    Of the methods in `best_of`, the best at each number of stages is drawn alone, as one line.
    """
    rivals = runs[runs["method"].isin(best_of)]
    runs = runs[~runs["method"].isin(best_of)]
    if len(rivals):
        best = rivals.groupby(["method", DEPTH])["train_loss"].mean().groupby(DEPTH).min()
        axes.plot(best.index, best, color="black", linestyle="--", marker="o", markersize=3, label="best baseline")
    for method, of_method in runs.groupby("method", sort=False):
        look = look_of(method)
        finals = of_method.groupby(DEPTH)["train_loss"].agg(["mean", "min", "max"])
        ends = finals["min"], finals["max"]
        draw_points(axes, finals.index, finals["mean"], ends, look, label=look.label, linestyle="-")
    axes.set_xscale("log", base=2)
    ticks = sorted(runs[DEPTH].unique())
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    finish_panel(axes, x_label, "final training loss (nats)", title)


def draw_rates(axes: Axes, scores: pd.DataFrame, **style: Any) -> None:
    """Final validation loss against the learning rate; the chosen one is filled, crosses at the top diverged or failed.

    `scores` are the rows of `brx.runs.experiments.tried_rates` of one experiment.
    """
    rates, failed = scores[RATE], np.isinf(scores["score"])
    chosen = scores[scores["is_best"]]
    axes.plot(rates[~failed], scores["score"][~failed], marker="o", markersize=4, fillstyle="none", **style)
    axes.plot(chosen[RATE], chosen["score"], marker="o", markersize=4, color=style["color"])
    at_top = np.full(failed.sum(), 0.97)
    axes.plot(rates[failed], at_top, "x", color=style["color"], transform=axes.get_xaxis_transform())
    axes.set_xscale("log")


def draw_slowdown(axes: Axes, undelayed: pd.DataFrame, delayed: pd.DataFrame, target: float) -> None:
    """A method with and without delay, and the iterations of each to a target loss."""
    look, curves = look_of(delayed["method"].iloc[0]), []
    for runs, style in ((undelayed, "-"), (delayed, "--")):
        label = f"P = {runs[DEPTH].iloc[0]}"
        axes.plot([], [], color="black", linestyle=style, label=label)
        # Labels that begin with an underscore stay out of legends, in which either line is black.
        curves.append(curve_of(runs, f"_{label}", linestyle=style))
    reference_stages = int(undelayed[DEPTH].iloc[0])
    (slowdown,) = slowdowns(pd.concat([undelayed, delayed]), target, reference_stages).to_dict("records")
    ratio = "" if pd.isna(slowdown["ratio"]) else f"\nslowdown {slowdown_text(slowdown)}"
    draw_training_losses(axes, curves, title=f"{look.label}{ratio}", target=target)
    for iterations in (slowdown["iterations"], slowdown["reference_iterations"]):
        axes.axvline(geometric_mean(iterations), color=look.color, linewidth=0.6, linestyle=":")


def draw_points(axes: Axes, x: Any, y: Any, ends: tuple[Any, Any], look: Look, **style: Any) -> None:
    """One or several points in a method's look, with bars between `ends` (low, high); none where these are NaN."""
    low, high = ends
    bars = None if np.isnan(low).any() else np.reshape([y - low, high - y], (2, -1))
    usual = {"color": look.color, "marker": look.marker, "markersize": 4, "capsize": 2, "linestyle": "none"}
    axes.errorbar(x, y, **{"yerr": bars, **usual, **style})


def factor_axis(axes: Axes) -> None:
    """A logarithmic y axis of factors near 1, with plain numbers at 1, 2, 3, 5 and their multiples of 10."""
    axes.set_yscale("log")
    axes.yaxis.set_minor_locator(LogLocator(subs=(2, 3, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("{x:g}")


def finish_panel(axes: Axes, x_label: str, y_label: str, title: str, *, columns: int | None = None) -> None:
    """Labels with units, and the legend under them, where it lies on no curve: by default two columns if they fit."""
    axes.set(xlabel=x_label, ylabel=y_label, title=title)
    _, labels = axes.get_legend_handles_labels()
    if labels:
        fitting = 2 if max(map(len, labels)) <= SHORT_LABEL else 1
        legend_below(axes, columns=columns or fitting)


def limit_losses(axes: Axes, curves: Sequence[Curve]) -> None:
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


def thin(losses: pd.DataFrame, most: int = MOST_POINTS) -> pd.DataFrame:
    """Evenly spread rows of a long frame or series, both ends among them."""
    return losses.iloc[np.unique(np.linspace(0, len(losses) - 1, min(len(losses), most)).astype(int))]


def row_of_axes(figure: Figure, count: int) -> list[Axes]:
    """Panels side by side."""
    return list(figure.subplots(1, count, squeeze=False)[0])
