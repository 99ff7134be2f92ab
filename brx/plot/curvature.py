"""Figures of curvature: norms of the Hessian, and the effective delay."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pandas as pd
from matplotlib.axes import Axes

from brx.curvature.effective_delay import EffectiveDelay, SlowdownPoint, uniform_effective_delay
from brx.curvature.norm_result import NormResult, Space, by_method_and_depth
from brx.curvature.norm_tables import NORM_TITLE, norm_table
from brx.plot.panels import factor_axis
from brx.plot.style import COLUMN_WIDTH_IN, legend_below, line_style, look_of, new_figure, save
from brx.runs.formats import format_table

SPACE_LINES = {"original": "-", "rotated": (0, (1, 1))}
SPACE_CENTERS: dict[Space, float] = {"original": -0.2, "rotated": 0.2}
SEED_OFFSET = 0.1


def draw_norms(results: Sequence[NormResult], path: Path) -> list[Path]:
    """The (1,1)-norm per parameter of each run, in both coordinates, with 95 % intervals; logarithmic.

    Runs of one method and P, which differ in the seed, are side by side.

    Returns:
        The files written (PNG, PDF, caption).
    """
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


def draw_effective_delay(
    curves: Sequence[tuple[NormResult, list[EffectiveDelay]]], points: Sequence[SlowdownPoint], path: Path
) -> list[Path]:
    """tau' as a share of the largest delay against the number of stages, and measured slowdowns against tau'.

    Args:
        curves: measurements, and tau' of each for several numbers of stages.
        points: runs with their slowdown.
        path: of the figure, without suffix.

    Returns:
        The files written (PNG, PDF, caption).
    """
    with new_figure(height=3.6, columns=2 if points else 1) as figure:
        panels = figure.subplots(1, 2 if points else 1, squeeze=False)[0]
        _draw_delays(panels[0], curves)
        if points:
            _draw_slowdowns(panels[1], points)
        lines = [
            f"{_label(result)} coordinates: "
            + ", ".join(f"P = {point.num_stages}: {point.delay:.3g} +- {point.standard_error:.2g}" for point in delays)
            for result, delays in curves
        ]
        lines += [
            f"{point.run}: tau' {point.delay.delay:.3g}, slowdown to loss {point.target:.3f}: "
            + ("never reached" if point.slowdown is None else f"{point.slowdown:.3g}")
            for point in points
        ]
        return save(figure, path, "Effective delay; bars and +-: standard error.\n" + "\n".join(lines))


def _draw_delays(axes: Axes, curves: Sequence[tuple[NormResult, list[EffectiveDelay]]]) -> None:
    stages = sorted({point.num_stages for _, delays in curves for point in delays} - {1})
    equal = [uniform_effective_delay(count) / (count - 1) for count in stages]
    axes.plot(stages, equal, color="black", linewidth=0.8, linestyle=":", label="equal stages")
    for label, of_label in _shares(curves).groupby("label", sort=False):
        method, run_stages, space = of_label[["method", "run_stages", "space"]].iloc[0]
        by_stages = of_label.groupby("P")
        shares = by_stages["share"].mean()
        look = look_of(method)
        axes.errorbar(
            shares.index,
            shares,
            yerr=by_stages["share"].sem().fillna(by_stages["error"].mean()),  # over seeds; of one, its estimate's
            color=look.color,
            marker=look.marker,
            markersize=3,
            linestyle=SPACE_LINES[space],
            alpha=0.4 if run_stages == 1 else 1.0,
            label=label,
        )
    axes.set_xlabel("stages P")
    axes.set_ylabel("effective delay $\\tau'$ / (P - 1)")
    axes.set_xticks(stages)
    axes.set_ylim(0.0, 1.0)
    legend_below(axes)


def _shares(curves: Sequence[tuple[NormResult, list[EffectiveDelay]]]) -> pd.DataFrame:
    """tau' over the largest delay, for every measurement and every P with a delay; seeds have one label."""
    rows = [
        {
            "label": _label(result),
            "method": result.method,
            "run_stages": result.num_stages,
            "space": result.space,
            "P": point.num_stages,
            "share": point.delay / point.largest,
            "error": point.standard_error / point.largest,
        }
        for result, delays in curves
        for point in delays
        if point.num_stages > 1
    ]
    return pd.DataFrame(rows)


def _label(result: NormResult) -> str:
    return f"{look_of(result.method).label} (run at P = {result.num_stages}), {result.space}"


def _draw_slowdowns(axes: Axes, points: Sequence[SlowdownPoint]) -> None:
    rows = [(point.method, point.label, point.delay.delay, point.slowdown) for point in points]
    table = pd.DataFrame(rows, columns=["method", "label", "delay", "slowdown"])
    for method, reached in table.dropna().groupby("method", sort=False):
        look = look_of(method)
        means = reached.groupby("label")[["delay", "slowdown"]].mean().sort_values("delay")  # over seeds
        axes.plot(means["delay"], means["slowdown"], color=look.color, linestyle=line_style(is_delayed=True))
        axes.scatter(
            reached["delay"], reached["slowdown"], s=16, color=look.color, marker=look.marker, label=look.label
        )
    # One label per delay profile, above its highest point: the methods' tau' are close to each other.
    labelled = {point.label: point for point in sorted(points, key=lambda point: point.slowdown or 0.0)}
    for label, point in labelled.items():
        position = (point.delay.delay, point.slowdown or 0.0)
        axes.annotate(label, position, textcoords="offset points", xytext=(0, 6), ha="center", fontsize=6)
    axes.margins(x=0.08, y=0.12)
    axes.axhline(1.0, color="black", linewidth=0.5)
    axes.set_xlabel("effective delay $\\tau'$ of the run")
    axes.set_ylabel("slowdown in iterations")
    legend_below(axes)
