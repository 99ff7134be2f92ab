"""The quadratic at many angles and delays: slowdown, and the (1,1)-norm of the Hessian.

Theorem 2.3 bounds the cost of delay by tau times this norm. A rotation of the eigenvectors changes
the norm and leaves the eigenvalues as they are."""

from pathlib import Path
from typing import Annotated, Any, NamedTuple, Self

import numpy as np
from matplotlib.axes import Axes
from pydantic import Field, model_validator

from brx.errors import counted
from brx.plot.style import factor_axis, new_figure, save, sequence_color
from brx.toy.descent import Array, kept, slowdown_ratios
from brx.toy.quadratic import (
    QuadraticSection,
    descend,
    quadratic_hessians,
    random_starts,
    rotation,
)


class SweepConfig(QuadraticSection):
    """Adam on the quadratic at every angle, momentum and delay, from many starts."""

    # Values of beta1. Each has its own sweep over angles and delays.
    momenta: list[Annotated[float, Field(ge=0, lt=1)]] = Field(min_length=1)
    angles_degrees: list[float] = Field(min_length=2)  # between eigenvectors and coordinates
    delays: list[Annotated[int, Field(ge=1)]] = Field(min_length=1)  # tau, in updates
    distance: float = Field(gt=0)  # from the starts to the optimum, in random directions
    starts: int = Field(ge=1)  # number of starts

    @model_validator(mode="after")
    def _starts_are_above_the_target(self) -> Self:
        self.check_loss("distance", 0.5 * min(self.eigenvalues) * self.distance**2)
        return self


class SweepResult(NamedTuple):
    """The Hessian's norm at each angle, and the number of updates that each descent needed."""

    config: SweepConfig
    # (angles,): sum |H_ij|, divided by the sum of the eigenvalues, which is its minimum over all
    # rotations.
    norms: Array
    # (momenta, 1 + delays, angles, starts): updates until the target loss; infinite if a start
    # never arrives. Index 0 of the second axis is without delay.
    updates: Array

    @property
    def slowdowns(self) -> Array:
        """(momenta, delays, angles): updates with delay divided by updates without, the median over
        the starts.

        Infinite where more than half of the starts never arrive. Starts that do not arrive even
        without delay are left out; NaN where none does."""
        ratios = slowdown_ratios(self.updates[:, :1], self.updates[:, 1:])
        is_known = ~np.isnan(ratios).all(-1)
        medians: Array = np.full(is_known.shape, np.nan)
        # With an even number of values, take the upper one of the middle two: their mean could be
        # infinite.
        medians[is_known] = np.nanquantile(ratios[is_known], 0.5, axis=-1, method="higher")
        return medians

    def correlation(self, momentum: int, delay: int) -> float | None:
        """Spearman's correlation of norm and slowdown over the angles that have a slowdown; None
        if all are equal, or there are fewer than two.

        Args:
            momentum: index into `config.momenta`.
            delay: index into `config.delays`.
        """
        slowdowns = self.slowdowns[momentum, delay]
        is_known = ~np.isnan(slowdowns)
        if len(np.unique(slowdowns[is_known])) < 2:
            return None
        from scipy.stats import spearmanr  # takes a second to load

        return float(spearmanr(self.norms[is_known], slowdowns[is_known]).statistic)

    def numbers(self) -> dict[str, Any]:
        """The content of the JSON file."""
        sweeps = []
        for row, beta1 in enumerate(self.config.momenta):
            for column, delay in enumerate(self.config.delays):
                sweeps.append(
                    {
                        "beta1": beta1,
                        "delay": delay,
                        "slowdowns": kept(self.slowdowns[row, column], 4),
                        "spearman_with_norm": kept([self.correlation(row, column)], 4)[0],
                    }
                )
        return {"config": self.config.model_dump(), "norms": kept(self.norms, 4), "sweeps": sweeps}


