"""Figures of measurements of the Hessian: norms by coordinates, effective delays, updates along an
eigenvector."""

import re
from collections.abc import Sequence
from pathlib import Path

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
    by_method_and_depth,
    norm_table,
    shares_of_original,
)
from brx.curvature.oscillation import DIRECTIONS, Oscillation, representative
from brx.plot.style import (
    COLUMN_WIDTH_IN,
    draw_points,
    factor_axis,
    legend_below,
    line_style,
    look_of,
    new_figure,
    save,
)
from brx.runs.slowdown import geometric_mean

BESIDE = (
    0.2  # how far the points of two coordinates or directions are from the middle of their place
)
SPACE_LINES = {"original": "-", "rotated": (0, (1, 1))}
MARKERS = "osD^v<>P*X"
BARS = "Bars: 95 % intervals."
FEWEST_POINTS = 3  # slowdowns that are worth a panel
MOST_PARTS = 3  # of a delay profile that is told in words
NORM_LABEL = "Hessian (1,1)-norm / parameter"
PREDICTORS = {"tau": "effective delay tau' (updates)", "product": "tau' x (1,1)-norm / parameter"}
"""Columns of `profile_points`, each with the label of its axis."""
TITLES = {
    "dominant": "along the dominant eigenvector",
    "random": "along a random orthogonal direction",
}


def draw_norms(results: Sequence[NormResult], path: Path) -> list[Path]:
    """The (1,1)-norm per parameter in both coordinates, with 95 % intervals; seeds of a run are
    next to each other."""
    kinds = by_method_and_depth(results)
    with new_figure(width=max(COLUMN_WIDTH_IN, 1.0 * len(kinds) + 0.8)) as figure:
        axes = figure.subplots()
        for place, of_seeds in enumerate(kinds.values()):
            for space, center in zip(SPACES, (place - BESIDE, place + BESIDE), strict=True):
                alike = [result for result in of_seeds if result.space == space]
                for index, result in enumerate(alike):
                    look = look_of(result.method)
                    face = "white" if space == "original" else look.color
                    x = center + 0.1 * (index - (len(alike) - 1) / 2)
                    draw_points(
                        axes, x, result.normalized, result.interval, look, markerfacecolor=face
                    )
        for space, face in zip(SPACES, ("white", "black"), strict=True):
            axes.plot(
                [],
                [],
                marker="o",
                color="black",
                markerfacecolor=face,
                linestyle="none",
                label=space,
            )
        labels = [f"{look_of(method).label}\nP = {num_stages}" for method, num_stages in kinds]
        axes.set_xticks(range(len(kinds)), labels)
        axes.set_xlim(-0.5, len(kinds) - 0.5)
        factor_axis(axes)
        axes.set_ylabel(NORM_LABEL)
        axes.legend(
            title="coordinates", title_fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5)
        )
        details = {"norms": norm_table(results).to_dict("records")}
        return save(
            figure,
            path,
            f"{NORM_TITLE}. {BARS}",
            command="brx hessian-norm RUNS --measured",
            details=details,
        )


def draw_strategy_norms(
    results: Sequence[NormResult], delays: StrategySlowdowns | None, path: Path
) -> list[Path]:
    """Norms by coordinates with 95 % intervals, or the range of seeds; a second panel has slowdowns
    against norms, if they are given."""
    columns = 2 if delays else 1
    with new_figure(width=3.4, height=3.1, columns=columns) as figure:
        left, *right = figure.subplots(1, columns, squeeze=False)[0]
        _draw_norms_by_strategy(left, results)
        if delays:
            _draw_slowdown_by_norm(right[0], results, delays)
        details = {"norms": strategy_table(results, delays).to_dict("records")}
        caption = f"{NORM_TITLE}. {BARS[:-1]}, of several seeds their range."
        return save(
            figure,
            path,
            caption,
            command="brx hessian-norm RUNS --strategies --measured",
            details=details,
        )


