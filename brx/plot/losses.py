"""Panels of losses: curves of experiments, final losses, and losses against the learning rate."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from brx.plot.style import draw_points, finish_panel, look_of, thin
from brx.runs.frames import DEPTH, side_by_side, validation_loss
from brx.runs.pace import fastest_paces
from brx.runs.trajectory import RATE, SEED

THIN = 0.8  # line width if a method has one seed
THICK = 1.5  # line width of a mean over several seeds


class Curve(NamedTuple):
    """One line of a panel."""

    runs: pd.DataFrame  # one run per seed, rows of `brx.runs.load`
    label: str
    style: dict[str, Any]  # keyword arguments of matplotlib's lines


def curve_of(runs: pd.DataFrame, label: str | None = None, **style: Any) -> Curve:
    """The curve of one method's runs, in the method's colour and by default with its label."""
    look = look_of(runs["method"].iloc[0])
    return Curve(runs, label or look.label, {"color": look.color, **style})


def draw_training_losses(axes: Axes, curves: Sequence[Curve], title: str = "") -> None:
    """Draw training loss against iterations: the mean over seeds, with their range as a band.

    The line is thin if there is only one seed. A note in the corner says so, and also if curves
    were run at only one learning rate."""
    for runs, label, style in curves:
        losses = thin(side_by_side(runs))
        width = THIN if len(losses.columns) == 1 else THICK
        (line,) = axes.plot(
            losses.mean(axis="columns"), label=label, **{"linewidth": width, **style}
        )
        if len(losses.columns) > 1:
            low, high = losses.min(axis="columns"), losses.max(axis="columns")
            axes.fill_between(
                losses.index, low, high, color=line.get_color(), alpha=0.2, linewidth=0
            )
    finish_panel(axes, "iteration", "training loss (nats)", title)
    _limit_losses(axes, curves)
    axes.annotate(
        _few_text(curves),
        (1, 1),
        xycoords="axes fraction",
        ha="right",
        va="top",
        fontsize=6,
        color="dimgrey",
    )


def _few_text(curves: Sequence[Curve]) -> str:
    """A line about curves with one seed and a line about curves with one learning rate, each only
    if there are such curves."""
    lines = []
    num_one_seed = len([curve for curve in curves if len(curve.runs) == 1])
    if num_one_seed == len(curves):
        lines.append("one seed")
    elif num_one_seed:
        lines.append("thin: one seed")
    num_one_rate = len([curve for curve in curves if (curve.runs["num_rates"] == 1).all()])
    if num_one_rate == len(curves):
        lines.append("one rate")
    elif num_one_rate:
        lines.append(f"one rate: {num_one_rate} of {len(curves)}")
    return "\n".join(lines)


def draw_validation(axes: Axes, curves: Sequence[Curve], title: str) -> None:
    """Draw validation loss against iterations, as the mean over seeds."""
    for runs, label, style in curves:
        axes.plot(side_by_side(runs, validation_loss).mean(axis="columns"), label=label, **style)
    finish_panel(axes, "iteration", "validation loss (nats)", title)


def draw_against_time(axes: Axes, curves: Sequence[Curve], title: str) -> None:
    """Draw training loss against training time: the mean over seeds, with their range as a band.

    All seeds are drawn with the time per iteration of the fastest one (of those with the settings
    for speed that all curves have), because other work on the machine may have slowed the rest
    down."""
    paces = fastest_paces([curve.runs for curve in curves])
    for (runs, label, style), seconds in zip(curves, paces, strict=True):
        losses = thin(side_by_side(runs))
        minutes = losses.index * seconds / 60.0
        axes.plot(minutes, losses.mean(axis="columns"), label=label, **style)
        low, high = losses.min(axis="columns"), losses.max(axis="columns")
        axes.fill_between(minutes, low, high, color=style["color"], alpha=0.2, linewidth=0)
    finish_panel(axes, "training time (minutes)", "training loss (nats)", title)
    _limit_losses(axes, curves)


def _limit_losses(axes: Axes, curves: Sequence[Curve]) -> None:
    """Set a range of losses without the steep fall at the beginning and without spikes.

    If panels share their y axis, the range fits the curves of all of them."""
    losses = [side_by_side(curve.runs).to_numpy() for curve in curves]
    finite = [values[np.isfinite(values)] for values in losses]
    lowest = min(float(values.min()) for values in finite)
    # Spikes are rarer than a quarter of the values.
    usual = max(float(np.quantile(values, 0.75)) for values in finite)
    low = lowest - 0.05
    high = usual + max(0.1, 0.4 * (usual - lowest))
    if not axes.get_autoscaley_on():  # another panel on the same y axis has already set a range
        shared_low, shared_high = axes.get_ylim()
        low = min(low, shared_low)
        high = max(high, shared_high)
    axes.set_ylim(low, high)


def draw_final_losses(axes: Axes, runs: pd.DataFrame, best_of: Sequence[str]) -> None:
    """Draw final training loss against P: a line per method, with bars for the range over seeds.

    Args:
        axes: the panel.
        runs: rows of `at_best_rates`.
        best_of: methods that share one line; see `_best_by_depth`.
    """
    is_rival = runs["method"].isin(best_of)
    if is_rival.any():
        best = _best_by_depth(runs[is_rival])
        axes.plot(
            list(best),
            list(best.values()),
            color="black",
            linestyle="--",
            marker="o",
            markersize=3,
            label="best baseline",
        )
    for method, of_method in runs[~is_rival].groupby("method", sort=False):
        look = look_of(method)
        finals = of_method.groupby(DEPTH)["train_loss"].agg(["mean", "min", "max"])
        ends = finals["min"], finals["max"]
        draw_points(axes, finals.index, finals["mean"], ends, look, label=look.label, linestyle="-")
    axes.set_xscale("log", base=2)
    ticks = sorted(runs.loc[~is_rival, DEPTH].unique())
    axes.set_xticks(ticks, [str(tick) for tick in ticks])


def _best_by_depth(rivals: pd.DataFrame) -> dict[int, float]:
    """At each P, the lowest final training loss of several methods on each seed, averaged over the
    seeds that all methods with runs at this P have. A P without such a seed is left out."""
    best = {}
    for P, at_depth in rivals.groupby(DEPTH):
        by_seed = at_depth.pivot(index=SEED, columns="method", values="train_loss").dropna()
        if len(by_seed):
            best[int(P)] = float(by_seed.min(axis="columns").mean())
    return best


def draw_rates(axes: Axes, scores: pd.DataFrame, color: Any) -> None:
    """Draw final validation loss against the learning rate.

    The chosen rate has a filled marker; rates at which a run diverged are crosses at the top.

    Args:
        axes: the panel.
        scores: rows of `brx.runs.experiments.tried_rates` for one method and P.
        color: the method's colour.
    """
    style: dict[str, Any] = {"color": color, "marker": "o", "markersize": 4}
    is_failed = np.isinf(scores["score"])
    finished = scores[~is_failed]
    axes.plot(finished[RATE], finished["score"], fillstyle="none", **style)
    chosen = scores[scores["is_best"]]
    axes.plot(chosen[RATE], chosen["score"], **style)
    failed_rates = scores.loc[is_failed, RATE]
    near_top = np.full(len(failed_rates), 0.97)  # as a share of the axis
    axes.plot(failed_rates, near_top, "x", color=color, transform=axes.get_xaxis_transform())
    axes.set_xscale("log")
    # Labels of minor ticks overlap if the axis has less than a decade.
    axes.tick_params(axis="x", which="minor", labelbottom=False)
