"""Figures of the two toy landscapes: "Impact of basis alignment" and "spiral"."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from brx.paper.toy.quadratic import QuadraticResult, Trajectory, comparisons, hessian
from brx.paper.toy.spiral import FloatArray, SpiralResult, angles_along, distance_from_floor, floor_points
from brx.plot.style import line_style, new_figure, save

ADASGD_COLOR, ADAM_COLOR = "#0072B2", "#E69F00"  # blue and orange, as in the paper
WIDTHS_MAGNIFIED = 1.3
"""Half the side of the spiral's inset, in the largest distances of the path from the floor."""
ALIGNED_COLOR, MISALIGNED_COLOR = "#009E73", "#D55E00"


def draw_quadratic(result: QuadraticResult, path: Path) -> list[Path]:
    """Trajectories of both optimizers (top) and Adam's updates along the dominant eigenvector (bottom).

    Returns:
        The files written (PNG, PDF, caption).
    """
    with new_figure(width=3.6, height=4.8, columns=2) as figure:
        panels = figure.subplots(2, 2, height_ratios=[3, 1.5])
        for column, aligned in enumerate((True, False)):
            top, bottom = panels[0, column], panels[1, column]
            shown = [trajectory for trajectory in result.trajectories if trajectory.case.aligned == aligned]
            top.set_title("eigenbasis aligned with the axes" if aligned else "eigenbasis misaligned")
            _draw_landscape(top, result, aligned, shown)
            for trajectory in shown:
                path_in_plane, style = trajectory.path.T.numpy(), _line(trajectory)
                top.plot(*path_in_plane, **style, marker="o", markersize=2, label=_label(trajectory))
            top.plot(*shown[0].path[0].numpy(), marker="s", color="black", markersize=4)
            top.set(xlabel="$w_1$", ylabel="$w_2$" if aligned else None)
            top.legend(loc="upper center", bbox_to_anchor=(0.5, -0.17), ncols=2, fontsize=6)
            for trajectory in shown:
                if trajectory.case.optimizer == "Adam":
                    updates = trajectory.along_dominant.numpy()
                    bottom.plot(range(1, len(updates) + 1), updates, **_line(trajectory))
            bottom.axhline(0.0, color="black", linewidth=0.5)
            bottom.set(xlabel="update", ylabel="Adam's update along\nthe dominant eigenvector" if aligned else None)
        panels[1, 0].sharey(panels[1, 1])
        panels[1, 0].sharex(panels[1, 1])
        return save(figure, path, _quadratic_caption(result))


def draw_spiral(result: SpiralResult, path: Path) -> list[Path]:
    """The trajectory, its oscillation across the valley, the slowdown along the way and against misalignment.

    Returns:
        The files written (PNG, PDF, caption).
    """
    with new_figure(width=3.2, height=5.4, columns=2) as figure:
        (way, across), (along, against) = figure.subplots(2, 2)
        _draw_way(way, result)
        _draw_oscillation_across(across, result)
        _draw_slowdown_along(along, result)
        against.plot(result.misalignments, result.slowdowns, ".", color=ADAM_COLOR, markersize=3)
        against.axhline(1.0, color="black", linewidth=0.5)
        correlation = result.correlation()
        if correlation is not None:
            against.set_title(f"Spearman correlation {correlation[0]:.3f}")
        against.set(xlabel="misalignment $\\Sigma |H_{ij}|$ / minimum", ylabel="slowdown", ylim=along.get_ylim())
        return save(figure, path, _spiral_caption(result))


def _label(trajectory: Trajectory) -> str:
    delay = f"delay {trajectory.case.delay}" if trajectory.case.delay else "no delay"
    return f"{trajectory.case.optimizer}, {delay}: {_count(trajectory.updates)}"


def _line(trajectory: Trajectory) -> dict[str, Any]:
    color = ADASGD_COLOR if trajectory.case.optimizer == "AdaSGD" else ADAM_COLOR
    return {"color": color, "linestyle": line_style(is_delayed=trajectory.case.delay > 0), "linewidth": 1.0}


