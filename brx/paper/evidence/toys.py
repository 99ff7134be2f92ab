"""What the toy problems say, from the files that `brx toy` keeps."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from brx.errors import UserError
from brx.paper.evidence.base import Evidence, NotTriedError
from brx.paper.scales import Experiments

TOYS = Path("results/toy")
MOST_CHANCE = 0.05
HARDLY = 1.1
"""The slowdown below which delay hardly slows: by less than a tenth (docs/protocol.md, 6)."""


def _read(name: str) -> dict[str, Any]:
    path = TOYS / f"{name}.json"
    if not path.is_file():
        raise NotTriedError(f"{path} is not there yet")
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path}: not readable: {error}; brx toy writes it anew") from None
    return content


def _number(value: float | None, instead: float) -> float:
    """A number of those files, which hold null for one that is not finite."""
    return instead if value is None else value


def delay_hurts_where_misaligned(_: Experiments) -> Evidence:
    """On the quadratic, delay slows Adam with the eigenvectors between the axes, and hardly along them."""
    by_case = {
        (row["optimizer"], row["aligned"]): _number(row["slowdown"], math.inf)
        for row in _read("quadratic")["slowdowns"]
    }
    aligned, misaligned = by_case["Adam", True], by_case["Adam", False]
    text = f"slowdown of Adam: aligned {aligned:.2f}, misaligned {misaligned:.2f}"
    return Evidence(holds=misaligned > aligned and aligned < HARDLY, text=text)


def misalignment_slows_on_the_spiral(_: Experiments) -> Evidence:
    """As the paper sets the spiral up, misalignment and slowdown rise together, on a trajectory that arrives."""
    spiral, small = _read("spiral"), _read("spiral-small-steps")
    correlation, with_small_steps = (_number(toy["spearman"], math.nan) for toy in (spiral, small))
    text = f"rank correlation of misalignment and slowdown {correlation:.2f}" + (
        "" if spiral["arrived"] else ", but Adam stops on the way"
    )
    text += f"; with smaller steps it {'arrives' if small['arrived'] else 'stops'}: {with_small_steps:.2f}"
    is_correlated = correlation > 0 and _number(spiral["p_value"], math.nan) < MOST_CHANCE
    return Evidence(holds=spiral["arrived"] and is_correlated, text=text)
