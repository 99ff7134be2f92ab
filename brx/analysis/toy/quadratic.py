"""A quadratic whose eigenbasis is or is not the coordinates' (the paper's figure "Impact of basis alignment")."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from brx.analysis.toy.adasgd import AdaSGD
from brx.analysis.toy.delayed import DelayedDescent
from brx.config.schema import Section


class QuadraticConfig(Section):
    """The set-up; what the paper states is its appendix's, what it leaves open is said in the configuration file."""

    lr: float = Field(gt=0)
    """Learning rate of both optimizers."""
    beta1: float = Field(ge=0, lt=1)
    """Decay of the first moment."""
    beta2: float = Field(ge=0, lt=1)
    """Decay of the second moment."""
    delay: int = Field(ge=0)
    """tau of the delayed runs."""
    target: float = Field(gt=0)
    """The loss at which a run has converged."""
    most_updates: int = Field(ge=1)
    """A run that has not converged by then never does."""
    eigenvalues: list[Annotated[float, Field(gt=0)]] = Field(min_length=2, max_length=2)
    """Of the Hessian, the dominant one first."""
    start: list[float] = Field(min_length=2, max_length=2)
    """The start, in coordinates of the eigenvectors."""
    rotation_degrees: float
    """Angle between eigenvectors and coordinates in the misaligned case."""


@dataclass(frozen=True)
class Trajectory:
    """One run.

    Attributes:
        optimizer: AdaSGD or Adam.
        aligned: whether the eigenvectors are the coordinate axes.
        delay: tau.
        path: the points (T + 1, 2), in the coordinates in which the optimizer works.
        along_dominant: each update's component along the dominant eigenvector (T,).
        updates: to the target loss; None if it was not reached.
    """

    optimizer: str
    aligned: bool
    delay: int
    path: Tensor
    along_dominant: Tensor
    updates: int | None


def run_quadratic(config: QuadraticConfig) -> list[Trajectory]:
    """All eight combinations of optimizer, alignment, and delay or none."""
    return [
        _run(config, name, aligned, delay)
        for aligned in (True, False)
        for name in ("AdaSGD", "Adam")
        for delay in (0, config.delay)
    ]


def hessian(config: QuadraticConfig, aligned: bool) -> tuple[Tensor, Tensor]:
    """H = Q diag(eigenvalues) Q^T and the eigenvectors Q (2, 2), float64."""
    angle = 0.0 if aligned else math.radians(config.rotation_degrees)
    cosine, sine = math.cos(angle), math.sin(angle)
    basis = torch.tensor([[cosine, -sine], [sine, cosine]], dtype=torch.float64)
    return basis @ torch.diag(torch.tensor(config.eigenvalues, dtype=torch.float64)) @ basis.T, basis


def _run(config: QuadraticConfig, name: str, aligned: bool, delay: int) -> Trajectory:
    curvature, basis = hessian(config, aligned)

    def loss(point: Tensor) -> Tensor:
        return 0.5 * point @ curvature @ point

    kind = AdaSGD if name == "AdaSGD" else torch.optim.Adam
    descent = DelayedDescent(
        loss,
        basis @ torch.tensor(config.start, dtype=torch.float64),
        lambda points: kind(points, lr=config.lr, betas=(config.beta1, config.beta2)),
        delay,
    )
    updates = descent.until(lambda point: loss(point).item() <= config.target, config.most_updates)
    path = torch.stack(descent.path)
    return Trajectory(name, aligned, delay, path, path.diff(dim=0) @ basis[:, 0], updates)
