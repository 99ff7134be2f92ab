"""Figures of measurements of the Hessian: norms by coordinates, effective delays, and updates along
an eigenvector."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.axes import Axes

from brx.curvature.effective_delay import (
    VARIANT_OF_SPACE,
    EffectiveDelay,
    StrategySlowdowns,
    profile_table,
    rank_correlation,
    stages_of,
    strategy_table,
    uniform_effective_delay,
)
from brx.curvature.norm_result import (
    NORM_TITLE,
    SPACES,
    STRATEGY_SPACES,
    NormResult,
    Space,
    by_method_and_depth,
    norm_table,
    shares_of_original,
)
from brx.curvature.oscillation import DIRECTIONS, Oscillation, representative
from brx.names import figure_label
from brx.plot.style import (
    COLUMN_WIDTH_IN,
    draw_points,
    factor_axis,
    legend_below,
    legend_below_all,
    legend_entries,
    line_style,
    look_of,
    new_figure,
    save,
)
from brx.runs.slowdown import geometric_mean

# Points in the original coordinates are this far to the left of their method's tick, points in the
# rotated ones this far to the right.
SHIFT = 0.2
SPACE_LINES = {"original": "-", "rotated": (0, (1, 1))}
MARKERS = "osD^v<>P*X"
BARS = "Bars: 95 % intervals."
FEWEST_POINTS = 3  # with fewer slowdowns, their panel is left out
MOST_PARTS = 3  # a delay profile with more parts is not put into words
NORM_LABEL = "Hessian (1,1)-norm / parameter"
PREDICTORS = {"tau": "effective delay tau' (updates)", "product": "tau' x (1,1)-norm / parameter"}
"""Columns of `profile_points` that may predict a slowdown, each with its axis label."""
TITLES = {  # by direction
    "dominant": "along the dominant eigenvector",
    "random": "along a random orthogonal direction",
}


def draw_norms(results: Sequence[NormResult], path: Path) -> list[Path]:
    """Draw the (1,1)-norm per parameter in both coordinates, with 95 % intervals.

    There is a tick for each method and number of stages, with its seeds next to each other. `path`
    is without suffix. Returns the files written."""
    kinds = by_method_and_depth(results)
    with new_figure(width=max(COLUMN_WIDTH_IN, 1.0 * len(kinds) + 0.8)) as figure:
        axes = figure.subplots()
        for x, of_seeds in enumerate(kinds.values()):
            for space, center in zip(SPACES, (x - SHIFT, x + SHIFT), strict=True):
                in_space = [result for result in of_seeds if result.space == space]
                _draw_seeds(axes, in_space, center)
        for space, face in zip(SPACES, ("white", "black"), strict=True):
            style: dict[str, Any] = {"markerfacecolor": face, "linestyle": "none", "label": space}
            axes.plot([], [], marker="o", color="black", **style)
        labels = [f"{look_of(method).label}\nP = {num_stages}" for method, num_stages in kinds]
        axes.set_xticks(range(len(kinds)), labels)
        axes.set_xlim(-0.5, len(kinds) - 0.5)
        factor_axis(axes)
        axes.set(ylabel=NORM_LABEL, title=_share_title(results))
        axes.legend(
            title="coordinates", title_fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5)
        )
        details = {"norms": norm_table(results).to_dict("records")}
        command = "brx hessian-norm RUNS --measured"
        return save(figure, path, f"{NORM_TITLE}. {BARS}", command=command, details=details)


def _share_title(results: Sequence[NormResult]) -> str:
    """A title that says which share of the norm is left in rotated coordinates.

    The share is the geometric mean over the seeds of a method at a number of stages; with several
    such means, the title has their range. It is empty if nothing was measured in both coordinates.
    """
    shares = []
    for of_seeds in by_method_and_depth(results).values():
        by_seed = []
        for result in of_seeds:
            if result.space == "rotated":
                by_seed += shares_of_original(result, results)[:1]  # the first norm's share, if any
        if by_seed:
            shares.append(geometric_mean(by_seed))
    if not shares:
        return ""
    low = f"{min(shares):.2f}"
    high = f"{max(shares):.2f}"
    left = low if low == high else f"{low} to {high}"
    return f"rotation leaves {left} of the norm"


def _draw_seeds(axes: Axes, alike: Sequence[NormResult], center: float) -> None:
    """Draw the norms of one method's seeds in the same coordinates, next to each other around
    x = `center`; hollow markers are the original coordinates."""
    for index, result in enumerate(alike):
        look = look_of(result.method)
        face = "white" if result.space == "original" else look.color
        x = center + 0.1 * (index - (len(alike) - 1) / 2)
        draw_points(axes, x, result.normalized, result.interval, look, markerfacecolor=face)


def draw_strategy_norms(
    results: Sequence[NormResult], delays: StrategySlowdowns | None, path: Path
) -> list[Path]:
    """Draw the norms in the coordinates of each strategy. If `delays` is given, a second panel has
    the slowdowns against the norms.

    Bars are 95 % intervals for one seed, and the range for several. `path` is without suffix.
    Returns the files written."""
    columns = 2 if delays else 1
    with new_figure(width=3.4, height=3.1, columns=columns) as figure:
        left, *right = figure.subplots(1, columns, squeeze=False)[0]
        _draw_norms_by_strategy(left, results)
        if delays:
            _draw_slowdown_by_norm(right[0], results, delays)
        details = {"norms": strategy_table(results, delays).to_dict("records")}
        caption = f"{NORM_TITLE}. {BARS[:-1]}, of several seeds their range."
        command = "brx hessian-norm RUNS --strategies --measured"
        return save(figure, path, caption, command=command, details=details)


def _draw_norms_by_strategy(axes: Axes, results: Sequence[NormResult]) -> None:
    """Draw a line per method and number of stages, with the strategies' coordinates along x."""
    kinds = by_method_and_depth(results)
    for index, ((method, num_stages), of_seeds) in enumerate(kinds.items()):
        norms = {}
        for x, space in enumerate(STRATEGY_SPACES):
            alike = [result for result in of_seeds if result.space == space]
            if alike:
                norms[x] = _over_seeds(alike)
        table = pd.DataFrame(norms, index=["mean", "low", "high"]).T
        look = look_of(method)
        draw_points(
            axes,
            table.index + 0.12 * (index - (len(kinds) - 1) / 2),
            table["mean"],
            (table["low"], table["high"]),
            look,
            linestyle=line_style(is_delayed=num_stages > 1),
            marker=MARKERS[index % 5],
            linewidth=0.8,
            label=f"weights of {look.label}, P = {num_stages}",
        )
    names = [space.replace("-", "\n") for space in STRATEGY_SPACES]
    axes.set_xticks(range(len(STRATEGY_SPACES)), names)
    factor_axis(axes)
    axes.set(ylabel=NORM_LABEL, title="norm in the coordinates of each strategy")
    legend_below(axes)


