"""The second line of a panel's title: what its curves show."""

import textwrap
from collections.abc import Sequence

import pandas as pd

from brx.plot import losses
from brx.plot.style import look_of
from brx.runs.frames import DEPTH
from brx.runs.trajectory import SEED

TITLE_CHARACTERS = 34  # most characters in a line of a panel's title
LEVEL = 0.005  # nats; smaller differences are 0.00 in a title


def in_even_lines(text: str) -> str:
    """The text, broken into as few lines as fit over a panel, all of about the same length."""
    num_lines = len(textwrap.wrap(text, TITLE_CHARACTERS))
    width = TITLE_CHARACTERS
    while width > 1 and len(textwrap.wrap(text, width - 1)) == num_lines:
        width -= 1
    return textwrap.fill(text, width)


def lowest(shown: Sequence[losses.Curve], loss: str) -> str:
    """A title: the curve that ends lowest, and its lead over the next one in nats.

    Args:
        shown: two curves or more.
        loss: the column of the final losses.
    """
    finals = finals_of(shown, loss)
    best, second = sorted(finals, key=finals.__getitem__)[:2]
    lead = finals[second] - finals[best]
    if lead < LEVEL:
        return f"{best} and {second} end within {LEVEL} nats"
    return f"{best} lowest by {lead:.2f} nats"


def change(shown: Sequence[losses.Curve], loss: str) -> str:
    """A title: the final loss of the last curve minus that of the first, for example
    `P = 1 to 32: +0.40 nats`."""
    (first, before), (last, after) = finals_of([shown[0], shown[-1]], loss).items()
    start = _first_part(first)
    end = _first_part(last)
    unit = end.rpartition(" ")[2]
    # `4 blocks to 32 blocks` becomes `4 to 32 blocks`.
    return f"{start.removesuffix(f' {unit}')} to {end}: {after - before:+.2f} nats"


def _first_part(label: str) -> str:
    """A label up to its comma, without the underscore that keeps it out of the legend."""
    return label.lstrip("_").partition(",")[0]


def against_the_last(shown: Sequence[losses.Curve], loss: str) -> str:
    """A title: whether the second to last curve ends above or below the last curve, and by how
    much."""
    (ours, own), (last, other) = finals_of(shown[-2:], loss).items()
    side = "below" if own < other else "above"
    return f"{ours} ends {abs(own - other):.2f} nats {side} {last}"


def costs_of_delay(shown: Sequence[losses.Curve], loss: str) -> str:
    """A title: the cost of delay for two methods. `shown` has the curves of both methods with
    delay, then of both without, in the same order; with fewer than four the title is empty."""
    if len(shown) < 4:
        return ""
    costs = []
    for curve, undelayed in zip(shown[:2], shown[2:4], strict=True):
        before, after = finals_of([undelayed, curve], loss).values()
        costs.append(f"{curve.label} {after - before:.2f}")
    return f"delay costs {' and '.join(costs)} nats"


def finals_of(shown: Sequence[losses.Curve], loss: str) -> dict[str, float]:
    """The mean final loss of each curve, by label, over the seeds that all curves have; if they
    share none, over each curve's own seeds."""
    shared = set[int].intersection(*(set(curve.runs[SEED]) for curve in shown))
    finals = {}
    for curve in shown:
        seeds = curve.runs[curve.runs[SEED].isin(shared)] if shared else curve.runs
        finals[curve.label] = float(seeds[loss].mean())
    return finals


def lowest_by_depth(runs: pd.DataFrame) -> str:
    """The variant that is lowest in final training loss, or level with the lowest, at the most
    numbers of stages P: for example `PipeDream lowest at 3 of 6 P`."""
    finals = runs.groupby([DEPTH, "variant"])["train_loss"].mean().unstack()
    leads = finals.sub(finals.min(axis="columns"), axis="index")
    is_level = leads < LEVEL
    counts = is_level.sum(axis="index")
    best = counts.idxmax()
    # Methods that were not run at a number of stages have NaN there, which is not level.
    is_shared = bool((is_level[best] & (is_level.sum(axis="columns") > 1)).any())
    verb = "lowest or level" if is_shared else "lowest"
    return f"{look_of(best).label} {verb} at {counts[best]} of {len(finals)} P"
