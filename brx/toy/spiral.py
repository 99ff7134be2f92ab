"""A spiral valley along which the eigenvectors turn: what a delay costs Adam at each place.

This is the paper's second toy landscape. Where the valley runs along an axis, the Hessian's
eigenbasis is aligned with the coordinates; 45 degrees further on it is misaligned."""

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
from brx.errors import counted
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
    interval_degrees: float = Field(gt=0)  # updates are counted until this angle is travelled
    start_radius: float = Field(gt=0)  # the trajectory starts on the valley's floor at this radius,
    end_radius: float = Field(gt=0)  # and ends at this one, or after `most_updates`
    # How many iterations are drawn at random, to introduce the delay at each of them.
    measurements: int = Field(ge=2)
    most_measured: int = Field(ge=1)  # updates after which a measurement gives up

    @property
    def first_measured(self) -> int:
        """The first iteration at which the delay may be introduced: by then the second moment no
        longer depends on the start."""
        return round(2.0 / (1.0 - self.beta2))

    @model_validator(mode="after")
    def _trajectory_is_possible(self) -> Self:
        start = self.start_radius
        end = self.end_radius
        refuse(end >= start, f"end_radius must be less than start_radius ({start}), got {end}")
        least = self.first_measured
        most = self.most_updates
        refuse(
            most < least, f"most_updates: must be at least {least} (2 / (1 - beta2)), got {most}"
        )
        return self


class SpecialAngles(NamedTuple):
    """Angles on the valley's floor, in degrees along the path (unwrapped)."""

    aligned: Array  # the dominant eigenvector lies on an axis
    misaligned: Array  # it lies halfway between two axes


class SpiralResult(NamedTuple):
    """A trajectory without delay, and what a delay costs at N of its iterations.

    Angles are in degrees along the path (unwrapped); they fall towards the centre."""

    config: SpiralConfig
    path: Array  # the trajectory without delay (T + 1, 2)
    angles: Array  # where the delay was introduced (N,)
    # Updates until the interval's angle was travelled (N,); infinite if `most_measured` updates
    # were not enough.
    plain: Array  # without delay
    delayed: Array  # with delay
    misalignments: Array  # where the delay was introduced (N,); see `misalignment`
    special_angles: SpecialAngles

    @property
    def slowdowns(self) -> Array:
        """Updates with delay divided by updates without (N,); NaN where either is infinite."""
        ratios = slowdown_ratios(self.plain, self.delayed)
        return np.where(np.isfinite(ratios), ratios, np.nan)

    @property
    def arrived(self) -> bool:
        """Whether the trajectory without delay ends at the configured radius."""
        return bool(np.hypot(*self.path[-1]) <= self.config.end_radius)

    def correlation(self) -> tuple[float, float]:
        """Spearman's correlation of misalignment and slowdown, and its p-value.

        Both are NaN if there are fewer than two slowdowns."""
        finished = np.isfinite(self.slowdowns)
        if finished.sum() < 2:
            return math.nan, math.nan
        from scipy.stats import spearmanr  # takes a second to load

        correlation = spearmanr(self.misalignments[finished], self.slowdowns[finished])
        return float(correlation.statistic), float(correlation.pvalue)

    def median_slowdown(self, low: float, high: float) -> float | None:
        """The median over misalignments from `low` to `high`; None if there is no slowdown."""
        is_inside = (self.misalignments >= low) & (self.misalignments <= high)
        chosen = self.slowdowns[is_inside]
        return None if np.isnan(chosen).all() else float(np.nanmedian(chosen))

    def numbers(self) -> dict[str, Any]:
        """The content of the JSON file."""
        correlation, p_value = self.correlation()
        angles = angles_along(self.path)
        return {
            "config": self.config.model_dump(),
            "updates": len(self.path) - 1,
            "arrived": self.arrived,
            "turned_degrees": round(float(angles[-1] - angles[0]), 2),
            "spearman": kept([correlation], 4)[0],
            "p_value": None if math.isnan(p_value) else float(f"{p_value:.2g}"),
            "not_travelled_without_delay": int(np.isinf(self.plain).sum()),
            "not_travelled_with_delay": int(np.isinf(self.delayed).sum()),
            "aligned_angles": kept(self.special_angles.aligned, 2),
            "misaligned_angles": kept(self.special_angles.misaligned, 2),
            "angles": kept(self.angles, 3),
            "misalignments": kept(self.misalignments, 4),
            "updates_without_delay": kept(self.plain, None),
            "updates_with_delay": kept(self.delayed, None),
        }


