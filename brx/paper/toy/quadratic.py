"""A quadratic whose eigenvectors stand at an angle to the coordinates (the paper's "Impact of basis alignment").

`brx toy quadratic` is the paper's comparison, aligned and not. `brx toy sweep` goes over angles and delays, beside the
Hessian's (1,1)-norm: theorem 2.3 bounds the cost of delay by tau times that norm, and a rotation changes nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Any, Literal, NamedTuple, Self

import numpy as np
from pydantic import Field, model_validator
from scipy.stats import spearmanr

from brx.paper.toy.descent import Array, DelayedAdam, ToySection, counts, finite

OptimizerName = Literal["AdaSGD", "Adam"]

COMPARISONS: list[tuple[OptimizerName, bool]] = [
    ("AdaSGD", True), ("Adam", True), ("AdaSGD", False), ("Adam", False)
]  # fmt: skip
"""Optimizer, and whether the eigenvectors are the axes: each is run with delay and without."""


class _QuadraticSection(ToySection):
    """What both set-ups have."""

    target: float = Field(gt=0)
    """The loss at which a run has converged."""
    eigenvalues: list[Annotated[float, Field(gt=0)]] = Field(min_length=2, max_length=2)
    """Of the Hessian, the dominant one first."""


class QuadraticConfig(_QuadraticSection):
    """The set-up; configs/toy/quadratic.yaml says which values are the paper's, and why the others are as they are."""

    beta1: float = Field(ge=0, lt=1)
    """Decay of the first moment."""
    delay: int = Field(ge=1)
    """tau of the delayed runs."""
    start: list[float] = Field(min_length=2, max_length=2)
    """The start, in coordinates of the eigenvectors."""
    rotation_degrees: float
    """Angle between eigenvectors and coordinates in the misaligned case."""
    other_starts: int = Field(ge=1)
    """Starts at the same distance from the optimum, in random directions."""

    @model_validator(mode="after")
    def _start_is_above_the_target(self) -> Self:
        loss = 0.5 * sum(value * place**2 for value, place in zip(self.eigenvalues, self.start, strict=True))
        if loss <= self.target:
            raise ValueError(f"start: has a loss of {loss:g}; must be above the target, {self.target:g}")
        return self

    def degrees(self, aligned: bool) -> float:
        """The angle of the eigenvectors to the axes."""
        return 0.0 if aligned else self.rotation_degrees


class SweepConfig(_QuadraticSection):
    """The set-up; configs/toy/sweep.yaml says why the values are what they are."""

    momenta: list[Annotated[float, Field(ge=0, lt=1)]] = Field(min_length=1)
    """Decays of the first moment, beta1: one sweep for each."""
    angles_degrees: list[float] = Field(min_length=2)
    """Angles between eigenvectors and coordinates."""
    delays: list[Annotated[int, Field(ge=1)]] = Field(min_length=1)
    """tau, in updates."""
    distance: float = Field(gt=0)
    """Distance of the starts from the optimum, in random directions."""
    starts: int = Field(ge=1)
    """Number of starts."""

    @model_validator(mode="after")
    def _starts_are_above_the_target(self) -> Self:
        least = 0.5 * min(self.eigenvalues) * self.distance**2
        if least <= self.target:
            raise ValueError(f"distance: starts have losses from {least:g}; must be above the target, {self.target:g}")
        return self


class Case(NamedTuple):
    """What a run is of: the optimizer, whether the eigenvectors are the axes, and tau."""

    optimizer: OptimizerName
    aligned: bool
    delay: int


class Trajectory(NamedTuple):
    """A run from the configured start, and how long other starts took."""

    path: Array  # the points (T + 1, 2), in the coordinates in which the optimizer works
    along_dominant: Array  # each update's component along the dominant eigenvector (T,)
    updates: Array  # to the target loss, from the start and from the others (1 + N,); infinite for never

    @property
    def sign_changes(self) -> float:
        """The share of updates that go the other way along the dominant eigenvector than the one before."""
        signs = np.sign(self.along_dominant)
        return float((signs[1:] != signs[:-1]).mean())


class QuadraticResult(NamedTuple):
    """What was measured."""

    config: QuadraticConfig
    runs: dict[Case, Trajectory]

    def slowdowns(self, optimizer: OptimizerName, aligned: bool) -> tuple[float, float]:
        """Updates with delay over updates without: from the configured start, and the median over the others.

        A run that never arrives is infinitely slow; starts from which that without delay does not are left out.
        """
        plain, delayed = (self.runs[Case(optimizer, aligned, delay)].updates for delay in (0, self.config.delay))
        ratios = _ratios(plain, delayed)
        others = ratios[1:][~np.isnan(ratios[1:])]
        return float(ratios[0]), float(np.median(others)) if len(others) else math.inf

    def numbers(self) -> dict[str, Any]:
        """What is kept in a file; a slowdown of None: never."""
        runs = [
            case._asdict()
            | {"updates": counts(run.updates)[0], "sign_changes": round(run.sign_changes, 4)}
            | {"updates_from_other_starts": counts(run.updates[1:])}
            for case, run in self.runs.items()
        ]
        slowdowns = [
            {"optimizer": optimizer, "aligned": aligned}
            | dict(zip(("slowdown", "median_slowdown_from_other_starts"), map(finite, ratios), strict=True))
            for optimizer, aligned in COMPARISONS
            for ratios in [self.slowdowns(optimizer, aligned)]
        ]
        return {"config": self.config.model_dump(), "runs": runs, "slowdowns": slowdowns}


