"""What delay does to gradients, updates and bases while runs train (`logging.staleness_every`)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from brx.errors import UserError
from brx.plot.style import new_figure, save, sequence_color
from brx.runs.curves_file import read_staleness
from brx.runs.reading import Run

PANELS = {
    "stage_gradient_cosine": "cosine of the applied\nand the fresh gradient",
    "stage_update_cosine": "cosine of the updates\n$t$ and $t - \\tau$",
    "stage_weight_distance": "distance of used from newest weights\n/ norm of the newest",
    "stage_sign_changes": "share of sign changes of the update\nin original coordinates",
    "stage_rotated_sign_changes": "share of sign changes of the update\nin the eigenbasis",
    "stage_basis_angle": "angle that the eigenbasis turned\nat a refresh (degrees)",
}
"""What each metric is, for the title of its panel."""


def draw_staleness(runs: Sequence[Path], path: Path) -> list[Path]:
    """A panel per measure against iterations: the mean over a run's stages, and their range as a band.

    Args:
        runs: folders of runs.
        path: of the figure, without suffix.

    Returns:
        The files written.

    Raises:
        UserError: a run has no measures.
    """
    measured = {_label(run): _read(run) for run in runs}
    with new_figure(width=2.6, height=4.6, columns=3) as figure:
        for axes, (name, title) in zip(figure.subplots(2, 3).flat, PANELS.items(), strict=True):
            for index, (label, measures) in enumerate(measured.items()):
                if name in measures:
                    iterations, numbers = measures[name]
                    color = sequence_color(index, len(measured))
                    axes.plot(iterations, np.nanmean(numbers, axis=1), color=color, label=label)
                    low, high = np.nanmin(numbers, axis=1), np.nanmax(numbers, axis=1)
                    axes.fill_between(iterations, low, high, color=color, alpha=0.15, linewidth=0)
            axes.set_title(title)
            axes.set_xlabel("iteration")
        handles, labels = figure.axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center")
        caption = "Mean over the stages, and their range. Runs: " + ", ".join(map(str, runs))
        return save(figure, path, f"{caption}\nDrawn by: brx plot staleness")


def _label(run: Path) -> str:
    read = Run.load(run)
    return f"{read.variant}, P = {read.stages} ({run.name})"


def _read(run: Path) -> dict[str, tuple[NDArray[np.float64], NDArray[np.float64]]]:
    """Iterations (T,) and numbers (T, stages) of every measure; NaN for none."""
    records = read_staleness(run)
    measures = {}
    for name in PANELS:
        rows = [(record["iteration"], record[name]) for record in records if name in record]
        rows = [(t, numbers) for t, numbers in rows if any(number is not None for number in numbers)]
        if rows:
            iterations, numbers = zip(*rows, strict=True)
            measures[name] = (np.array(iterations, dtype=float), np.array(numbers, dtype=float))
    if not measures:
        raise UserError(f"{run}: no staleness was measured; train with logging.staleness_every=100")
    return measures