def spiral(point: Tensor) -> Tensor:
    """f = r^2 + (20 sin(4 r - theta) + 1)^2 at a point (x, y)."""
    radius = torch.linalg.vector_norm(point)
    angle = torch.atan2(point[1], point[0])
    value: Tensor = radius**2 + (20.0 * torch.sin(4.0 * radius - angle) + 1.0) ** 2
    return value


def _radius_and_phase(points: Array) -> tuple[Array, Array]:
    """r and 4 r - theta at points (N, 2)."""
    x, y = points.T
    radius = np.hypot(x, y)
    return radius, 4.0 * radius - np.arctan2(y, x)


def spiral_gradient(points: Array) -> Array:
    """The gradient of `spiral` at points (N, 2).

    It is written out for speed: a descent takes a hundred thousand gradients."""
    x, y = points.T
    radius, phase = _radius_and_phase(points)
    # `by_x` is the derivative of f by x. By the chain rule: the phase 4 r - theta, then r and
    # theta, then x and y.
    by_phase = 2.0 * (20.0 * np.sin(phase) + 1.0) * 20.0 * np.cos(phase)
    by_radius = 2.0 * radius + 4.0 * by_phase
    by_angle = -by_phase
    by_x = by_radius * x / radius - by_angle * y / radius**2
    by_y = by_radius * y / radius + by_angle * x / radius**2
    return np.stack([by_x, by_y], axis=1)


def spiral_hessians(points: Array) -> Tensor:
    """The Hessians of `spiral` (N, 2, 2) at points (N, 2)."""
    hessians: Tensor = vmap(hessian(spiral))(torch.from_numpy(points))
    return hessians


def misalignment(hessians: Tensor) -> Array:
    """sum |H_ij| of matrices (N, 2, 2), divided by its minimum over all rotations (N,).

    The minimum is the sum of |eigenvalues|; the ratio lies between 1 and 2."""
    norms = hessians.abs().sum((-2, -1))
    smallest_norms = torch.linalg.eigvalsh(hessians).abs().sum(-1)
    ratio: Array = (norms / smallest_norms).numpy()
    return ratio


def floor_points(radii: Array) -> Array:
    """Points on the valley's floor (N, 2) at these radii (N,)."""
    angles = 4.0 * radii - PHASE_OF_FLOOR  # theta
    return np.stack([radii * np.cos(angles), radii * np.sin(angles)], axis=1)


def distance_from_floor(points: Array) -> Array:
    """The signed distance of points (N, 2) from the valley's floor, to first order.

    It is the deviation of the phase 4 r - theta, divided by the norm of the phase's gradient."""
    radius, phase = _radius_and_phase(points)
    return _wrapped(phase - PHASE_OF_FLOOR) / np.sqrt(16.0 + 1.0 / radius**2)


def _wrapped(angle: Array) -> Array:
    """The same angle between -pi and pi."""
    return (angle + math.pi) % (2.0 * math.pi) - math.pi


def _angles_of(points: Array) -> Array:
    """theta at points (N, 2), between -pi and pi."""
    x, y = points.T
    angles: Array = np.arctan2(y, x)
    return angles


def angles_along(path: Array) -> Array:
    """The angles of points (T, 2) along a path, unwrapped, in degrees."""
    unwrapped: Array = np.degrees(np.unwrap(_angles_of(path)))
    return unwrapped


def adam_at(
    config: SpiralConfig, states: State, iterations: NDArray[np.int64], delay: int
) -> DelayedAdam:
    """Adam that continues with a delay from N iterations of a trajectory, separately from each.

    Args:
        config: the optimizer's settings.
        states: the states of a trajectory without delay, arrays (T + 1, 2).
        iterations: the iterations to continue from (N,).
        delay: tau from there on.
    """
    # The last tau + 1 points before each iteration, the oldest first; the start stands in for
    # points before it.
    recent = [states.point[np.maximum(0, iterations - age)] for age in range(delay, -1, -1)]
    return DelayedAdam(
        spiral_gradient,
        config.lr,
        config.beta1,
        config.beta2,
        recent,
        exp_avg=states.exp_avg[iterations],
        exp_avg_sq=states.exp_avg_sq[iterations],
        step=iterations[:, None].astype(np.float64),
    )


