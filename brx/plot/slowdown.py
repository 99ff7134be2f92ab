"""Slowdown against the target loss, so that nobody has to trust one choice of target."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from brx.plot.panels import finish_panel
from brx.plot.style import figure, look_of, save
from brx.runs.experiments import Group
from brx.runs.slowdown import slowdowns, slowest_final, with_reference

NUM_TARGETS = 40


def draw_all_targets(
    groups: Sequence[Group], path: Path, reference_stages: int = 1, marked: float | None = None
) -> list[Path]:
    """Slowdown at the largest number of stages for every target from an early loss to the best final one.

    A line ends where its method no longer reaches the target under delay.

    Args:
        groups: experiments of one model and budget.
        path: of the figure, without suffix.
        reference_stages: what slowdown is relative to.
        marked: a target to mark; by default the loss that all of `groups` that have a reference reach.
    """
    most = max(group.stages for group in groups)
    delayed = [group for group in groups if group.stages in (most, reference_stages)]
    highest = max(float(group.smoothed[:, group.smoothed.shape[1] // 20].mean()) for group in delayed)
    lowest = min(group.final_loss for group in delayed if group.stages == most)
    lines: dict[str, list[tuple[float, float]]] = {}
    for target in np.linspace(highest, lowest, NUM_TARGETS):
        for one in slowdowns(delayed, float(target), reference_stages):
            if one.ratio is not None and not one.is_censored:
                lines.setdefault(one.group.variant, []).append((float(target), one.ratio))
    with figure(width=4.4, height=3.0) as made:
        axes = made.add_subplot()
        for name, points in lines.items():
            look = look_of(name)
            targets, ratios = zip(*points, strict=True)
            axes.plot(targets, ratios, color=look.color, marker=look.marker, markersize=3, label=look.label)
        label = "slowest-final" if marked is None else "target"
        line = slowest_final(with_reference(groups, reference_stages)) if marked is None else marked
        axes.axvline(line, color="black", linewidth=0.6, linestyle=":", label=label)
        axes.invert_xaxis()
        axes.set_yscale("log")
        finish_panel(axes, "target training loss (nats)", f"slowdown at P = {most}", "")
        sources = "\n".join(str(run.path) for group in delayed for run in group.runs)
        return save(
            made, path, f"Slowdown at P = {most} against the target loss; a line ends where delay wins.\n{sources}"
        )
