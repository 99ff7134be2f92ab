"""A spiral valley, whose Hessian's eigenbasis turns along the way (the paper's figure "spiral")."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field, model_validator
from scipy.stats import spearmanr
from torch import Tensor
from torch.func import hessian, vmap

from brx.config.schema import Section

FloatArray = NDArray[np.float64]

PHASE_OF_FLOOR = -math.asin(1.0 / 20.0)
"""4 r - theta where the second term of the spiral vanishes."""


class SpiralConfig(Section):
    """The set-up; configs/toy/spiral.yaml says which values are the paper's, and why the others are as they are."""

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
    """The trajectory starts on the valley's floor at this radius,"""
    end_radius: float = Field(gt=0)
    """and ends at this one,"""
    most_updates: int = Field(ge=1)
    """or after so many updates."""
    measurements: int = Field(ge=2)
    """At how many iterations of the trajectory the delay is introduced."""
    most_measured: int = Field(ge=1)
    """Updates after which a measurement gives up."""
    seed: int = Field(ge=0)
    """Chooses those iterations."""

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


@dataclass(frozen=True)
class SpiralResult:
    """What was measured; angles in degrees along the way (unwrapped), which falls towards the centre.

    Attributes:
        config: the set-up.
        path: the trajectory without delay (T + 1, 2).
        angles: where the delay was introduced (N,).
        plain: updates for the interval without delay (N,); NaN where it was not travelled.
        delayed: the same with delay.
        misalignments: sum |H_ij| over its minimum over all rotations, there (N,).
        aligned_angles: where the dominant eigenvector on the valley's floor lies along an axis.
        misaligned_angles: where it is half-way between axes.
    """

    config: SpiralConfig
    path: FloatArray
    angles: FloatArray
    plain: FloatArray
    delayed: FloatArray
    misalignments: FloatArray
    aligned_angles: FloatArray
    misaligned_angles: FloatArray

    @property
    def slowdowns(self) -> FloatArray:
        """Updates with delay over updates without; NaN where either did not travel the interval."""
        ratio: FloatArray = self.delayed / self.plain
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
        correlation = self.correlation()
        return {
            "config": self.config.model_dump(),
            "updates": len(self.path) - 1,
            "arrived": self.arrived,
            "turned_degrees": round(float(angles_along(self.path)[-1] - angles_along(self.path)[0]), 2),
            "spearman": None if correlation is None else round(correlation[0], 4),
            "p_value": None if correlation is None else float(f"{correlation[1]:.2g}"),
            "not_travelled_without_delay": int(np.isnan(self.plain).sum()),
            "not_travelled_with_delay": int(np.isnan(self.delayed).sum()),
            "aligned_angles": [round(float(angle), 2) for angle in self.aligned_angles],
            "misaligned_angles": [round(float(angle), 2) for angle in self.misaligned_angles],
            "angles": [round(float(angle), 3) for angle in self.angles],
            "misalignments": [round(float(value), 4) for value in self.misalignments],
            "updates_without_delay": _counts(self.plain),
            "updates_with_delay": _counts(self.delayed),
        }


def spiral(point: Tensor) -> Tensor:
    """f = r^2 + (20 sin(4 r - theta) + 1)^2 at a point (x, y)."""
    radius = torch.linalg.vector_norm(point)
    angle = torch.atan2(point[1], point[0])
    value: Tensor = radius**2 + (20.0 * torch.sin(4.0 * radius - angle) + 1.0) ** 2
    return value


def gradient(points: FloatArray) -> FloatArray:
    """Of the spiral, at points (N, 2): by hand, since a descent takes a hundred thousand of them."""
    x, y = points.T
    radius = np.hypot(x, y)
    phase = 4.0 * radius - np.arctan2(y, x)
    by_phase = 2.0 * (20.0 * np.sin(phase) + 1.0) * 20.0 * np.cos(phase)
    by_radius, by_angle = 2.0 * radius + 4.0 * by_phase, -by_phase
    return np.stack(
        [by_radius * x / radius - by_angle * y / radius**2, by_radius * y / radius + by_angle * x / radius**2], axis=1
    )


def hessians(points: FloatArray) -> Tensor:
    """Second derivatives (N, 2, 2) of the spiral at points (N, 2)."""
    hessians: Tensor = vmap(hessian(spiral))(torch.from_numpy(points))
    return hessians


def misalignment(curvatures: Tensor) -> FloatArray:
    """sum |H_ij| of matrices (N, 2, 2) over its minimum over rotations, the sum of |eigenvalues|: from 1 to 2."""
    ratio: FloatArray = (curvatures.abs().sum((-2, -1)) / torch.linalg.eigvalsh(curvatures).abs().sum(-1)).numpy()
    return ratio


def floor_points(radii: FloatArray) -> FloatArray:
    """The points (N, 2) of the valley's floor at these radii."""
    angles = 4.0 * radii - PHASE_OF_FLOOR
    return np.stack([radii * np.cos(angles), radii * np.sin(angles)], axis=1)


def distance_from_floor(points: FloatArray) -> FloatArray:
    """Signed and to first order, for points (N, 2) in the valley."""
    x, y = points.T
    radius = np.hypot(x, y)
    phase = 4.0 * radius - np.arctan2(y, x) - PHASE_OF_FLOOR
    wrapped = (phase + math.pi) % (2.0 * math.pi) - math.pi
    distance: FloatArray = wrapped / np.sqrt(16.0 + 1.0 / radius**2)
    return distance


def angles_along(path: FloatArray) -> FloatArray:
    """Angles in degrees of consecutive points (T, 2), unwrapped."""
    unwrapped: FloatArray = np.degrees(np.unwrap(np.arctan2(path[:, 1], path[:, 0])))
    return unwrapped


