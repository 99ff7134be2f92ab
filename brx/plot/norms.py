"""Norms of the Hessian by coordinates, and against what delay costs the strategies that step in them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes

from brx.curvature.norm_result import (
    NORM_TITLE,
    STRATEGY_SPACES,
    NormResult,
    Space,
    by_method_and_depth,
    norm_table,
    shares_of_original,
)
from brx.curvature.strategies import VARIANT_OF_SPACE, StrategySlowdowns, strategy_table
from brx.plot.panels import factor_axis
from brx.plot.style import COLUMN_WIDTH_IN, legend_below, line_style, look_of, new_figure, save
from brx.runs.formats import format_table
from brx.runs.slowdown import geometric_mean

SPACE_CENTERS: dict[Space, float] = {"original": -0.2, "rotated": 0.2}
SEED_OFFSET = 0.1
_MARKERS = "osD^v"


def draw_norms(results: Sequence[NormResult], path: Path) -> list[Path]:
    """The (1,1)-norm per parameter of each run, in both coordinates, with 95 % intervals; logarithmic.

    Runs of one method and P, which differ in the seed, are side by side."""
    kinds = by_method_and_depth(results)
    with new_figure(width=max(COLUMN_WIDTH_IN, 1.0 * len(kinds) + 0.8)) as figure:
        axes = figure.subplots()
        for position, of_seeds in enumerate(kinds.values()):
            for space, center in SPACE_CENTERS.items():
                _draw_seeds(axes, position + center, [result for result in of_seeds if result.space == space])
        for space in SPACE_CENTERS:
            face = "white" if space == "original" else "black"
            axes.plot([], [], marker="o", color="black", markerfacecolor=face, linestyle="none", label=space)
        labels = [f"{look_of(method).label}\nP = {num_stages}" for method, num_stages in kinds]
        axes.set_xticks(range(len(kinds)), labels)
        axes.set_xlim(-0.5, len(kinds) - 0.5)
        factor_axis(axes)
        axes.set_ylabel("Hessian (1,1)-norm / parameter")
        axes.legend(title="coordinates", title_fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))
        table = format_table(norm_table(results), "markdown")
        return save(figure, path, f"{NORM_TITLE}; bars: 95 % intervals\n{table}")


def _draw_seeds(axes: Axes, center: float, of_seeds: Sequence[NormResult]) -> None:
    for index, result in enumerate(of_seeds):
        look = look_of(result.method)
        low, high = result.interval
        axes.errorbar(
            center + SEED_OFFSET * (index - (len(of_seeds) - 1) / 2),
            result.normalized,
            yerr=[[result.normalized - low], [high - result.normalized]],
            color=look.color,
            marker=look.marker,
            markersize=4,
            markerfacecolor="white" if result.space == "original" else look.color,
            capsize=2,
            linestyle="none",
        )


def draw_strategy_norms(results: Sequence[NormResult], delays: StrategySlowdowns | None, path: Path) -> list[Path]:
    """Norms by coordinates with 95 % intervals, or the range of seeds; if given, slowdowns against norms beside."""
    with new_figure(width=3.4, height=3.1, columns=1 if delays is None else 2) as figure:
        panels = figure.subplots(1, 1 if delays is None else 2, squeeze=False)[0]
        _draw_norms(panels[0], results)
        if delays is not None:
            _draw_slowdowns(panels[1], results, delays)
        table = format_table(strategy_table(results, delays), "markdown")
        return save(figure, path, f"{NORM_TITLE}; bars: 95 % intervals, of several seeds their range\n{table}")


def _draw_norms(axes: Axes, results: Sequence[NormResult]) -> None:
    kinds = by_method_and_depth(results)
    for index, ((method, num_stages), of_seeds) in enumerate(kinds.items()):
        look = look_of(method)
        spaces = [space for space in STRATEGY_SPACES if any(result.space == space for result in of_seeds)]
        norms = [_over_seeds([result for result in of_seeds if result.space == space]) for space in spaces]
        axes.errorbar(
            [STRATEGY_SPACES.index(space) + 0.12 * (index - (len(kinds) - 1) / 2) for space in spaces],
            [mean for mean, _, _ in norms],
            yerr=[[mean - low for mean, low, _ in norms], [high - mean for mean, _, high in norms]],
            color=look.color,
            linestyle=line_style(is_delayed=num_stages > 1),
            marker=_MARKERS[index % len(_MARKERS)],
            markersize=4,
            capsize=2,
            linewidth=0.8,
            label=f"weights of {look.label}, P = {num_stages}",
        )
    axes.set_xticks(range(len(STRATEGY_SPACES)), [space.replace("-", "\n") for space in STRATEGY_SPACES])
    factor_axis(axes)
    axes.set_ylabel("Hessian (1,1)-norm / parameter")
    axes.set_title("norm in each strategy's coordinates")
    legend_below(axes)


def _over_seeds(of_seeds: Sequence[NormResult]) -> tuple[float, float, float]:
    """The geometric mean per parameter, and the range; of one seed the interval of its estimate."""
    if len(of_seeds) == 1:
        return of_seeds[0].normalized, *of_seeds[0].interval
    norms = [result.normalized for result in of_seeds]
    return geometric_mean(norms), min(norms), max(norms)


def _draw_slowdowns(axes: Axes, results: Sequence[NormResult], delays: StrategySlowdowns) -> None:
    """The norm's share of the original one, the mean of the runs in the logarithm, against the slowdown."""
    for space, row in delays.by_space.items():
        shares = [shares_of_original(result, results) for result in results if result.space == space]
        known = [share for share, *_ in filter(None, shares)]
        if not known or row["ratio"] != row["ratio"]:  # NaN: the reference never reaches the target
            continue
        look = look_of(VARIANT_OF_SPACE[space])
        errors = None if row["low"] != row["low"] else [[row["ratio"] - row["low"]], [row["high"] - row["ratio"]]]
        share = geometric_mean(known)
        marker = "^" if row["is_censored"] else look.marker
        axes.errorbar(share, row["ratio"], yerr=errors, color=look.color, marker=marker, markersize=5, capsize=2)
        axes.annotate(
            space.replace("-", "/") + (" (more)" if row["is_censored"] else ""),
            (share, row["ratio"]),
            xytext=(5, 4),
            textcoords="offset points",
            fontsize=7,
        )
    axes.axhline(1.0, color="black", linewidth=0.5)
    factor_axis(axes)
    axes.margins(x=0.3, y=0.15)
    axes.set_xlabel("norm / that in original coordinates")
    axes.set_ylabel(f"slowdown at P = {delays.num_stages}")
    axes.set_title("and what delay costs the strategy")
