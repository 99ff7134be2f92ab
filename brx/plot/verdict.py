"""The figure of `brx verdict`: who is faster over P and M, and the slowdown that would make them equal."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import TwoSlopeNorm

from brx.planning.verdict import Grid, Verdict
from brx.planning.verdict_text import units_line
from brx.plot.style import look_of, new_figure, save
from brx.runs.time_to_loss import Measurements

STRONGEST = 2.0
"""log2 of the ratio of times at which the colour is full."""


SCHEDULE_STYLES: dict[str, Any] = {
    "1F1B": "-",
    "interleaved 1F1B": "--",
    "zero-bubble H1": "-.",
    "zero-bubble H2": ":",
}
"""Lines of the schedules; GPipe waits as long as 1F1B, with transfers a little less."""


def draw_verdict(cells: Grid, path: Path, measurements: Measurements) -> list[Path]:
    """Left: times against each other, P by M; right: at the largest P, measured slowdowns and the break-even.

    Args:
        cells: the answers of the same loss, by P and M; one of them at least.
        path: of the figure, without suffix.
        measurements: what they are from.

    Returns:
        The files written.
    """
    verdicts = [verdict for verdict in cells.values() if verdict is not None]
    deepest = max(verdict.question.num_stages for verdict in verdicts)
    with new_figure(width=3.6, height=3.4, columns=2) as panels:
        grid, curves = panels.subplots(1, 2)
        _draw_grid(grid, cells)
        _draw_break_even(curves, [verdict for verdict in verdicts if verdict.question.num_stages == deepest])
        return save(panels, path, "\n".join(_caption(cells, verdicts, measurements)))


def _draw_grid(axes: Axes, cells: Grid) -> None:
    stages, micro_batches = (sorted(set(numbers)) for numbers in zip(*cells, strict=True))
    ratios = np.full((len(stages), len(micro_batches)), np.nan)
    for (num_stages, num_micro_batches), verdict in cells.items():
        row, column = stages.index(num_stages), micro_batches.index(num_micro_batches)
        if verdict is None:
            continue
        if verdict.advantage is None:
            reason = "too little\nmemory" if verdict.question.is_memory_short else "not\nmeasured"
            axes.text(column, row, reason, ha="center", va="center", fontsize=5, color="grey")
            continue
        ratios[row, column] = math.log2(verdict.advantage)
        bound = "< " if verdict.is_upper_bound else ""
        axes.text(column, row, f"{bound}{verdict.advantage:.2g}", ha="center", va="center", fontsize=6)
    norm = TwoSlopeNorm(0.0, -STRONGEST, STRONGEST)
    axes.imshow(ratios, cmap="RdBu", norm=norm, origin="lower", aspect="auto", alpha=0.75)
    axes.set_xticks(range(len(micro_batches)), [str(count) for count in micro_batches])
    axes.set_yticks(range(len(stages)), [str(count) for count in stages])
    axes.grid(False)
    axes.set(xlabel="micro-batches per update M", ylabel="stages P")
    axes.set_title("synchronous time / asynchronous time\n(blue: asynchronous is faster)")


def _draw_break_even(axes: Axes, verdicts: Sequence[Verdict]) -> None:
    verdicts = sorted(verdicts, key=lambda verdict: verdict.question.num_micro_batches)
    counts = [verdict.question.num_micro_batches for verdict in verdicts]
    for schedule, style in SCHEDULE_STYLES.items():
        factors = [_break_even_factor(verdict, schedule) for verdict in verdicts]
        axes.plot(counts, factors, color="black", linewidth=0.8, linestyle=style, label=f"break-even, {schedule}")
    methods = {option.method for verdict in verdicts for option in verdict.asynchronous}
    for method in sorted(methods):
        points = [
            (verdict.question.num_micro_batches, verdict.slowdown(option), option.iterations.is_lower_bound)
            for verdict in verdicts
            for option in verdict.asynchronous
            if option.method == method and verdict.synchronous
        ]
        reached = [(count, slowdown) for count, slowdown, is_bound in points if not is_bound]
        if reached:
            look = look_of(method)
            axes.plot(*zip(*reached, strict=True), color=look.color, marker=look.marker, markersize=3, label=look.label)
    axes.set_xscale("log", base=2)
    if any(verdict.synchronous for verdict in verdicts):
        axes.set_yscale("log", base=2)
    else:
        axes.set_yticks([])
        axes.text(0.5, 0.5, "no synchronous option", transform=axes.transAxes, ha="center")
    axes.set_xticks(counts, [str(count) for count in counts])
    axes.set(xlabel="micro-batches per update M", ylabel="slowdown in iterations")
    has_transfers = any(verdict.question.transfer_time for verdict in verdicts)
    formula = "(1 - asynchronous idle) / (1 - idle)" if has_transfers else "1 / (1 - idle)"
    axes.set_title(f"P = {verdicts[0].question.num_stages}: slowdown measured at (P - 1) / M\nbreak-even {formula}")
    if methods:
        axes.legend(fontsize=5)


def _break_even_factor(verdict: Verdict, schedule: str) -> float:
    """The slowdown at which the schedule is as fast as the asynchronous one; NaN where it is no option."""
    options = (option for option in verdict.synchronous if option.schedule == schedule)
    return next((verdict.schedule_break_even(option) for option in options), math.nan)


def _caption(cells: Grid, verdicts: Sequence[Verdict], measurements: Measurements) -> list[str]:
    questions = [verdict.question for verdict in verdicts]
    lines = [
        f"Time to a training loss of {questions[0].loss:g} nats: the best synchronous schedule and method over the"
        " best asynchronous method, whose iterations were measured at (or between) the same delays in updates,"
        " (P - 1) / M. <: the asynchronous run had not reached the loss.",
        f"Runs: {measurements.source} ({measurements.model}).",
        units_line([question.transfer_time for question in questions]),
    ]
    if len(verdicts) < len(cells):
        lines.append("Blank: the model has fewer than P blocks, or its batch is no multiple of M.")
    if any(question.excluded for question in questions):
        lines.append("Without the schedules that need more memory, at that P and M, than a device has.")
    return lines
