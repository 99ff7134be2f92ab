"""What the toy problems say, from the files that `brx toy` keeps."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel

from brx.config.loading import validate
from brx.errors import UserError
from brx.paper.evidence.base import Evidence, NotTriedError
from brx.paper.scales import Experiments

TOYS = Path("results/toy")
MOST_CHANCE = 0.05
HARDLY = 1.1
"""The slowdown below which delay hardly slows: by less than a tenth (docs/protocol.md, 6)."""


class _Case(BaseModel):
    optimizer: str
    aligned: bool
    slowdown: float | None


class _Quadratic(BaseModel):
    slowdowns: list[_Case]


class _Spiral(BaseModel):
    arrived: bool
    spearman: float | None
    p_value: float | None


Toy = TypeVar("Toy", bound=BaseModel)


def _read(name: str, kind: type[Toy]) -> Toy:
    path = TOYS / f"{name}.json"
    if not path.is_file():
        raise NotTriedError(f"{path} is not there yet")
    try:
        return validate(json.loads(path.read_text(encoding="utf-8")), kind, str(path))
    except ValueError as error:
        raise UserError(f"{path}: not readable: {error}; brx toy writes it anew") from None


def _number(value: float | None, instead: float) -> float:
    """A number of those files, which hold null for one that is not finite."""
    return instead if value is None else value


def delay_hurts_where_misaligned(_: Experiments) -> Evidence:
    """On the quadratic, delay slows Adam with the eigenvectors between the axes, and hardly along them."""
    cases = _read("quadratic", _Quadratic).slowdowns
    of_adam = {case.aligned: _number(case.slowdown, math.inf) for case in cases if case.optimizer == "Adam"}
    if len(of_adam) < 2:
        raise NotTriedError(f"{TOYS}/quadratic.json has no Adam both aligned and misaligned")
    aligned, misaligned = of_adam[True], of_adam[False]
    text = f"slowdown of Adam: aligned {aligned:.2f}, misaligned {misaligned:.2f}"
    return Evidence(holds=misaligned > aligned and aligned < HARDLY, text=text)


def misalignment_slows_on_the_spiral(_: Experiments) -> Evidence:
    """As the paper sets the spiral up, misalignment and slowdown rise together, on a trajectory that arrives."""
    spiral, small = _read("spiral", _Spiral), _read("spiral-small-steps", _Spiral)
    correlation, with_small_steps = (_number(toy.spearman, math.nan) for toy in (spiral, small))
    text = f"rank correlation of misalignment and slowdown {correlation:.2f}" + (
        "" if spiral.arrived else ", but Adam stops on the way"
    )
    text += f"; with smaller steps it {'arrives' if small.arrived else 'stops'}: {with_small_steps:.2f}"
    is_correlated = correlation > 0 and _number(spiral.p_value, math.nan) < MOST_CHANCE
    return Evidence(holds=spiral.arrived and is_correlated, text=text)
