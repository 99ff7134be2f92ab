"""The figure of `brx toy sweep`: slowdown against angle and against delay times norm."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes

from brx.paper.toy.sweep import SweepResult
from brx.plot.style import new_figure, save, sequence_color


def draw_sweep(result: SweepResult, path: Path) -> list[Path]:
    """A column per momentum: slowdown against the angle beside the (1,1)-norm (top), and against tau x norm (bottom).

    Returns:
        The files written (PNG, PDF, caption).
    """
    momenta = result.config.momenta
    with new_figure(width=3.4, height=5.2, columns=len(momenta)) as figure:
        panels = figure.subplots(2, len(momenta), squeeze=False, sharey="row")
        for column, beta1 in enumerate(momenta):
            top, bottom = panels[:, column]
            top.set_title(f"Adam without momentum, $\\beta_1$ = {beta1:g}" if beta1 == 0 else f"$\\beta_1$ = {beta1:g}")
            _draw_against_angle(top, result, column)
            _draw_against_product(bottom, result, column)
        panels[0, 0].set_ylabel("slowdown (median over starts)")
        panels[1, 0].set_ylabel("slowdown (median over starts)")
        panels[0, 0].legend(fontsize=6)
        return save(figure, path, _caption(result))


def _draw_against_angle(axes: Axes, result: SweepResult, momentum: int) -> None:
    angles = result.config.angles_degrees
    for index, delay in enumerate(result.config.delays):
        color = sequence_color(index, len(result.config.delays))
        slowdowns = result.slowdowns[momentum, index]
        axes.plot(angles, _finite(slowdowns), color=color, marker="o", markersize=3, label=f"$\\tau$ = {delay}")
    axes.plot(angles, result.norms, color="black", linestyle=":", label="(1,1)-norm / its minimum")
    axes.set_yscale("log")
    axes.set_xlabel("angle of the eigenvectors to the coordinates (degrees)")


def _draw_against_product(axes: Axes, result: SweepResult, momentum: int) -> None:
    for index, delay in enumerate(result.config.delays):
        color = sequence_color(index, len(result.config.delays))
        axes.plot(delay * result.norms, _finite(result.slowdowns[momentum, index]), "o", color=color, markersize=3)
    axes.set(xscale="log", yscale="log", xlabel="$\\tau \\times$ (1,1)-norm / its minimum")


def _finite(values: np.ndarray) -> np.ndarray:
    """Gaps where there is no number."""
    return np.where(np.isfinite(values), values, np.nan)


def _caption(result: SweepResult) -> str:
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
