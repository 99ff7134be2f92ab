"""A spiral valley whose eigenvectors turn along the way: Adam, and a delay that begins somewhere.

Where the valley runs along an axis, the Hessian's eigenbasis is aligned with the coordinates. Half
a right angle further it is misaligned (the paper's second toy landscape)."""

import math
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from matplotlib.axes import Axes
from numpy.typing import NDArray
from pydantic import Field, model_validator
from torch import Tensor
from torch.func import hessian, vmap

from brx.config.schema import refuse
from brx.plot.style import new_figure, save
from brx.toy.descent import COLORS, Array, DelayedAdam, State, ToySection, kept, slowdown_ratios

PHASE_OF_FLOOR = -math.asin(1.0 / 20.0)
"""4 r - theta on the floor of the valley, where the second term of the spiral vanishes."""
SPECIAL_COLORS = ("#009E73", "#D55E00")
"""Green where the eigenbasis is aligned, red where it is misaligned."""


class SpiralConfig(ToySection):
    """Adam along the spiral, with a delay that is introduced at some of its iterations."""

    beta1: float = Field(ge=0, lt=1)
    delay: int = Field(ge=1)  # tau, once it is introduced
    interval_degrees: float = Field(gt=0)  # the angle to be travelled with and without delay
    start_radius: float = Field(gt=0)  # the trajectory starts on the valley's floor at this radius,
    end_radius: float = Field(gt=0)  # and ends at this one, or after `most_updates`
    # Iterations of the trajectory, drawn at random, at which the delay is introduced
    measurements: int = Field(ge=2)
    most_measured: int = Field(ge=1)  # updates after which a measurement gives up

    @property
    def first_measured(self) -> int:
        """By then the second moment has forgotten its start."""
        return round(2.0 / (1.0 - self.beta2))

    @model_validator(mode="after")
    def _there_is_a_way(self) -> Self:
        start, end, least, most = (
            self.start_radius,
            self.end_radius,
            self.first_measured,
            self.most_updates,
        )
        refuse(end >= start, f"end_radius must be less than start_radius ({start}), got {end}")
        refuse(
            most < least, f"most_updates: must be at least {least} (2 / (1 - beta2)), got {most}"
        )
        return self


class SpiralResult(NamedTuple):
    """What was measured at N iterations; angles in degrees along the way (unwrapped), falling
    towards the centre."""

    config: SpiralConfig
    path: Array  # the trajectory without delay (T + 1, 2)
    angles: Array  # where the delay was introduced (N,)
    plain: Array  # updates for the interval without delay (N,); infinite where it was not travelled
    delayed: Array  # the same with delay
    misalignments: Array  # there (N,)
    # Angles of the valley's floor: the dominant eigenvector lies on an axis; halfway between axes.
    special_angles: tuple[Array, Array]

    @property
    def slowdowns(self) -> Array:  # NaN where the interval was not travelled with delay or without
        ratios = slowdown_ratios(self.plain, self.delayed)
        return np.where(np.isfinite(ratios), ratios, np.nan)

    @property
    def arrived(self) -> bool:
        return bool(np.hypot(*self.path[-1]) <= self.config.end_radius)

    def correlation(self) -> tuple[float, float]:
        """Spearman's, of misalignment and slowdown, with its p-value; NaN if there are not two
        finished pairs."""
        finished = np.isfinite(self.slowdowns)
        if finished.sum() < 2:
            return math.nan, math.nan
        from scipy.stats import spearmanr  # takes a second to load

        correlation = spearmanr(self.misalignments[finished], self.slowdowns[finished])
        return float(correlation.statistic), float(correlation.pvalue)

    def median_slowdown(
        self, low: float, high: float
    ) -> float | None:  # at misalignments between these
        chosen = self.slowdowns[(self.misalignments >= low) & (self.misalignments <= high)]
        return None if np.isnan(chosen).all() else float(np.nanmedian(chosen))

    def numbers(self) -> dict[str, Any]:
        correlation, p_value = self.correlation()
        way = angles_along(self.path)
        aligned, misaligned = (kept(angles, 2) for angles in self.special_angles)
        return {
            "config": self.config.model_dump(),
            "updates": len(self.path) - 1,
            "arrived": self.arrived,
            "turned_degrees": round(float(way[-1] - way[0]), 2),
            "spearman": kept([correlation], 4)[0],
            "p_value": None if math.isnan(p_value) else float(f"{p_value:.2g}"),
            "not_travelled_without_delay": int(np.isinf(self.plain).sum()),
            "not_travelled_with_delay": int(np.isinf(self.delayed).sum()),
            "aligned_angles": aligned,
            "misaligned_angles": misaligned,
            "angles": kept(self.angles, 3),
            "misalignments": kept(self.misalignments, 4),
            "updates_without_delay": kept(self.plain, None),
            "updates_with_delay": kept(self.delayed, None),
        }


