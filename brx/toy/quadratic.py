"""A quadratic whose eigenvectors stand at an angle to the coordinates, with and without delay.

Adam's step is a diagonal matrix in the coordinates. So it fits the Hessian where eigenvectors and
axes agree, and delay costs it more where they do not (the paper's first toy landscape)."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Self

import numpy as np
from matplotlib.axes import Axes
from pydantic import Field, model_validator

from brx.config.schema import refuse
from brx.plot.style import line_style, new_figure, save
from brx.toy.descent import (
    COLORS,
    Array,
    DelayedAdam,
    OptimizerName,
    State,
    ToySection,
    kept,
    slowdown_ratios,
)

COMPARISONS: list[tuple[OptimizerName, bool]] = [
    ("AdaSGD", True),
    ("Adam", True),
    ("AdaSGD", False),
    ("Adam", False),
]
"""Optimizer, and whether the eigenvectors are the axes; each runs with delay and without."""


class QuadraticSection(ToySection):
    target: float = Field(gt=0)  # the loss at which a run has converged
    # The dominant one first
    eigenvalues: list[Annotated[float, Field(gt=0)]] = Field(min_length=2, max_length=2)

    def check_loss(self, key: str, loss: float) -> None:
        refuse(
            loss <= self.target,
            f"{key}: the loss there, {loss:g}, must be above the target, {self.target:g}",
        )


class QuadraticConfig(QuadraticSection):
    beta1: float = Field(ge=0, lt=1)
    delay: int = Field(ge=1)  # tau of the delayed runs
    start: list[float] = Field(min_length=2, max_length=2)  # in coordinates of the eigenvectors
    rotation_degrees: float  # angle between eigenvectors and coordinates in the misaligned case
    other_starts: int = Field(ge=1)  # at the same distance from the optimum, in random directions

    @model_validator(mode="after")
    def _start_is_above_the_target(self) -> Self:
        l1, l2 = self.eigenvalues
        self.check_loss("start", 0.5 * (l1 * self.start[0] ** 2 + l2 * self.start[1] ** 2))
        return self

    def degrees(self, aligned: bool) -> float:
        return 0.0 if aligned else self.rotation_degrees


def rotation(degrees: float) -> Array:  # eigenvectors (2, 2), as columns
    cosine, sine = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    return np.array([[cosine, -sine], [sine, cosine]])


def quadratic_hessians(eigenvalues: Sequence[float], angles_degrees: Sequence[float]) -> Array:
    """Q diag(eigenvalues) Q^T at each angle (A, 2, 2)."""
    bases = np.stack([rotation(angle) for angle in angles_degrees])
    hessians: Array = np.einsum("aij,j,akj->aik", bases, np.array(eigenvalues), bases)
    return hessians


def random_starts(seed: int, count: int, distance: float) -> Array:
    """Points (count, 2) at this distance from the optimum, in random directions."""
    angles = np.random.default_rng(seed).uniform(0.0, 2.0 * math.pi, count)
    return distance * np.stack([np.cos(angles), np.sin(angles)], axis=-1)


def descend(
    config: QuadraticSection,
    curvatures: Array,  # (A, 2, 2)
    starts: Array,  # (A, S, 2)
    beta1: float,
    delay: int,
    one_size: bool = False,
    trace: list[State] | None = None,
) -> Array:
    """How many updates each start needs to the target loss of its quadratic (A, S); infinite for
    never."""
    adam = DelayedAdam(
        lambda points: np.einsum("aij,asj->asi", curvatures, points),
        config.lr,
        beta1,
        config.beta2,
        [starts] * (delay + 1),
        one_size=one_size,
        trace=trace,
    )
    return adam.updates_until(
        lambda points: (
            0.5 * np.einsum("asi,aij,asj->as", points, curvatures, points) <= config.target
        ),
        config.most_updates,
    )


class Case(NamedTuple):
    """What a run on the quadratic is of; `aligned`: whether the eigenvectors are the axes."""

    optimizer: OptimizerName
    aligned: bool
    delay: int


class Trajectory(NamedTuple):
    path: Array  # the points (T + 1, 2), in the coordinates in which the optimizer works
    along_dominant: Array  # each update's component along the dominant eigenvector (T,)
    updates: (
        Array  # to the target loss, from the start and from the others (1 + N,); infinite for never
    )


class QuadraticResult(NamedTuple):
    config: QuadraticConfig
    runs: dict[Case, Trajectory]

    def slowdowns(self, optimizer: OptimizerName, aligned: bool) -> tuple[float, float]:
        """Updates with delay over updates without: from the configured start, and the median over
        the others.

        A run that never arrives is infinitely slow; where that without delay does not, NaN, or left
        out of the others."""
        plain, delayed = (
            self.runs[Case(optimizer, aligned, delay)].updates for delay in (0, self.config.delay)
        )
        ratios = slowdown_ratios(plain, delayed)
        others = ratios[1:][~np.isnan(ratios[1:])]
        return float(ratios[0]), float(np.median(others)) if len(others) else math.nan

    def numbers(self) -> dict[str, Any]:
        """What is kept in a file; a slowdown of None: never, or unknown; `sign_changes`: the share
        that turns back."""
        runs, slowdowns = [], []
        for case, run in self.runs.items():
            signs = np.sign(run.along_dominant)
            first, *others = kept(run.updates, None)
            turns = signs[1:] != signs[:-1]
            # None if it arrives at the first update.
            sign_changes = round(float(turns.mean()), 4) if len(turns) else None
            counted = {
                "updates": first,
                "sign_changes": sign_changes,
                "updates_from_other_starts": others,
            }
            runs.append(case._asdict() | counted)
        for optimizer, aligned in COMPARISONS:
            ratios = kept(self.slowdowns(optimizer, aligned), 17)
            names = ("optimizer", "aligned", "slowdown", "median_slowdown_from_other_starts")
            slowdowns.append(dict(zip(names, (optimizer, aligned, *ratios), strict=True)))
        return {"config": self.config.model_dump(), "runs": runs, "slowdowns": slowdowns}


def run_quadratic(config: QuadraticConfig) -> QuadraticResult:
    others = random_starts(config.seed, config.other_starts, math.hypot(*config.start))
    runs = {}
    for optimizer, aligned in COMPARISONS:
        basis = rotation(config.degrees(aligned))
        curvature = quadratic_hessians(config.eigenvalues, [config.degrees(aligned)])
        starts = np.array([config.start, *others]) @ basis.T
        for delay in (0, config.delay):
            trace: list[State] = []
            updates = descend(
                config, curvature, starts[None], config.beta1, delay, optimizer == "AdaSGD", trace
            )[0]
            last = int(min(updates[0], config.most_updates))
            path = np.stack([starts[0], *(state.point[0, 0] for state in trace[:last])])
            runs[Case(optimizer, aligned, delay)] = Trajectory(
                path, np.diff(path, axis=0) @ basis[:, 0], updates
            )
    return QuadraticResult(config, runs)


def draw_quadratic(result: QuadraticResult, path: Path) -> list[Path]:
    with new_figure(width=3.6, height=4.8, columns=2) as figure:
        panels = figure.subplots(2, 2, height_ratios=[3, 1.5])
        for column, aligned in enumerate((True, False)):
            top, bottom = panels[0, column], panels[1, column]
            shown = {case: run for case, run in result.runs.items() if case.aligned == aligned}
            top.set_title(
                "eigenbasis aligned with the axes" if aligned else "eigenbasis misaligned"
            )
            _draw_landscape(top, result, aligned)
            for case, run in shown.items():
                style = {
                    "color": COLORS[case.optimizer],
                    "linestyle": line_style(is_delayed=case.delay > 0),
                }
                label = (
                    f"{case.optimizer}, {f'delay {case.delay}' if case.delay else 'no delay'}: "
                    f"{_count(run)}"
                )
                top.plot(*run.path.T, **style, linewidth=1.0, marker="o", markersize=2, label=label)
                if case.optimizer == "Adam":
                    bottom.plot(range(1, len(run.path)), run.along_dominant, **style, linewidth=1.0)
            top.plot(*run.path[0], marker="s", color="black", markersize=4)
            top.set(xlabel="$w_1$", ylabel="$w_2$" if aligned else None)
            top.legend(loc="upper center", bbox_to_anchor=(0.5, -0.17), ncols=2, fontsize=6)
            bottom.axhline(0.0, color="black", linewidth=0.5)
            bottom.set(
                xlabel="update",
                ylabel="Adam's update along\nthe dominant eigenvector" if aligned else None,
            )
        panels[1, 0].sharey(panels[1, 1])
        panels[1, 0].sharex(panels[1, 1])
        return save(figure, path, _quadratic_caption(result))


def _count(run: Trajectory) -> str:
    return f"{run.updates[0]:.0f} updates" if np.isfinite(run.updates[0]) else "never there"


def _draw_landscape(axes: Axes, result: QuadraticResult, aligned: bool) -> None:
    """Level lines around all the points, the one of the target loss thick."""
    config = result.config
    points = np.concatenate(
        [run.path for case, run in result.runs.items() if case.aligned == aligned]
    )
    middle, half = (points.min(0) + points.max(0)) / 2, 0.55 * float(np.ptp(points, axis=0).max())
    x, y = (np.linspace(center - half, center + half, 200) for center in middle)
    (curvature,) = quadratic_hessians(config.eigenvalues, [config.degrees(aligned)])
    grid = np.stack(np.meshgrid(x, y), axis=-1)
    loss = 0.5 * np.einsum("abi,ij,abj->ab", grid, curvature, grid)
    axes.contour(
        x,
        y,
        loss,
        levels=[config.target * 4.0**power for power in range(1, 7)],
        colors="0.8",
        linewidths=0.6,
    )
    axes.contour(x, y, loss, levels=[config.target], colors="0.3", linewidths=1.0)
    axes.set_aspect("equal")
    axes.grid(visible=False)


def _quadratic_caption(result: QuadraticResult) -> str:
    config = result.config
    lines = [
        f"Quadratic with eigenvalues {config.eigenvalues}; updates until the loss is "
        f"{config.target:g} (dark ellipse)"
        f" without delay and with delay {config.delay}, lr {config.lr:g}, beta1 {config.beta1:g}, "
        f"beta2"
        f" {config.beta2:g}. Slowdown: their ratio; in brackets its median over "
        f"{config.other_starts} other starts at"
        " the same distance."
    ]
    for optimizer, aligned in COMPARISONS:
        plain, delayed = (
            _count(result.runs[Case(optimizer, aligned, delay)]) for delay in (0, config.delay)
        )
        slowdown, median = (
            "unknown" if math.isnan(ratio) else f"{ratio:.2f}".replace("inf", "infinite")
            for ratio in result.slowdowns(optimizer, aligned)
        )
        basis = "aligned" if aligned else "misaligned"
        lines.append(
            f"{optimizer}, {basis}: {plain}, with delay {delayed}, slowdown {slowdown} ({median})"
        )
    return "\n".join(lines)
