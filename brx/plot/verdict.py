"""The figure of `brx verdict`: who is faster over P and M, and the slowdown that would make them equal."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import TwoSlopeNorm

from brx.errors import UserError
from brx.planning.verdict import Question, Verdict, answer
from brx.planning.verdict_text import units_line
from brx.plot.style import factor_axis, look_of, new_figure, save
from brx.runs.time_to_loss import Measurements

if TYPE_CHECKING:
    from brx.planning.planned_run import PlannedRun

STAGES, MICRO_BATCHES = (2, 4, 8, 16, 32), (1, 2, 4, 8, 16, 32)
STRONGEST = 2.0  # log2 of the ratio of times at which the colour is full
Grid = dict[tuple[int, int], Verdict | None]  # answers by P and M; None where the model cannot be split up so


def grid(
    measurements: Measurements,
    ask: Callable[[int, int], Question],
    stages: Sequence[int] | None = None,
    micro_batches: Sequence[int] | None = None,
) -> Grid:
    """The same question for every P and M; `ask` raises UserError where the model cannot be split up so."""
    cells: Grid = {}
    for shape in product(stages or STAGES, micro_batches or MICRO_BATCHES):
        cells[shape] = None
        with suppress(UserError):
            cells[shape] = answer(measurements, ask(*shape))
    return cells


def draw_verdict(cells: Grid, path: Path, measurements: Measurements, run: PlannedRun | None = None) -> list[Path]:
    """Left: times against each other, P by M; right: at the largest P, slowdowns and the break-even."""
    verdicts = [verdict for verdict in cells.values() if verdict is not None]
    deepest = max(verdict.question.num_stages for verdict in verdicts)
    with new_figure(width=3.6, height=3.4, columns=2) as panels:
        left, right = panels.subplots(1, 2)
        _draw_grid(left, cells)
        _draw_break_even(right, [verdict for verdict in verdicts if verdict.question.num_stages == deepest])
        caption = (
            f"Time to a training loss of {verdicts[0].question.loss:g} nats: the best synchronous cut and method over"
            " the best asynchronous method, whose iterations were measured at (or between) the same delays in updates,"
            " (P - 1) / M. <: the asynchronous run had not reached the loss; tie: within the noise between seeds."
        )
        details = {"runs": measurements.source, "notes": _notes(cells, verdicts, measurements, run)}
        return save(panels, path, caption, command="brx verdict RUNS --figure FIGURE", details=details)


def _draw_grid(axes: Axes, cells: Grid) -> None:
    stages, micro_batches = (sorted(set(numbers)) for numbers in zip(*cells, strict=True))
    ratios = np.full((len(stages), len(micro_batches)), np.nan)
    for (num_stages, num_micro_batches), verdict in cells.items():
        if verdict is None:
            continue
        row, column = stages.index(num_stages), micro_batches.index(num_micro_batches)
        text = _cell(verdict)
        axes.text(column, row, text, ha="center", va="center", fontsize=5 if "\n" in text else 6)
        if verdict.advantage is not None:
            ratios[row, column] = 0.0 if verdict.is_tie else math.log2(verdict.advantage)
    norm = TwoSlopeNorm(0.0, -STRONGEST, STRONGEST)
    axes.imshow(ratios, cmap="RdBu", norm=norm, origin="lower", aspect="auto", alpha=0.75)
    axes.set_xticks(range(len(micro_batches)), [str(count) for count in micro_batches])
    axes.set_yticks(range(len(stages)), [str(count) for count in stages])
    axes.grid(False)
    axes.set(xlabel="micro-batches per update M", ylabel="stages P")
    decided = [v for v in cells.values() if v is not None and v.advantage is not None and not v.is_upper_bound]
    ties = sum(verdict.is_tie for verdict in decided)
    wins = sum(not verdict.is_tie and (verdict.advantage or 0.0) > 1 for verdict in decided)
    axes.set_title(
        f"asynchronous is faster in {wins} of {len(decided)} pipelines, {ties} tie\n(synchronous / asynchronous time)"
    )


def _cell(verdict: Verdict) -> str:
    if verdict.advantage is None:
        return "too little\nmemory" if verdict.is_memory_short else "not\nmeasured"
    number = f"{'< ' if verdict.is_upper_bound else ''}{verdict.advantage:.2g}"
    return f"tie\n({number})" if verdict.is_tie else number


def _draw_break_even(axes: Axes, verdicts: Sequence[Verdict]) -> None:
    verdicts = sorted(verdicts, key=lambda verdict: verdict.question.num_micro_batches)
    counts = [verdict.question.num_micro_batches for verdict in verdicts]
    for method in sorted({option.method for verdict in verdicts for option in verdict.asynchronous}):
        points = [
            (verdict.question.num_micro_batches, option.slowdown.ratio, verdict.break_even(option))
            for verdict in verdicts
            for option in verdict.asynchronous
            if option.method == method and option.slowdown is not None and not option.slowdown.is_lower_bound
        ]
        if points:
            label, color, marker = look_of(method)
            where, slowdowns, evens = zip(*points, strict=True)
            axes.plot(where, slowdowns, color=color, marker=marker, markersize=3, label=label)
            axes.plot(where, evens, color=color, linestyle=":", linewidth=0.8)
    if axes.lines:
        factor_axis(axes)
        axes.plot([], [], color="black", linestyle=":", linewidth=0.8, label="its break-even")
        axes.legend(fontsize=6, loc="center left", bbox_to_anchor=(1, 0.5))
    else:
        axes.set_yticks([])
        axes.text(0.5, 0.5, "no slowdown to compare", transform=axes.transAxes, ha="center")
    axes.set_xscale("log", base=2)
    axes.set_xticks(counts, [str(count) for count in counts])
    axes.set(xlabel="micro-batches per update M", ylabel="slowdown in iterations")
    axes.set_title(
        f"P = {verdicts[0].question.num_stages}: slowdown measured at (P - 1) / M\n(dotted: as fast as the rival)"
    )


def _notes(cells: Grid, verdicts: Sequence[Verdict], measurements: Measurements, run: PlannedRun | None) -> list[str]:
    lines = [f"Model of the runs: {measurements.model}.", units_line(run)]
    if len(verdicts) < len(cells):
        lines.append("Blank: the model has fewer than P blocks, or its batch is no multiple of M.")
    if any(verdict.question.devices.memory is not None for verdict in verdicts):
        lines.append("Without what needs more memory, at that P and M, than a device has.")
    return lines