def spiral(point: Tensor) -> Tensor:
    """f = r^2 + (20 sin(4 r - theta) + 1)^2 at a point (x, y)."""
    radius, angle = torch.linalg.vector_norm(point), torch.atan2(point[1], point[0])
    value: Tensor = radius**2 + (20.0 * torch.sin(4.0 * radius - angle) + 1.0) ** 2
    return value


def _radius_and_phase(points: Array) -> tuple[Array, Array]:  # r and 4 r - theta at points (N, 2)
    x, y = points.T
    radius = np.hypot(x, y)
    return radius, 4.0 * radius - np.arctan2(y, x)


def spiral_gradient(points: Array) -> Array:
    """At points (N, 2): by hand, since a descent takes a hundred thousand of them."""
    x, y = points.T
    radius, phase = _radius_and_phase(points)
    by_phase = 2.0 * (20.0 * np.sin(phase) + 1.0) * 20.0 * np.cos(phase)
    by_radius, by_angle = 2.0 * radius + 4.0 * by_phase, -by_phase
    by_x = by_radius * x / radius - by_angle * y / radius**2
    by_y = by_radius * y / radius + by_angle * x / radius**2
    return np.stack([by_x, by_y], axis=1)


def spiral_hessians(points: Array) -> Tensor:  # at points (N, 2): (N, 2, 2)
    hessians: Tensor = vmap(hessian(spiral))(torch.from_numpy(points))
    return hessians


def misalignment(hessians: Tensor) -> Array:
    """sum |H_ij| of matrices (N, 2, 2) over its minimum over rotations, the sum of |eigenvalues|:
    from 1 to 2."""
    ratio: Array = (
        hessians.abs().sum((-2, -1)) / torch.linalg.eigvalsh(hessians).abs().sum(-1)
    ).numpy()
    return ratio


def floor_points(radii: Array) -> Array:  # (N, 2) at these radii
    angles = 4.0 * radii - PHASE_OF_FLOOR
    return np.stack([radii * np.cos(angles), radii * np.sin(angles)], axis=1)


def distance_from_floor(points: Array) -> Array:
    """Signed and to first order, for points (N, 2) in the valley."""
    radius, phase = _radius_and_phase(points)
    return _wrapped(phase - PHASE_OF_FLOOR) / np.sqrt(16.0 + 1.0 / radius**2)


def _wrapped(angle: Array) -> Array:
    return (angle + math.pi) % (2.0 * math.pi) - math.pi


def angles_along(path: Array) -> Array:  # angles of points (T, 2), unwrapped
    unwrapped: Array = np.degrees(np.unwrap(np.arctan2(path[:, 1], path[:, 0])))
    return unwrapped


def adam_at(
    config: SpiralConfig, states: State, iterations: NDArray[np.int64], delay: int
) -> DelayedAdam:
    """Adam at N iterations of a trajectory without delay (T + 1, 2), to go on from there with a
    delay."""
    recent = [states.point[np.maximum(0, iterations - age)] for age in range(delay, -1, -1)]
    moments = states.exp_avg[iterations], states.exp_avg_sq[iterations]
    step = iterations[:, None].astype(np.float64)
    return DelayedAdam(
        spiral_gradient, config.lr, config.beta1, config.beta2, recent, *moments, step
    )


def run_spiral(config: SpiralConfig) -> SpiralResult:
    """Descend without delay, and measure at random iterations what a delay introduced there would
    cost."""
    states = spiral_trajectory(config)
    path = states.point
    candidates = np.arange(min(len(path) - 1, config.first_measured), len(path))
    count = min(config.measurements, len(candidates))
    chosen = np.sort(
        np.random.default_rng(config.seed).choice(candidates, size=count, replace=False)
    )
    plain, delayed = (
        updates_for_interval(config, adam_at(config, states, chosen, delay))
        for delay in (0, config.delay)
    )
    angles = angles_along(path)
    misalignments = misalignment(spiral_hessians(path[chosen]))
    return SpiralResult(
        config, path, angles[chosen], plain, delayed, misalignments, special_angles(config, angles)
    )


