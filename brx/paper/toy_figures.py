"""The toys' figures: "Impact of basis alignment", "spiral", and the sweep over angle and delay."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
from matplotlib.axes import Axes

from brx.config import load_yaml_as
from brx.config.loading import PRESETS
from brx.files import write_json
from brx.paper.toy_problems import (
    COMPARISONS,
    Array,
    Case,
    QuadraticConfig,
    QuadraticResult,
    SpiralConfig,
    SpiralResult,
    SweepConfig,
    SweepResult,
    Trajectory,
    angles_along,
    distance_from_floor,
    floor_points,
    quadratic_hessians,
    run_quadratic,
    run_spiral,
    run_sweep,
)
from brx.plot.style import line_style, new_figure, save, sequence_color

COLORS = {"AdaSGD": "#0072B2", "Adam": "#E69F00"}  # blue and orange, as in the paper
SPECIAL_COLORS = ("#009E73", "#D55E00")  # green: the eigenbasis is aligned, red: misaligned
WIDTHS_MAGNIFIED = 1.3
"""Half the side of the spiral's inset, in the largest distances of the path from the floor."""


def run_toy(
    landscape: Literal["quadratic", "spiral", "sweep"], figure: Path, config: Path | None = None,
    numbers: Path | None = None,
) -> list[Path]:  # fmt: skip
    """Run the descents of one landscape, draw them, and keep their numbers; returns the files written.

    Args:
        landscape: which one; `sweep` is the quadratic over angle and delay.
        figure: its path without suffix.
        config: YAML file of the set-up; by default the paper's.
        numbers: the JSON file to write, if any.
    """
    section, run, draw = TOYS[landscape]
    result = run(load_yaml_as(config or PRESETS / "toy" / f"{landscape}.yaml", section))
    written = draw(result, figure)
    if numbers is None:
        return written
    numbers.parent.mkdir(parents=True, exist_ok=True)
    write_json(numbers, result.numbers())
    return [*written, numbers]


def draw_quadratic(result: QuadraticResult, path: Path) -> list[Path]:
    """Trajectories of both optimizers (top) and Adam's updates along the dominant eigenvector (bottom)."""
    with new_figure(width=3.6, height=4.8, columns=2) as figure:
        panels = figure.subplots(2, 2, height_ratios=[3, 1.5])
        for column, aligned in enumerate((True, False)):
            top, bottom = panels[0, column], panels[1, column]
            shown = {case: run for case, run in result.runs.items() if case.aligned == aligned}
            top.set_title("eigenbasis aligned with the axes" if aligned else "eigenbasis misaligned")
            _draw_landscape(top, result, aligned)
            for case, run in shown.items():
                style = {"color": COLORS[case.optimizer], "linestyle": line_style(is_delayed=case.delay > 0)}
                label = f"{case.optimizer}, {f'delay {case.delay}' if case.delay else 'no delay'}: {_count(run)}"
                top.plot(*run.path.T, **style, linewidth=1.0, marker="o", markersize=2, label=label)
                if case.optimizer == "Adam":
                    bottom.plot(range(1, len(run.path)), run.along_dominant, **style, linewidth=1.0)
            top.plot(*run.path[0], marker="s", color="black", markersize=4)
            top.set(xlabel="$w_1$", ylabel="$w_2$" if aligned else None)
            top.legend(loc="upper center", bbox_to_anchor=(0.5, -0.17), ncols=2, fontsize=6)
            bottom.axhline(0.0, color="black", linewidth=0.5)
            bottom.set(xlabel="update", ylabel="Adam's update along\nthe dominant eigenvector" if aligned else None)
        panels[1, 0].sharey(panels[1, 1])
        panels[1, 0].sharex(panels[1, 1])
        return save(figure, path, _quadratic_caption(result))


def _count(run: Trajectory) -> str:
    return f"{run.updates[0]:.0f} updates" if np.isfinite(run.updates[0]) else "never there"


def _draw_landscape(axes: Axes, result: QuadraticResult, aligned: bool) -> None:
    """Level lines around all the points, the one of the target loss thick."""
    config = result.config
    points = np.concatenate([run.path for case, run in result.runs.items() if case.aligned == aligned])
    middle, half = (points.min(0) + points.max(0)) / 2, 0.55 * float(np.ptp(points, axis=0).max())
    x, y = (np.linspace(center - half, center + half, 200) for center in middle)
    (curvature,) = quadratic_hessians(config.eigenvalues, [config.degrees(aligned)])
    grid = np.stack(np.meshgrid(x, y), axis=-1)
    loss = 0.5 * np.einsum("abi,ij,abj->ab", grid, curvature, grid)
    levels = [config.target * 4.0**power for power in range(1, 7)]
    axes.contour(x, y, loss, levels=levels, colors="0.8", linewidths=0.6)
    axes.contour(x, y, loss, levels=[config.target], colors="0.3", linewidths=1.0)
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
    for optimizer, aligned in COMPARISONS:
        plain, delayed = (_count(result.runs[Case(optimizer, aligned, delay)]) for delay in (0, config.delay))
        slowdown, median = (
            f"{ratio:.2f}" if math.isfinite(ratio) else "infinite" for ratio in result.slowdowns(optimizer, aligned)
        )
        basis = "aligned" if aligned else "misaligned"
        lines.append(f"{optimizer}, {basis}: {plain}, with delay {delayed}, slowdown {slowdown} ({median})")
    return "\n".join(lines)


