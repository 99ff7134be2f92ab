"""The ladder as a figure: slowdown and iterations saved against the relative delay, extrapolated to the paper's."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter, StrMethodFormatter

from brx.paper.ladder import (
    PAPER_RELATIVE_DELAY,
    PowerLaw,
    Rung,
    at_the_papers_delay,
    ladder_savings,
    ladder_slowdowns,
    saving_law,
    slowdown_law,
)
from brx.paper.printed import SAVED, SLOWDOWNS
from brx.plot.ladder import draw_band, draw_rungs, finish_ladder, mark_paper
from brx.plot.panels import row_of_axes
from brx.plot.style import look_of

SIDEWAYS = 1.03
"""Neighbouring methods' points, as a factor of the relative delay."""


def fill_ladder(figure: Figure, ladder: Sequence[Rung]) -> None:
    """Both panels; the legends say what is extrapolated."""
    figure.set_size_inches(7.0, 3.4)
    left, right = row_of_axes(figure, 2)
    stages = ladder[0].num_stages
    _fill_slowdowns(left, ladder_slowdowns(ladder))
    finish_ladder(left, PAPER_RELATIVE_DELAY, f"slowdown at P = {stages}", f"slowdown at P = {stages}")
    _fill_savings(right, ladder_savings(ladder))
    finish_ladder(right, PAPER_RELATIVE_DELAY, "iterations saved over the best baseline", "iterations saved")
    for axes in (left, right):
        axes.legend(title="at the paper's delay: extrapolated [95 %] / paper", title_fontsize=7, fontsize=7,
                    loc="upper center", bbox_to_anchor=(0.5, -0.2))  # fmt: skip


def _fill_slowdowns(axes: Axes, rows: pd.DataFrame) -> None:
    methods = list(dict.fromkeys(rows["method"]))
    top = [SLOWDOWNS[method] for method in methods]
    for index, method in enumerate(methods):
        points = rows[(rows["method"] == method) & rows["ratio"].notna()]
        points = points.assign(value=points["ratio"], is_bound=points["is_censored"])
        top += points["value"].tolist()
        law = slowdown_law(points)
        text = f"{at_the_papers_delay(law, 1, 1, '.2f')} / {SLOWDOWNS[method]:.2f}"
        _draw(axes, points, method, law, (1, 1), text, SIDEWAYS ** (index - (len(methods) - 1) / 2))
        mark_paper(axes, PAPER_RELATIVE_DELAY, SLOWDOWNS[method], look_of(method))
    axes.set_yscale("log")
    axes.set_ylim(0.93, 1.3 * max(top))
    axes.axhline(1.0, color="black", linewidth=0.5)
    axes.set_yticks([tick for tick in (1, 1.5, 2, 3, 5, 10, 20, 50) if tick < 1.3 * max(top)])
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.minorticks_off()


def _fill_savings(axes: Axes, rows: pd.DataFrame) -> None:
    bottom = [SAVED["main"]]
    for method in dict.fromkeys(rows["method"]):
        points = rows[(rows["method"] == method) & rows["share"].notna()]
        points = points.assign(value=points["share"], is_bound=False)
        bottom += points["value"].tolist()
        law = saving_law(points)
        text = f"{at_the_papers_delay(law, 1, -1, '.0%')} / {SAVED['main']:.1%}"
        _draw(axes, points, method, law, (1, -1), text, 1.0)
        mark_paper(axes, PAPER_RELATIVE_DELAY, SAVED["main"], look_of(method))
    axes.set_ylim(min(0.0, min(bottom) - 0.05), 1.0)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))


def _draw(
    axes: Axes,
    points: pd.DataFrame,
    method: str,
    law: PowerLaw | None,
    scale: tuple[float, float],
    text: str,
    offset: float,
) -> None:
    """The points of a method, and its law: scale[0] + scale[1] times it."""
    look = look_of(method)
    draw_rungs(axes, points, look, f"{look.label}: {text}", offset)
    if law is not None:
        shift, factor = scale

        def law_at(delay: float) -> tuple[float, float, float]:
            value, low, high = law.at(delay)
            return shift + factor * value, shift + factor * low, shift + factor * high

        draw_band(axes, law_at, PAPER_RELATIVE_DELAY, points["relative_delay"].max(), look)
