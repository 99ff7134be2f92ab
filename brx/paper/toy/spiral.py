"""A spiral valley, whose Hessian's eigenbasis turns along the way (the paper's figure "spiral")."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field, model_validator
from scipy.stats import spearmanr
from torch import Tensor
from torch.func import hessian, vmap

from brx.paper.toy.descent import Array, DelayedAdam, ToySection, counts, finite

PHASE_OF_FLOOR = -math.asin(1.0 / 20.0)
"""4 r - theta where the second term of the spiral vanishes."""


class SpiralConfig(ToySection):
    """The set-up; configs/toy/spiral.yaml says which values are the paper's, and why the others are as they are."""

    beta1: float = Field(ge=0, lt=1)
    """Decay of the first moment."""
    delay: int = Field(ge=1)
    """tau, introduced at a chosen iteration."""
    interval_degrees: float = Field(gt=0)
    """The angle to be travelled with and without delay."""
    start_radius: float = Field(gt=0)
    """The trajectory starts on the valley's floor at this radius,"""
    end_radius: float = Field(gt=0)
    """and ends at this one, or after `most_updates`."""
    measurements: int = Field(ge=2)
    """At how many iterations of the trajectory, drawn at random, the delay is introduced."""
    most_measured: int = Field(ge=1)
    """Updates after which a measurement gives up."""

    @property
    def first_measured(self) -> int:
        """The first iteration to measure at: by then the second moment has forgotten its start."""
        return round(2.0 / (1.0 - self.beta2))

    @model_validator(mode="after")
    def _there_is_a_way(self) -> Self:
        if self.end_radius >= self.start_radius:
            raise ValueError(f"end_radius must be less than start_radius ({self.start_radius}), got {self.end_radius}")
        if self.most_updates < self.first_measured:
            raise ValueError(
                f"most_updates: must be at least {self.first_measured} (2 / (1 - beta2)), got {self.most_updates}"
            )
        return self


class SpiralResult(NamedTuple):
    """What was measured at N iterations; angles in degrees along the way (unwrapped), falling towards the centre."""

    config: SpiralConfig
    path: Array  # the trajectory without delay (T + 1, 2)
    angles: Array  # where the delay was introduced (N,)
    plain: Array  # updates for the interval without delay (N,); NaN where it was not travelled
    delayed: Array  # the same with delay
    misalignments: Array  # there (N,)
    aligned_angles: Array  # where the dominant eigenvector on the valley's floor lies along an axis,
    misaligned_angles: Array  # and where half-way between axes

    @property
    def slowdowns(self) -> Array:
        """Updates with delay over updates without; NaN where either did not travel the interval."""
        ratio: Array = self.delayed / self.plain
        return ratio

    @property
    def arrived(self) -> bool:
        """Whether the trajectory came to its end before its updates did."""
        return bool(np.hypot(*self.path[-1]) <= self.config.end_radius)

    def correlation(self) -> tuple[float, float] | None:
        """Spearman's, of misalignment and slowdown, with its p-value; None if there are not two finished pairs."""
        finished = np.isfinite(self.slowdowns)
        if finished.sum() < 2:
            return None
        correlation = spearmanr(self.misalignments[finished], self.slowdowns[finished])
        return float(correlation.statistic), float(correlation.pvalue)

    def median_slowdown(self, low: float, high: float) -> float | None:
        """Over the measurements at misalignments from `low` to `high`."""
        chosen = self.slowdowns[(self.misalignments >= low) & (self.misalignments <= high)]
        chosen = chosen[np.isfinite(chosen)]
        return float(np.median(chosen)) if len(chosen) else None

    def numbers(self) -> dict[str, Any]:
        """What is kept in a file."""
        correlation, p_value = self.correlation() or (None, None)
        way = angles_along(self.path)

        def rounded(values: Array, digits: int) -> list[float]:
            return [round(float(value), digits) for value in values]

        return {
            "config": self.config.model_dump(),
            "updates": len(self.path) - 1,
            "arrived": self.arrived,
            "turned_degrees": round(float(way[-1] - way[0]), 2),
            "spearman": finite(correlation, 4),
            "p_value": None if p_value is None else float(f"{p_value:.2g}"),
            "not_travelled_without_delay": int(np.isnan(self.plain).sum()),
            "not_travelled_with_delay": int(np.isnan(self.delayed).sum()),
            "aligned_angles": rounded(self.aligned_angles, 2),
            "misaligned_angles": rounded(self.misaligned_angles, 2),
            "angles": rounded(self.angles, 3),
            "misalignments": rounded(self.misalignments, 4),
            "updates_without_delay": counts(self.plain),
            "updates_with_delay": counts(self.delayed),
        }


def spiral(point: Tensor) -> Tensor:
    """f = r^2 + (20 sin(4 r - theta) + 1)^2 at a point (x, y)."""
    radius = torch.linalg.vector_norm(point)
    angle = torch.atan2(point[1], point[0])
    value: Tensor = radius**2 + (20.0 * torch.sin(4.0 * radius - angle) + 1.0) ** 2
    return value


def gradient(points: Array) -> Array:
    """Of the spiral, at points (N, 2): by hand, since a descent takes a hundred thousand of them."""
    x, y = points.T
    radius = np.hypot(x, y)
    phase = 4.0 * radius - np.arctan2(y, x)
    by_phase = 2.0 * (20.0 * np.sin(phase) + 1.0) * 20.0 * np.cos(phase)
    by_radius, by_angle = 2.0 * radius + 4.0 * by_phase, -by_phase
    return np.stack(
        [by_radius * x / radius - by_angle * y / radius**2, by_radius * y / radius + by_angle * x / radius**2], axis=1
    )