def _draw_norms_by_strategy(axes: Axes, results: Sequence[NormResult]) -> None:
    kinds = by_method_and_depth(results)
    for index, ((method, num_stages), of_seeds) in enumerate(kinds.items()):
        by_space = {
            space: [result for result in of_seeds if result.space == space]
            for space in STRATEGY_SPACES
        }
        norms = pd.DataFrame(
            {
                place: _over_seeds(by_space[space])
                for place, space in enumerate(STRATEGY_SPACES)
                if by_space[space]
            },
            index=["mean", "low", "high"],
        ).T
        look = look_of(method)
        draw_points(
            axes,
            norms.index + 0.12 * (index - (len(kinds) - 1) / 2),
            norms["mean"],
            (norms["low"], norms["high"]),
            look,
            linestyle=line_style(is_delayed=num_stages > 1),
            marker=MARKERS[index % 5],
            linewidth=0.8,
            label=f"weights of {look.label}, P = {num_stages}",
        )
    axes.set_xticks(
        range(len(STRATEGY_SPACES)), [space.replace("-", "\n") for space in STRATEGY_SPACES]
    )
    factor_axis(axes)
    axes.set(ylabel=NORM_LABEL, title="norm in each strategy's coordinates")
    legend_below(axes)


def _over_seeds(of_seeds: Sequence[NormResult]) -> tuple[float, float, float]:
    """The geometric mean per parameter, and the range; of one seed the interval of its estimate."""
    norms = [result.normalized for result in of_seeds]
    return (
        (norms[0], *of_seeds[0].interval)
        if len(norms) == 1
        else (geometric_mean(norms), min(norms), max(norms))
    )


def _draw_slowdown_by_norm(
    axes: Axes, results: Sequence[NormResult], delays: StrategySlowdowns
) -> None:
    """The norm's share of the original one, the mean of the runs in the logarithm, against the
    slowdown."""
    for space, row in delays.items():
        shares = [
            shares_of_original(result, results) for result in results if result.space == space
        ]
        known = [share for share, *_ in filter(None, shares)]
        if not known or pd.isna(row["ratio"]):  # NaN: the reference never reaches the target
            continue
        look, point = look_of(VARIANT_OF_SPACE[space]), (geometric_mean(known), row["ratio"])
        marker = "^" if row["is_censored"] else look.marker
        draw_points(
            axes,
            *point,
            (row["low"], row["high"]),
            look,
            marker=marker,
            markersize=5,
            linestyle="-",
        )
        name = space.replace("-", "/") + (" (more)" if row["is_censored"] else "")
        # The points of the two sources are close: label them on different sides.
        side, beside = ("right", -5) if space.startswith("2nd") else ("left", 5)
        axes.annotate(
            name, point, xytext=(beside, 4), textcoords="offset points", ha=side, fontsize=7
        )
    axes.axhline(1.0, color="black", linewidth=0.5)
    factor_axis(axes)
    axes.margins(x=0.4, y=0.15)
    axes.set(
        xlabel="norm / that in original coordinates", ylabel=f"slowdown at P = {stages_of(delays)}"
    )
    axes.set_title("and what delay costs the strategy")


def draw_effective_delay(
    curves: Sequence[tuple[NormResult, list[EffectiveDelay]]], points: pd.DataFrame, path: Path
) -> list[Path]:
    """tau' as a share of the largest delay against P, by run, and measured slowdowns against
    tau', where there are enough of them to show anything."""
    shown = points if len(points) >= FEWEST_POINTS else points.iloc[:0]
    columns = 2 if len(shown) else 1
    with new_figure(height=3.6, columns=columns) as figure:
        left, *right = figure.subplots(1, columns, squeeze=False)[0]
        _draw_delays(left, curves)
        if right:
            _draw_profile_points(right[0], shown, "tau")
            _name_profiles(right[0], shown)
            right[0].set(xlabel="effective delay $\\tau'$", ylabel="slowdown in iterations")
            legend_below(right[0])
        of_runs = [
            f"{_label(result)} coordinates: "
            + ", ".join(
                f"P = {point.num_stages}: {point.delay:.3g} +- {point.standard_error:.2g}"
                for point in delays
            )
            for result, delays in curves
        ]
        caption = "Effective delay as a share of the largest (bars: standard error)."
        if right:
            caption = f"{caption[:-1]}, and slowdowns against it."
        details = {
            "effective delays": of_runs,
            "slowdowns": profile_table(points).to_dict("records"),
        }
        return save(figure, path, caption, command="brx effective-delay RUNS", details=details)