def spiral_trajectory(config: SpiralConfig) -> State:
    """Without delay, with the optimizer's state at each iteration t = 0 .. T; arrays (T + 1, 2)."""
    start = State(floor_points(np.array([config.start_radius])), np.zeros((1, 2)), np.zeros((1, 2)))
    adam = adam_at(config, start, np.array([0]), delay=0)
    adam.trace = trace = [start]
    adam.updates_until(lambda points: np.hypot(*points.T) <= config.end_radius, config.most_updates)
    return State(*(np.concatenate(values) for values in zip(*trace, strict=True)))


def updates_for_interval(config: SpiralConfig, adam: DelayedAdam) -> Array:
    """Updates until each point's angle has fallen by the interval (N,); infinite where it has not
    in time."""
    angle = np.arctan2(*adam.recent[-1].T[::-1])
    turned = np.zeros(len(angle))

    def has_arrived(points: Array) -> NDArray[np.bool_]:
        nonlocal angle
        before, angle = angle, np.arctan2(*points.T[::-1])
        turned[:] += _wrapped(angle - before)
        return turned <= -math.radians(config.interval_degrees)

    return adam.updates_until(has_arrived, config.most_measured)


def special_angles(config: SpiralConfig, angles: Array) -> tuple[Array, Array]:
    """Where on the floor, as far as the path goes, the dominant eigenvector is on an axis, and
    half-way."""
    points = floor_points(np.linspace(config.start_radius, config.end_radius, 4000))
    along_floor = angles_along(points)
    along_floor += angles[0] - along_floor[0]
    dominant = torch.linalg.eigh(spiral_hessians(points)).eigenvectors[:, :, -1].numpy()
    # Four times the eigenvector's direction makes one turn from axis to axis, and does not see its
    # sign.
    turns = np.unwrap(4.0 * np.arctan2(dominant[:, 1], dominant[:, 0])) / (2.0 * math.pi)
    inside = (along_floor >= angles.min()) & (along_floor <= angles.max())

    aligned, misaligned = (np.diff(np.floor(turns - offset)) != 0 for offset in (0.0, 0.5))
    return along_floor[1:][aligned & inside[1:]], along_floor[1:][misaligned & inside[1:]]


def draw_spiral(result: SpiralResult, path: Path) -> list[Path]:
    with new_figure(width=3.2, height=5.4, columns=2) as figure:
        (way, across), (along, against) = figure.subplots(2, 2)
        _draw_way(way, result)
        _draw_oscillation_across(across, result)
        slowdowns = result.slowdowns
        highest = max(1.1, 1.1 * float(np.nanmax(slowdowns, initial=1.0)))
        for axes, places in ((along, result.angles), (against, result.misalignments)):
            axes.plot(places, slowdowns, ".", color=COLORS["Adam"], markersize=3)
            axes.axhline(1.0, color="black", linewidth=0.5)
            axes.set_ylim(0.0, highest)
        _mark(along, result)
        along.set_ylabel("slowdown $T_{delay} / T_{no\\ delay}$")
        along.set_title("dotted: aligned (green), misaligned (red)")
        correlation, _ = result.correlation()
        if math.isfinite(correlation):
            against.set_title(f"Spearman correlation {correlation:.3f}")
        against.set(xlabel="misalignment $\\Sigma |H_{ij}|$ / minimum", ylabel="slowdown")
        return save(figure, path, _spiral_caption(result))