def hessians(points: Array) -> Tensor:
    """Second derivatives (N, 2, 2) of the spiral at points (N, 2)."""
    hessians: Tensor = vmap(hessian(spiral))(torch.from_numpy(points))
    return hessians


def misalignment(curvatures: Tensor) -> Array:
    """sum |H_ij| of matrices (N, 2, 2) over its minimum over rotations, the sum of |eigenvalues|: from 1 to 2."""
    ratio: Array = (curvatures.abs().sum((-2, -1)) / torch.linalg.eigvalsh(curvatures).abs().sum(-1)).numpy()
    return ratio


def floor_points(radii: Array) -> Array:
    """The points (N, 2) of the valley's floor at these radii."""
    angles = 4.0 * radii - PHASE_OF_FLOOR
    return np.stack([radii * np.cos(angles), radii * np.sin(angles)], axis=1)


def distance_from_floor(points: Array) -> Array:
    """Signed and to first order, for points (N, 2) in the valley."""
    x, y = points.T
    radius = np.hypot(x, y)
    phase = 4.0 * radius - np.arctan2(y, x) - PHASE_OF_FLOOR
    wrapped = (phase + math.pi) % (2.0 * math.pi) - math.pi
    distance: Array = wrapped / np.sqrt(16.0 + 1.0 / radius**2)
    return distance


def angles_along(path: Array) -> Array:
    """Angles in degrees of consecutive points (T, 2), unwrapped."""
    unwrapped: Array = np.degrees(np.unwrap(np.arctan2(path[:, 1], path[:, 0])))
    return unwrapped


@dataclass(frozen=True)
class History:
    """A trajectory without delay, with the optimizer's state at each iteration t = 0 .. T; arrays (T + 1, 2)."""

    config: SpiralConfig
    path: Array
    exp_avg: Array
    exp_avg_sq: Array

    def at(self, iterations: NDArray[np.int64], delay: int) -> DelayedAdam:
        """The optimizer at N iterations, to go on from there with a delay."""
        recent = [self.path[np.maximum(0, iterations - age)] for age in range(delay, -1, -1)]
        moments = self.exp_avg[iterations], self.exp_avg_sq[iterations]
        return adam(self.config, recent, *moments, iterations[:, None].astype(np.float64))


def adam(config: SpiralConfig, recent: list[Array], exp_avg: Array, exp_avg_sq: Array, step: Array) -> DelayedAdam:
    """Adam on the spiral, at N points (N, 2) with N counts of updates (N, 1)."""
    return DelayedAdam(
        gradient, config.lr, config.beta1, config.beta2, recent, exp_avg=exp_avg, exp_avg_sq=exp_avg_sq, step=step
    )


def run_spiral(config: SpiralConfig) -> SpiralResult:
    """Descend without delay, and measure at random iterations what a delay introduced there would cost."""
    history = descend(config)
    candidates = np.arange(min(len(history.path) - 1, config.first_measured), len(history.path))
    count = min(config.measurements, len(candidates))
    chosen = np.sort(np.random.default_rng(config.seed).choice(candidates, size=count, replace=False))
    plain, delayed = (updates_for_interval(config, history.at(chosen, delay)) for delay in (0, config.delay))
    angles = angles_along(history.path)
    misalignments = misalignment(hessians(history.path[chosen]))
    return SpiralResult(
        config, history.path, angles[chosen], plain, delayed, misalignments, *special_angles(config, angles)
    )


def descend(config: SpiralConfig) -> History:
    """The trajectory without delay."""
    start = floor_points(np.array([config.start_radius]))
    point = adam(config, [start], np.zeros((1, 2)), np.zeros((1, 2)), np.zeros((1, 1)))
    states = [(start, point.exp_avg, point.exp_avg_sq)]
    for _ in range(config.most_updates):
        states.append((point.update(), point.exp_avg, point.exp_avg_sq))
        if math.hypot(*states[-1][0][0]) <= config.end_radius:
            break
    return History(config, *(np.concatenate(values) for values in zip(*states, strict=True)))


def updates_for_interval(config: SpiralConfig, points: DelayedAdam) -> Array:
    """Updates until each point's angle has fallen by the interval (N,); NaN where it has not by `most_measured`."""
    before = np.arctan2(*points.recent[-1].T[::-1])
    turned, updates = np.zeros(len(before)), np.full(len(before), np.nan)
    for count in range(1, config.most_measured + 1):
        now = np.arctan2(*points.update().T[::-1])
        turned += (now - before + math.pi) % (2.0 * math.pi) - math.pi
        before = now
        updates[np.isnan(updates) & (turned <= -math.radians(config.interval_degrees))] = count
        if not np.isnan(updates).any():
            break
    return updates


def special_angles(config: SpiralConfig, angles: Array) -> tuple[Array, Array]:
    """Where on the valley's floor the dominant eigenvector of the Hessian lies on an axis, and half-way between axes.

    Only within the range of `angles`, a trajectory's, whose first one is the floor's at the start.
    """
    points = floor_points(np.linspace(config.start_radius, config.end_radius, 4000))
    along_floor = angles_along(points)
    along_floor += angles[0] - along_floor[0]
    dominant = torch.linalg.eigh(hessians(points)).eigenvectors[:, :, -1].numpy()
    # Four times the eigenvector's direction makes one turn from axis to axis, and does not see its sign.
    turns = np.unwrap(4.0 * np.arctan2(dominant[:, 1], dominant[:, 0])) / (2.0 * math.pi)
    inside = (along_floor >= angles.min()) & (along_floor <= angles.max())

    def crossings(offset: float) -> Array:
        crossed = np.diff(np.floor(turns - offset)) != 0
        angles: Array = along_floor[1:][crossed & inside[1:]]
        return angles

    return crossings(0.0), crossings(0.5)