def _draw_delays(axes: Axes, curves: Sequence[tuple[NormResult, list[EffectiveDelay]]]) -> None:
    rows = [
        (
            _label(result),
            result,
            one.num_stages,
            one.delay / one.largest,
            one.standard_error / one.largest,
        )
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
            yerr=by_stages["share"]
            .sem()
            .fillna(by_stages["error"].mean()),  # over seeds; of one, its estimate's
            color=look.color,
            marker=look.marker,
            markersize=3,
            linestyle=SPACE_LINES[result.space],
            alpha=0.4 if result.num_stages == 1 else 1.0,
            label=label,
        )
    axes.set(
        xlabel="stages P",
        ylabel="effective delay $\\tau'$ / (P - 1)",
        xticks=stages,
        ylim=(0.0, 1.0),
    )
    if len(table):
        low, high = table["share"].min(), table["share"].max()
        axes.set_title(f"effective delay: {low:.0%} to {high:.0%} of the largest")
    legend_below(axes)


def _label(result: NormResult) -> str:
    return f"{look_of(result.method).label} (run at P = {result.num_stages}), {result.space}"


def draw_profiles(points: pd.DataFrame, path: Path) -> list[Path]:
    """A panel per predictor; colours are methods, markers are profiles, bars are 95 % intervals."""
    methods = dict(iter(points.groupby("method", sort=False)))
    groups = {look_of(method).label: of_method for method, of_method in methods.items()}
    groups |= {"all": points} if len(methods) > 1 else {}
    with new_figure(columns=2, height=2.8) as figure:
        panels = figure.subplots(1, 2, sharey=True)
        lines = []
        for axes, (predictor, title) in zip(panels, PREDICTORS.items(), strict=True):
            _draw_profile_points(axes, points, predictor)
            axes.set_xlabel(title.replace("tau'", "$\\tau'$"))
            known = {name: rank_correlation(members, predictor) for name, members in groups.items()}
            correlations = ", ".join(
                f"{name} {correlation:.2f}" for name, correlation in known.items()
            )
            of_all = list(known.values())[-1]
            axes.set_title(f"rank correlation with the slowdown: {of_all:.2f}")
            lines.append(f"Spearman correlation with {title}: {correlations}.")
        panels[0].set_ylabel("slowdown in iterations")
        _name_profiles(panels[1], points)
        figure.legend(
            loc="outside right center", fontsize=7, title="delays (else none)", title_fontsize=7
        )
        details = {"correlations": lines, "profiles": profile_table(points).to_dict("records")}
        caption = f"Slowdown under delay profiles. {BARS[:-1]}, arrows: lower bounds."
        return save(figure, path, caption, command="brx plot profiles RUNS", details=details)


def profile_words(profile: str) -> str:
    """A delay profile as text, such as `0 x 4, 8 x 4` (`profile_text`), in words: `8 in stages 5 to
    8`. A profile of many different delays, or of a user's function, stays as it is."""
    parts = []
    first = 1
    for part in profile.split(", "):
        match = re.fullmatch(r"(\d+)(?: x (\d+))?", part)
        if match is None:
            return profile
        delay, count = match[1], int(match[2] or 1)
        last = first + count - 1
        if delay != "0":
            stages = f"stages {first} to {last}" if count > 1 else f"stage {first}"
            parts.append(f"{delay} in {stages}")
        first = last + 1
    return ", ".join(parts) if 0 < len(parts) <= MOST_PARTS else profile


def _markers_of(points: pd.DataFrame) -> dict[str, str]:
    return dict(zip(points["profile"].unique(), MARKERS * len(points), strict=False))


def _name_profiles(axes: Axes, points: pd.DataFrame) -> None:
    """What a legend will say of markers and colours."""
    for profile, marker in _markers_of(points).items():
        label = profile_words(profile)
        axes.plot([], [], color="black", marker=marker, markersize=4, linestyle="none", label=label)
    for method in points["method"].unique():
        axes.plot([], [], color=look_of(method).color, label=look_of(method).label)


def _draw_profile_points(axes: Axes, points: pd.DataFrame, predictor: str) -> None:
    markers = _markers_of(points)
    # Without a ratio, the reference never reaches the loss.
    for point in points[points["ratio"] > 0].to_dict("records"):
        ratio, low, high, is_bound = (point[key] for key in ("ratio", "low", "high", "is_censored"))
        # A bound has no interval: the length of its arrow says nothing.
        arrow = (
            {"lolims": True, "yerr": 0.15 * ratio}
            if is_bound and not low > 0
            else {"lolims": is_bound}
        )
        style = {"marker": markers[point["profile"]], "elinewidth": 0.8, **arrow}
        draw_points(axes, point[predictor], ratio, (low, high), look_of(point["method"]), **style)
    axes.axhline(1.0, color="black", linewidth=0.5)
    factor_axis(axes)
    axes.set_xlim(0, 1.1 * points[predictor].max())


