"""The ladder as a figure: slowdown and iterations saved against the relative delay, extrapolated to the paper's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, PercentFormatter, StrMethodFormatter

from brx.paper.ladder import (
    PAPER_RELATIVE_DELAY,
    SAVING,
    SLOWDOWN,
    Length,
    PowerLaw,
    Quantity,
    ladder_savings,
    ladder_slowdowns,
)
from brx.paper.printed import SAVED, SLOWDOWNS
from brx.plot.panels import row_of_axes
from brx.plot.style import Look, look_of

SIDEWAYS = 1.03
"""Neighbouring methods' points, as a factor of the relative delay: their intervals must not cover each other."""
TICKS = [digit * 10.0**power for power in range(-5, 0) for digit in (1, 2, 5)]
"""Relative delays that are marked."""


def fill_ladder(figure: Figure, ladder: Sequence[Length]) -> None:
    """Both panels; the legends say what is extrapolated."""
    figure.set_size_inches(7.0, 3.4)
    left, right = row_of_axes(figure, 2)
    stages = ladder[0].num_stages
    slowed, saved = ladder_slowdowns(ladder), ladder_savings(ladder)
    highest = 1.3 * max(_fill(left, slowed, SLOWDOWN, SLOWDOWNS, ".2f"))
    left.set_yscale("log")
    left.set_ylim(0.93, highest)
    left.axhline(1.0, color="black", linewidth=0.5)
    left.set_yticks([tick for tick in (1, 1.5, 2, 3, 5, 10, 20, 50) if tick < highest])
    left.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    left.minorticks_off()
    _finish(left, _by_length(slowed, SLOWDOWN, "slowdown"), f"slowdown at P = {stages}")
    lowest = min(_fill(right, saved, SAVING, {"basis-rotation": SAVED["main"]}, ".1%"))
    right.set_ylim(min(0.0, lowest - 0.05), 1.0)
    right.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    _finish(right, _by_length(saved, SAVING, "saves"), "iterations saved over best baseline")


def _by_length(rows: pd.DataFrame, quantity: Quantity, what: str) -> str:
    """Basis rotation's number after the shortest training and after the longest."""
    of_ours = rows[(rows["method"] == "basis-rotation") & rows[quantity.column].notna()]
    ends = of_ours.sort_values("iterations_of_training").iloc[[0, -1]]
    bounds = ["> " if row.get("is_censored") else "" for row in ends.to_dict("records")]
    values = [f"{bound}{value:{quantity.form}}" for bound, value in zip(bounds, ends[quantity.column], strict=True)]
    lengths = [f"{length:,}" for length in ends["iterations_of_training"]]
    return f"Basis rotation: {what} {values[0]} at {lengths[0]}\niterations, {values[-1]} at {lengths[-1]}"


def _fill(axes: Axes, rows: pd.DataFrame, quantity: Quantity, printed: Mapping[str, float], form: str) -> list[float]:
    """Each method's points, its law down to the paper's delay, and the paper's number there; all values drawn."""
    methods = list(dict.fromkeys(rows["method"]))
    values = []
    for index, method in enumerate(methods):
        points, look = rows[(rows["method"] == method) & rows[quantity.column].notna()], look_of(method)
        values += [printed[method], *points[quantity.column]]
        law = quantity.law(points)
        label = f"{look.label}: {quantity.at_the_papers_delay(law)} / {printed[method]:{form}}"
        _draw_points(axes, points, quantity.column, look, label, SIDEWAYS ** (index - (len(methods) - 1) / 2))
        if law is not None:
            _draw_law(axes, quantity, law, points["relative_delay"].max(), look)
        axes.plot(PAPER_RELATIVE_DELAY, printed[method], "*", color=look.color, markersize=10,
                  markeredgecolor="black", markeredgewidth=0.6)  # fmt: skip
    return values


def _draw_points(axes: Axes, points: pd.DataFrame, column: str, look: Look, label: str, offset: float) -> None:
    """Points with their intervals; hollow: one seed; an arrow: a lower bound."""
    for index, point in enumerate(points.to_dict("records")):
        value = point[column]
        errors = None if pd.isna(point["low"]) else [[value - point["low"]], [point["high"] - value]]
        axes.errorbar(
            point["relative_delay"] * offset,
            value,
            yerr=errors,
            color=look.color,
            marker=r"$\uparrow$" if point.get("is_censored") else look.marker,
            markerfacecolor="white" if point["num_seeds"] == 1 else look.color,
            markersize=5,
            capsize=2,
            linestyle="none",
            label=label if index == 0 else None,
        )


def _draw_law(axes: Axes, quantity: Quantity, law: PowerLaw, end: float, look: Look) -> None:
    """A law from the paper's relative delay to another, with its interval."""
    delays = np.geomspace(PAPER_RELATIVE_DELAY, end, 60)
    values, lows, highs = np.array([quantity.predicted(law, float(delay)) for delay in delays]).T
    axes.plot(delays, values, color=look.color, linewidth=1.0, linestyle=(0, (4, 1.5)))
    axes.fill_between(delays, lows, highs, color=look.color, alpha=0.12, linewidth=0)


def _finish(axes: Axes, title: str, y_label: str) -> None:
    """Scale, labels, legend, and a line where the paper is."""
    axes.set_xscale("log")
    low, high = axes.get_xlim()
    axes.set_xticks([tick for tick in TICKS if low <= tick <= high])
    axes.xaxis.set_major_formatter(FuncFormatter(lambda share, _: f"{100 * share:g}%"))
    axes.minorticks_off()
    axes.axvline(PAPER_RELATIVE_DELAY, color="black", linewidth=0.6, linestyle=":")
    axes.annotate(
        "the paper:\n31 / 244,000", (PAPER_RELATIVE_DELAY, 0.98), xycoords=("data", "axes fraction"), xytext=(3, 0),
        textcoords="offset points", va="top", fontsize=7,
    )  # fmt: skip
    axes.set(xlabel="relative delay $\\tau / T$", ylabel=y_label)
    axes.set_title(title)
    axes.legend(title="at the paper's delay: extrapolated [95 %] / paper", title_fontsize=7, fontsize=7,
                loc="upper center", bbox_to_anchor=(0.5, -0.2))  # fmt: skip
