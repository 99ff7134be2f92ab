"""The pipeline over time: synchronous, asynchronous, and the delay at the first stage (the paper's first figure)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from brx.pipeline.schedule import (
    Timed,
    asynchronous_1f1b,
    bubble_share,
    steady_state,
    synchronous_1f1b,
    timeline,
    updates_between,
)
from brx.plot.style import new_figure, save

FORWARD_COLOR, BACKWARD_COLOR, UPDATE_COLOR = "#9CC9E8", "#A5D6A7", "#D62728"


def draw_schedules(num_ranks: int, num_micro_batches: int, path: Path) -> list[Path]:
    ranks, last = range(num_ranks), 2 * num_micro_batches + 4 * num_ranks
    synchronous = timeline([list(synchronous_1f1b(rank, num_ranks, num_micro_batches, 2)) for rank in ranks])
    asynchronous = timeline([list(asynchronous_1f1b(rank, num_ranks, 1, lambda: last)) for rank in ranks])
    window = max(entry.end for rank in synchronous for entry in rank)
    idle = bubble_share(synchronous), bubble_share(asynchronous, *steady_state(asynchronous))
    with new_figure(width=7.0, height=0.36 * num_ranks * 2 + 2.4) as figure:
        axes = figure.subplots(3, 1, height_ratios=[num_ranks, num_ranks, 2.2])
        title = f"(a) synchronous 1F1B, {num_micro_batches} micro-batches: idle {idle[0]:.0%}"
        _draw_devices(axes[0], synchronous, window, title)
        _draw_devices(axes[1], asynchronous, window, f"(b) asynchronous 1F1B: idle {idle[1]:.0%} once full")
        _draw_delay(axes[2], asynchronous[0], num_ranks, window)
        caption = (
            f"Pipeline of {num_ranks} devices over time; a backward pass takes as long as two forward passes.\n"
            "Blue: forward passes, green: backward passes, red: updates; numbers are micro-batches.\n"
            f"Drawn from the action sequences by: brx schedule --stages {num_ranks}"
            f" --micro-batches {num_micro_batches} --figure {path}"
        )
        return save(figure, path, caption)


def _draw_devices(axes: Axes, timed: Sequence[Sequence[Timed]], window: float, title: str) -> None:
    axes.set_title(title, loc="left")
    for rank, entries in enumerate(timed):
        _draw_row(axes, entries, len(timed) - 1 - rank, window)
    axes.set_yticks(range(len(timed)), [f"stage {rank + 1}" for rank in reversed(range(len(timed)))])
    _frame(axes, window, len(timed))


def _draw_row(axes: Axes, entries: Sequence[Timed], height: float, window: float) -> None:
    for entry in entries:
        if entry.start >= window:
            continue
        if entry.action.kind == "U":
            axes.plot(entry.start, height - 0.4, "o", color=UPDATE_COLOR, markersize=3, zorder=3, clip_on=False)
            continue
        color = FORWARD_COLOR if entry.action.kind == "F" else BACKWARD_COLOR
        width = min(entry.end, window) - entry.start
        axes.add_patch(Rectangle((entry.start, height - 0.4), width, 0.8, facecolor=color, edgecolor="white"))
        axes.text(entry.start + width / 2, height, str(entry.action.number), ha="center", va="center", fontsize=7)


def _draw_delay(axes: Axes, entries: Sequence[Timed], num_ranks: int, window: float) -> None:
    """The first stage's row with its versions, and the arrow from the weights used to the update they lead to."""
    micro_batch = num_ranks
    tau = updates_between([entry.action for entry in entries], micro_batch)
    _draw_row(axes, entries, 0.0, window)
    by_action = {(entry.action.kind, entry.action.number): entry for entry in entries}
    forward, update = by_action["F", micro_batch], by_action["U", micro_batch]
    for entry in entries:
        if entry.action.kind == "U" and entry.start < window - 0.5:
            number = entry.action.number
            axes.text(entry.start, -0.85, f"$w_{{{number}}}$", ha="center", va="center", color=UPDATE_COLOR, fontsize=7)
    axes.annotate(
        "",
        xy=(update.start, 0.45),
        xytext=((forward.start + forward.end) / 2, 0.45),
        arrowprops={"arrowstyle": "->", "connectionstyle": "arc3,rad=-0.12", "linewidth": 0.9},
    )
    text = (
        rf"$w_{{{micro_batch - 1}}} \rightarrow w_{{{micro_batch}}}$ with the gradient of micro-batch {micro_batch}"
        rf" at $w_{{{max(0, micro_batch - 1 - tau)}}}$: delay {tau}"
    )
    axes.text((forward.end + update.start) / 2, 1.35, text, ha="center", va="center", fontsize=7)
    axes.set_title("(c) delay at stage 1", loc="left")
    axes.set_yticks([0], ["stage 1"])
    _frame(axes, window, 1)
    axes.set(ylim=(-1.2, 1.8), xlabel="time (forward passes)")


def _frame(axes: Axes, window: float, num_rows: int) -> None:
    axes.set(xlim=(0, window), ylim=(-0.6, num_rows - 0.4))
    axes.grid(False)
    axes.spines["left"].set_visible(False)
    axes.tick_params(left=False)