@dataclass
class AdamPoints:
    """Adam on N points of the spiral, each by itself, with delayed gradients: a copy of torch's would take minutes.

    Attributes:
        recent: the last tau + 1 positions (N, 2), the newest last; the gradient is that of the first.
        exp_avg: first moment (N, 2).
        exp_avg_sq: second moment (N, 2).
        step: updates behind each point (N, 1).
    """

    recent: list[FloatArray]
    exp_avg: FloatArray
    exp_avg_sq: FloatArray
    step: FloatArray

    def update(self, config: SpiralConfig) -> FloatArray:
        """Make one update; returns the new positions."""
        slope = gradient(self.recent[0])
        self.exp_avg = config.beta1 * self.exp_avg + (1.0 - config.beta1) * slope
        self.exp_avg_sq = config.beta2 * self.exp_avg_sq + (1.0 - config.beta2) * slope**2
        self.step = self.step + 1.0
        mean = self.exp_avg / (1.0 - config.beta1**self.step)
        root = np.sqrt(self.exp_avg_sq / (1.0 - config.beta2**self.step)) + 1e-8
        self.recent = [*self.recent[1:], self.recent[-1] - config.lr * mean / root]
        return self.recent[-1]


@dataclass(frozen=True)
class History:
    """A trajectory without delay, with the optimizer's state at each iteration t = 0 .. T; arrays (T + 1, 2)."""

    path: FloatArray
    exp_avg: FloatArray
    exp_avg_sq: FloatArray

    def at(self, iterations: NDArray[np.int64], delay: int) -> AdamPoints:
        """The optimizer at some iterations, to go on from there with a delay."""
        recent = [self.path[np.maximum(0, iterations - age)] for age in range(delay, -1, -1)]
        step = iterations[:, None].astype(np.float64)
        return AdamPoints(recent, self.exp_avg[iterations], self.exp_avg_sq[iterations], step)


def run_spiral(config: SpiralConfig) -> SpiralResult:
    """Descend without delay, and measure at random iterations what a delay introduced there would cost."""
    history = descend(config)
    chosen = _chosen_iterations(config, len(history.path) - 1)
    plain, delayed = (updates_for_interval(config, history.at(chosen, delay)) for delay in (0, config.delay))
    angles = angles_along(history.path)
    aligned, misaligned = special_angles(config, angles)
    return SpiralResult(
        config=config,
        path=history.path,
        angles=angles[chosen],
        plain=plain,
        delayed=delayed,
        misalignments=misalignment(hessians(history.path[chosen])),
        aligned_angles=aligned,
        misaligned_angles=misaligned,
    )


def descend(config: SpiralConfig) -> History:
    """The trajectory without delay."""
    start = floor_points(np.array([config.start_radius]))
    point = AdamPoints([start], np.zeros((1, 2)), np.zeros((1, 2)), np.zeros((1, 1)))
    path, exp_avg, exp_avg_sq = [start], [point.exp_avg], [point.exp_avg_sq]
    for _ in range(config.most_updates):
        path.append(point.update(config))
        exp_avg.append(point.exp_avg)
        exp_avg_sq.append(point.exp_avg_sq)
        if math.hypot(*path[-1][0]) <= config.end_radius:
            break
    return History(*(np.concatenate(values) for values in (path, exp_avg, exp_avg_sq)))


def updates_for_interval(config: SpiralConfig, points: AdamPoints) -> FloatArray:
    """Updates until each point's angle has fallen by the interval; NaN where it has not by `most_measured`."""
    turned = np.zeros(len(points.step))
    updates = np.full(len(points.step), np.nan)
    before = np.arctan2(*points.recent[-1].T[::-1])
    for count in range(1, config.most_measured + 1):
        now = np.arctan2(*points.update(config).T[::-1])
        turned += (now - before + math.pi) % (2.0 * math.pi) - math.pi
        before = now
        updates[np.isnan(updates) & (turned <= -math.radians(config.interval_degrees))] = count
        if not np.isnan(updates).any():
            break
    return updates


def special_angles(config: SpiralConfig, angles: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Where on the valley's floor the dominant eigenvector of the Hessian lies on an axis, and half-way between axes.

    Args:
        config: from which radius to which.
        angles: of the trajectory, whose range is kept; its first one is the floor's at the start.
    """
    points = floor_points(np.linspace(config.start_radius, config.end_radius, 4000))
    along_floor = angles_along(points)
    along_floor += angles[0] - along_floor[0]
    dominant = torch.linalg.eigh(hessians(points)).eigenvectors[:, :, -1].numpy()
    # Four times the eigenvector's direction makes one turn from axis to axis, and does not see its sign.
    turns = np.unwrap(4.0 * np.arctan2(dominant[:, 1], dominant[:, 0])) / (2.0 * math.pi)
    inside = (along_floor >= angles.min()) & (along_floor <= angles.max())

    def crossings(offset: float) -> FloatArray:
        crossed = np.diff(np.floor(turns - offset)) != 0
        angles: FloatArray = along_floor[1:][crossed & inside[1:]]
        return angles

    return crossings(0.0), crossings(0.5)


def _chosen_iterations(config: SpiralConfig, length: int) -> NDArray[np.int64]:
    """Iterations of the trajectory in increasing order, drawn without replacement."""
    candidates = np.arange(min(length, config.first_measured), length + 1)
    count = min(config.measurements, len(candidates))
    return np.sort(np.random.default_rng(config.seed).choice(candidates, size=count, replace=False))


def _counts(updates: FloatArray) -> list[int | None]:
    return [None if math.isnan(count) else int(count) for count in updates]
