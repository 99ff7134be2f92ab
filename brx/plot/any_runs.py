"""Figures of any runs: loss curves, slowdown against the target, the leaderboard, and what delay
does on the way."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from brx.errors import UserError
from brx.names import figure_label
from brx.plot.style import (
    factor_axis,
    finish_panel,
    legend_below,
    line_style,
    look_of,
    new_figure,
    save,
    sequence_color,
)
from brx.runs.comparison import common_target, is_reference, slowdowns, with_reference
from brx.runs.experiments import by_experiment
from brx.runs.frames import DEPTH, SMOOTHING, curves, differences, load, read_run, side_by_side
from brx.runs.metrics import read_staleness

NUM_TARGETS = 40
SMOOTHED = 5  # measurements of staleness in a mean
# Entries of a legend: more do not fit under the panel, and take longer to draw than the curves.
MOST_LABELS = 20


def draw_curves(runs: pd.DataFrame, path: Path, *, target: float | None = None) -> list[Path]:
    """Smoothed training loss of rows of `brx.runs.load`, dashed with delay.

    Of more than `MOST_LABELS` runs the legend names those that end lowest.

    Raises:
        UserError: a run has no loss yet.
    """
    if len(empty := runs.index[runs["train_loss"].isna()]):
        raise UserError(
            f"{empty[0]}: ended before its first loss was written; there is nothing to draw"
        )
    by_run = dict(iter(curves(runs).groupby("run", sort=False)))
    is_delayed = runs["largest_delay"] > 0
    labels, colors = _labels_and_colors(runs, is_delayed)
    finals = runs["train_loss"].sort_values(kind="stable")
    named = set(finals.index[:MOST_LABELS])
    with new_figure(width=5.0, height=3.6) as figure:
        axes = figure.add_subplot()
        for run, losses in by_run.items():
            style: Any = {"color": colors[run], "linestyle": line_style(is_delayed=is_delayed[run])}
            if run in named:
                style["label"] = labels[run]
            axes.plot(losses["iteration"], losses["smoothed"], **style)
        if len(runs) > len(named):
            axes.plot([], [], " ", label=f"and {len(runs) - len(named)} that end higher")
        if target is not None:
            axes.axhline(
                target,
                color="black",
                linewidth=0.6,
                linestyle=":",
                label=f"common target {target:.2f}",
            )
        smoothed = [losses["smoothed"].dropna() for losses in by_run.values()]
        settled = np.concatenate([losses[len(losses) // 20 :] for losses in smoothed])
        # A spike must not set the scale.
        axes.set_ylim(settled.min() - 0.1, np.quantile(settled, 0.99) + 0.2)
        axes.set_xlim(0, max(losses["iteration"].max() for losses in by_run.values()))
        title, notes = "", differences(runs)
        is_fair = (
            not notes
            and (runs["status"] == "finished").all()
            and runs["last_iteration"].nunique() == 1
        )
        if len(finals) > 1 and is_fair:
            lead = finals.iloc[1] - finals.iloc[0]
            lowest = f"{labels[finals.index[0]]} ends lowest, by {lead:.2f} nats"
            title = _costs_of_delay(runs, is_delayed) or lowest
        finish_panel(axes, "iteration", "training loss (nats)", title, columns=2)
        caption = f"Training loss in nats; lines are means over {SMOOTHING:.0%} of the iterations."
        details: dict[str, Any] = {"runs": {str(run): label for run, label in labels.items()}}
        details |= {"notes": notes} if notes else {}
        return save(figure, path, caption, command="brx plot curves RUN...", details=details)


def _labels_and_colors(runs: pd.DataFrame, style: pd.Series) -> tuple[pd.Series, dict[str, Any]]:
    """By run; with its name, and a colour of its own, where another of its `style` would have the
    same."""
    labels = _variant_labels(runs) + ", P = " + runs[DEPTH].astype(str)
    names = runs["name"].map(figure_label)
    labels = labels.where(~labels.duplicated(keep=False), labels + " (" + names + ")")
    colors = runs["variant"].map(lambda variant: look_of(variant).color)
    is_alone = ~pd.concat([colors, style], axis=1).duplicated(keep=False)
    own = {
        run: sequence_color(place, len(runs))
        for place, run in enumerate(runs.index)
        if not is_alone[run]
    }
    return labels, {**colors, **own}


def _variant_labels(runs: pd.DataFrame) -> pd.Series:
    """By run, the label of its method and the settings that the variant adds."""
    methods = runs["method"].map(lambda method: look_of(method).label)
    suffixes = [
        figure_label(variant.removeprefix(method))
        for variant, method in zip(runs["variant"], runs["method"], strict=True)
    ]
    return methods + suffixes


def _costs_of_delay(runs: pd.DataFrame, is_delayed: pd.Series) -> str:
    """What delay costs each variant, as a title. Empty unless the runs are pairs, one pair per
    variant: a run without delay, and one with the delay that all others have."""
    without, delayed = runs[~is_delayed], runs[is_delayed]
    variants = set(runs["variant"])
    num_pairs = len(variants)
    is_paired = len(without) == len(delayed) == num_pairs
    is_complete = set(without["variant"]) == set(delayed["variant"]) == variants
    if not (is_paired and is_complete and delayed[DEPTH].nunique() == 1):
        return ""
    before = without.set_index("variant")["train_loss"]
    after = delayed.set_index("variant")["train_loss"]
    labels = _variant_labels(without)
    costs = []
    for run, variant in without["variant"].items():
        costs.append(f"{labels[run]} {after[variant] - before[variant]:.2f}")
    return f"delay costs {', '.join(costs)} nats"


def draw_all_targets(
    chosen: pd.DataFrame, path: Path, reference_stages: int = 1, marked: float | None = None
) -> list[Path]:
    """Slowdown at the largest number of stages for every target from an early loss to the best
    final one.

    `chosen` are rows of `at_best_rates` of one model and budget, some with a reference; `marked` is
    a target to mark, by default the loss that all of those reach."""
    compared = with_reference(chosen, reference_stages)
    most = compared.loc[~is_reference(compared, reference_stages), DEPTH].max()
    delayed = compared[compared[DEPTH].isin((most, reference_stages))]
    losses_by_seed = [side_by_side(seeds) for seeds in by_experiment(delayed)]
    highest = max(float(losses.iloc[len(losses) // 20].mean()) for losses in losses_by_seed)
    lowest = delayed[delayed[DEPTH] == most].groupby("experiment")["train_loss"].mean().min()
    targets = np.linspace(highest, lowest, NUM_TARGETS)
    ratios = pd.concat(
        [slowdowns(delayed, float(target), reference_stages) for target in targets],
        ignore_index=True,
    )
    ratios = ratios[ratios["ratio"].notna() & ~ratios["is_censored"]]
    if ratios.empty:
        raise UserError(
            f"--all-targets: no target at which runs at P = {most} have a slowdown that is no bound"
        )
    with new_figure(width=6.6, height=4.6) as figure:
        axes = figure.add_subplot()
        for method, points in ratios.groupby("method", sort=False):
            label, color, marker = look_of(method)
            axes.plot(
                points["target"],
                points["ratio"],
                label=label,
                color=color,
                marker=marker,
                markersize=3,
            )
        label = "common target" if marked is None else "target"
        line = common_target(compared) if marked is None else marked
        axes.axvline(line, color="black", linewidth=0.6, linestyle=":", label=label)
        axes.invert_xaxis()
        factor_axis(axes)
        least = ratios.loc[ratios.groupby("target")["ratio"].idxmin(), "method"].value_counts()
        title = (
            f"{look_of(least.index[0]).label}: least slowed down at {least.iloc[0]} of "
            f"{NUM_TARGETS} targets"
        )
        finish_panel(
            axes, "target training loss (nats)", f"slowdown at P = {most}", title, columns=3
        )
        caption = f"Slowdown at P = {most} against the target loss; a line ends where delay wins."
        command = "brx slowdown RUNS --all-targets FIGURE"
        return save(figure, path, caption, command=command, details={"runs": list(delayed.index)})


def draw_leaderboard(board: pd.DataFrame, delays: Sequence[str], path: Path) -> list[Path]:
    """A line per method, the best under the longest delay at the top; a point per delay. Returns
    the files written."""
    shown = [delay for delay in delays if delay in set(board["delay"])]
    losses = board.pivot(index=["rank", "method"], columns="delay", values="loss")[shown]
    methods = losses.index.get_level_values("method")
    heights = range(len(losses), 0, -1)
    with new_figure(width=5.0, height=1.3 + 0.24 * len(losses)) as figure:
        axes = figure.add_subplot()
        axes.hlines(
            heights,
            losses.min(axis=1),
            losses.max(axis=1),
            color="lightgrey",
            linewidth=2,
            zorder=1,
        )
        for index, delay in enumerate(shown):
            color = sequence_color(index, len(shown))
            axes.scatter(
                losses[delay], heights, color=color, s=18, label=f"delay: {delay}", zorder=2
            )
        axes.set_yticks(list(heights), [look_of(method).label for method in methods])
        axes.set_xlabel("final training loss (nats)")
        legend_below(axes, columns=3)
        under_longest = losses.iloc[:, -1]
        label = look_of(methods[under_longest.argmin()]).label
        axes.set_title(
            f"{label} ends lowest under the longest delay, at {under_longest.min():.2f} nats"
        )
        caption = (
            "Final training loss of each method without delay and under the delays of deeper "
            "pipelines, at the best"
            f" learning rate of each, by the protocol of docs/compare.md. Seeds: at least "
            f"{board['num_seeds'].min()}."
        )
        return save(figure, path, caption, command="brx compare --figure")


STALENESS_PANELS = {
    "stage_gradient_cosine": "cosine of the applied\nand the fresh gradient",
    "stage_update_cosine": "cosine of the updates\n$t$ and $t - \\lceil\\tau / M\\rceil$",
    "stage_weight_distance": "distance of used from newest weights\n/ norm of the newest",
    "stage_sign_changes": "share of sign changes of the update\nin original coordinates",
    "stage_rotated_sign_changes": "share of sign changes of the update\nin the eigenbasis",
    "stage_basis_angle": "angle that the eigenbasis turned\nat a refresh (degrees)",
}
"""What each metric of `logging.staleness_every` is, for the title of its panel."""


def draw_staleness(folders: Sequence[Path], path: Path) -> list[Path]:
    """A panel per measure: the mean over the stages with delay (all, if none has).

    One run alone has the stages' range as a band. Of several, whose bands would cover each other,
    the lines are means over SMOOTHED measurements, too."""
    runs = load(folders)
    measured = {run: _staleness_of(Path(str(run))) for run in runs.index}
    labels, colors = _labels_and_colors(runs, pd.Series("solid", runs.index))
    with new_figure(width=2.6, height=4.6, columns=3) as figure:
        for axes, (name, title) in zip(
            figure.subplots(2, 3).flat, STALENESS_PANELS.items(), strict=True
        ):
            for run, measures in measured.items():
                if name in measures:
                    iterations, numbers = measures[name]
                    means = np.nanmean(numbers, axis=1)
                    style: Any = {"color": colors[run], "label": labels[run]}
                    if len(measured) > 1:
                        axes.plot(iterations, _smoothed(means), **style)
                        continue
                    axes.plot(iterations, means, **style)
                    low, high = np.nanmin(numbers, axis=1), np.nanmax(numbers, axis=1)
                    axes.fill_between(
                        iterations, low, high, color=colors[run], alpha=0.15, linewidth=0
                    )
            axes.set_title(title)
            axes.set_xlabel("iteration")
        handles, texts = figure.axes[0].get_legend_handles_labels()
        figure.legend(handles, texts, loc="outside lower center", ncols=min(4, len(texts)))
        what = "and their range" if len(measured) == 1 else f"of {SMOOTHED} measurements each"
        caption = (
            f"Mean over the delayed stages, {what}; signs of the attention and MLP matrices. Runs: "
        )
        caption += ", ".join(runs.index)
        return save(figure, path, f"{caption}\nDrawn by: brx plot staleness")


def _smoothed(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Centred means over SMOOTHED measurements, over fewer at the ends."""
    rolling = pd.Series(values).rolling(SMOOTHED, center=True, min_periods=1)
    return np.asarray(rolling.mean(), dtype=np.float64)


def _staleness_of(folder: Path) -> dict[str, tuple[NDArray[np.float64], NDArray[np.float64]]]:
    """By measure, iterations (T,) and numbers (T, stages with delay) of a run, NaN for none."""
    run = read_run(folder)
    records = read_staleness(run.path)
    delays = np.array([delay.tau for delay in run.delays])
    is_shown = delays > 0 if delays.any() else delays == 0
    measures = {}
    for name in STALENESS_PANELS:
        rows = [(record["iteration"], record[name]) for record in records if name in record]
        rows = [
            (t, numbers) for t, numbers in rows if any(number is not None for number in numbers)
        ]
        if rows:
            iterations, numbers = zip(*rows, strict=True)
            measures[name] = (
                np.array(iterations, dtype=float),
                np.array(numbers, dtype=float)[:, is_shown],
            )
    if not measures:
        raise UserError(
            f"{folder}: no staleness was measured; train with logging.staleness_every=100"
        )
    return measures