def _over_seeds(of_seeds: Sequence[NormResult]) -> tuple[float, float, float]:
    """The geometric mean, minimum and maximum of the seeds' norms per parameter; for a single seed,
    its norm and the ends of its interval."""
    norms = [result.normalized for result in of_seeds]
    if len(norms) == 1:
        low, high = of_seeds[0].interval
        return norms[0], low, high
    return geometric_mean(norms), min(norms), max(norms)


def _draw_slowdown_by_norm(
    axes: Axes, results: Sequence[NormResult], delays: StrategySlowdowns
) -> None:
    """Draw a point per strategy: its slowdown, against its norm divided by the norm in the original
    coordinates (geometric mean over the runs)."""
    for space, row in delays.items():
        shares = []
        for result in results:
            if result.space == space:
                shares += shares_of_original(result, results)[:1]  # the first norm's share, if any
        # The ratio is NaN if the reference never reaches the target.
        if shares and not pd.isna(row["ratio"]):
            _draw_strategy(axes, space, geometric_mean(shares), row)
    axes.axhline(1.0, color="black", linewidth=0.5)
    factor_axis(axes)
    axes.margins(x=0.5, y=0.15)
    axes.set(
        xlabel="norm / norm in the original coordinates",
        ylabel=f"slowdown at P = {stages_of(delays)}",
        title="slowdown against the norm",
    )


def _draw_strategy(axes: Axes, space: Space, share: float, row: Mapping[str, Any]) -> None:
    """Draw a strategy's point with its name; a lower bound is a triangle that points up.

    `row` is a value of `StrategySlowdowns`."""
    name = space.replace("-", "/")
    look = look_of(VARIANT_OF_SPACE[space])
    marker = look.marker
    if row["is_censored"]:
        name += " (more)"
        marker = "^"
    ends = row["low"], row["high"]
    style: dict[str, Any] = {"marker": marker, "markersize": 5, "linestyle": "-"}
    draw_points(axes, share, row["ratio"], ends, look, **style)
    # The points of the two sources are close: label them on different sides.
    side, offset = ("right", -5) if space.startswith("2nd") else ("left", 5)
    axes.annotate(
        name,
        (share, row["ratio"]),
        xytext=(offset, 4),
        textcoords="offset points",
        ha=side,
        fontsize=7,
    )


