"""Loss curves of runs in one figure."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from brx.errors import UserError
from brx.plot.style import legend_below, line_style, look_of, new_figure, save
from brx.runs.frames import DEPTH, curves
from brx.runs.reading import SMOOTHING


def draw_curves(runs: pd.DataFrame, path: Path, *, target: float | None = None) -> list[Path]:
    """Smoothed training loss against iterations; solid without delay, dashed with.

    Args:
        runs: what to draw, rows of `brx.runs.load`.
        path: of the figure, without suffix.
        target: a loss to mark with a line.

    Returns:
        The files written (PNG, PDF, caption).

    Raises:
        UserError: a run failed before its first loss was written.
    """
    if len(empty := runs.index[runs["train_loss"].isna()]):
        raise UserError(f"{empty[0]}: failed before its first loss was written; there is nothing to draw")
    by_run = dict(iter(curves(runs).groupby("run", sort=False)))
    labels = {path: _label(run) for path, run in runs.iterrows()}
    with new_figure(width=5.0, height=3.6) as figure:
        axes = figure.add_subplot()
        for run, losses in by_run.items():
            linestyle = line_style(is_delayed=runs.at[run, "largest_delay"] > 0)
            style: Any = {"color": look_of(runs.at[run, "method"]).color, "linestyle": linestyle}
            axes.plot(losses["iteration"], losses["smoothed"], label=labels[run], **style)
        if target is not None:
            axes.axhline(target, color="black", linewidth=0.6, linestyle=":", label=f"common target {target:.2f}")
        axes.set_xlabel("iteration")
        axes.set_ylabel("training loss (nats)")
        smoothed = [losses["smoothed"].dropna() for losses in by_run.values()]
        settled = np.concatenate([losses[len(losses) // 20 :] for losses in smoothed])
        axes.set_ylim(settled.min() - 0.1, np.quantile(settled, 0.99) + 0.2)  # a spike must not set the scale
        axes.set_xlim(0, max(losses["iteration"].max() for losses in by_run.values()))
        legend_below(axes, columns=2)
        finals = runs["train_loss"].sort_values()
        if len(finals) > 1:
            lead = finals.iloc[1] - finals.iloc[0]
            axes.set_title(f"{labels[finals.index[0]]} ends lowest, by {lead:.2f} nats")
        caption = f"Training loss in nats; lines are means over {SMOOTHING:.0%} of the iterations."
        details = {"runs": {str(run): label for run, label in labels.items()}}
        return save(figure, path, caption, command="brx plot curves RUN...", details=details)


def _label(run: pd.Series) -> str:
    """The method, what of it and of its delay is not as usual, and P."""
    return f"{look_of(run['method']).label}{run['variant'].removeprefix(run['method'])}, P = {run[DEPTH]}"
