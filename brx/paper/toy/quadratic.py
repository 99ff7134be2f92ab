"""A quadratic whose eigenbasis is or is not the coordinates' (the paper's figure "Impact of basis alignment")."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

import numpy as np
import torch
from pydantic import Field, model_validator
from torch import Tensor

from brx.config.schema import Section
from brx.paper.toy.adasgd import AdaSGD
from brx.paper.toy.delayed import DelayedDescent

OptimizerName = Literal["AdaSGD", "Adam"]


class QuadraticConfig(Section):
    """The set-up; configs/toy/quadratic.yaml says which values are the paper's, and why the others are as they are."""

    lr: float = Field(gt=0)
    """Learning rate of both optimizers."""
    beta1: float = Field(ge=0, lt=1)
    """Decay of the first moment."""
    beta2: float = Field(ge=0, lt=1)
    """Decay of the second moment."""
    delay: int = Field(ge=1)
    """tau of the delayed runs."""
    target: float = Field(gt=0)
    """The loss at which a run has converged."""
    eigenvalues: list[Annotated[float, Field(gt=0)]] = Field(min_length=2, max_length=2)
    """Of the Hessian, the dominant one first."""
    start: list[float] = Field(min_length=2, max_length=2)
    """The start, in coordinates of the eigenvectors."""
    rotation_degrees: float
    """Angle between eigenvectors and coordinates in the misaligned case."""
    most_updates: int = Field(ge=1)
    """A run that has not converged by then never does."""
    other_starts: int = Field(ge=1)
    """Starts at the same distance from the optimum, in random directions."""
    seed: int = Field(ge=0)
    """Of those directions."""

    @model_validator(mode="after")
    def _start_is_above_the_target(self) -> Self:
        loss = 0.5 * sum(value * place**2 for value, place in zip(self.eigenvalues, self.start, strict=True))
        if loss <= self.target:
            raise ValueError(f"start: has a loss of {loss:g}; must be above the target, {self.target:g}")
        return self


@dataclass(frozen=True)
class Case:
    """What a run is of.

    Attributes:
        optimizer: AdaSGD or Adam.
        aligned: whether the eigenvectors are the coordinate axes.
        delay: tau.
    """

    optimizer: OptimizerName
    aligned: bool
    delay: int


@dataclass(frozen=True)
class Trajectory:
    """One run.

    Attributes:
        case: what it is of.
        path: the points (T + 1, 2), in the coordinates in which the optimizer works.
        along_dominant: each update's component along the dominant eigenvector (T,).
        updates: to the target loss; None if it was not reached.
    """

    case: Case
    path: Tensor
    along_dominant: Tensor
    updates: int | None

    @property
    def sign_changes(self) -> float:
        """The share of updates that go the other way along the dominant eigenvector than the one before."""
        signs = self.along_dominant.sign()
        return float((signs[1:] != signs[:-1]).double().mean())


@dataclass(frozen=True)
class QuadraticResult:
    """What was measured.

    Attributes:
        config: the set-up.
        trajectories: one for each case, from the configured start.
        other_updates: for each case, the updates that the other starts needed (None where the target was not reached).
    """

    config: QuadraticConfig
    trajectories: list[Trajectory]
    other_updates: dict[Case, list[int | None]]

    def slowdown(self, optimizer: OptimizerName, aligned: bool) -> float | None:
        """Updates with delay over updates without, from the configured start."""
        updates = {trajectory.case: trajectory.updates for trajectory in self.trajectories}
        return _ratio(*(updates[case] for case in self._pair(optimizer, aligned)))

    def median_slowdown(self, optimizer: OptimizerName, aligned: bool) -> float | None:
        """The median over the other starts; a run that never arrives counts as infinitely slow."""
        plain, delayed = (self.other_updates[case] for case in self._pair(optimizer, aligned))
        ratios = [
            math.inf if late is None else late / base
            for base, late in zip(plain, delayed, strict=True)
            if base is not None
        ]
        middle = float(np.median(ratios)) if ratios else math.inf
        return middle if math.isfinite(middle) else None

    def _pair(self, optimizer: OptimizerName, aligned: bool) -> tuple[Case, Case]:
        return Case(optimizer, aligned, 0), Case(optimizer, aligned, self.config.delay)

    def numbers(self) -> dict[str, Any]:
        """What is kept in a file."""
        return {
            "config": self.config.model_dump(),
            "runs": [
                vars(trajectory.case)
                | {"updates": trajectory.updates, "sign_changes": round(trajectory.sign_changes, 4)}
                | {"updates_from_other_starts": self.other_updates[trajectory.case]}
                for trajectory in self.trajectories
            ],
            "slowdowns": [
                {
                    "optimizer": optimizer,
                    "aligned": aligned,
                    "slowdown": self.slowdown(optimizer, aligned),
                    "median_slowdown_from_other_starts": self.median_slowdown(optimizer, aligned),
                }
                for optimizer, aligned in comparisons()
            ],
        }


def comparisons() -> Iterator[tuple[OptimizerName, bool]]:
    """Optimizer and alignment of the four comparisons of delay with none."""
    for aligned in (True, False):
        yield "AdaSGD", aligned
        yield "Adam", aligned


def run_quadratic(config: QuadraticConfig) -> QuadraticResult:
    """All eight cases: optimizer, alignment, and delay or none."""
    cases = [Case(*comparison, delay) for comparison in comparisons() for delay in (0, config.delay)]
    angles = np.random.default_rng(config.seed).uniform(0.0, 2.0 * math.pi, config.other_starts)
    distance = math.hypot(*config.start)
    others = [(distance * math.cos(angle), distance * math.sin(angle)) for angle in angles]
    return QuadraticResult(
        config,
        [_run(config, case, config.start) for case in cases],
        {case: [_run(config, case, start).updates for start in others] for case in cases},
    )


def hessian(config: QuadraticConfig, aligned: bool) -> tuple[Tensor, Tensor]:
    """H = Q diag(eigenvalues) Q^T and the eigenvectors Q (2, 2), float64."""
    angle = 0.0 if aligned else math.radians(config.rotation_degrees)
    cosine, sine = math.cos(angle), math.sin(angle)
    basis = torch.tensor([[cosine, -sine], [sine, cosine]], dtype=torch.float64)
    return basis @ torch.diag(torch.tensor(config.eigenvalues, dtype=torch.float64)) @ basis.T, basis


def _run(config: QuadraticConfig, case: Case, start: Sequence[float]) -> Trajectory:
    curvature, basis = hessian(config, case.aligned)

    def loss(point: Tensor) -> Tensor:
        return 0.5 * point @ curvature @ point

    kind = AdaSGD if case.optimizer == "AdaSGD" else torch.optim.Adam
    descent = DelayedDescent(
        loss,
        basis @ torch.tensor(start, dtype=torch.float64),
        lambda points: kind(points, lr=config.lr, betas=(config.beta1, config.beta2)),
        case.delay,
    )
    updates = descent.until(lambda point: loss(point).item() <= config.target, config.most_updates)
    path = torch.stack(descent.path)
    return Trajectory(case, path, path.diff(dim=0) @ basis[:, 0], updates)


def _ratio(plain: int | None, delayed: int | None) -> float | None:
    return None if plain is None or delayed is None else delayed / plain
