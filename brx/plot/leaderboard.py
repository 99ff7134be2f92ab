"""The leaderboard as a figure: each method's final loss without delay and with each delay."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from brx.plot.style import legend_below, look_of, new_figure, save, sequence_color


def draw_leaderboard(board: pd.DataFrame, delays: Sequence[str], path: Path) -> list[Path]:
    """A line per method, the best under the longest delay at the top; a point per delay. Returns the files written."""
    shown = [delay for delay in delays if f"loss {delay}" in board]
    losses = board[[f"loss {delay}" for delay in shown]]
    heights = range(len(board), 0, -1)
    with new_figure(width=5.0, height=1.3 + 0.24 * len(board)) as figure:
        axes = figure.add_subplot()
        axes.hlines(heights, losses.min(axis=1), losses.max(axis=1), color="lightgrey", linewidth=2, zorder=1)
        for index, delay in enumerate(shown):
            color = sequence_color(index, len(shown))
            axes.scatter(losses[f"loss {delay}"], heights, color=color, s=18, label=f"delay: {delay}", zorder=2)
        axes.set_yticks(list(heights), [look_of(method).label for method in board["method"]])
        axes.set_xlabel("final training loss (nats)")
        legend_below(axes, columns=3)
        best = losses.iloc[:, -1].idxmin()
        label = look_of(board.loc[best, "method"]).label
        axes.set_title(f"{label} ends lowest under the longest delay, at {losses.iloc[:, -1].min():.2f} nats")
        caption = (
            "Final training loss of each method without delay and under the delays of deeper pipelines, at the best"
            f" learning rate of each, by the protocol of docs/compare.md. Seeds: at least {board['num_seeds'].min()}."
        )
        return save(figure, path, caption, command="brx compare --figure")
