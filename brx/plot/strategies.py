"""The Hessian's norm in each strategy's coordinates, and against the strategy's slowdown."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from brx.curvature.norm_result import STRATEGY_SPACES, NormResult, Space
from brx.curvature.norm_tables import NORM_TITLE
from brx.curvature.strategies import VARIANT_OF_SPACE, StrategySlowdowns, share_of_original, strategy_table
from brx.plot.panels import factor_axis
from brx.plot.style import look_of, new_figure, save, sequence_color
from brx.runs.formats import format_table

LABELS: dict[Space, str] = {
    "original": "original",
    "1st-unilateral": "1st\nunilateral",
    "1st-bilateral": "1st\nbilateral",
    "2nd-unilateral": "2nd\nunilateral",
    "2nd-bilateral": "2nd\nbilateral",
}
_MARKERS = "osD^v"


def draw_strategy_norms(results: Sequence[NormResult], delays: StrategySlowdowns | None, path: Path) -> list[Path]:
    """Norms by coordinates with 95 % intervals, one marker per run; beside them, if given, slowdowns against norms.

    Returns:
        The files written (PNG, PDF, caption).
    """
    with new_figure(width=3.4, height=2.6, columns=1 if delays is None else 2) as figure:
        fill_strategy_norms(figure, results, delays)
        table = format_table(strategy_table(results, delays), "markdown")
        return save(figure, path, f"{NORM_TITLE}; bars: 95 % intervals\n{table}")


def fill_strategy_norms(figure: Figure, results: Sequence[NormResult], delays: StrategySlowdowns | None) -> None:
    """The panels of `draw_strategy_norms` in a figure."""
    panels = figure.subplots(1, 1 if delays is None else 2, squeeze=False)[0]
    _draw_norms(panels[0], results)
    if delays is not None:
        _draw_slowdowns(panels[1], results, delays)


def _draw_norms(axes: Axes, results: Sequence[NormResult]) -> None:
    runs = list(dict.fromkeys(result.run for result in results))
    for index, run in enumerate(runs):
        of_run = [result for result in results if result.run == run]
        of_run.sort(key=lambda result: STRATEGY_SPACES.index(result.space))
        look = look_of(of_run[0].method)
        values = [result.normalized for result in of_run]
        axes.errorbar(
            [STRATEGY_SPACES.index(result.space) + 0.12 * (index - (len(runs) - 1) / 2) for result in of_run],
            values,
            yerr=[
                [value - result.interval[0] for value, result in zip(values, of_run, strict=True)],
                [result.interval[1] - value for value, result in zip(values, of_run, strict=True)],
            ],
            color=sequence_color(index, len(runs)) if len(runs) > 1 else look.color,
            marker=_MARKERS[index % len(_MARKERS)],
            markersize=4,
            capsize=2,
            linewidth=0.8,
            label=f"{look.label}, P = {of_run[0].num_stages}",
        )
    axes.set_xticks(range(len(STRATEGY_SPACES)), [LABELS[space] for space in STRATEGY_SPACES])
    factor_axis(axes)
    axes.set_ylabel("Hessian (1,1)-norm / parameter")
    axes.set_title("norm in each strategy's coordinates")
    axes.legend(title="weights of", title_fontsize=7)


def _draw_slowdowns(axes: Axes, results: Sequence[NormResult], delays: StrategySlowdowns) -> None:
    """The norm's share of the original one, the mean of the runs in the logarithm, against the slowdown."""
    for space, row in delays.by_space.items():
        shares = [share_of_original(result, results) for result in results if result.space == space]
        known = [share for share in shares if share is not None]
        if not known or row["ratio"] != row["ratio"]:  # NaN: the reference never reaches the target
            continue
        look = look_of(VARIANT_OF_SPACE[space])
        errors = None if row["low"] != row["low"] else [[row["ratio"] - row["low"]], [row["high"] - row["ratio"]]]
        share = 1.0
        for measured in known:
            share *= measured ** (1 / len(known))
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