def _count(updates: int | None) -> str:
    return "never there" if updates is None else f"{updates} updates"


def _draw_landscape(axes: Axes, result: QuadraticResult, aligned: bool, shown: list[Trajectory]) -> None:
    """Level lines around all the points, the one of the target loss thick."""
    points = np.concatenate([trajectory.path.numpy() for trajectory in shown])
    middle, half = (points.min(0) + points.max(0)) / 2, 0.55 * float(np.ptp(points, axis=0).max())
    x, y = (np.linspace(center - half, center + half, 200) for center in middle)
    curvature = hessian(result.config, aligned)[0].numpy()
    grid = np.stack(np.meshgrid(x, y), axis=-1)
    loss = 0.5 * np.einsum("abi,ij,abj->ab", grid, curvature, grid)
    target = result.config.target
    axes.contour(x, y, loss, levels=[target * 4.0**power for power in range(1, 7)], colors="0.8", linewidths=0.6)
    axes.contour(x, y, loss, levels=[target], colors="0.3", linewidths=1.0)
    axes.set_aspect("equal")
    axes.grid(visible=False)


def _quadratic_caption(result: QuadraticResult) -> str:
    config = result.config
    lines = [
        f"Quadratic with eigenvalues {config.eigenvalues}; updates until the loss is {config.target:g} (dark ellipse)"
        f" without delay and with delay {config.delay}, lr {config.lr:g}, beta1 {config.beta1:g}, beta2"
        f" {config.beta2:g}. Slowdown: their ratio; in brackets its median over {config.other_starts} other starts at"
        " the same distance."
    ]
    for optimizer, aligned in comparisons():
        plain, delayed = (
            trajectory.updates
            for trajectory in result.trajectories
            if trajectory.case.optimizer == optimizer and trajectory.case.aligned == aligned
        )
        lines.append(
            f"{optimizer}, {'aligned' if aligned else 'misaligned'}: {_count(plain)}, with delay {_count(delayed)},"
            f" slowdown {_ratio(result.slowdown(optimizer, aligned))}"
            f" ({_ratio(result.median_slowdown(optimizer, aligned))})"
        )
    return "\n".join(lines)


def _ratio(value: float | None) -> str:
    return "infinite" if value is None else f"{value:.2f}"