def _draw_way(axes: Axes, result: SpiralResult) -> None:
    x, y = result.path[:: max(1, len(result.path) // 20000)].T
    floor = floor_points(np.linspace(result.config.start_radius, result.config.end_radius, 2000))
    axes.plot(*floor.T, color="0.85", linewidth=3.0, zorder=1)
    axes.plot(x, y, color=COLORS["Adam"], linewidth=0.8, zorder=2, rasterized=True)
    axes.plot(*result.path[0], marker="s", color="black", markersize=4)
    along = angles_along(result.path)
    for angles, color in zip(result.special_angles, SPECIAL_COLORS, strict=True):
        radii = result.config.start_radius + np.radians(angles - along[0]) / 4.0
        points = np.stack([radii * np.cos(np.radians(angles)), radii * np.sin(np.radians(angles))])
        axes.plot(*points, "o", color=color, markersize=4, zorder=3)
    axes.set(
        xlabel="x",
        ylabel="y",
        aspect="equal",
        title="Adam without delay; grey: floor of the valley",
    )
    _magnify_oscillation(axes, result, floor)


def _magnify_oscillation(axes: Axes, result: SpiralResult, floor: Array) -> None:
    distance = distance_from_floor(result.path)  # the inset is where this is largest
    center = result.path[int(np.argmax(distance))]
    # Show a little more than the largest distance.
    half = 1.3 * max(float(distance.max()), result.config.lr)
    inset = axes.inset_axes(
        (1.0, 0.7, 0.28, 0.28), xlim=center[0] + [-half, half], ylim=center[1] + [-half, half]
    )
    near = np.abs(result.path - center).max(axis=1) < 2 * half
    inset.plot(*floor.T, color="0.85", linewidth=3.0)
    path = np.where(near[:, None], result.path, np.nan)
    inset.plot(*path.T, color=COLORS["Adam"], marker=".", markersize=2, linewidth=0.6)
    inset.set(xticks=[], yticks=[], aspect="equal")
    inset.grid(visible=False)
    for spine in inset.spines.values():
        spine.set_visible(True)
    axes.indicate_inset_zoom(inset, edgecolor="black")


def _draw_oscillation_across(axes: Axes, result: SpiralResult) -> None:
    """Root mean square distance from the floor in bins of two degrees, in steps."""
    turned = angles_along(result.path)
    bins = np.floor((turned[0] - turned) / 2.0).astype(int)
    bins -= bins.min()
    counts = np.bincount(bins)
    visited = counts >= 10
    centers, squares = (
        np.bincount(bins, weights=values)[visited] / counts[visited]
        for values in (turned, distance_from_floor(result.path) ** 2)
    )
    axes.plot(centers, np.sqrt(squares) / result.config.lr, color=COLORS["Adam"], linewidth=1.0)
    _mark(axes, result)
    axes.set(ylabel="oscillation across the valley\n(r.m.s. distance, in steps of lr)")


def _mark(axes: Axes, result: SpiralResult) -> None:
    """Green lines at aligned angles, red ones at misaligned; the way is from left to right."""
    for angles, color in zip(result.special_angles, SPECIAL_COLORS, strict=True):
        for angle in angles:
            axes.axvline(float(angle), color=color, linestyle=":", linewidth=1.0)
    turned = angles_along(result.path)
    margin = 0.02 * float(np.ptp(turned))
    axes.set_xlim(turned.max() + margin, turned.min() - margin)
    axes.set_xlabel("angle along the spiral (degrees)")


def _spiral_caption(result: SpiralResult) -> str:
    config = result.config
    numbers = result.numbers()
    lines = [
        f"Adam on r^2 + (20 sin(4 r - theta) + 1)^2, lr {config.lr:g}, beta1 {config.beta1:g}, "
        f"beta2 {config.beta2:g};"
        f" delay {config.delay} introduced at {len(result.angles)} random iterations; slowdown: "
        f"updates for"
        f" {config.interval_degrees:g} degrees with delay over those without. Green: the Hessian's "
        f"dominant eigenvector"
        " on the floor of the valley lies along an axis; red: half-way between axes.",
        f"trajectory without delay: from radius {config.start_radius:g}, {numbers['updates']:,} "
        f"updates,"
        f" {numbers['turned_degrees']:g} degrees; "
        + (
            f"arrived at radius {config.end_radius:g}"
            if result.arrived
            else "came to a stop on the way"
        ),
        f"aligned angles: {numbers['aligned_angles']}; misaligned angles: "
        f"{numbers['misaligned_angles']}",
        f"measurements that did not travel the angle in {config.most_measured:,} updates:"
        f" {numbers['not_travelled_without_delay']} without delay, "
        f"{numbers['not_travelled_with_delay']} with",
    ]
    for low, high in ((1.0, 1.1), (1.1, 1.5), (1.5, 2.0)):
        median = result.median_slowdown(low, high)
        slowdown = "none measured" if median is None else f"median slowdown {median:.2f}"
        lines.append(f"misalignment {low:g} to {high:g}: {slowdown}")
    correlation, p_value = result.correlation()
    if math.isfinite(correlation):
        lines.append(
            f"Spearman correlation of misalignment and slowdown: {correlation:.3f} (p "
            f"{p_value:.2g})"
        )
    return "\n".join(lines)