def draw_effective_delay(
    curves: Sequence[tuple[NormResult, list[EffectiveDelay]]], points: pd.DataFrame, path: Path
) -> list[Path]:
    """Draw tau' as a share of the largest delay against P, and measured slowdowns against tau'.

    `curves` pairs each measured norm with its tau' at each P. `points` are rows of
    `profile_points`; fewer than FEWEST_POINTS are not drawn. `path` is without suffix. Returns the
    files written."""
    shown = points if len(points) >= FEWEST_POINTS else points.iloc[:0]
    columns = 2 if len(shown) else 1
    with new_figure(height=3.6, columns=columns) as figure:
        left, *right = figure.subplots(1, columns, squeeze=False)[0]
        _draw_delays(left, curves)
        caption = "Effective delay as a share of the largest (bars: standard error)."
        if right:
            _draw_profile_points(right[0], shown, "tau")
            _name_profiles(right[0], shown)
            right[0].set(xlabel="effective delay $\\tau'$", ylabel="slowdown in iterations")
            legend_below(right[0])
            caption = f"{caption[:-1]}, and slowdowns against it."
        details = {
            "effective delays": [_delays_text(result, delays) for result, delays in curves],
            "slowdowns": profile_table(points).to_dict("records"),
        }
        return save(figure, path, caption, command="brx effective-delay RUNS", details=details)


def _delays_text(result: NormResult, delays: Sequence[EffectiveDelay]) -> str:
    """A run's tau' with its standard error, for each P."""
    texts = [
        f"P = {point.num_stages}: {point.delay:.3g} +- {point.standard_error:.2g}"
        for point in delays
    ]
    return f"{_label(result)} coordinates: {', '.join(texts)}"


def _draw_delays(axes: Axes, curves: Sequence[tuple[NormResult, list[EffectiveDelay]]]) -> None:
    """Draw a line over P for each label, the mean of the runs that share it."""
    rows = []
    for result, delays in curves:
        for one in delays:
            if one.num_stages > 1:
                share = one.delay / one.largest
                error = one.standard_error / one.largest
                rows.append((_label(result), result, one.num_stages, share, error))
    table = pd.DataFrame(rows, columns=["label", "result", "P", "share", "error"])
    stages = sorted(table["P"].unique())
    equal = [uniform_effective_delay(count) / (count - 1) for count in stages]
    axes.plot(stages, equal, color="black", linewidth=0.8, linestyle=":", label="equal stages")
    for label, of_label in table.groupby("label", sort=False):
        first: NormResult = of_label["result"].iloc[0]
        by_stages = of_label.groupby("P")
        shares = by_stages["share"].mean()
        # The error over seeds; for one seed, the estimate's own error.
        errors = by_stages["share"].sem().fillna(by_stages["error"].mean())
        look = look_of(first.method)
        axes.errorbar(
            shares.index,
            shares,
            yerr=errors,
            color=look.color,
            marker=look.marker,
            markersize=3,
            linestyle=SPACE_LINES[first.space],
            alpha=0.4 if first.num_stages == 1 else 1.0,
            label=label,
        )
    axes.set(xlabel="stages P", ylabel="effective delay $\\tau'$ / (P - 1)", xticks=stages)
    axes.set_ylim(0.0, 1.0)
    if len(table):
        least = table["share"].min()
        most = table["share"].max()
        axes.set_title(f"effective delay: {least:.0%} to {most:.0%} of the largest")
    legend_below(axes)


def _label(result: NormResult) -> str:
    """The method, the number of stages that it was trained with, and the coordinates."""
    return f"{look_of(result.method).label} (run at P = {result.num_stages}), {result.space}"


