"""Adam and AdaSGD under delay, from many points at once; used by all toy landscapes."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from brx.config.schema import Section
from brx.errors import UserError

Array = NDArray[np.float64]
OptimizerName = Literal["AdaSGD", "Adam"]

EPS = 1e-8
"""Added to the root of the second moment, as torch's Adam does."""
COLORS = {"AdaSGD": "#0072B2", "Adam": "#E69F00"}
"""Blue and orange, as in the paper."""


class ToySection(Section):
    """Settings that every landscape has.

    The files in configs/toy say which values the paper states, and why the others were chosen."""

    lr: float = Field(gt=0)
    beta2: float = Field(ge=0, lt=1)
    most_updates: int = Field(ge=1)  # a run that has not arrived by then never does
    seed: int = Field(ge=0)  # seed of the random draws


class State(NamedTuple):
    """Points and their moments after an update, three arrays (..., 2)."""

    point: Array
    exp_avg: Array
    exp_avg_sq: Array


@dataclass
class DelayedAdam:
    """Adam from many points (..., 2) at once, which do not affect each other:

        w(t) = w(t-1) - update(gradient(w(t-1-tau)))

    With `one_size` it is AdaSGD (Wang & Wiens 2020, arXiv:2006.16541): the squared gradient is
    averaged over the coordinates before it enters the second moment, so that all coordinates have
    the same step size."""

    gradient: Callable[[Array], Array]
    lr: float
    beta1: float
    beta2: float
    recent: list[Array]  # the last tau + 1 points, the newest last; all equal at the start
    exp_avg: Array | float = 0.0
    exp_avg_sq: Array | float = 0.0
    step: Array | int = 0  # updates made so far: one number, or one per point (..., 1)
    one_size: bool = False
    trace: list[State] | None = None  # if given, every update appends its state

    def update(self) -> Array:
        """Update every point once; returns the new points (..., 2).

        Raises:
            UserError: the numbers are too large for a float64.
        """
        with np.errstate(all="ignore"):  # what overflows is told below
            points = self._updated()
        if not np.isfinite(points).all():
            raise UserError(
                f"lr: with {self.lr:g}, points or gradients become too large for a float64; try a "
                f"lower one"
            )
        return points

    def _updated(self) -> Array:
        gradient = self.gradient(self.recent[0])  # at the points of tau updates ago
        square = gradient**2
        if self.one_size:
            square = square.mean(-1, keepdims=True)
        self.step = self.step + 1
        self.exp_avg = self.beta1 * self.exp_avg + (1.0 - self.beta1) * gradient
        self.exp_avg_sq = self.beta2 * self.exp_avg_sq + (1.0 - self.beta2) * square
        mean = self.exp_avg / (1.0 - self.beta1**self.step)
        root = np.sqrt(self.exp_avg_sq / (1.0 - self.beta2**self.step)) + EPS
        self.recent = [*self.recent[1:], self.recent[-1] - self.lr * mean / root]
        if self.trace is not None:
            self.trace.append(State(self.recent[-1], self.exp_avg, self.exp_avg_sq))
        return self.recent[-1]

    def updates_until(self, has_arrived: Callable[[Array], NDArray[np.bool_]], most: int) -> Array:
        """Update until all points have arrived; returns the number of updates that each of them
        needed (...).

        It is infinite for points that have not arrived after `most` updates.

        Args:
            has_arrived: takes points (..., 2), and says for each whether it has arrived (...).
            most: the largest number of updates.
        """
        needed = np.full(self.recent[-1].shape[:-1], np.inf)
        for count in range(1, most + 1):
            arrived = has_arrived(self.update())
            needed[np.isinf(needed) & arrived] = count
            if np.isfinite(needed).all():
                break
        return needed


def kept(values: Iterable[float | None], digits: int | None) -> list[float | None]:
    """Numbers as a file holds them: rounded, and None if they are not finite.

    Args:
        values: numbers, or None.
        digits: decimal places; None rounds to integers.
    """
    written: list[float | None] = []
    for value in values:
        if value is None or not math.isfinite(value):
            written.append(None)
        else:
            written.append(round(float(value), digits))
    return written


def slowdown_ratios(plain: Array, delayed: Array) -> Array:
    """Updates with delay divided by updates without, for each start.

    Infinite if the start arrives without delay but never with it; NaN if it never arrives without
    delay."""
    arrives = np.isfinite(plain)
    return np.where(arrives, delayed / np.where(arrives, plain, 1.0), np.nan)
