"""Loss curves of runs in one figure."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from brx.plot.style import figure, line_style, look_of, save
from brx.runs.reading import SMOOTHING, Run


def draw_curves(runs: Sequence[Run], path: Path, *, target: float | None = None) -> list[Path]:
    """Training loss against iterations: smoothed lines over the raw losses; solid at P = 1, dashed with delay.

    Args:
        runs: what to draw.
        path: of the figure, without suffix.
        target: a loss to mark with a line.

    Returns:
        The files written (PNG, PDF, caption).
    """
    with figure(width=5.0, height=3.2) as made:
        axes = made.add_subplot()
        for run in runs:
            look = look_of(run.method)
            axes.plot(run.iterations, run.train_loss, color=look.color, alpha=0.12, linewidth=0.4)
        for run in runs:
            look = look_of(run.method)
            label = f"{look.label}, P = {run.stages}"
            iterations = run.iterations[run.centres]
            axes.plot(iterations, run.smoothed, color=look.color, linestyle=line_style(run.stages), label=label)
        if target is not None:
            axes.axhline(target, color="black", linewidth=0.6, linestyle=":", label=f"common target {target:.2f}")
        axes.set_xlabel("iteration")
        axes.set_ylabel("training loss (nats)")
        settled = np.concatenate([run.smoothed[len(run.smoothed) // 20 :] for run in runs])
        axes.set_ylim(settled.min() - 0.1, np.quantile(settled, 0.99) + 0.2)  # a spike must not set the scale
        axes.set_xlim(0, max(run.iterations[-1] for run in runs))
        axes.legend()
        caption = f"Training loss in nats; lines are means over {SMOOTHING:.0%} of the iterations.\n" + "\n".join(
            f"{look_of(run.method).label}, P = {run.stages}: {run.path}" for run in runs
        )
        return save(made, path, caption)
