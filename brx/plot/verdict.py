"""The figure of `brx verdict`: who is faster over P and M, and the slowdown that would make them equal."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import TwoSlopeNorm

from brx.planning.verdict import Verdict
from brx.planning.verdict_text import assumption_lines
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
"""Lines of the schedules; GPipe waits as long as 1F1B."""


def draw_verdict(verdicts: Sequence[Verdict], path: Path, measurements: Measurements) -> list[Path]:
    """Left: times against each other, P by M; right: at the largest P, measured slowdowns and the break-even.

    Args:
        verdicts: of the same loss, for every pair of some P and some M.
        path: of the figure, without suffix.
        measurements: what they are from.

    Returns:
        The files written.
    """
    stages = sorted({verdict.question.num_stages for verdict in verdicts})
    with new_figure(width=3.6, height=3.4, columns=2) as panels:
        grid, curves = panels.subplots(1, 2)
        _draw_grid(grid, verdicts, stages)
        _draw_break_even(curves, [verdict for verdict in verdicts if verdict.question.num_stages == stages[-1]])
        return save(panels, path, _caption(verdicts[0], measurements))


def _draw_grid(axes: Axes, verdicts: Sequence[Verdict], stages: Sequence[int]) -> None:
    micro_batches = sorted({verdict.question.num_micro_batches for verdict in verdicts})
    ratios = np.full((len(stages), len(micro_batches)), np.nan)
    for verdict in verdicts:
        row = stages.index(verdict.question.num_stages)
        column = micro_batches.index(verdict.question.num_micro_batches)
        if verdict.advantage is None:
            axes.text(column, row, "not\nmeasured", ha="center", va="center", fontsize=5, color="grey")
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
    axes.set_yscale("log", base=2)
    axes.set_xticks(counts, [str(count) for count in counts])
    axes.set(xlabel="micro-batches per update M", ylabel="slowdown in iterations")
    axes.set_title(
        f"P = {verdicts[0].question.num_stages}: slowdown measured at (P - 1) / M\nbreak-even 1 / (1 - idle)"
    )
    if methods:
        axes.legend(fontsize=5)


def _break_even_factor(verdict: Verdict, schedule: str) -> float:
    """1 / (1 - idle share); NaN where the schedule is no option."""
    shares = [option.idle_share for option in verdict.synchronous if option.schedule == schedule]
    return 1.0 / (1.0 - shares[0]) if shares else math.nan


def _caption(verdict: Verdict, measurements: Measurements) -> str:
    lines = [
        f"Time to a training loss of {verdict.question.loss:g} nats: the best synchronous schedule and method over the"
        " best asynchronous method, whose iterations were measured at (or between) the same delays in updates,"
        " (P - 1) / M. <: the asynchronous run had not reached the loss.",
        f"Runs: {measurements.source} ({measurements.model}).",
        *assumption_lines(verdict)[:1],
    ]
    return "\n".join(lines)
