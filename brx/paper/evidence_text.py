"""The evidence in words: turns the numbers that `brx.paper.evidence` computes into texts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pandas as pd

from brx.paper.strict import Trend

Ends = tuple[float, float]  # of a 95 % interval


def seeds_suffix(num_seeds: int) -> str:
    """The number of seeds in brackets; empty for one seed."""
    return f" ({num_seeds} seeds)" if num_seeds > 1 else ""


def trend_text(rise: Trend) -> str:
    """The rank test's p-values, in brackets."""
    return (
        f"(rank test: chance {rise.chance:.2g}, without the last point "
        f"{rise.chance_without_last:.2g})"
    )


def ends_below_text(
    name: str,
    loss: float,  # nats
    closest: str,
    their_loss: float,  # nats
    lead: Ends | None,  # the interval of theirs minus ours, in nats
) -> str:
    """Two final losses, and the interval of ours minus theirs."""
    text = f"{name} {loss:.3f}, {closest} {their_loss:.3f} nats"
    if lead is None:
        return text
    low, high = lead
    return text + f", difference [{-high:+.3f}, {-low:+.3f}]"


@dataclass(frozen=True)
class LeadAtDepth:
    """The smallest lead at a number of stages, in nats, and the intervals there that contain
    zero."""

    mean: float
    num_seeds: int
    open_intervals: Sequence[Ends]


def leads_by_depth_text(leads: Mapping[int, LeadAtDepth]) -> str:
    """The smallest lead at each P, and the intervals that contain zero."""
    parts = [f"P = {P}: {lead.mean:.3f}{seeds_suffix(lead.num_seeds)}" for P, lead in leads.items()]
    text = f"nats below: {', '.join(parts)}"
    for P, lead in leads.items():
        for low, high in lead.open_intervals:
            text += f"; at P = {P} one is [{low:+.3f}, {high:+.3f}]"
    return text


def widening_text(ends_text: str, means: pd.Series, rise: Trend) -> str:
    """A given text about the leads at both ends, followed by the mean lead at each P (the index of
    `means`) and the rank test."""
    depths = ", ".join(map(str, means.index))
    leads = ", ".join(f"{mean:.3f}" for mean in means)
    return f"{ends_text}; at P = {depths}: {leads} {trend_text(rise)}"


def growth_text(
    small: float, small_stages: int, large: float, large_stages: int, num_seeds: int
) -> str:
    """Leads in nats at two numbers of stages."""
    return (
        f"lead {small:.3f} nats at P = {small_stages}, {large:.3f} at P = "
        f"{large_stages}{seeds_suffix(num_seeds)}"
    )


def difference_text(interval: Ends | None) -> str:
    """The interval of a difference, to follow the two numbers; empty without one."""
    if interval is None:
        return ""
    low, high = interval
    return f", difference [{low:+.3f}, {high:+.3f}]"


def by_blocks_text(means: pd.Series, rise: Trend) -> str:
    """Final losses by the number of blocks (the index), and the rank test."""
    losses = ", ".join(f"{count} blocks: {mean:.3f}" for count, mean in means.items())
    return f"{losses} {trend_text(rise)}"


def rises_text(rises: Mapping[str, float], closest: str, interval: Ends | None) -> str:
    """The rise of each method's loss in nats, and the interval of the closest baseline's rise minus
    basis rotation's."""
    each_rise = ", ".join(f"{method} {rise:+.3f}" for method, rise in rises.items())
    text = f"rise: {each_rise} nats"
    if interval is None:
        return text
    low, high = interval
    return text + f", {closest}'s above basis rotation's by [{low:+.3f}, {high:+.3f}]"


def validation_text(
    training: Mapping[str, float],  # nats, from the lowest to the highest
    validation: Mapping[str, float],
    num_ordered: int,
    num_pairs: int,
) -> str:
    """Both final losses of each method, and how many sure pairs are in the same order by both
    losses."""
    finals = ", ".join(
        f"{method} {loss:.3f} / {validation[method]:.3f}" for method, loss in training.items()
    )
    return f"training / validation: {finals} nats; by both {num_ordered} of {num_pairs} sure pairs"


def slowdowns_text(ratios: Mapping[str, float], has_bounds: Mapping[str, bool]) -> str:
    """The slowdown of each method, with `>` for lower bounds."""
    texts = []
    for method, ratio in ratios.items():
        bound = "> " if has_bounds[method] else ""
        texts.append(f"{method} {bound}{ratio:.2f}")
    return ", ".join(texts)


def ratio_interval_text(worse: str, better: str, log_interval: Ends | None) -> str:
    """The interval of the ratio of two slowdowns, from the interval of its logarithm."""
    if log_interval is None:
        return ""
    low, high = map(math.exp, log_interval)
    return f"; {worse} over {better} [{low:.2f}, {high:.2f}]"


def time_text(
    share: str,  # share of time saved, with its interval
    over: str,
    times: Mapping[str, float],  # time of an iteration by method, over AdamW's
) -> str:
    """The share of time saved, and the times from which it is computed."""
    each_time = ", ".join(f"{method} {time:.2f}" for method, time in times.items())
    return f"{share} {over}; time of an iteration: {each_time} x AdamW's"