def draw_profiles(points: pd.DataFrame, path: Path) -> list[Path]:
    """Draw slowdowns under delay profiles, a panel per predictor in PREDICTORS.

    `points` are rows of `profile_points`. Colours are methods, markers are profiles, bars are 95 %
    intervals. `path` is without suffix. Returns the files written."""
    methods = dict(iter(points.groupby("method", sort=False)))
    groups = {look_of(method).label: of_method for method, of_method in methods.items()}
    if len(methods) > 1:
        groups["all"] = points
    with new_figure(columns=2, height=2.8) as figure:
        panels = figure.subplots(1, 2, sharey=True)
        lines = []
        for axes, (predictor, title) in zip(panels, PREDICTORS.items(), strict=True):
            _draw_profile_points(axes, points, predictor)
            axes.set_xlabel(title.replace("tau'", "$\\tau'$"))
            correlations = {
                name: rank_correlation(members, predictor) for name, members in groups.items()
            }
            of_all = rank_correlation(points, predictor)
            axes.set_title(f"rank correlation with the slowdown: {of_all:.2f}")
            texts = [f"{name} {correlation:.2f}" for name, correlation in correlations.items()]
            lines.append(f"Spearman correlation with {title}: {', '.join(texts)}.")
        panels[0].set_ylabel("slowdown in iterations")
        _name_profiles(panels[1], points)
        figure.legend(
            loc="outside right center", fontsize=7, title="delays (else none)", title_fontsize=7
        )
        details = {"correlations": lines, "profiles": profile_table(points).to_dict("records")}
        caption = f"Slowdown under delay profiles. {BARS[:-1]}, arrows: lower bounds."
        return save(figure, path, caption, command="brx plot profiles RUNS", details=details)


def profile_words(profile: str) -> str:
    """Put a delay profile into words: `0 x 4, 8 x 4` (as `profile_text` writes it) becomes `8 in
    stages 5 to 8`. A profile with many different delays, or of a user's function, stays as it is.
    """
    parts = []
    first = 1
    for part in profile.split(", "):
        match = re.fullmatch(r"(\d+)(?: x (\d+))?", part)
        if match is None:
            return profile
        delay = match[1]
        count = int(match[2] or 1)
        last = first + count - 1
        if delay != "0":
            stages = f"stages {first} to {last}" if count > 1 else f"stage {first}"
            parts.append(f"{delay} in {stages}")
        first = last + 1
    return ", ".join(parts) if 0 < len(parts) <= MOST_PARTS else profile


def _markers_of(points: pd.DataFrame) -> dict[str, str]:
    """A marker per profile; from the eleventh profile on they repeat."""
    profiles = points["profile"].unique()
    return {profile: MARKERS[index % len(MARKERS)] for index, profile in enumerate(profiles)}


def _name_profiles(axes: Axes, points: pd.DataFrame) -> None:
    """Explain markers (profiles) and colours (methods) in the legend, by lines without points."""
    for profile, marker in _markers_of(points).items():
        label = figure_label(profile_words(profile))
        axes.plot([], [], color="black", marker=marker, markersize=4, linestyle="none", label=label)
    for method in points["method"].unique():
        axes.plot([], [], color=look_of(method).color, label=look_of(method).label)


def _draw_profile_points(axes: Axes, points: pd.DataFrame, predictor: str) -> None:
    """Draw slowdowns against a predictor, a column of `points`; arrows are lower bounds."""
    markers = _markers_of(points)
    # A point has no ratio if the reference never reaches the loss.
    for point in points[points["ratio"] > 0].to_dict("records"):
        ratio = point["ratio"]
        ends = point["low"], point["high"]
        is_bound = point["is_censored"]
        style = {"marker": markers[point["profile"]], "elinewidth": 0.8, "lolims": is_bound}
        if is_bound and not point["low"] > 0:
            # A bound without an interval. The length of its arrow means nothing.
            style["yerr"] = 0.15 * ratio
        draw_points(axes, point[predictor], ratio, ends, look_of(point["method"]), **style)
    axes.axhline(1.0, color="black", linewidth=0.5)
    factor_axis(axes)
    axes.set_xlim(0, 1.1 * points[predictor].max())


def _by_method(results: Sequence[Oscillation]) -> dict[str, list[Oscillation]]:
    grouped: dict[str, list[Oscillation]] = {}
    for result in results:
        grouped.setdefault(result.method, []).append(result)
    return grouped


