"""Adam with delayed gradients on many points at once; torch's optimizers, one point at a time, would take minutes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from brx.config.schema import Section

Array = NDArray[np.float64]

EPS = 1e-8  # torch's


class ToySection(Section):
    """What every set-up has."""

    lr: float = Field(gt=0)
    """Learning rate."""
    beta2: float = Field(ge=0, lt=1)
    """Decay of the second moment."""
    most_updates: int = Field(ge=1)
    """A run that has not arrived by then never does."""
    seed: int = Field(ge=0)
    """Of what is drawn at random."""


@dataclass
class DelayedAdam:
    """Adam on points (..., 2), each by itself: w(t) = w(t-1) - update(gradient(w(t-1-tau))).

    Attributes:
        gradient: of the landscape, at points (..., 2).
        recent: the last tau + 1 positions, the newest last; at first all are the start.
        one_size: AdaSGD (Wang & Wiens 2020, arXiv:2006.16541): the second moment is of the mean squared gradient, so
            that all coordinates have one step size.
        step: updates behind the points: one number, or one per point (..., 1).
    """

    gradient: Callable[[Array], Array]
    lr: float
    beta1: float
    beta2: float
    recent: list[Array]
    one_size: bool = False
    exp_avg: Array | float = 0.0
    exp_avg_sq: Array | float = 0.0
    step: Array | int = 0

    def update(self) -> Array:
        """Make one update; returns the new positions."""
        slope = self.gradient(self.recent[0])
        square = (slope**2).mean(-1, keepdims=True) if self.one_size else slope**2
        self.step = self.step + 1
        self.exp_avg = self.beta1 * self.exp_avg + (1.0 - self.beta1) * slope
        self.exp_avg_sq = self.beta2 * self.exp_avg_sq + (1.0 - self.beta2) * square
        mean = self.exp_avg / (1.0 - self.beta1**self.step)
        root = np.sqrt(self.exp_avg_sq / (1.0 - self.beta2**self.step)) + EPS
        self.recent = [*self.recent[1:], self.recent[-1] - self.lr * mean / root]
        return self.recent[-1]


def counts(updates: Array) -> list[int | None]:
    """Numbers of updates as a file keeps them: None for never."""
    return [int(count) if np.isfinite(count) else None for count in updates]


def finite(value: float | None, digits: int = 17) -> float | None:
    """A number as a file keeps it, rounded; None for one that is not finite."""
    return None if value is None or not math.isfinite(value) else round(float(value), digits)
