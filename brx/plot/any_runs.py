"""Figures of any runs: loss curves, slowdown against the target, the leaderboard, and staleness
during training."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from numpy.typing import NDArray

from brx.errors import UserError, counted
from brx.names import figure_label, path_of_text, path_text
from brx.plot.style import (
    factor_axis,
    finish_panel,
    legend_below,
    legend_below_all,
    legend_entries,
    line_style,
    look_of,
    new_figure,
    save,
    sequence_color,
)
from brx.runs.aspects import differences, first_names
from brx.runs.comparison import common_target, is_reference, slowdowns, with_reference
from brx.runs.experiments import by_experiment
from brx.runs.folder import read_each
from brx.runs.frames import DEPTH, curves, load, side_by_side
from brx.runs.metrics import read_staleness
from brx.runs.run import SMOOTHING, read_run

Array = NDArray[np.float64]

NUM_TARGETS = 40  # points per line in `draw_all_targets`
SMOOTHED = 5  # measurements of staleness per moving average
# Entries of a legend. More do not fit under the panel, and take longer to draw than the curves.
MOST_LABELS = 20


def draw_curves(runs: pd.DataFrame, path: Path, *, target: float | None = None) -> list[Path]:
    """Draw smoothed training losses, with dashed lines for runs with delay; returns the files
    written.

    The legend names at most `MOST_LABELS` runs, those that end lowest.

    Args:
        runs: rows of `brx.runs.load`.
        path: the figure's path without suffix.
        target: a loss to mark, in nats.

    Raises:
        UserError: a run has no loss yet.
    """
    empty = runs.index[runs["iteration"] == 0]
    if len(empty):
        raise UserError(
            f"{empty[0]}: ended before its first loss was written; there is nothing to draw"
        )
    is_delayed = runs["largest_delay"] > 0
    labels, colors = _labels_and_colors(runs, is_delayed)
    by_run = dict(iter(curves(runs).groupby("run", sort=False)))
    lowest_first = runs["train_loss"].sort_values(kind="stable").index
    named = set(lowest_first[:MOST_LABELS])
    notes = differences(runs)
    with new_figure(width=5.0, height=3.6) as figure:
        axes = figure.add_subplot()
        for run, losses in by_run.items():
            style: Any = {"color": colors[run], "linestyle": line_style(is_delayed=is_delayed[run])}
            if run in named:
                style["label"] = labels[run]
            axes.plot(losses["iteration"], losses["smoothed"], **style)
        num_unnamed = len(runs) - len(named)
        if num_unnamed > 0:
            axes.plot([], [], " ", label=f"and {num_unnamed} that end higher")
        if target is not None:
            label = f"common target {target:.2f}"
            axes.axhline(target, color="black", linewidth=0.6, linestyle=":", label=label)
        _limit_to_settled(axes, list(by_run.values()))
        title = "" if notes else _curves_title(runs, labels, is_delayed)
        finish_panel(axes, "iteration", "training loss (nats)", title, columns=2)
        caption = f"Training loss in nats; lines are means over {SMOOTHING:.0%} of the iterations."
        details: dict[str, Any] = {"runs": {str(run): label for run, label in labels.items()}}
        if notes:
            details["notes"] = notes
        return save(figure, path, caption, command="brx plot curves RUN...", details=details)


def _limit_to_settled(axes: Axes, runs: Sequence[pd.DataFrame]) -> None:
    """Set ranges that show the losses after the first twentieth of each run, without spikes."""
    smoothed = [losses["smoothed"].dropna() for losses in runs]
    settled = np.concatenate([losses[len(losses) // 20 :] for losses in smoothed])
    settled = settled[np.isfinite(settled)]  # a run that diverged may end at infinity
    if len(settled):
        # The 99th percentile, so that a spike does not set the scale.
        axes.set_ylim(settled.min() - 0.1, np.quantile(settled, 0.99) + 0.2)
    axes.set_xlim(0, max(losses["iteration"].max() for losses in runs))


def _curves_title(runs: pd.DataFrame, labels: pd.Series, is_delayed: pd.Series) -> str:
    """A title that states the cost of delay if the runs are pairs with and without it, and else
    names the run that ends lowest.

    Empty unless there are several runs, all finished and equally long."""
    all_finished = (runs["status"] == "finished").all() and runs["last_iteration"].nunique() == 1
    if not all_finished or len(runs) < 2:
        return ""
    finals = runs["train_loss"].sort_values(kind="stable")
    lead = finals.iloc[1] - finals.iloc[0]
    lowest = f"{labels[finals.index[0]]} ends lowest, by {lead:.2f} nats"
    return _costs_of_delay(runs, is_delayed) or lowest


def _labels_and_colors(runs: pd.DataFrame, style: pd.Series) -> tuple[pd.Series, dict[str, Any]]:
    """A label and a colour for each run.

    Runs with equal labels also get their names, and runs that diverged the iteration. Runs with
    equal colours and an equal `style` get colours of their own."""
    labels = _variant_labels(runs) + ", P = " + runs[DEPTH].astype(str)
    names = runs["name"].map(figure_label)
    labels = labels.where(~labels.duplicated(keep=False), labels + " (" + names + ")")
    # Its last losses may lie outside of the figure.
    ends = ", diverged after iteration " + runs["iteration"].astype(str)
    labels += ends.where(runs["status"] == "diverged", "")
    colors = runs["variant"].map(lambda variant: look_of(variant).color)
    is_alone = ~pd.concat([colors, style], axis=1).duplicated(keep=False)
    own_colors = {}
    for index, run in enumerate(runs.index):
        if not is_alone[run]:
            own_colors[run] = sequence_color(index, len(runs))
    return labels, {**colors, **own_colors}


def _variant_labels(runs: pd.DataFrame) -> pd.Series:
    """For each run, the label of its method followed by the settings that its variant adds."""
    methods = runs["method"].map(lambda method: look_of(method).label)
    suffixes = [
        figure_label(variant.removeprefix(method))
        for variant, method in zip(runs["variant"], runs["method"], strict=True)
    ]
    return methods + suffixes


def _costs_of_delay(runs: pd.DataFrame, is_delayed: pd.Series) -> str:
    """The cost of delay for each variant, as a title. Empty unless the runs are pairs, one pair per
    variant: a run without delay, and one with the delay that all others have."""
    without = runs[~is_delayed]
    delayed = runs[is_delayed]
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
    """Draw the slowdown at the largest number of stages against the target; returns the files
    written.

    The targets go from an early loss to the best final loss.

    Args:
        chosen: rows of `at_best_rates` of one model and budget; methods without a reference run are
            left out.
        path: the figure's path without suffix.
        reference_stages: P of the reference runs.
        marked: a target to mark; by default the lowest loss that all runs reach.

    Raises:
        UserError: no target gives a slowdown.
    """
    compared = with_reference(chosen, reference_stages)
    deepest = compared.loc[~is_reference(compared, reference_stages), DEPTH].max()
    shown = compared[compared[DEPTH].isin((deepest, reference_stages))]
    ratios = _ratios_by_target(shown, deepest, reference_stages)
    with new_figure(width=6.6, height=4.6) as figure:
        axes = figure.add_subplot()
        for method, points in ratios.groupby("method", sort=False):
            label, color, marker = look_of(method)
            style: Any = {"label": label, "color": color, "marker": marker, "markersize": 3}
            axes.plot(points["target"], points["ratio"], **style)
        label = "common target" if marked is None else "target"
        line = common_target(compared) if marked is None else marked
        axes.axvline(line, color="black", linewidth=0.6, linestyle=":", label=label)
        axes.invert_xaxis()
        factor_axis(axes)
        y_label = f"slowdown at P = {deepest}"
        title = _least_slowed_title(ratios)
        finish_panel(axes, "target training loss (nats)", y_label, title, columns=3)
        caption = (
            f"Slowdown at P = {deepest} against the target loss. A line ends where runs no longer "
            "reach the target."
        )
        command = "brx slowdown RUNS --all-targets FIGURE"
        return save(figure, path, caption, command=command, details={"runs": list(shown.index)})


def _least_slowed_title(ratios: pd.DataFrame) -> str:
    """A title that names the method that is slowed down least at most targets."""
    least_slowed = ratios.groupby("target")["ratio"].idxmin()  # a row per target
    wins = ratios.loc[least_slowed, "method"].value_counts()
    label = look_of(wins.index[0]).label
    return f"{label}: least slowed down at {wins.iloc[0]} of {NUM_TARGETS} targets"


def _ratios_by_target(runs: pd.DataFrame, deepest: int, reference_stages: int) -> pd.DataFrame:
    """Slowdowns at each target, without those that are only lower bounds.

    Args:
        runs: rows at P = `deepest` and at P = `reference_stages`.
        deepest: the largest number of stages.
        reference_stages: P of the reference runs.

    Raises:
        UserError: there are none.
    """
    losses_by_seed = [side_by_side(seeds) for seeds in by_experiment(runs)]
    # The first target is the highest loss that an experiment has after a twentieth of its run.
    early_losses = [float(losses.iloc[len(losses) // 20].mean()) for losses in losses_by_seed]
    finals = runs[runs[DEPTH] == deepest].groupby("experiment")["train_loss"].mean()
    targets = np.linspace(max(early_losses), finals.min(), NUM_TARGETS)
    tables = [slowdowns(runs, float(target), reference_stages) for target in targets]
    ratios = pd.concat(tables, ignore_index=True)
    ratios = ratios[ratios["ratio"].notna() & ~ratios["is_censored"]]
    if ratios.empty:
        raise UserError(
            f"--all-targets: at no target do runs at P = {deepest} have a slowdown, only bounds"
        )
    return ratios


def draw_leaderboard(board: pd.DataFrame, delays: Sequence[str], path: Path) -> list[Path]:
    """Draw final losses, a row per method and a point per delay; returns the files written.

    The method that is best under the longest delay is at the top.

    Args:
        board: rows with `rank`, `method`, `delay`, `loss` and `num_seeds`.
        delays: names of the delays, the longest last; ones that `board` lacks are left out.
        path: the figure's path without suffix.
    """
    measured = set(board["delay"])
    shown = [delay for delay in delays if delay in measured]
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
        # The first by rank: a method of which a run diverged has a mean over the others, and a low
        # rank.
        best = look_of(methods[0]).label
        loss = losses.iloc[0, -1]
        axes.set_title(f"{best} ends lowest under the longest delay, at {loss:.2f} nats")
        caption = (
            "Final training loss of each method without delay and under the delays of deeper "
            "pipelines, at the best learning rate of each, by the protocol of docs/compare.md. "
            f"Seeds: at least {board['num_seeds'].min()}."
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
"""The panel title of each metric that `logging.staleness_every` records."""


class _Series(NamedTuple):
    """One metric of one run."""

    iterations: Array  # (T,)
    by_stage: Array  # (T, stages that are shown); NaN where a number is missing


def draw_staleness(folders: Sequence[Path], path: Path) -> list[Path]:
    """Draw a panel per metric of staleness; returns the files written.

    A line is the mean over the stages with delay (over all stages if none has delay). With a single
    run, a band shows the range over these stages. With several runs, the bands would cover each
    other: there are none, and each line is a moving average over `SMOOTHED` measurements. Runs
    without measurements are left out and named on stderr.

    Args:
        folders: runs, or folders of runs.
        path: the figure's path without suffix.

    Raises:
        UserError: no run has a measurement of staleness.
    """
    runs = load(folders)
    readable = read_each(map(path_of_text, runs.index), _staleness_of)
    measured = {path_text(path): metrics for path, metrics in readable if metrics}
    lacking = [path_text(path) for path, metrics in readable if not metrics]
    why = "no staleness was measured; train with logging.staleness_every=100"
    if not measured:
        raise UserError(f"{first_names(lacking)}: {why}")
    if lacking:
        print(f"brx: note: left out: {first_names(lacking)}: {why}", file=sys.stderr)
    runs = runs.loc[list(measured)]
    is_alone = len(measured) == 1
    labels, colors = _labels_and_colors(runs, pd.Series("solid", runs.index))
    with new_figure(width=2.6, height=4.6, columns=3) as figure:
        panels = figure.subplots(2, 3).flat
        for axes, (name, title) in zip(panels, STALENESS_PANELS.items(), strict=True):
            for run, metrics in measured.items():
                if name in metrics:
                    style = {"color": colors[run], "label": labels[run]}
                    _draw_metric(axes, metrics[name], style, with_range=is_alone)
            axes.set_title(title)
            axes.set_xlabel("iteration")
        # A run may lack some of the metrics, so that no single panel need have all lines.
        handles, names = legend_entries(figure.axes)
        legend_below_all(figure, handles, names, columns=min(4, len(names)))
        what = "and their range" if is_alone else f"of {SMOOTHED} measurements each"
        caption = (
            f"Mean over the delayed stages, {what}; signs of the attention and MLP matrices. Runs: "
        )
        caption += ", ".join(runs.index)
        return save(figure, path, f"{caption}\nDrawn by: brx plot staleness")


def _draw_metric(axes: Axes, series: _Series, style: dict[str, Any], *, with_range: bool) -> None:
    """Draw the mean over the stages: with their range as a band, or else as a moving average."""
    means = np.nanmean(series.by_stage, axis=1)
    if not with_range:
        axes.plot(series.iterations, _smoothed(means), **style)
        return
    axes.plot(series.iterations, means, **style)
    low = np.nanmin(series.by_stage, axis=1)
    high = np.nanmax(series.by_stage, axis=1)
    axes.fill_between(series.iterations, low, high, color=style["color"], alpha=0.15, linewidth=0)


def _smoothed(values: Array) -> Array:
    """Centred moving averages over SMOOTHED measurements, over fewer at the ends."""
    rolling = pd.Series(values).rolling(SMOOTHED, center=True, min_periods=1)
    return np.asarray(rolling.mean(), dtype=np.float64)


def _staleness_of(folder: Path) -> dict[str, _Series]:
    """A run's metrics of staleness by name, at the iterations at which a stage that is shown has a
    number.

    Raises:
        UserError: a metric is not a number or None per stage.
    """
    run = read_run(folder)
    records = read_staleness(run.path)
    delays = np.array([delay.tau for delay in run.delays])
    is_shown = delays > 0
    if not is_shown.any():
        is_shown = np.full(len(delays), True)
    measures = {}
    for name in STALENESS_PANELS:
        iterations = []
        by_stage = []
        for record in records:
            numbers = _numbers_by_stage(record, name, len(delays), folder)[is_shown]
            if np.isfinite(numbers).any():
                iterations.append(record["iteration"])
                by_stage.append(numbers)
        if by_stage:
            measures[name] = _Series(np.array(iterations, dtype=float), np.array(by_stage))
    return measures


def _numbers_by_stage(record: dict[str, Any], name: str, num_stages: int, folder: Path) -> Array:
    """A metric of a record, a number per stage; NaN where a stage has none.

    Raises:
        UserError: it is not a number or None per stage.
    """
    numbers = record.get(name)
    if numbers is None:
        return np.full(num_stages, np.nan)
    is_list = isinstance(numbers, list) and len(numbers) == num_stages
    if not is_list or not all(isinstance(number, float | int | None) for number in numbers):
        raise UserError(
            f"{folder}: {name} of iteration {record['iteration']} must be a list of "
            f"{counted(num_stages, 'number')}, one per stage; restore the file, or train the run "
            f"again"
        )
    return np.array(numbers, dtype=np.float64)