def run_spiral(config: SpiralConfig) -> SpiralResult:
    """Descend without delay, and measure at random iterations what a delay would cost if it were
    introduced there."""
    states = spiral_trajectory(config)
    path = states.point
    candidates = np.arange(min(len(path) - 1, config.first_measured), len(path))
    count = min(config.measurements, len(candidates))
    drawn = np.random.default_rng(config.seed).choice(candidates, size=count, replace=False)
    chosen = np.sort(drawn)
    plain = updates_for_interval(config, adam_at(config, states, chosen, 0))
    delayed = updates_for_interval(config, adam_at(config, states, chosen, config.delay))
    angles = angles_along(path)
    return SpiralResult(
        config=config,
        path=path,
        angles=angles[chosen],
        plain=plain,
        delayed=delayed,
        misalignments=misalignment(spiral_hessians(path[chosen])),
        special_angles=special_angles(config, angles),
    )


def spiral_trajectory(config: SpiralConfig) -> State:
    """Descend without delay; returns the states at iterations t = 0 .. T, arrays (T + 1, 2)."""
    start = State(floor_points(np.array([config.start_radius])), np.zeros((1, 2)), np.zeros((1, 2)))
    adam = adam_at(config, start, np.array([0]), delay=0)
    trace = [start]
    adam.trace = trace
    adam.updates_until(lambda points: np.hypot(*points.T) <= config.end_radius, config.most_updates)
    return State(
        point=np.concatenate([state.point for state in trace]),
        exp_avg=np.concatenate([state.exp_avg for state in trace]),
        exp_avg_sq=np.concatenate([state.exp_avg_sq for state in trace]),
    )


def updates_for_interval(config: SpiralConfig, adam: DelayedAdam) -> Array:
    """Updates until each point's angle has fallen by the interval (N,).

    Infinite for points that have not come that far after `most_measured` updates."""
    angles = _angles_of(adam.recent[-1])
    turned = np.zeros(len(angles))  # radians since the beginning; negative towards the centre

    def has_arrived(points: Array) -> NDArray[np.bool_]:
        nonlocal angles
        before = angles
        angles = _angles_of(points)
        turned[:] += _wrapped(angles - before)
        return turned <= -math.radians(config.interval_degrees)

    return adam.updates_until(has_arrived, config.most_measured)


def special_angles(config: SpiralConfig, angles: Array) -> SpecialAngles:
    """Where the eigenbasis is aligned or misaligned on the valley's floor.

    Args:
        config: the radii between which the floor is searched.
        angles: the angles along the trajectory (T + 1,), in degrees. Only angles that it reaches
            are returned.
    """
    points = floor_points(np.linspace(config.start_radius, config.end_radius, 4000))
    along_floor = angles_along(points)
    along_floor += angles[0] - along_floor[0]  # both begin at the same angle
    eigenvectors = torch.linalg.eigh(spiral_hessians(points)).eigenvectors
    dominant = eigenvectors[:, :, -1].numpy()  # (4000, 2): of the largest eigenvalue
    # Four times the eigenvector's angle makes one full turn from an axis to the next, and does not
    # depend on the eigenvector's sign.
    turns = np.unwrap(4.0 * _angles_of(dominant)) / (2.0 * math.pi)
    is_reached = (along_floor >= angles.min()) & (along_floor <= angles.max())
    # At a whole number of turns it lies on an axis, at a half number halfway between two axes.
    passes_axis = np.diff(np.floor(turns)) != 0
    passes_halfway = np.diff(np.floor(turns - 0.5)) != 0
    return SpecialAngles(
        aligned=along_floor[1:][passes_axis & is_reached[1:]],
        misaligned=along_floor[1:][passes_halfway & is_reached[1:]],
    )


def draw_spiral(result: SpiralResult, path: Path) -> list[Path]:
    """Draw four panels and save the figure; returns the files written.

    They are the trajectory, its oscillation across the valley, and the slowdown against the angle
    and against the misalignment.

    Args:
        result: what `run_spiral` returned.
        path: the figure's path without suffix.
    """
    with new_figure(width=3.2, height=5.4, columns=2) as figure:
        (trajectory, oscillation), (by_angle, by_misalignment) = figure.subplots(2, 2)
        _draw_trajectory(trajectory, result)
        _draw_oscillation_across(oscillation, result)
        slowdowns = result.slowdowns
        highest = max(1.1, 1.1 * float(np.nanmax(slowdowns, initial=1.0)))
        for axes, x in ((by_angle, result.angles), (by_misalignment, result.misalignments)):
            axes.plot(x, slowdowns, ".", color=COLORS["Adam"], markersize=3)
            axes.axhline(1.0, color="black", linewidth=0.5)
            axes.set_ylim(0.0, highest)
        _mark_special_angles(by_angle, result)
        by_angle.set_ylabel("slowdown $T_{delay} / T_{no\\ delay}$")
        by_angle.set_title("dotted: aligned (green), misaligned (red)")
        correlation, _ = result.correlation()
        if math.isfinite(correlation):
            by_misalignment.set_title(f"Spearman correlation {correlation:.3f}")
        by_misalignment.set(xlabel="misalignment $\\Sigma |H_{ij}|$ / minimum", ylabel="slowdown")
        return save(figure, path, _spiral_caption(result))