def _draw_way(axes: Axes, result: SpiralResult) -> None:
    """The path on the valley's floor, with the places where the eigenbasis lies along the axes and half-way between."""
    every = max(1, len(result.path) // 20000)
    x, y = result.path[::every].T
    floor = floor_points(np.linspace(result.config.start_radius, result.config.end_radius, 2000))
    axes.plot(*floor.T, color="0.85", linewidth=3.0, zorder=1)
    axes.plot(x, y, color=ADAM_COLOR, linewidth=0.8, zorder=2, rasterized=True)
    axes.plot(*result.path[0], marker="s", color="black", markersize=4)
    along = angles_along(result.path)
    for angles, color in _special(result):
        radii = result.config.start_radius + np.radians(angles - along[0]) / 4.0
        points = np.stack([radii * np.cos(np.radians(angles)), radii * np.sin(np.radians(angles))])
        axes.plot(*points, "o", color=color, markersize=4, zorder=3)
    axes.set(xlabel="x", ylabel="y", aspect="equal", title="Adam without delay; grey: floor of the valley")
    _magnify_oscillation(axes, result, floor)


def _magnify_oscillation(axes: Axes, result: SpiralResult, floor: FloatArray) -> None:
    """An inset beside the spiral: where the path is farthest from the floor."""
    distance = distance_from_floor(result.path)
    center = result.path[int(np.argmax(distance))]
    half = WIDTHS_MAGNIFIED * max(float(distance.max()), result.config.lr)
    inset = axes.inset_axes((1.0, 0.7, 0.28, 0.28), xlim=center[0] + [-half, half], ylim=center[1] + [-half, half])
    near = np.abs(result.path - center).max(axis=1) < 2 * half
    inset.plot(*floor.T, color="0.85", linewidth=3.0)
    inset.plot(
        *np.where(near[:, None], result.path, np.nan).T, color=ADAM_COLOR, marker=".", markersize=2, linewidth=0.6
    )
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
    squares = np.bincount(bins, weights=distance_from_floor(result.path) ** 2)
    counts = np.bincount(bins)
    visited = counts >= 10
    centers = np.bincount(bins, weights=turned)[visited] / counts[visited]
    rms = np.sqrt(squares[visited] / counts[visited]) / result.config.lr
    axes.plot(centers, rms, color=ADAM_COLOR, linewidth=1.0)
    _mark(axes, result)
    axes.set(ylabel="oscillation across the valley\n(r.m.s. distance, in steps of lr)")


def _draw_slowdown_along(axes: Axes, result: SpiralResult) -> None:
    axes.plot(result.angles, result.slowdowns, ".", color=ADAM_COLOR, markersize=3)
    axes.axhline(1.0, color="black", linewidth=0.5)
    _mark(axes, result)
    axes.set(ylabel="slowdown $T_{delay} / T_{no\\ delay}$")
    axes.set_ylim(0.0, max(1.1, 1.1 * float(np.nanmax(result.slowdowns, initial=1.0))))


def _mark(axes: Axes, result: SpiralResult) -> None:
    """Green lines at aligned angles, red ones at misaligned; the way is from left to right."""
    for angles, color in _special(result):
        for angle in angles:
            axes.axvline(float(angle), color=color, linestyle=":", linewidth=1.0)
    turned = angles_along(result.path)
    margin = 0.02 * float(np.ptp(turned))
    axes.set_xlim(turned.max() + margin, turned.min() - margin)
    axes.set_xlabel("angle along the spiral (degrees)")


def _special(result: SpiralResult) -> list[tuple[FloatArray, str]]:
    return [(result.aligned_angles, ALIGNED_COLOR), (result.misaligned_angles, MISALIGNED_COLOR)]


def _spiral_caption(result: SpiralResult) -> str:
    config = result.config
    numbers = result.numbers()
    correlation = result.correlation()
    lines = [
        f"Adam on r^2 + (20 sin(4 r - theta) + 1)^2, lr {config.lr:g}, beta1 {config.beta1:g}, beta2 {config.beta2:g};"
        f" delay {config.delay} introduced at {len(result.angles)} random iterations; slowdown: updates for"
        f" {config.interval_degrees:g} degrees with delay over those without. Green: the Hessian's dominant eigenvector"
        " on the floor of the valley lies along an axis; red: half-way between axes.",
        f"trajectory without delay: from radius {config.start_radius:g}, {numbers['updates']:,} updates,"
        f" {numbers['turned_degrees']:g} degrees; "
        + (f"arrived at radius {config.end_radius:g}" if result.arrived else "came to a stop on the way"),
        f"aligned angles: {numbers['aligned_angles']}; misaligned angles: {numbers['misaligned_angles']}",
        f"measurements that did not travel the angle in {config.most_measured:,} updates:"
        f" {numbers['not_travelled_without_delay']} without delay, {numbers['not_travelled_with_delay']} with",
    ]
    for low, high in ((1.0, 1.1), (1.1, 1.5), (1.5, 2.0)):
        median = result.median_slowdown(low, high)
        slowdown = "none measured" if median is None else f"median slowdown {median:.2f}"
        lines.append(f"misalignment {low:g} to {high:g}: {slowdown}")
    if correlation is not None and math.isfinite(correlation[0]):
        lines.append(
            f"Spearman correlation of misalignment and slowdown: {correlation[0]:.3f} (p {correlation[1]:.2g})"
        )
    return "\n".join(lines)
