"""Slowdown under delay profiles against the effective delay, and against that times the (1,1)-norm."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from matplotlib.axes import Axes

from brx.curvature.profiles import ProfilePoint, profile_table, rank_correlation
from brx.plot.panels import factor_axis
from brx.plot.style import look_of, new_figure, save
from brx.runs.formats import format_table

MARKERS = "osD^v<>P*X"
PREDICTORS: dict[str, Callable[[ProfilePoint], float]] = {
    "effective delay tau' (updates)": lambda point: point.effective.delay,
    "tau' x (1,1)-norm / parameter": lambda point: point.product,
}


def draw_profiles(points: Sequence[ProfilePoint], path: Path) -> list[Path]:
    """A panel per predictor; colours are methods, markers are profiles, bars are 95 % intervals.

    Args:
        points: of `profile_points`.
        path: of the figure, without suffix.

    Returns:
        The files written (PNG, PDF, caption).
    """
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