def draw_oscillation(results: Sequence[Oscillation], path: Path) -> list[Path]:
    """Draw the updates along the two directions, in a row of panels per P.

    The first two panels have the projections at one checkpoint per method (`representative`), the
    third has the variances at all checkpoints. `path` is without suffix. Returns the files written.
    """
    stages = sorted({result.num_stages for result in results})
    with new_figure(width=2.6, height=0.9 + 1.5 * len(stages), columns=3) as figure:
        rows = figure.subplots(
            len(stages), 3, squeeze=False, sharey="col", width_ratios=(1, 1, 0.75)
        )
        for row, num_stages in zip(rows, stages, strict=True):
            of_row = [result for result in results if result.num_stages == num_stages]
            _draw_oscillation_row(row, num_stages, _by_method(of_row))
        rows[0, 1].set_title(TITLES["random"])
        rows[0, 2].set_title("variance (hollow: random)")
        for axes in rows[-1][:2]:
            axes.set_xlabel("iterations after the checkpoint")
        handles, labels = legend_entries(rows[:, 0])
        legend_below_all(figure, handles, labels, columns=len(labels))
        caption = (
            "Projections of the updates w(t) - w(t - 1), trained on from a checkpoint on the way "
            "(of a method's first seed, the middle one), and their variances. Filled: along the "
            "dominant eigenvector, hollow: along the random direction; a point per checkpoint and "
            "seed, a bar and the number: geometric mean."
        )
        details = dict(_oscillation_texts(result) for result in results)
        command = "brx oscillation RUNS --measured"
        return save(figure, path, caption, command=command, details=details)


def _draw_oscillation_row(
    row: Sequence[Axes], num_stages: int, by_method: Mapping[str, Sequence[Oscillation]]
) -> None:
    """Draw the three panels of one P."""
    shown = [representative(of_method) for of_method in by_method.values()]
    for axes, direction in zip(row[:2], DIRECTIONS, strict=True):
        for result in shown:
            look = look_of(result.method)
            projections = getattr(result, direction).projections
            iterations = range(1, len(projections) + 1)
            axes.plot(iterations, projections, color=look.color, lw=1.0, label=look.label)
        axes.axhline(0.0, color="black", linewidth=0.5)
        axes.ticklabel_format(axis="y", scilimits=(-2, 3))
    _draw_variances(row[2], by_method)
    row[0].set_ylabel(f"P = {num_stages}\nprojection of the update")
    eigenvalues = [f"{look_of(one.method).label} {one.eigenvalue:.2g}" for one in shown]
    row[0].set_title(f"{TITLES['dominant']}\n(eigenvalue: {', '.join(eigenvalues)})")


def _oscillation_texts(result: Oscillation) -> tuple[str, dict[str, str]]:
    """The checkpoint as a text, and the measurement along each direction as a text."""
    checkpoint = f"{result.run}, iteration {result.iteration}, eigenvalue {result.eigenvalue:.4g}"
    texts = {}
    for direction, title in TITLES.items():
        track = getattr(result, direction)
        texts[title] = (
            f"sign changes {track.sign_changes:.0%}, variance {track.variance:.3g}, "
            f"share of the updates' squared norms {track.share:.2g}"
        )
    return checkpoint, texts


def _draw_points_with_mean(
    axes: Axes, x: float, values: Sequence[float], style: Mapping[str, Any], *, is_above: bool
) -> None:
    """Draw points above each other, with a bar at their geometric mean, whose value is written
    above the points or below them."""
    axes.plot([x] * len(values), values, linestyle="none", **style)
    mean = geometric_mean(values)
    if len(values) > 1:
        axes.hlines(mean, x - 0.12, x + 0.12, color="black", linewidth=1.2)
    axes.annotate(
        f"{mean:.1e}",
        (x, max(values) if is_above else min(values)),
        xytext=(0, 5 if is_above else -5),
        textcoords="offset points",
        ha="center",
        va="bottom" if is_above else "top",
        fontsize=6,
    )


def _draw_variances(axes: Axes, by_method: Mapping[str, Sequence[Oscillation]]) -> None:
    """Draw a point per measurement: filled along the dominant eigenvector, hollow along the random
    direction. A bar is the geometric mean of several measurements."""
    for index, (method, results) in enumerate(by_method.items()):
        _, color, marker = look_of(method)
        dominant = [result.dominant.variance for result in results]
        random = [result.random.variance for result in results]
        style: dict[str, Any] = {"color": color, "marker": marker, "ms": 5}
        # Variances along the random direction are smaller, so their mean is written below.
        _draw_points_with_mean(axes, index - 0.15, dominant, style, is_above=True)
        hollow = {**style, "markerfacecolor": "white"}
        _draw_points_with_mean(axes, index + 0.15, random, hollow, is_above=False)
    axes.set_yscale("log")
    axes.margins(x=0.3, y=0.3)
    labels = [look_of(method).label.replace(" ", "\n") for method in by_method]
    axes.set_xticks(range(len(by_method)), labels)
    axes.grid(visible=False, axis="x")