def _draw_trajectory(axes: Axes, result: SpiralResult) -> None:
    """Draw the trajectory on the valley's floor, with the special angles."""
    shown = result.path[:: max(1, len(result.path) // 20000)]  # at most about 20,000 points
    floor = floor_points(np.linspace(result.config.start_radius, result.config.end_radius, 2000))
    axes.plot(*floor.T, color="0.85", linewidth=3.0, zorder=1)
    axes.plot(*shown.T, color=COLORS["Adam"], linewidth=0.8, zorder=2, rasterized=True)
    axes.plot(*result.path[0], marker="s", color="black", markersize=4)
    first_angle = angles_along(result.path)[0]
    for angles, color in zip(result.special_angles, SPECIAL_COLORS, strict=True):
        # 4 r - theta is constant on the floor, so that r grows by a quarter of theta's growth.
        radii = result.config.start_radius + np.radians(angles - first_angle) / 4.0
        radians = np.radians(angles)
        points = np.stack([radii * np.cos(radians), radii * np.sin(radians)])
        axes.plot(*points, "o", color=color, markersize=4, zorder=3)
    axes.set(
        xlabel="x",
        ylabel="y",
        aspect="equal",
        title="Adam without delay; grey: floor of the valley",
    )
    _magnify_oscillation(axes, result, floor)


def _magnify_oscillation(axes: Axes, result: SpiralResult, floor: Array) -> None:
    """Draw an inset around the place where the trajectory is farthest from the floor (N, 2)."""
    distance = distance_from_floor(result.path)
    center = result.path[int(np.argmax(distance))]
    # Half the width of the inset: a little more than the largest distance, or than one step.
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
    """Draw the root mean square distance from the floor in units of lr, by bins of two degrees."""
    angles = angles_along(result.path)
    bins = np.floor((angles[0] - angles) / 2.0).astype(int)
    bins -= bins.min()
    counts = np.bincount(bins)
    visited = counts >= 10  # a mean over fewer points is too noisy to draw

    def mean_by_bin(values: Array) -> Array:
        return np.bincount(bins, weights=values)[visited] / counts[visited]

    oscillation = np.sqrt(mean_by_bin(distance_from_floor(result.path) ** 2))
    axes.plot(
        mean_by_bin(angles), oscillation / result.config.lr, color=COLORS["Adam"], linewidth=1.0
    )
    _mark_special_angles(axes, result)
    axes.set(ylabel="oscillation across the valley\n(r.m.s. distance, in steps of lr)")


def _mark_special_angles(axes: Axes, result: SpiralResult) -> None:
    """Draw green lines at aligned angles and red ones at misaligned angles. The axis of angles is
    set so that the trajectory runs from left to right."""
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
    end = f"has not arrived at radius {config.end_radius:g}"
    if result.arrived:
        end = f"arrived at radius {config.end_radius:g}"
    lines = [
        f"Adam on r^2 + (20 sin(4 r - theta) + 1)^2, lr {config.lr:g}, beta1 {config.beta1:g}, "
        f"beta2 {config.beta2:g}; delay {config.delay} introduced at "
        f"{counted(len(result.angles), 'random iteration')}; slowdown: updates for "
        f"{config.interval_degrees:g} degrees with delay over those without. Green: the Hessian's "
        "dominant eigenvector on the floor of the valley lies along an axis; red: half-way between "
        "axes.",
        f"trajectory without delay: from radius {config.start_radius:g}, "
        f"{counted(numbers['updates'], 'update', ',')}, {numbers['turned_degrees']:g} degrees; "
        f"{end}",
        f"aligned angles: {numbers['aligned_angles']}; misaligned angles: "
        f"{numbers['misaligned_angles']}",
        f"measurements that did not travel the angle in {config.most_measured:,} updates: "
        f"{numbers['not_travelled_without_delay']} without delay, "
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
