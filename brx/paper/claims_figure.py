"""The claims as a figure: a row each, by how they came out; ours over the paper's number beside the statement."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from brx.paper.claims import FACTOR, GROUPS, Outcome, in_groups, measured_text, number_text
from brx.plot.style import GROUP_COLORS

LINE_IN = 0.13
LINE_CHARACTERS = 92  # of a statement, before it goes on below
WIDEST = 16.0  # ratios are drawn up to this factor either way; those beyond sit at the edge
COLUMNS = (("the paper", 0.01), ("here [95 %]", 0.17), ("where", 0.7))


def fill_claims(figure: Figure, outcomes: Sequence[Outcome]) -> None:
    groups = in_groups(outcomes)
    statements = {each.claim.name: textwrap.fill(each.claim.statement, LINE_CHARACTERS) for each in outcomes}
    lines = sum(1.5 + statement.count("\n") for statement in statements.values()) + 1.6 * len(GROUPS)
    figure.set_size_inches(11.0, 1.0 + LINE_IN * lines)
    axes, texts = figure.subplots(1, 2, width_ratios=(1, 1.25), sharey=True)
    ticks, labels, place = [], [], 0.0
    for (name, group), color in zip(groups.items(), GROUP_COLORS, strict=True):
        if group:
            heading = f"{name}: {len(group)} of {len(outcomes)}"
            texts.text(0.0, place + 0.9, heading, color=color, weight="bold", fontsize=8, va="center")
            place += 1.6
        for outcome in group:
            height = 1.5 + statements[outcome.claim.name].count("\n")
            middle = place + height / 2
            for panel in (axes, texts):
                panel.axhspan(place, place + height, color=color, alpha=0.1, linewidth=0)
            _draw_ratio(axes, outcome, middle, color)
            cells = (paper_text(outcome), our_text(outcome), outcome.claim.where)
            for (_, x), text in zip(COLUMNS, cells, strict=True):
                texts.text(x, middle, text, va="center", fontsize=7)
            ticks.append(middle)
            labels.append(statements[outcome.claim.name])
            place += height
    for heading, x in COLUMNS:
        texts.text(x, -0.6, heading, va="center", fontsize=7, weight="bold")
    texts.set_xlim(0, 1)
    texts.set_axis_off()
    axes.axvspan(1 / FACTOR, FACTOR, color="black", alpha=0.06, linewidth=0)
    axes.axvline(1.0, color="black", linewidth=0.6)
    axes.set_xscale("log", base=2)
    axes.set_xlim(1 / WIDEST, WIDEST)
    powers = [2.0**power for power in range(-4, 5)]
    axes.set_xticks(powers, [f"{tick:g}" if tick >= 1 else f"1/{1 / tick:g}" for tick in powers])
    axes.set_ylim(place, -1.2)
    axes.set_yticks(ticks, labels, fontsize=6.5)
    axes.grid(visible=False, axis="y")
    axes.set_xlabel("ours / the paper's number (of shares saved: what is left)")
    figure.suptitle(", ".join(f"{len(group)} {name}" for name, group in groups.items() if group), fontsize=9)


def ratio_of(outcome: Outcome) -> tuple[float, float, float] | None:
    """Ours over the paper's number with the ends of its interval (NaN for none); of shares saved, of what is left."""
    claim, ours = outcome.claim, outcome.evidence
    if ours is None or claim.paper is None or pd.isna(ours.value):
        return None
    is_share = claim.unit == "percent" and claim.rule != "closed form"
    values = (ours.value, ours.low, ours.high)
    ratios = [(1 - value) / (1 - claim.paper) if is_share else value / claim.paper for value in values]
    return ratios[0], min(ratios[1:]), max(ratios[1:])


def paper_text(outcome: Outcome) -> str:
    claim = outcome.claim
    if claim.paper is None:
        return "numbers" if claim.rule == "closed form" else "direction"
    return f"{'≥ ' if claim.rule == 'at least' else ''}{number_text(claim.paper, claim.unit)}"


def our_text(outcome: Outcome) -> str:
    """Our number with its interval; of a direction, whether it holds; with longer training, that."""
    claim, ours = outcome.claim, outcome.evidence
    if ours is None:
        return ""
    if claim.paper is not None:
        text = measured_text(claim, ours)
    elif claim.rule == "closed form":
        text = "as printed" if ours.holds else "not all as printed"
    else:
        text = "holds" if ours.holds else "does not hold"
    text += f"; longer: {number_text(outcome.longer.value, claim.unit)}" if outcome.longer else ""
    return text + (", one seed" if outcome.num_seeds == 1 else "")


def _draw_ratio(axes: Axes, outcome: Outcome, place: float, color: str) -> None:
    ratios = ratio_of(outcome)
    if ratios is None or outcome.evidence is None:
        return
    ratio, low, high = (float(np.clip(value, 1 / WIDEST, WIDEST)) for value in ratios)
    marker = ">" if outcome.evidence.is_bound or ratios[0] > WIDEST else "<" if ratios[0] < 1 / WIDEST else "o"
    face = "white" if outcome.num_seeds == 1 else color
    if not pd.isna(ratios[1]):
        axes.plot([low, high], [place, place], color=color, linewidth=1.5)
    axes.plot(ratio, place, marker, color=color, markerfacecolor=face, markersize=5, clip_on=False)
