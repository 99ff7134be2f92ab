"""Figures of curvature: norms of the Hessian, and the effective delay."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes

from brx.curvature.effective_delay import EffectiveDelay, SlowdownPoint, uniform_effective_delay
from brx.curvature.norm_result import NormResult
from brx.curvature.norm_tables import NORM_TITLE, norm_table
from brx.plot.style import COLUMN_WIDTH_IN, legend_below, line_style, look_of, new_figure, save
from brx.runs.formats import format_table

SPACE_LINES = {"original": "-", "rotated": (0, (1, 1))}


def draw_norms(results: Sequence[NormResult], path: Path) -> list[Path]:
    """The (1,1)-norm per parameter of each run, in both coordinates, with 95 % intervals; logarithmic.

    Returns:
        The files written (PNG, PDF, caption).
    """
    runs = list(dict.fromkeys(result.run for result in results))
    with new_figure(width=max(COLUMN_WIDTH_IN, 1.0 * len(runs) + 0.8)) as figure:
        axes = figure.subplots()
        for space, face in (("original", "white"), ("rotated", "black")):
            shown = [result for result in results if result.space == space]
            positions = [runs.index(result.run) + (-0.12 if space == "original" else 0.12) for result in shown]
            for position, result in zip(positions, shown, strict=True):
                look = look_of(result.method)
                low, high = result.interval
                errors = [[result.normalized - low], [high - result.normalized]]
                axes.errorbar(
                    position,
                    result.normalized,
                    yerr=errors,
                    color=look.color,
                    marker=look.marker,
                    markersize=4,
                    markerfacecolor="white" if space == "original" else look.color,
                    capsize=2,
                    linestyle="none",
                )
            axes.plot([], [], marker="o", color="black", markerfacecolor=face, linestyle="none", label=space)
        first_of = {result.run: result for result in reversed(results)}
        labels = [f"{look_of(first_of[run].method).label}\nP = {first_of[run].num_stages}" for run in runs]
        axes.set_xticks(range(len(runs)), labels)
        axes.set_xlim(-0.5, len(runs) - 0.5)
        axes.set_yscale("log")
        axes.set_ylabel("Hessian (1,1)-norm / parameter")
        axes.legend(title="coordinates", title_fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))
        table = format_table(norm_table(results), "markdown")
        return save(figure, path, f"{NORM_TITLE}; bars: 95 % intervals\n{table}")


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
    for result, delays in curves:
        look = look_of(result.method)
        delayed = [point for point in delays if point.num_stages > 1]
        axes.errorbar(
            [point.num_stages for point in delayed],
            [point.delay / point.largest for point in delayed],
            yerr=[point.standard_error / point.largest for point in delayed],
            color=look.color,
            marker=look.marker,
            markersize=3,
            linestyle=SPACE_LINES[result.space],
            alpha=0.4 if result.num_stages == 1 else 1.0,
            label=_label(result),
        )
    axes.set_xlabel("stages P")
    axes.set_ylabel("effective delay $\\tau'$ / (P - 1)")
    axes.set_xticks(stages)
    axes.set_ylim(0.0, 1.0)
    legend_below(axes)


def _label(result: NormResult) -> str:
    return f"{look_of(result.method).label} (run at P = {result.num_stages}), {result.space}"


def _draw_slowdowns(axes: Axes, points: Sequence[SlowdownPoint]) -> None:
    for method in dict.fromkeys(point.method for point in points):
        look = look_of(method)
        reached = [point for point in points if point.method == method and point.slowdown is not None]
        reached.sort(key=lambda point: point.delay.delay)
        axes.plot(
            [point.delay.delay for point in reached],
            [point.slowdown or 0.0 for point in reached],
            color=look.color,
            marker=look.marker,
            markersize=4,
            linestyle=line_style(is_delayed=True),
            label=look.label,
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