def draw_oscillation(results: Sequence[Oscillation], path: Path) -> list[Path]:
    """A row per P: projections of one checkpoint per method on both directions, and the variances
    of all."""
    stages = sorted({result.num_stages for result in results})
    with new_figure(width=2.6, height=0.9 + 1.5 * len(stages), columns=3) as figure:
        rows = figure.subplots(
            len(stages), 3, squeeze=False, sharey="col", width_ratios=(1, 1, 0.75)
        )
        for row, num_stages in zip(rows, stages, strict=True):
            alike = [result for result in results if result.num_stages == num_stages]
            methods = {
                one.method: [other for other in alike if other.method == one.method]
                for one in alike
            }
            shown = [representative(of_method) for of_method in methods.values()]
            for axes, direction in zip(row, DIRECTIONS, strict=False):
                for result in shown:
                    look, projections = (
                        look_of(result.method),
                        getattr(result, direction).projections,
                    )
                    axes.plot(
                        range(1, len(projections) + 1),
                        projections,
                        color=look.color,
                        lw=1.0,
                        label=look.label,
                    )
                axes.axhline(0.0, color="black", linewidth=0.5)
                axes.ticklabel_format(axis="y", scilimits=(-2, 3))
            _draw_variances(row[2], methods)
            row[0].set_ylabel(f"P = {num_stages}\nprojection of the update")
            eigenvalues = (f"{look_of(one.method).label} {one.eigenvalue:.2g}" for one in shown)
            row[0].set_title(f"{TITLES['dominant']}\n(eigenvalue: {', '.join(eigenvalues)})")
        rows[0, 1].set_title(TITLES["random"])
        rows[0, 2].set_title("variance (hollow: random)")
        for axes in rows[-1][:2]:
            axes.set_xlabel("iterations after the checkpoint")
        lines = {
            line.get_label(): line for row in rows for line in row[0].get_legend_handles_labels()[0]
        }
        figure.legend(handles=list(lines.values()), loc="outside lower center", ncols=len(lines))
        caption = (
            "Projections of the updates w(t) - w(t - 1), trained on from a checkpoint on the way "
            "(of a method's first"
            " seed, the middle one), and their variances. Filled: along the dominant eigenvector, "
            "hollow: along the"
            " random direction; a point per checkpoint and seed, a bar and the number: geometric "
            "mean."
        )
        checkpoint = "{0.run}, iteration {0.iteration}, eigenvalue {0.eigenvalue:.4g}".format
        form = (
            "sign changes {0.sign_changes:.0%}, variance {0.variance:.3g}, share of the "
            "updates' squared norms"
        )
        along = f"{form} {{0.share:.2g}}".format
        details = {
            checkpoint(result): {
                title: along(getattr(result, direction)) for direction, title in TITLES.items()
            }
            for result in results
        }
        return save(
            figure, path, caption, command="brx oscillation RUNS --measured", details=details
        )


def _draw_variances(axes: Axes, methods: dict[str, list[Oscillation]]) -> None:
    """Filled along the dominant eigenvector, hollow along the random one; a bar at the geometric
    mean of several."""
    for index, (method, results) in enumerate(methods.items()):
        _, color, marker = look_of(method)
        for direction, face, beside in zip(
            DIRECTIONS, (color, "white"), (-0.15, 0.15), strict=True
        ):
            variances, x = (
                [getattr(result, direction).variance for result in results],
                index + beside,
            )
            axes.plot(
                [x] * len(variances), variances, marker, color=color, markerfacecolor=face, ms=5
            )
            mean = geometric_mean(variances)
            if len(variances) > 1:
                axes.hlines(mean, x - 0.12, x + 0.12, color="black", linewidth=1.2)
            axes.annotate(
                f"{mean:.1e}",
                (x, max(variances)),
                xytext=(0, 5),
                textcoords="offset points",
                ha="center",
                fontsize=6,
            )
    axes.set_yscale("log")
    axes.margins(x=0.3, y=0.2)
    axes.set_xticks(
        range(len(methods)), [look_of(method).label.replace(" ", "\n") for method in methods]
    )
    axes.grid(visible=False, axis="x")
