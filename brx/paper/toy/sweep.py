"""Slowdown of Adam on the quadratic over angle and delay, beside the Hessian's (1,1)-norm (`brx toy sweep`).

The paper shows one angle and one delay; its theorem 2.3 bounds the cost of delay by tau times the (1,1)-norm, which a
rotation of the eigenbasis changes and nothing else does.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator
from scipy.stats import spearmanr

from brx.config.schema import Section

FloatArray = NDArray[np.float64]

EPS = 1e-8  # torch's


class SweepConfig(Section):
    """The set-up; configs/toy/sweep.yaml says why the values are what they are."""

    lr: float = Field(gt=0)
    """Adam's learning rate."""
    momenta: list[Annotated[float, Field(ge=0, lt=1)]] = Field(min_length=1)
    """Decays of the first moment, beta1: one sweep for each."""
    beta2: float = Field(ge=0, lt=1)
    """Decay of the second moment."""
    angles_degrees: list[float] = Field(min_length=2)
    """Angles between eigenvectors and coordinates."""
    delays: list[Annotated[int, Field(ge=1)]] = Field(min_length=1)
    """tau, in updates."""
    target: float = Field(gt=0)
    """The loss at which a run has converged."""
    eigenvalues: list[Annotated[float, Field(gt=0)]] = Field(min_length=2, max_length=2)
    """Of the Hessian, the dominant one first."""
    distance: float = Field(gt=0)
    """Distance of the starts from the optimum, in random directions."""
    starts: int = Field(ge=1)
    """Number of starts."""
    most_updates: int = Field(ge=1)
    """A run that has not converged by then never does."""
    seed: int = Field(ge=0)
    """Seed of the directions."""

    @model_validator(mode="after")
    def _starts_are_above_the_target(self) -> Self:
        least = 0.5 * min(self.eigenvalues) * self.distance**2
        if least <= self.target:
            raise ValueError(f"distance: starts have losses from {least:g}; must be above the target, {self.target:g}")
        return self


@dataclass(frozen=True)
class SweepResult:
    """What was measured.

    Attributes:
        config: the set-up.
        norms: sum |H_ij| over the sum of the eigenvalues, its minimum over rotations, at each angle (A,).
        updates: to the target (momenta, 1 + delays, angles, starts), the first delay being none; infinite for never.
    """

    config: SweepConfig
    norms: FloatArray
    updates: FloatArray

    @property
    def slowdowns(self) -> FloatArray:
        """Median over the starts of updates with delay over updates without (momenta, delays, angles).

        Infinite where more than half of the starts never arrive; those that do not even without delay do not count.
        """
        plain, delayed = self.updates[:, :1], self.updates[:, 1:]
        ratios = np.where(np.isfinite(plain), delayed / np.where(np.isfinite(plain), plain, 1.0), np.nan)
        # Of an even number, the upper of the two in the middle: a mean with infinity says nothing.
        medians: FloatArray = np.nanquantile(ratios, 0.5, axis=-1, method="higher")
        return medians

    def correlation(self, momentum: int, delay: int) -> float | None:
        """Spearman's, of norm and slowdown over the angles, for a momentum and a delay by index.

        None where all slowdowns are equal.
        """
        slowdowns = self.slowdowns[momentum, delay]
        if np.all(slowdowns == slowdowns[0]):
            return None
        return float(spearmanr(self.norms, slowdowns).statistic)

    def numbers(self) -> dict[str, Any]:
        """What is kept in a file; a slowdown of None: never."""
        return {
            "config": self.config.model_dump(),
            "norms": [round(float(norm), 4) for norm in self.norms],
            "sweeps": [
                {
                    "beta1": beta1,
                    "delay": delay,
                    "slowdowns": [_number(value) for value in self.slowdowns[row, column]],
                    "spearman_with_norm": _number(self.correlation(row, column)),
                }
                for row, beta1 in enumerate(self.config.momenta)
                for column, delay in enumerate(self.config.delays)
            ],
        }


def run_sweep(config: SweepConfig) -> SweepResult:
    """Adam from every start, at every angle, with every delay and momentum."""
    directions = np.random.default_rng(config.seed).uniform(0.0, 2.0 * math.pi, config.starts)
    starts = config.distance * np.stack([np.cos(directions), np.sin(directions)], axis=-1)
    hessians = rotated_hessians(config.eigenvalues, config.angles_degrees)
    bases = np.stack([rotation(angle) for angle in config.angles_degrees])
    # The starts lie alike to the eigenvectors at every angle, so that the landscape alone turns under the optimizer.
    points = np.einsum("aij,sj->asi", bases, starts)
    updates = [
        [updates_to_target(config, hessians, points, beta1, delay) for delay in (0, *config.delays)]
        for beta1 in config.momenta
    ]
    norms = np.abs(hessians).sum((-2, -1)) / sum(config.eigenvalues)
    return SweepResult(config, norms, np.array(updates))


def rotation(degrees: float) -> FloatArray:
    """The eigenvectors (2, 2), as columns, at this angle to the coordinates."""
    cosine, sine = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    return np.array([[cosine, -sine], [sine, cosine]])


def rotated_hessians(eigenvalues: list[float], angles_degrees: list[float]) -> FloatArray:
    """Q diag(eigenvalues) Q^T at each angle (A, 2, 2)."""
    bases = np.stack([rotation(angle) for angle in angles_degrees])
    hessians: FloatArray = np.einsum("aij,j,akj->aik", bases, np.array(eigenvalues), bases)
    return hessians


def updates_to_target(
    config: SweepConfig, hessians: FloatArray, starts: FloatArray, beta1: float, delay: int
) -> FloatArray:
    """How many updates Adam needs from each start (A, S, 2) on its quadratic (A, 2, 2); infinite for never (A, S).

    All of them at once: update t takes the gradient at the point before update t - delay.
    """
    recent = [starts] * (delay + 1)
    exp_avg, exp_avg_sq = np.zeros_like(starts), np.zeros_like(starts)
    counts = np.full(starts.shape[:-1], np.inf)
    for count in range(1, config.most_updates + 1):
        gradient = np.einsum("aij,asj->asi", hessians, recent[0])
        exp_avg = beta1 * exp_avg + (1.0 - beta1) * gradient
        exp_avg_sq = config.beta2 * exp_avg_sq + (1.0 - config.beta2) * gradient**2
        mean = exp_avg / (1.0 - beta1**count)
        root = np.sqrt(exp_avg_sq / (1.0 - config.beta2**count)) + EPS
        point = recent[-1] - config.lr * mean / root
        recent = [*recent[1:], point]
        losses = 0.5 * np.einsum("asi,aij,asj->as", point, hessians, point)
        counts[np.isinf(counts) & (losses <= config.target)] = count
        if np.isfinite(counts).all():
            break
    return counts


def _number(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else round(float(value), 4)
