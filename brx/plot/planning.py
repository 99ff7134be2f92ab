"""Figures of planning: the pipeline over time (`brx schedule`, the paper's first figure), and
synchronous against asynchronous training (`brx verdict`)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import chain, product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.colors import TwoSlopeNorm
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle

from brx.errors import UserError, counted
from brx.pipeline.schedule import (
    Timed,
    asynchronous_1f1b,
    bubble_share,
    steady_state,
    synchronous_1f1b,
    timeline,
    updates_between,
)
from brx.planning.verdict import Question, Verdict, answer
from brx.planning.verdict_text import units_line
from brx.plot.style import factor_axis, look_of, new_figure, save
from brx.runs.time_to_loss import Measurements

if TYPE_CHECKING:
    from brx.planning.planned_run import PlannedRun

FORWARD_COLOR = "#9CC9E8"
BACKWARD_COLOR = "#A5D6A7"
UPDATE_COLOR = "#D62728"

# In `draw_schedules`, rows are one unit apart.
BAR_HEIGHT = 0.8
VERSIONS_Y = -0.85  # names of weight versions, below the row of the first stage
ARROW_Y = 0.45  # just above the row
ARROW_TEXT_Y = 1.35

# P and M of the grid of `brx verdict`.
STAGES = (2, 4, 8, 16, 32)
MICRO_BATCHES = (1, 2, 4, 8, 16, 32)
STRONGEST = 2.0  # the colour scale ends where |log2(ratio of times)| reaches this

Grid = dict[tuple[int, int], Verdict | None]
"""A verdict by P and M; None if the model cannot be split in this way."""


def draw_schedules(num_ranks: int, num_micro_batches: int, path: Path) -> list[Path]:
    """Draw a synchronous and an asynchronous pipeline over time; returns the files written.

    Args:
        num_ranks: devices, with one stage each.
        num_micro_batches: micro-batches per update of the synchronous pipeline.
        path: the figure's path without suffix.
    """
    last = 2 * num_micro_batches + 4 * num_ranks  # enough micro-batches to fill the window
    synchronous_actions = []
    asynchronous_actions = []
    for rank in range(num_ranks):
        synchronous_actions.append(list(synchronous_1f1b(rank, num_ranks, num_micro_batches, 2)))
        asynchronous_actions.append(list(asynchronous_1f1b(rank, num_ranks, 1, lambda: last)))
    synchronous = timeline(synchronous_actions)
    asynchronous = timeline(asynchronous_actions)
    # Both panels show the time that the two synchronous steps take.
    window = max(entry.end for entry in chain.from_iterable(synchronous))
    idle = bubble_share(synchronous)
    idle_once_full = bubble_share(asynchronous, *steady_state(asynchronous))
    with new_figure(width=7.0, height=0.36 * num_ranks * 2 + 2.4) as figure:
        top, middle, bottom = figure.subplots(3, 1, height_ratios=[num_ranks, num_ranks, 2.2])
        micro_batches = counted(num_micro_batches, "micro-batch")
        title = f"(a) synchronous 1F1B, {micro_batches}: idle {idle:.0%}"
        _draw_devices(top, synchronous, window, title)
        title = f"(b) asynchronous 1F1B: idle {idle_once_full:.0%} once full"
        _draw_devices(middle, asynchronous, window, title)
        _draw_delay(bottom, asynchronous[0], num_ranks, window)
        _name_colors(figure)
        caption = (
            f"Pipeline of {counted(num_ranks, 'device')} over time; a backward pass takes as long "
            f"as two forward passes.\n"
            "Blue: forward passes, green: backward passes, red: updates; numbers are "
            "micro-batches.\n"
            "Drawn from the sequences of actions that the engine runs."
        )
        command = (
            f"brx schedule --stages {num_ranks} --micro-batches {num_micro_batches} --figure FIGURE"
        )
        return save(figure, path, caption, command=command)


def _name_colors(figure: Figure) -> None:
    """Draw a legend below all panels."""
    handles: list[Artist] = [
        Patch(color=FORWARD_COLOR, label="forward pass"),
        Patch(color=BACKWARD_COLOR, label="backward pass"),
        Line2D([], [], color=UPDATE_COLOR, marker="o", ms=3, linestyle="none", label="update"),
        Line2D([], [], linestyle="none", label="numbers: micro-batches"),
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles))


def _draw_devices(axes: Axes, timed: Sequence[Sequence[Timed]], window: float, title: str) -> None:
    """Draw a row per device, the first one at the top."""
    axes.set_title(title, loc="left")
    num_ranks = len(timed)
    for rank, entries in enumerate(timed):
        y = num_ranks - 1 - rank
        _draw_row(axes, entries, y, window)
    labels = [f"stage {rank + 1}" for rank in reversed(range(num_ranks))]
    axes.set_yticks(range(num_ranks), labels)
    _frame(axes, window, num_ranks)


def _draw_row(axes: Axes, entries: Sequence[Timed], y: float, window: float) -> None:
    """Draw the actions of a device that begin within the window, centred at `y`."""
    bottom = y - BAR_HEIGHT / 2
    for entry in entries:
        if entry.start >= window:
            continue
        if entry.action.kind == "U":
            axes.plot(
                entry.start,
                bottom,
                "o",
                color=UPDATE_COLOR,
                markersize=3,
                zorder=3,
                clip_on=False,
            )
            continue
        color = FORWARD_COLOR if entry.action.kind == "F" else BACKWARD_COLOR
        width = min(entry.end, window) - entry.start
        axes.add_patch(
            Rectangle((entry.start, bottom), width, BAR_HEIGHT, facecolor=color, edgecolor="white")
        )
        axes.text(
            entry.start + width / 2,
            y,
            str(entry.action.number),
            ha="center",
            va="center",
            fontsize=7,
        )


def _draw_delay(axes: Axes, entries: Sequence[Timed], num_ranks: int, window: float) -> None:
    """Draw the first stage's row with its weight versions, and an arrow from a forward pass to the
    update with its gradient."""
    micro_batch = num_ranks  # the first one with the full delay, P - 1
    tau = updates_between([entry.action for entry in entries], micro_batch)
    _draw_row(axes, entries, 0.0, window)
    by_action = {(entry.action.kind, entry.action.number): entry for entry in entries}
    forward = by_action["F", micro_batch]
    update = by_action["U", micro_batch]
    for entry in entries:
        if entry.action.kind == "U" and entry.start < window - 0.5:
            number = entry.action.number
            axes.text(
                entry.start,
                VERSIONS_Y,
                f"$w_{{{number}}}$",
                ha="center",
                va="center",
                color=UPDATE_COLOR,
                fontsize=7,
            )
    axes.annotate(
        "",
        xy=(update.start, ARROW_Y),
        xytext=((forward.start + forward.end) / 2, ARROW_Y),
        arrowprops={"arrowstyle": "->", "connectionstyle": "arc3,rad=-0.12", "linewidth": 0.9},
    )
    text = (
        rf"$w_{{{micro_batch - 1}}} \rightarrow w_{{{micro_batch}}}$ with the gradient of "
        rf"micro-batch {micro_batch}"
        rf" at $w_{{{max(0, micro_batch - 1 - tau)}}}$: delay {tau}"
    )
    middle = (forward.end + update.start) / 2
    axes.text(middle, ARROW_TEXT_Y, text, ha="center", va="center", fontsize=7)
    axes.set_title("(c) delay at stage 1", loc="left")
    axes.set_yticks([0], ["stage 1"])
    _frame(axes, window, 1)
    axes.set(ylim=(-1.2, 1.8), xlabel="time (forward passes)")


def _frame(axes: Axes, window: float, num_rows: int) -> None:
    """Set the ranges, and remove the grid and the left spine."""
    axes.set(xlim=(0, window), ylim=(-0.6, num_rows - 0.4))
    axes.grid(False)
    axes.spines["left"].set_visible(False)
    axes.tick_params(left=False)


def grid(measurements: Measurements, ask: Callable[[int, int], Question]) -> Grid:
    """Answer the same question for every P of `STAGES` and M of `MICRO_BATCHES`.

    Args:
        measurements: times and slowdowns.
        ask: the question for P and M; raises UserError if the model cannot be split in this way.
    """
    cells: Grid = {}
    for shape in product(STAGES, MICRO_BATCHES):
        cells[shape] = None
        with suppress(UserError):
            cells[shape] = answer(measurements, ask(*shape))
    return cells


def draw_verdict(
    cells: Grid, path: Path, measurements: Measurements, run: PlannedRun | None = None
) -> list[Path]:
    """Draw the verdicts for every P and M; returns the files written.

    Left: the ratio of times, P by M. Right: the slowdowns at the largest P, and the slowdowns at
    which both sides would take equally long.

    Args:
        cells: what `grid` returned, with at least one verdict.
        path: the figure's path without suffix.
        measurements: the times and slowdowns behind the verdicts.
        run: the planned run, if there is one, for its units.
    """
    verdicts = [verdict for verdict in cells.values() if verdict is not None]
    deepest = max(verdict.question.num_stages for verdict in verdicts)
    at_deepest = [verdict for verdict in verdicts if verdict.question.num_stages == deepest]
    with new_figure(width=3.6, height=3.4, columns=2) as figure:
        left, right = figure.subplots(1, 2)
        _draw_grid(left, cells)
        _draw_break_even(right, at_deepest)
        caption = (
            f"Time to a training loss of {verdicts[0].question.loss:g} nats: the best synchronous "
            "cut and method over the best asynchronous method, whose iterations were measured at "
            "(or between) the same delays in updates, (P - 1) / M. <: the asynchronous run had not "
            "reached the loss; tie: within the noise between seeds."
        )
        notes = [f"Model of the runs: {measurements.model}.", units_line(run)]
        if len(verdicts) < len(cells):
            notes.append(
                "Blank: the model has fewer than P blocks, or its batch is no multiple of M."
            )
        if any(verdict.question.devices.memory is not None for verdict in verdicts):
            notes.append("Without what needs more memory, at that P and M, than a device has.")
        details = {"runs": measurements.source, "notes": notes}
        command = "brx verdict RUNS --figure FIGURE"
        return save(figure, path, caption, command=command, details=details)


def _draw_grid(axes: Axes, cells: Grid) -> None:
    """Draw a cell per P and M, coloured by the ratio of times."""
    stages = sorted({num_stages for num_stages, _ in cells})
    micro_batches = sorted({num_micro_batches for _, num_micro_batches in cells})
    ratios = np.full((len(stages), len(micro_batches)), np.nan)  # log2; NaN has no colour
    for (num_stages, num_micro_batches), verdict in cells.items():
        if verdict is None:
            continue
        row = stages.index(num_stages)
        column = micro_batches.index(num_micro_batches)
        text = _cell(verdict)
        axes.text(column, row, text, ha="center", va="center", fontsize=5 if "\n" in text else 6)
        best = verdict.best_of_each
        if best is not None and not best.is_open:
            ratios[row, column] = 0.0 if best.is_tie else math.log2(best.advantage)
    norm = TwoSlopeNorm(0.0, -STRONGEST, STRONGEST)
    axes.imshow(ratios, cmap="RdBu", norm=norm, origin="lower", aspect="auto", alpha=0.75)
    axes.set_xticks(range(len(micro_batches)), [str(count) for count in micro_batches])
    axes.set_yticks(range(len(stages)), [str(count) for count in stages])
    axes.grid(False)
    axes.set(xlabel="micro-batches per update M", ylabel="stages P")
    verdicts = [verdict for verdict in cells.values() if verdict is not None]
    axes.set_title(_grid_title(verdicts))


def _grid_title(verdicts: Sequence[Verdict]) -> str:
    """A title that says how often each side is faster."""
    bests = [verdict.best_of_each for verdict in verdicts]
    decided = [best for best in bests if best is not None and not best.is_open]
    ties = [best for best in decided if best.is_tie]
    wins = [best for best in decided if best.advantage > 1 and not best.is_tie]
    losses = {verdict.question.loss for verdict in verdicts}
    to_loss = f" to {losses.pop():g} nats" if len(losses) == 1 else ""
    pipelines = counted(len(decided), "pipeline")
    return (
        f"asynchronous is faster in {len(wins)} of {pipelines}, {len(ties)} tie\n"
        f"(synchronous / asynchronous time{to_loss})"
    )


def _cell(verdict: Verdict) -> str:
    """The text of a cell: the ratio of times, or why there is none."""
    best = verdict.best_of_each
    if best is None:
        nothing_fits = bool(verdict.too_large) and not verdict.asynchronous
        is_memory_short = not verdict.has_cuts or nothing_fits
        return "too little\nmemory" if is_memory_short else "not\nmeasured"
    bound = "< " if best.is_upper_bound else ""
    number = f"{bound}{best.advantage:.2g}"
    return f"tie\n({number})" if best.is_tie else number


def _break_even_points(verdicts: Sequence[Verdict]) -> pd.DataFrame:
    """A row per method and M, with its slowdown and the slowdown at which both sides are equally
    fast."""
    points = []
    for verdict in verdicts:
        num_micro_batches = verdict.question.num_micro_batches
        for option in verdict.asynchronous:
            slowdown = option.slowdown
            if slowdown is not None and not slowdown.is_lower_bound:
                break_even = verdict.break_even(option)
                points.append((option.method, num_micro_batches, slowdown.ratio, break_even))
    return pd.DataFrame(points, columns=["method", "M", "slowdown", "break-even"])


def _draw_break_even(axes: Axes, verdicts: Sequence[Verdict]) -> None:
    """Draw slowdowns against M at one P, each method with its break-even."""
    verdicts = sorted(verdicts, key=lambda verdict: verdict.question.num_micro_batches)
    counts = [verdict.question.num_micro_batches for verdict in verdicts]
    for method, points in _break_even_points(verdicts).groupby("method"):
        label, color, marker = look_of(method)
        style: Any = {"color": color, "marker": marker, "markersize": 3, "label": label}
        axes.plot(points["M"], points["slowdown"], **style)
        axes.plot(points["M"], points["break-even"], color=color, linestyle=":", linewidth=0.8)
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
        f"P = {verdicts[0].question.num_stages}: below its dotted line a method\n"
        f"is faster asynchronously"
    )