def run_sweep(config: SweepConfig) -> SweepResult:
    """Descend the quadratic from every start, at every angle, momentum and delay."""
    starts = random_starts(config.seed, config.starts, config.distance)  # (S, 2)
    curvatures = quadratic_hessians(config.eigenvalues, config.angles_degrees)  # (A, 2, 2)
    bases = np.stack([rotation(angle) for angle in config.angles_degrees])  # (A, 2, 2)
    # The starts turn with the eigenvectors, so that at every angle a start has the same place in
    # the landscape.
    points = np.einsum("aij,sj->asi", bases, starts)  # (A, S, 2)
    delays = (0, *config.delays)
    updates = []
    for beta1 in config.momenta:
        updates.append([descend(config, curvatures, points, beta1, delay) for delay in delays])
    norms = np.abs(curvatures).sum((-2, -1)) / sum(config.eigenvalues)
    return SweepResult(config, norms, np.array(updates))


def draw_sweep(result: SweepResult, path: Path) -> list[Path]:
    """Draw two panels per momentum and save the figure; returns the files written.

    Top: slowdown and the (1,1)-norm against the angle. Bottom: slowdown against tau x norm.

    Args:
        result: what `run_sweep` returned.
        path: the figure's path without suffix.
    """
    num_momenta = len(result.config.momenta)
    num_lines = len(result.config.delays) + 1
    with new_figure(width=3.4, height=5.2, columns=num_momenta) as figure:
        panels = figure.subplots(2, num_momenta, squeeze=False, sharey="row")
        for column in range(num_momenta):
            top, bottom = panels[:, column]
            _draw_momentum(top, bottom, result, column)
        for axes in panels[:, 0]:
            axes.set_ylabel("slowdown (median over starts)")
        handles, labels = panels[0, -1].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=num_lines)
        return save(figure, path, _sweep_caption(result))


def _draw_momentum(top: Axes, bottom: Axes, result: SweepResult, momentum: int) -> None:
    """Draw both panels of a momentum, an index into `config.momenta`."""
    delays = result.config.delays
    angles = result.config.angles_degrees
    # Lines have gaps where a slowdown is infinite.
    slowdowns = np.where(np.isfinite(result.slowdowns), result.slowdowns, np.nan)
    correlations = [result.correlation(momentum, index) for index in range(len(delays))]
    known = [correlation for correlation in correlations if correlation is not None]
    finding = ""
    if known:
        finding = f"rank correlation with the norm {min(known):.2f} to {max(known):.2f}"
    top.set_title(f"Adam with $\\beta_1$ = {result.config.momenta[momentum]:g}\n{finding}")
    for index, delay in enumerate(delays):
        own = slowdowns[momentum, index]
        color = sequence_color(index, len(delays))
        look: dict[str, Any] = {"color": color, "marker": "o", "markersize": 3}
        top.plot(angles, own, **look, label=f"$\\tau$ = {delay}")
        bottom.plot(delay * result.norms, own, **look, linestyle="none")
    top.plot(angles, result.norms, color="black", linestyle=":", label="(1,1)-norm / its minimum")
    top.set_xlabel("angle of the eigenvectors to the coordinates (degrees)")
    factor_axis(top)
    bottom.set(xscale="log", xlabel="$\\tau \\times$ (1,1)-norm / its minimum")
    bottom.xaxis.set_major_formatter("{x:g}")
    # A log scale needs at least one finite value.
    if np.isfinite(slowdowns).any():
        factor_axis(bottom)


def _sweep_caption(result: SweepResult) -> str:
    config = result.config
    lines = [
        f"Adam on a quadratic with eigenvalues {config.eigenvalues}, whose eigenvectors stand at "
        f"an angle to the coordinates; lr {config.lr:g}, beta2 {config.beta2:g}, from "
        f"{counted(config.starts, 'start')} at distance {config.distance:g} to a loss of "
        f"{config.target:g}. Slowdown: updates with delay over updates without, median over the "
        f"starts; a gap: more than half of them never arrive in {config.most_updates:,} updates.",
        "Spearman's correlation of slowdown and (1,1)-norm over the angles:",
    ]
    for row, beta1 in enumerate(config.momenta):
        correlations = []
        for column, delay in enumerate(config.delays):
            correlation = result.correlation(row, column)
            is_measured = np.isfinite(result.slowdowns[row, column]).any()
            none = "all equal" if is_measured else "none measured"
            text = none if correlation is None else f"{correlation:.2f}"
            correlations.append(f"tau {delay}: {text}")
        lines.append(f"beta1 {beta1:g}: {', '.join(correlations)}")
    return "\n".join(lines)