class SweepResult(NamedTuple):
    """What was measured."""

    config: SweepConfig
    norms: Array  # sum |H_ij| over the sum of the eigenvalues, its minimum over rotations, at each angle (A,)
    updates: Array  # to the target (momenta, 1 + delays, angles, starts), first without delay; infinite for never

    @property
    def slowdowns(self) -> Array:
        """Median over the starts of updates with delay over updates without (momenta, delays, angles).

        Infinite where more than half of the starts never arrive; those that do not even without delay do not count.
        """
        ratios = _ratios(self.updates[:, :1], self.updates[:, 1:])
        # Of an even number, the upper of the two in the middle: a mean with infinity says nothing.
        medians: Array = np.nanquantile(ratios, 0.5, axis=-1, method="higher")
        return medians

    def correlation(self, momentum: int, delay: int) -> float | None:
        """Spearman's, of norm and slowdown over the angles, by index; None where all slowdowns are equal."""
        slowdowns = self.slowdowns[momentum, delay]
        return None if np.all(slowdowns == slowdowns[0]) else float(spearmanr(self.norms, slowdowns).statistic)

    def numbers(self) -> dict[str, Any]:
        """What is kept in a file; a slowdown of None: never."""
        sweeps = [
            {
                "beta1": beta1,
                "delay": delay,
                "slowdowns": [finite(value, 4) for value in self.slowdowns[row, column]],
                "spearman_with_norm": finite(self.correlation(row, column), 4),
            }
            for row, beta1 in enumerate(self.config.momenta)
            for column, delay in enumerate(self.config.delays)
        ]
        return {"config": self.config.model_dump(), "norms": [finite(norm, 4) for norm in self.norms], "sweeps": sweeps}


def run_quadratic(config: QuadraticConfig) -> QuadraticResult:
    """All eight cases: optimizer, alignment, and delay or none."""
    angles = np.random.default_rng(config.seed).uniform(0.0, 2.0 * math.pi, config.other_starts)
    distance = math.hypot(*config.start)
    others = [(distance * math.cos(angle), distance * math.sin(angle)) for angle in angles]
    runs = {}
    for optimizer, aligned in COMPARISONS:
        basis = rotation(config.degrees(aligned))
        starts = np.array([config.start, *others]) @ basis.T
        for delay in (0, config.delay):
            curvature = hessians(config.eigenvalues, [config.degrees(aligned)])
            updates, path = descend(config, curvature, starts[None], config.beta1, delay, optimizer == "AdaSGD")
            last = int(min(updates[0, 0], config.most_updates))
            points = path[: last + 1, 0, 0]
            along = np.diff(points, axis=0) @ basis[:, 0]
            runs[Case(optimizer, aligned, delay)] = Trajectory(points, along, updates[0])
    return QuadraticResult(config, runs)


def run_sweep(config: SweepConfig) -> SweepResult:
    """Adam from every start, at every angle, with every delay and momentum."""
    directions = np.random.default_rng(config.seed).uniform(0.0, 2.0 * math.pi, config.starts)
    starts = config.distance * np.stack([np.cos(directions), np.sin(directions)], axis=-1)
    curvatures = hessians(config.eigenvalues, config.angles_degrees)
    bases = np.stack([rotation(angle) for angle in config.angles_degrees])
    # The starts lie alike to the eigenvectors at every angle, so that the landscape alone turns under the optimizer.
    points = np.einsum("aij,sj->asi", bases, starts)
    updates = [
        [descend(config, curvatures, points, beta1, delay)[0] for delay in (0, *config.delays)]
        for beta1 in config.momenta
    ]
    return SweepResult(config, np.abs(curvatures).sum((-2, -1)) / sum(config.eigenvalues), np.array(updates))


def rotation(degrees: float) -> Array:
    """The eigenvectors (2, 2), as columns, at this angle to the coordinates."""
    cosine, sine = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    return np.array([[cosine, -sine], [sine, cosine]])


def hessians(eigenvalues: Sequence[float], angles_degrees: Sequence[float]) -> Array:
    """Q diag(eigenvalues) Q^T at each angle (A, 2, 2)."""
    bases = np.stack([rotation(angle) for angle in angles_degrees])
    hessians: Array = np.einsum("aij,j,akj->aik", bases, np.array(eigenvalues), bases)
    return hessians


def descend(
    config: QuadraticConfig | SweepConfig,
    curvatures: Array,  # (A, 2, 2)
    starts: Array,  # (A, S, 2)
    beta1: float,
    delay: int,
    one_size: bool = False,
) -> tuple[Array, Array]:
    """How many updates each start needs on its quadratic (A, S), infinite for never, and the points (T+1, A, S, 2)."""
    adam = DelayedAdam(
        lambda points: np.einsum("aij,asj->asi", curvatures, points),
        config.lr, beta1, config.beta2, [starts] * (delay + 1), one_size,
    )  # fmt: skip
    path, needed = [starts], np.full(starts.shape[:-1], np.inf)
    for count in range(1, config.most_updates + 1):
        path.append(point := adam.update())
        losses = 0.5 * np.einsum("asi,aij,asj->as", point, curvatures, point)
        needed[np.isinf(needed) & (losses <= config.target)] = count
        if np.isfinite(needed).all():
            break
    return needed, np.stack(path)


def _ratios(plain: Array, delayed: Array) -> Array:
    """Updates with delay over those without; NaN where the run without never arrives."""
    arrives = np.isfinite(plain)
    return np.where(arrives, delayed / np.where(arrives, plain, 1.0), np.nan)
