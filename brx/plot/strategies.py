"""The Hessian's norm in each strategy's coordinates, and against the strategy's slowdown."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from brx.curvature.norm_result import STRATEGY_SPACES, NormResult, Space, by_method_and_depth
from brx.curvature.norm_tables import NORM_TITLE
from brx.curvature.strategies import VARIANT_OF_SPACE, StrategySlowdowns, share_of_original, strategy_table
from brx.plot.panels import factor_axis
from brx.plot.style import legend_below, line_style, look_of, new_figure, save
from brx.runs.formats import format_table
from brx.runs.slowdown import geometric_mean

LABELS: dict[Space, str] = {
    "original": "original",
    "1st-unilateral": "1st\nunilateral",
    "1st-bilateral": "1st\nbilateral",
    "2nd-unilateral": "2nd\nunilateral",
    "2nd-bilateral": "2nd\nbilateral",
}
_MARKERS = "osD^v"


def draw_strategy_norms(results: Sequence[NormResult], delays: StrategySlowdowns | None, path: Path) -> list[Path]:
    """Norms by coordinates with 95 % intervals, or the range of seeds; beside them, if given, slowdowns against norms.

    Returns:
        The files written (PNG, PDF, caption).
    """
    with new_figure(width=3.4, height=3.1, columns=1 if delays is None else 2) as figure:
        fill_strategy_norms(figure, results, delays)
        table = format_table(strategy_table(results, delays), "markdown")
        return save(figure, path, f"{NORM_TITLE}; bars: 95 % intervals, of several seeds their range\n{table}")


def fill_strategy_norms(figure: Figure, results: Sequence[NormResult], delays: StrategySlowdowns | None) -> None:
    """The panels of `draw_strategy_norms` in a figure."""
    panels = figure.subplots(1, 1 if delays is None else 2, squeeze=False)[0]
    _draw_norms(panels[0], results)
    if delays is not None:
        _draw_slowdowns(panels[1], results, delays)


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
    axes.set_xticks(range(len(STRATEGY_SPACES)), [LABELS[space] for space in STRATEGY_SPACES])
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
        shares = [share_of_original(result, results) for result in results if result.space == space]
        known = [share for share in shares if share is not None]
        if not known or row["ratio"] != row["ratio"]:  # NaN: the reference never reaches the target
            continue
        look = look_of(VARIANT_OF_SPACE[space])
        errors = None if row["low"] != row["low"] else [[row["ratio"] - row["low"]], [row["high"] - row["ratio"]]]
        share = geometric_mean(known)
        marker = "^" if row["is_censored"] else look.marker
        axes.errorbar(share, row["ratio"], yerr=errors, color=look.color, marker=marker, markersize=5, capsize=2)
        axes.annotate(
            LABELS[space].replace("\n", "/") + (" (more)" if row["is_censored"] else ""),
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
