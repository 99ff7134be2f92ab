"""A spiral valley, whose Hessian's eigenbasis turns along the way (the paper's figure "spiral")."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from scipy.stats import spearmanr
from torch import Tensor

from brx.analysis.toy.delayed import DelayedDescent
from brx.config.schema import Section

FloatArray = NDArray[np.float64]


class SpiralConfig(Section):
    """The set-up; what the paper states is its appendix's, what it leaves open is said in the configuration file."""

    lr: float = Field(gt=0)
    """Adam's learning rate."""
    beta1: float = Field(ge=0, lt=1)
    """Decay of the first moment."""
    beta2: float = Field(ge=0, lt=1)
    """Decay of the second moment."""
    delay: int = Field(ge=1)
    """tau, introduced at a chosen iteration."""
    interval_degrees: float = Field(gt=0)
    """The angle to be travelled with and without delay."""
    start_radius: float = Field(gt=0)
    """Where the trajectory starts, at angle 0 on the floor of the valley."""
    end_radius: float = Field(gt=0)
    """Where it ends: nearer to the centre the spiral is no valley any more."""
    most_updates: int = Field(ge=1)
    """A bound for the trajectory and for each measurement."""
    measurements: int = Field(ge=2)
    """How many iterations of the trajectory the delay is introduced at."""
    seed: int = Field(ge=0)
    """Chooses them."""


@dataclass(frozen=True)
class SpiralResult:
    """What was measured.

    Attributes:
        path: the trajectory without delay (T + 1, 2).
        angles: where the delay was introduced, in degrees along the way (unwrapped).
        slowdowns: updates with delay over updates without, for the same angle.
        misalignments: sum |H_ij| over its minimum over all rotations, there.
        aligned_angles: where the dominant eigenvector on the valley's floor lies along an axis, in degrees.
        misaligned_angles: where it is half-way between axes.
        correlation: Spearman's, of misalignment and slowdown.
        p_value: of the correlation.
        unfinished: measurements in which a run did not travel the angle.
    """

    path: FloatArray
    angles: FloatArray
    slowdowns: FloatArray
    misalignments: FloatArray
    aligned_angles: FloatArray
    misaligned_angles: FloatArray
    correlation: float
    p_value: float
    unfinished: int


def spiral(point: Tensor) -> Tensor:
    """f = r^2 + (20 sin(4 r - theta) + 1)^2 at a point (x, y)."""
    radius = torch.linalg.vector_norm(point)
    angle = torch.atan2(point[1], point[0])
    value: Tensor = radius**2 + (20.0 * torch.sin(4.0 * radius - angle) + 1.0) ** 2
    return value


def hessian(point: Tensor) -> Tensor:
    """Second derivatives (2, 2) of the spiral."""
    found: Tensor = torch.autograd.functional.hessian(spiral, point)  # type: ignore[no-untyped-call]
    return found


def misalignment(curvature: Tensor) -> float:
    """sum |H_ij| over its minimum over rotations, the sum of |eigenvalues|; 1 where the eigenbasis is the axes'."""
    return float(curvature.abs().sum() / torch.linalg.eigvalsh(curvature).abs().sum())


def floor_point(radius: float) -> Tensor:
    """The point of the valley's floor (sin(4 r - theta) = -1/20) at a radius."""
    angle = 4.0 * radius + math.asin(1.0 / 20.0)
    return torch.tensor([radius * math.cos(angle), radius * math.sin(angle)], dtype=torch.float64)


def run_spiral(config: SpiralConfig) -> SpiralResult:
    """Descend without delay, and measure at random iterations what a delay introduced there would cost."""
    descent = _start(config)
    chosen = _chosen_iterations(config)
    measured, unfinished = [], 0
    for iteration in range(1, max(chosen) + 1):
        point = descent.update()
        if iteration not in chosen:
            continue
        plain, delayed = (_updates_for_interval(descent.branch(delay), config) for delay in (0, config.delay))
        if plain is None or delayed is None:
            unfinished += 1
            continue
        measured.append((_travelled(descent.path)[-1], delayed / plain, misalignment(hessian(point))))
    path = torch.stack(descent.path).numpy()
    angles, slowdowns, misalignments = np.array(measured).T
    correlation, p_value = spearmanr(misalignments, slowdowns)
    turns = _travelled(descent.path)
    aligned, between = _special_angles(config, turns[0], turns[-1])
    return SpiralResult(
        path, angles, slowdowns, misalignments, aligned, between, float(correlation), float(p_value), unfinished
    )


def _start(config: SpiralConfig) -> DelayedDescent:
    return DelayedDescent(
        spiral,
        floor_point(config.start_radius),
        lambda points: torch.optim.Adam(points, lr=config.lr, betas=(config.beta1, config.beta2)),
    )


def _chosen_iterations(config: SpiralConfig) -> set[int]:
    """Iterations between start and end of the trajectory, drawn without replacement."""
    descent = _start(config)
    ends = descent.until(lambda point: torch.linalg.vector_norm(point).item() <= config.end_radius, config.most_updates)
    length = ends if ends is not None else config.most_updates
    generator = np.random.default_rng(config.seed)
    first = 10  # by then Adam's second moment has forgotten its start
    count = min(config.measurements, length - first)
    return {int(i) for i in generator.choice(np.arange(first, length), size=count, replace=False)}


def _updates_for_interval(descent: DelayedDescent, config: SpiralConfig) -> int | None:
    """Updates until the angle has changed by the interval, inwards along the spiral."""
    before = len(descent.path) - 1
    interval = config.interval_degrees

    def reached(point: Tensor) -> bool:
        turned = _travelled([*descent.path[before:], point])
        return bool(turned[-1] - turned[0] <= -interval)

    return descent.until(lambda point: reached(point), config.most_updates)


def _travelled(points: list[Tensor]) -> FloatArray:
    """The points' angles in degrees, unwrapped along the way."""
    path = torch.stack(points).numpy()
    unwrapped: FloatArray = np.degrees(np.unwrap(np.arctan2(path[:, 1], path[:, 0])))
    return unwrapped


def _special_angles(config: SpiralConfig, first: float, last: float) -> tuple[FloatArray, FloatArray]:
    """Angles along the valley's floor at which the dominant eigenvector lies on an axis, and half-way between axes."""
    radii = np.linspace(config.start_radius, config.end_radius, 4000)
    points = [floor_point(float(radius)) for radius in radii]
    angles = _travelled(points) + (first - _travelled(points[:1])[0])
    vectors = [torch.linalg.eigh(hessian(point)).eigenvectors[:, -1] for point in points]
    directions = np.array([math.atan2(float(v[1]), float(v[0])) for v in vectors])
    quarter = np.unwrap(4.0 * directions)  # one turn of it is a quarter turn of the eigenvector
    inside = (angles <= max(first, last)) & (angles >= min(first, last))

    def crossings(offset: float) -> FloatArray:
        phase = np.floor((quarter - offset) / (2.0 * math.pi))
        found: FloatArray = angles[1:][(np.diff(phase) != 0) & inside[1:]]
        return found

    return crossings(0.0), crossings(math.pi)
