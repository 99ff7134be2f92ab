"""The claims as a figure: a row each, ours over the paper's number, in the colour of the verdict."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from brx.paper.claims import FACTOR, Outcome, measured_text, number_text
from brx.plot.style import VERDICT_COLORS

ROW_IN = 0.19
WIDEST = 16.0
"""Ratios are drawn up to this factor either way; those beyond sit at the edge."""


def fill_claims(figure: Figure, outcomes: Sequence[Outcome]) -> None:
    """A row per claim in the paper's order: its name, the ratio where there are numbers, both numbers, the verdict."""
    figure.set_size_inches(8.0, 1.1 + ROW_IN * len(outcomes))
    axes, texts = figure.subplots(1, 2, width_ratios=(1, 1.05), sharey=True)
    for row, outcome in enumerate(outcomes):
        color = VERDICT_COLORS[outcome.verdict]
        for panel in (axes, texts):
            panel.axhspan(row - 0.5, row + 0.5, color=color, alpha=0.13, linewidth=0)
        _draw_ratio(axes, outcome, row, color)
        texts.text(0.01, row, paper_text(outcome), va="center", fontsize=7)
        texts.text(0.21, row, our_text(outcome), va="center", fontsize=7)
        texts.text(0.72, row, outcome.verdict_text, va="center", fontsize=7, color=color, weight="bold")
    for text, position in (("the paper", 0.01), ("here [95 %]", 0.21), ("reproduced?", 0.72)):
        texts.text(position, -1, text, va="center", fontsize=7, weight="bold")
    texts.set_xlim(0, 1)
    texts.set_axis_off()
    axes.axvspan(1 / FACTOR, FACTOR, color="black", alpha=0.06, linewidth=0)
    axes.axvline(1.0, color="black", linewidth=0.6)
    axes.set_xscale("log", base=2)
    axes.set_xlim(1 / WIDEST, WIDEST)
    ticks = [2.0**power for power in range(-4, 5)]
    axes.set_xticks(ticks, [f"{tick:g}" if tick >= 1 else f"1/{1 / tick:g}" for tick in ticks])
    axes.set_ylim(len(outcomes) - 0.5, -0.5)
    axes.set_yticks(range(len(outcomes)), [outcome.claim.name for outcome in outcomes], fontsize=7)
    axes.grid(visible=False, axis="y")
    axes.set_xlabel("ours / the paper's number (of shares saved: what is left)")
    counts = pd.Series([outcome.verdict for outcome in outcomes]).value_counts()
    axes.set_title(
        ", ".join(f"{counts.get(verdict, 0)} {verdict}" for verdict in VERDICT_COLORS) + f" of {len(outcomes)} claims",
        loc="left",
        pad=16,
    )


def ratio_of(outcome: Outcome) -> tuple[float, float, float] | None:
    """Ours over the paper's number with the ends of its interval (NaN for none); of shares saved, of what is left.

    None for a direction, a claim that was not tried, and a number that could not be measured.
    """
    claim, ours = outcome.claim, outcome.evidence
    if ours is None or claim.paper is None or pd.isna(ours.value):
        return None
    is_share = claim.unit == "percent" and claim.rule != "closed form"
    values = (ours.value, ours.low, ours.high)
    ratios = [(1 - value) / (1 - claim.paper) if is_share else value / claim.paper for value in values]
    return ratios[0], min(ratios[1:]), max(ratios[1:])


def paper_text(outcome: Outcome) -> str:
    """The paper's number; without a single one, what there is."""
    claim = outcome.claim
    if claim.paper is None:
        return "numbers" if claim.rule == "closed form" else "direction"
    return f"{'≥ ' if claim.rule == 'at least' else ''}{number_text(claim.paper, claim.unit)}"


def our_text(outcome: Outcome) -> str:
    """Our number with its interval; of a direction, whether it holds."""
    claim, ours = outcome.claim, outcome.evidence
    if ours is None:
        return ""
    if claim.paper is None:
        texts = ("as printed", "not all as printed") if claim.rule == "closed form" else ("holds", "does not hold")
        return texts[0 if ours.holds else 1]
    return measured_text(claim, ours)


def _draw_ratio(axes: Axes, outcome: Outcome, row: int, color: str) -> None:
    ratios = ratio_of(outcome)
    if ratios is None:
        return
    ratio, low, high = (float(np.clip(value, 1 / WIDEST, WIDEST)) for value in ratios)
    assert outcome.evidence is not None
    marker = ">" if outcome.evidence.is_bound or ratios[0] > WIDEST else "<" if ratios[0] < 1 / WIDEST else "o"
    face = "white" if outcome.num_seeds == 1 else color
    if not pd.isna(ratios[1]):
        axes.plot([low, high], [row, row], color=color, linewidth=1.5)
    axes.plot(ratio, row, marker, color=color, markerfacecolor=face, markersize=5, clip_on=False)
