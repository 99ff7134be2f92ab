"""The effective delay, and slowdowns against it: of pipelines (`brx effective-delay`) and of delay profiles."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pandas as pd
from matplotlib.axes import Axes

from brx.curvature.effective_delay import (
    EffectiveDelay,
    ProfilePoint,
    SlowdownPoint,
    profile_table,
    rank_correlation,
    uniform_effective_delay,
)
from brx.curvature.norm_result import NormResult
from brx.plot.panels import factor_axis
from brx.plot.style import legend_below, line_style, look_of, new_figure, save
from brx.runs.formats import format_table

SPACE_LINES = {"original": "-", "rotated": (0, (1, 1))}
MARKERS = "osD^v<>P*X"
PREDICTORS: dict[str, Callable[[ProfilePoint], float]] = {
    "effective delay tau' (updates)": lambda point: point.effective.delay,
    "tau' x (1,1)-norm / parameter": lambda point: point.product,
}


def draw_effective_delay(
    curves: Sequence[tuple[NormResult, list[EffectiveDelay]]], points: Sequence[SlowdownPoint], path: Path
) -> list[Path]:
    """tau' as a share of the largest delay against the number of stages, and measured slowdowns against tau'.

    Args:
        curves: measurements, and tau' of each for several numbers of stages.
        points: runs with their slowdown.
        path: of the figure, without suffix.
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
    """A curve per method, P and coordinates; over seeds, means and standard errors."""
    rows = [
        (_label(result), result, one.num_stages, one.delay / one.largest, one.standard_error / one.largest)
        for result, delays in curves
        for one in delays
        if one.num_stages > 1
    ]
    table = pd.DataFrame(rows, columns=["label", "result", "P", "share", "error"])
    stages = sorted(table["P"].unique())
    equal = [uniform_effective_delay(count) / (count - 1) for count in stages]
    axes.plot(stages, equal, color="black", linewidth=0.8, linestyle=":", label="equal stages")
    for label, of_label in table.groupby("label", sort=False):
        result: NormResult = of_label["result"].iloc[0]
        by_stages = of_label.groupby("P")
        shares = by_stages["share"].mean()
        look = look_of(result.method)
        axes.errorbar(
            shares.index,
            shares,
            yerr=by_stages["share"].sem().fillna(by_stages["error"].mean()),  # over seeds; of one, its estimate's
            color=look.color,
            marker=look.marker,
            markersize=3,
            linestyle=SPACE_LINES[result.space],
            alpha=0.4 if result.num_stages == 1 else 1.0,
            label=label,
        )
    axes.set(xlabel="stages P", ylabel="effective delay $\\tau'$ / (P - 1)", xticks=stages, ylim=(0.0, 1.0))
    legend_below(axes)


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


def draw_profiles(points: Sequence[ProfilePoint], path: Path) -> list[Path]:
    """A panel per predictor; colours are methods, markers are profiles, bars are 95 % intervals."""
    markers = dict(zip(dict.fromkeys(point.profile for point in points), MARKERS * len(points), strict=False))
    with new_figure(columns=2, height=2.8) as figure:
        panels = figure.subplots(1, 2, sharey=True)
        lines = []
        for axes, (title, predictor) in zip(panels, PREDICTORS.items(), strict=True):
            _draw_points(axes, points, predictor, markers)
            axes.set_xlabel(title.replace("tau'", "$\\tau'$"))
            correlations = _correlations(points, predictor)
            axes.set_title(f"Spearman: {', '.join(correlations)}", fontsize=6)
            lines.append(f"Spearman correlation with {title}: {', '.join(correlations)}.")
        panels[0].set_ylabel("slowdown in iterations")
        for profile, marker in markers.items():
            panels[1].plot([], [], color="black", marker=marker, markersize=4, linestyle="none", label=profile)
        for method in dict.fromkeys(point.method for point in points):
            panels[1].plot([], [], color=look_of(method).color, label=look_of(method).label)
        figure.legend(loc="outside right center", fontsize=6, title="delays by stage", title_fontsize=6)
        caption = "Slowdown under delay profiles; bars: 95 % intervals, arrows: lower bounds.\n" + "\n".join(lines)
        return save(figure, path, f"{caption}\n{format_table(profile_table(points), 'markdown')}")


def _draw_points(
    axes: Axes, points: Sequence[ProfilePoint], predictor: Callable[[ProfilePoint], float], markers: dict[str, str]
) -> None:
    for point in points:
        if not point.ratio > 0:  # its reference never reaches the loss
            continue
        low, high = point.slowdown["low"], point.slowdown["high"]
        is_bound = bool(point.slowdown["is_censored"])
        bars = [[point.ratio - low], [high - point.ratio]] if low > 0 else 0.15 * point.ratio if is_bound else None
        axes.errorbar(
            predictor(point),
            point.ratio,
            yerr=bars,
            lolims=is_bound,
            color=look_of(point.method).color,
            marker=markers[point.profile],
            markersize=4,
            elinewidth=0.8,
            capsize=2,
            linestyle="none",
        )
    axes.axhline(1.0, color="black", linewidth=0.5)
    factor_axis(axes)
    axes.set_xlim(left=0)


def _correlations(points: Sequence[ProfilePoint], predictor: Callable[[ProfilePoint], float]) -> list[str]:
    """Of each method by itself, and of all together."""
    methods = list(dict.fromkeys(point.method for point in points))
    groups = {look_of(method).label: [one for one in points if one.method == method] for method in methods}
    if len(methods) > 1:
        groups["all"] = list(points)
    return [
        f"{name} {rank_correlation(members, [predictor(point) for point in members]):.2f}"
        for name, members in groups.items()
    ]