def draw_spiral(result: SpiralResult, path: Path) -> list[Path]:
    """The trajectory, its oscillation across the valley, the slowdown along the way and against misalignment."""
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
        if correlation := result.correlation():
            against.set_title(f"Spearman correlation {correlation[0]:.3f}")
        against.set(xlabel="misalignment $\\Sigma |H_{ij}|$ / minimum", ylabel="slowdown")
        return save(figure, path, _spiral_caption(result))


def _draw_way(axes: Axes, result: SpiralResult) -> None:
    """The path on the valley's floor, with the places where the eigenbasis lies along the axes and half-way between."""
    every = max(1, len(result.path) // 20000)
    x, y = result.path[::every].T
    floor = floor_points(np.linspace(result.config.start_radius, result.config.end_radius, 2000))
    axes.plot(*floor.T, color="0.85", linewidth=3.0, zorder=1)
    axes.plot(x, y, color=COLORS["Adam"], linewidth=0.8, zorder=2, rasterized=True)
    axes.plot(*result.path[0], marker="s", color="black", markersize=4)
    along = angles_along(result.path)
    for angles, color in zip(result.special_angles, SPECIAL_COLORS, strict=True):
        radii = result.config.start_radius + np.radians(angles - along[0]) / 4.0
        points = np.stack([radii * np.cos(np.radians(angles)), radii * np.sin(np.radians(angles))])
        axes.plot(*points, "o", color=color, markersize=4, zorder=3)
    axes.set(xlabel="x", ylabel="y", aspect="equal", title="Adam without delay; grey: floor of the valley")
    _magnify_oscillation(axes, result, floor)


def _magnify_oscillation(axes: Axes, result: SpiralResult, floor: Array) -> None:
    """An inset beside the spiral: where the path is farthest from the floor."""
    distance = distance_from_floor(result.path)
    center = result.path[int(np.argmax(distance))]
    half = WIDTHS_MAGNIFIED * max(float(distance.max()), result.config.lr)
    inset = axes.inset_axes((1.0, 0.7, 0.28, 0.28), xlim=center[0] + [-half, half], ylim=center[1] + [-half, half])
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
    squares = np.bincount(bins, weights=distance_from_floor(result.path) ** 2)
    counts = np.bincount(bins)
    visited = counts >= 10
    centers = np.bincount(bins, weights=turned)[visited] / counts[visited]
    rms = np.sqrt(squares[visited] / counts[visited]) / result.config.lr
    axes.plot(centers, rms, color=COLORS["Adam"], linewidth=1.0)
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
    correlation, p_value = result.correlation() or (math.nan, math.nan)
    if math.isfinite(correlation):
        lines.append(f"Spearman correlation of misalignment and slowdown: {correlation:.3f} (p {p_value:.2g})")
    return "\n".join(lines)


def draw_sweep(result: SweepResult, path: Path) -> list[Path]:
    """Per momentum: slowdown against the angle beside the (1,1)-norm (top), and against tau x norm (bottom)."""
    momenta, delays, angles = result.config.momenta, result.config.delays, result.config.angles_degrees
    slowdowns = np.where(np.isfinite(result.slowdowns), result.slowdowns, np.nan)  # gaps where there is no number
    with new_figure(width=3.4, height=5.2, columns=len(momenta)) as figure:
        panels = figure.subplots(2, len(momenta), squeeze=False, sharey="row")
        for column, beta1 in enumerate(momenta):
            top, bottom = panels[:, column]
            top.set_title(f"Adam without momentum, $\\beta_1$ = {beta1:g}" if beta1 == 0 else f"$\\beta_1$ = {beta1:g}")
            for index, delay in enumerate(delays):
                look = {"color": sequence_color(index, len(delays)), "marker": "o", "markersize": 3}
                top.plot(angles, slowdowns[column, index], **look, label=f"$\\tau$ = {delay}")
                bottom.plot(delay * result.norms, slowdowns[column, index], **look, linestyle="none")
            top.plot(angles, result.norms, color="black", linestyle=":", label="(1,1)-norm / its minimum")
            top.set(yscale="log", xlabel="angle of the eigenvectors to the coordinates (degrees)")
            bottom.set(xscale="log", yscale="log", xlabel="$\\tau \\times$ (1,1)-norm / its minimum")
        for axes in panels[:, 0]:
            axes.set_ylabel("slowdown (median over starts)")
        panels[0, 0].legend(fontsize=6)
        return save(figure, path, _sweep_caption(result))


def _sweep_caption(result: SweepResult) -> str:
    config = result.config
    lines = [
        f"Adam on a quadratic with eigenvalues {config.eigenvalues}, whose eigenvectors stand at an angle to the"
        f" coordinates; lr {config.lr:g}, beta2 {config.beta2:g}, from {config.starts} starts at distance"
        f" {config.distance:g} to a loss of {config.target:g}. Slowdown: updates with delay over updates without,"
        f" median over the starts; a gap: more than half of them never arrive in {config.most_updates:,} updates.",
        "Spearman's correlation of slowdown and (1,1)-norm over the angles:",
    ]
    for row, beta1 in enumerate(config.momenta):
        correlations = [
            f"tau {delay}: " + ("all equal" if correlation is None else f"{correlation:.2f}")
            for column, delay in enumerate(config.delays)
            for correlation in [result.correlation(row, column)]
        ]
        lines.append(f"beta1 {beta1:g}: {', '.join(correlations)}")
    return "\n".join(lines)


TOYS: dict[str, tuple[type[Any], Callable[[Any], Any], Callable[[Any, Path], list[Path]]]] = {
    "quadratic": (QuadraticConfig, run_quadratic, draw_quadratic),
    "spiral": (SpiralConfig, run_spiral, draw_spiral),
    "sweep": (SweepConfig, run_sweep, draw_sweep),
}
"""By landscape: the set-up, the descents, the figure."""
