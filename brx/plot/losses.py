"""How losses are drawn: curves of experiments, their final losses, and what learning rates came
to."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from brx.plot.style import draw_points, finish_panel, look_of, thin
from brx.runs.frames import DEPTH, RATE, SEED, side_by_side, validation_loss

THIN, THICK = 0.8, 1.5  # widths of curves of one seed, and of several


class Curve(NamedTuple):
    runs: pd.DataFrame  # its seeds, rows of `brx.runs.load`
    label: str
    style: dict[str, Any]  # keyword arguments of matplotlib's lines


def curve_of(runs: pd.DataFrame, label: str | None = None, **style: Any) -> Curve:
    look = look_of(runs["method"].iloc[0])
    return Curve(runs, label or look.label, {"color": look.color, **style})


def draw_training_losses(axes: Axes, curves: Sequence[Curve], title: str = "") -> None:
    """Training loss against iterations: mean over seeds, and their range as a band; thin where
    there is one seed."""
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
    num_single = sum(len(curve.runs) == 1 for curve in curves)
    num_one_rate = sum((curve.runs["num_rates"] == 1).all() for curve in curves)
    notes = []
    if num_single:
        notes.append("one seed" if num_single == len(curves) else "thin: one seed")
    if num_one_rate:
        notes.append(
            "one rate"
            + ("" if num_one_rate == len(curves) else f": {num_one_rate} of {len(curves)}")
        )
    axes.annotate(
        "\n".join(notes),
        (1, 1),
        xycoords="axes fraction",
        ha="right",
        va="top",
        fontsize=6,
        color="dimgrey",
    )


def draw_validation(axes: Axes, curves: Sequence[Curve], title: str) -> None:
    for runs, label, style in curves:
        axes.plot(side_by_side(runs, validation_loss).mean(axis="columns"), label=label, **style)
    finish_panel(axes, "iteration", "validation loss (nats)", title)


def draw_against_time(axes: Axes, curves: Sequence[Curve], title: str) -> None:
    """The mean training loss over seeds against training time, at the undisturbed pace of the
    method's fastest seed; the range over seeds is a band."""
    for runs, label, style in curves:
        losses = thin(side_by_side(runs))
        minutes = losses.index * runs["seconds_per_iteration"].min() / 60.0
        axes.plot(minutes, losses.mean(axis="columns"), label=label, **style)
        low, high = losses.min(axis="columns"), losses.max(axis="columns")
        axes.fill_between(minutes, low, high, color=style["color"], alpha=0.2, linewidth=0)
    finish_panel(axes, "training time (minutes)", "training loss (nats)", title)
    _limit_losses(axes, curves)


def _limit_losses(axes: Axes, curves: Sequence[Curve]) -> None:
    """Leave the first steep fall and spikes out of the range; panels that share theirs all fit
    in."""
    losses = [side_by_side(curve.runs).to_numpy() for curve in curves]
    finite = [values[np.isfinite(values)] for values in losses]
    low = min(float(values.min()) for values in finite)
    # Spikes are rarer than a quarter of the values.
    usual = max(float(np.quantile(values, 0.75)) for values in finite)
    low, high = low - 0.05, usual + max(0.1, 0.4 * (usual - low))
    if not axes.get_autoscaley_on():  # a panel that shares this range has set it
        low, high = min(low, axes.get_ylim()[0]), max(high, axes.get_ylim()[1])
    axes.set_ylim(low, high)


def draw_final_losses(axes: Axes, runs: pd.DataFrame, best_of: Sequence[str]) -> None:
    """A line per method against P; bars: range over seeds. Of `best_of`, each seed's best at a P,
    as one line."""
    is_rival = runs["method"].isin(best_of)
    if is_rival.any():
        best = runs[is_rival].groupby([DEPTH, SEED])["train_loss"].min().groupby(DEPTH).mean()
        axes.plot(
            best.index,
            best,
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


def draw_rates(axes: Axes, scores: pd.DataFrame, color: Any) -> None:
    """Final validation loss by rate (`tried_rates`); the chosen one is filled, crosses at the top
    diverged."""
    rates, failed, chosen = scores[RATE], np.isinf(scores["score"]), scores[scores["is_best"]]
    style: dict[str, Any] = {"color": color, "marker": "o", "markersize": 4}
    axes.plot(rates[~failed], scores["score"][~failed], fillstyle="none", **style)
    axes.plot(chosen[RATE], chosen["score"], **style)
    axes.plot(
        rates[failed],
        np.full(failed.sum(), 0.97),
        "x",
        color=color,
        transform=axes.get_xaxis_transform(),
    )
    axes.set_xscale("log")
    # Labels of minor ticks overlap if the axis has less than a decade.
    axes.tick_params(axis="x", which="minor", labelbottom=False)
