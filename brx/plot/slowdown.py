"""Slowdown against the target loss, so that nobody has to trust one choice of target."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from brx.plot.panels import factor_axis, finish_panel
from brx.plot.style import look_of, new_figure, save
from brx.runs.comparison import common_target, is_reference, slowdowns, with_reference
from brx.runs.experiments import by_experiment
from brx.runs.frames import DEPTH, side_by_side

NUM_TARGETS = 40


def draw_all_targets(
    chosen: pd.DataFrame, path: Path, reference_stages: int = 1, marked: float | None = None
) -> list[Path]:
    """Slowdown at the largest number of stages for every target from an early loss to the best final one.

    A line ends where its method no longer reaches the target under delay.

    Args:
        chosen: experiments of one model and budget, rows of `at_best_rates`, of which `has_slowdowns`.
        path: of the figure, without suffix.
        reference_stages: what slowdown is relative to.
        marked: a target to mark; by default the loss that all of `chosen` that have a reference reach.
    """
    compared = with_reference(chosen, reference_stages)
    most = compared.loc[~is_reference(compared, reference_stages), DEPTH].max()
    delayed = compared[compared[DEPTH].isin((most, reference_stages))]
    curves = [side_by_side(seeds) for seeds in by_experiment(delayed)]
    highest = max(float(losses.iloc[len(losses) // 20].mean()) for losses in curves)
    lowest = delayed[delayed[DEPTH] == most].groupby("experiment")["train_loss"].mean().min()
    targets = np.linspace(highest, lowest, NUM_TARGETS)
    ratios = pd.concat([slowdowns(delayed, float(target), reference_stages) for target in targets])
    ratios = ratios[ratios["ratio"].notna() & ~ratios["is_censored"]]
    with new_figure(width=6.6, height=4.6) as figure:
        axes = figure.add_subplot()
        for method, points in ratios.groupby("method", sort=False):
            look = look_of(method)
            style: dict[str, Any] = {"color": look.color, "marker": look.marker, "markersize": 3}
            axes.plot(points["target"], points["ratio"], label=look.label, **style)
        label = "common target" if marked is None else "target"
        line = common_target(compared) if marked is None else marked
        axes.axvline(line, color="black", linewidth=0.6, linestyle=":", label=label)
        axes.invert_xaxis()
        factor_axis(axes)
        least = ratios.loc[ratios.groupby("target")["ratio"].idxmin(), "method"].value_counts()
        title = f"{look_of(least.index[0]).label}: least slowed down at {least.iloc[0]} of {NUM_TARGETS} targets"
        finish_panel(axes, "target training loss (nats)", f"slowdown at P = {most}", title, columns=3)
        caption = f"Slowdown at P = {most} against the target loss; a line ends where delay wins."
        command = "brx slowdown RUNS --all-targets FIGURE"
        return save(figure, path, caption, command=command, details={"runs": list(delayed.index)})
