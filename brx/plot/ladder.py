"""Panels against the relative delay: points of several lengths of training, a law through them, the paper's point."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter

from brx.plot.style import Look

TICKS = [digit * 10.0**power for power in range(-5, 0) for digit in (1, 2, 5)]
"""Relative delays that are marked."""
Band = Callable[[float], tuple[float, float, float]]
"""From a relative delay to a value and the two ends of its interval."""


def draw_rungs(axes: Axes, points: pd.DataFrame, look: Look, label: str, offset: float = 1.0) -> None:
    """Points with their intervals; hollow: one seed; a triangle: a lower bound.

    Args:
        axes: logarithmic across.
        points: `relative_delay`, `value`, `low`, `high` (NaN for no interval), `num_seeds`, `is_bound`.
        look: of the method.
        label: in the legend.
        offset: factor that moves the points sideways, so that intervals of several methods do not cover each other.
    """
    for index, point in enumerate(points.to_dict("records")):
        errors = None
        if not pd.isna(point["low"]):
            errors = [[point["value"] - point["low"]], [point["high"] - point["value"]]]
        axes.errorbar(
            point["relative_delay"] * offset,
            point["value"],
            yerr=errors,
            color=look.color,
            marker="^" if point["is_bound"] else look.marker,
            markerfacecolor="white" if point["num_seeds"] == 1 else look.color,
            markersize=5,
            capsize=2,
            linestyle="none",
            label=label if index == 0 else None,
        )


def draw_band(axes: Axes, band: Band, start: float, end: float, look: Look) -> None:
    """A law from one relative delay to another, with its interval, and a bar at its end."""
    delays = np.geomspace(start, end, 60)
    values, lows, highs = np.array([band(float(delay)) for delay in delays]).T
    axes.plot(delays, values, color=look.color, linewidth=1.0, linestyle=(0, (4, 1.5)))
    axes.fill_between(delays, lows, highs, color=look.color, alpha=0.12, linewidth=0)


def mark_paper(axes: Axes, relative_delay: float, value: float, look: Look) -> None:
    """The paper's own number at its own relative delay."""
    axes.plot(relative_delay, value, "*", color=look.color, markersize=10, markeredgecolor="black", markeredgewidth=0.6)


def finish_ladder(axes: Axes, relative_delay: float, title: str, y_label: str) -> None:
    """Scale, labels, and a line where the paper is."""
    axes.set_xscale("log")
    low, high = axes.get_xlim()
    axes.set_xticks([tick for tick in TICKS if low <= tick <= high])
    axes.xaxis.set_major_formatter(FuncFormatter(lambda share, _: f"{100 * share:g}%"))
    axes.minorticks_off()
    axes.axvline(relative_delay, color="black", linewidth=0.6, linestyle=":")
    axes.annotate(
        "the paper:\n31 / 244,000", (relative_delay, 0.98), xycoords=("data", "axes fraction"), xytext=(3, 0),
        textcoords="offset points", va="top", fontsize=7,
    )  # fmt: skip
    axes.set_xlabel("relative delay $\\tau / T$")
    axes.set_ylabel(y_label)
    axes.set_title(title)
