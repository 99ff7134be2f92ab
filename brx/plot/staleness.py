"""What delay does to gradients, updates and bases while runs train (`logging.staleness_every`)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from brx.errors import UserError
from brx.pipeline.delay import depth, stage_delays
from brx.plot.style import look_of, new_figure, save, sequence_color
from brx.runs.curves_file import read_staleness
from brx.runs.reading import Run

Array = NDArray[np.float64]

PANELS = {
    "stage_gradient_cosine": "cosine of the applied\nand the fresh gradient",
    "stage_update_cosine": "cosine of the updates\n$t$ and $t - \\lceil\\tau / M\\rceil$",
    "stage_weight_distance": "distance of used from newest weights\n/ norm of the newest",
    "stage_sign_changes": "share of sign changes of the update\nin original coordinates",
    "stage_rotated_sign_changes": "share of sign changes of the update\nin the eigenbasis",
    "stage_basis_angle": "angle that the eigenbasis turned\nat a refresh (degrees)",
}
"""What each metric is, for the title of its panel."""


class _Measured(NamedTuple):
    """A run's measures, and its label in the legend."""

    method: str
    label: str
    measures: dict[str, tuple[Array, Array]]  # iterations (T,), numbers (T, stages with delay) of each; NaN for none


def draw_staleness(runs: Sequence[Path], path: Path) -> list[Path]:
    """A panel per measure against iterations: the mean over a run's delayed stages, and their range as a band.

    Stages without delay are left out, where nothing is stale, unless a run has no others.

    Raises:
        UserError: a run has no measures.
    """
    measured = [_read(run) for run in runs]
    labels, methods = ([getattr(run, name) for run in measured] for name in ("label", "method"))
    with new_figure(width=2.6, height=4.6, columns=3) as figure:
        for axes, (name, title) in zip(figure.subplots(2, 3).flat, PANELS.items(), strict=True):
            for index, run in enumerate(measured):
                if name in run.measures:
                    iterations, numbers = run.measures[name]
                    alone = methods.count(run.method) == 1
                    color = look_of(run.method).color if alone else sequence_color(index, len(measured))
                    label = run.label if labels.count(run.label) == 1 else f"{run.label} ({runs[index].name})"
                    axes.plot(iterations, np.nanmean(numbers, axis=1), color=color, label=label)
                    low, high = np.nanmin(numbers, axis=1), np.nanmax(numbers, axis=1)
                    axes.fill_between(iterations, low, high, color=color, alpha=0.15, linewidth=0)
            axes.set_title(title)
            axes.set_xlabel("iteration")
        handles, texts = figure.axes[0].get_legend_handles_labels()
        figure.legend(handles, texts, loc="outside lower center", ncols=min(4, len(texts)))
        caption = "Mean over the delayed stages, and their range; signs of the attention and MLP matrices. Runs: "
        caption += ", ".join(map(str, runs))
        return save(figure, path, f"{caption}\nDrawn by: brx plot staleness")


def _read(folder: Path) -> _Measured:
    run = Run.load(folder)
    records = read_staleness(folder)
    delays = np.array([delay.tau for delay in stage_delays(run.config.pipeline)])
    is_shown = delays > 0 if delays.any() else delays == 0
    measures = {}
    for name in PANELS:
        rows = [(record["iteration"], record[name]) for record in records if name in record]
        rows = [(t, numbers) for t, numbers in rows if any(number is not None for number in numbers)]
        if rows:
            iterations, numbers = zip(*rows, strict=True)
            measures[name] = (np.array(iterations, dtype=float), np.array(numbers, dtype=float)[:, is_shown])
    if not measures:
        raise UserError(f"{folder}: no staleness was measured; train with logging.staleness_every=100")
    label = f"{look_of(run.variant).label}, P = {depth(run.config.pipeline)}"
    return _Measured(run.variant, label, measures)
