"""A quadratic whose eigenvectors are at an angle to the coordinates, with and without delay.

This is the paper's first toy landscape. Adam scales the gradient by a diagonal matrix, which fits
the Hessian if its eigenvectors are the axes. If they are not, delay costs Adam more."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Self

import numpy as np
from matplotlib.axes import Axes
from numpy.typing import NDArray
from pydantic import Field, model_validator

from brx.config.schema import refuse
from brx.errors import counted
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
"""Pairs of an optimizer and whether the eigenvectors are the axes. Each runs with delay and
without."""


class QuadraticSection(ToySection):
    """Settings of everything that descends a quadratic."""

    target: float = Field(gt=0)  # the loss at which a run has converged
    # The dominant eigenvalue comes first.
    eigenvalues: list[Annotated[float, Field(gt=0)]] = Field(min_length=2, max_length=2)

    def check_loss(self, key: str, loss: float) -> None:
        """Refuse a start whose loss is not above the target; `key` is the setting of the start."""
        refuse(
            loss <= self.target,
            f"{key}: the loss there, {loss:g}, must be above the target, {self.target:g}",
        )


class QuadraticConfig(QuadraticSection):
    """AdaSGD and Adam on the quadratic, aligned and misaligned, with delay and without."""

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
        """The angle between eigenvectors and coordinates."""
        return 0.0 if aligned else self.rotation_degrees


def rotation(degrees: float) -> Array:
    """The rotation matrix (2, 2) of an angle; its columns are the eigenvectors."""
    cosine = math.cos(math.radians(degrees))
    sine = math.sin(math.radians(degrees))
    return np.array([[cosine, -sine], [sine, cosine]])


def quadratic_hessians(eigenvalues: Sequence[float], angles_degrees: Sequence[float]) -> Array:
    """The Hessians Q diag(eigenvalues) Q^T (A, 2, 2), with Q = `rotation` of each angle."""
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
    """Adam (or AdaSGD, with `one_size`) on A quadratics from S starts each.

    Returns the number of updates that each start needs to reach the target loss (A, S), which is
    infinite if it never does. The state after every update is appended to `trace`, if given."""
    adam = DelayedAdam(
        lambda points: np.einsum("aij,asj->asi", curvatures, points),  # H w
        config.lr,
        beta1,
        config.beta2,
        [starts] * (delay + 1),
        one_size=one_size,
        trace=trace,
    )

    def is_at_target(points: Array) -> NDArray[np.bool_]:
        # w^T H w / 2
        losses: Array = 0.5 * np.einsum("asi,aij,asj->as", points, curvatures, points)
        return losses <= config.target

    return adam.updates_until(is_at_target, config.most_updates)


class Case(NamedTuple):
    """One way to descend the quadratic."""

    optimizer: OptimizerName
    aligned: bool  # whether the eigenvectors are the axes
    delay: int


class Trajectory(NamedTuple):
    """The descent of one case, and the number of updates that it needs from other starts."""

    path: Array  # the points (T + 1, 2), in the coordinates in which the optimizer works
    along_dominant: Array  # each update's component along the dominant eigenvector (T,)
    # (1 + N,): updates until the target loss, from the configured start and from N others; infinite
    # if a start never arrives.
    updates: Array


class QuadraticResult(NamedTuple):
    """The descents of all cases."""

    config: QuadraticConfig
    runs: dict[Case, Trajectory]

    def slowdowns(self, optimizer: OptimizerName, aligned: bool) -> tuple[float, float]:
        """Updates with delay divided by updates without: from the configured start, and the median
        over the other starts.

        A start's slowdown is infinite if only the delayed run never arrives. It is NaN if the run
        without delay never arrives; the median leaves such starts out."""
        plain = self.runs[Case(optimizer, aligned, 0)].updates
        delayed = self.runs[Case(optimizer, aligned, self.config.delay)].updates
        first, *others = slowdown_ratios(plain, delayed)
        known = [ratio for ratio in others if not math.isnan(ratio)]
        return float(first), float(np.median(known)) if known else math.nan

    def numbers(self) -> dict[str, Any]:
        """The content of the JSON file. A slowdown of None is infinite or unknown."""
        runs = [_numbers_of(case, run) for case, run in self.runs.items()]
        slowdowns = []
        for optimizer, aligned in COMPARISONS:
            # 17 decimal places change nothing: only infinity and NaN become None.
            first, median = kept(self.slowdowns(optimizer, aligned), 17)
            slowdowns.append(
                {
                    "optimizer": optimizer,
                    "aligned": aligned,
                    "slowdown": first,
                    "median_slowdown_from_other_starts": median,
                }
            )
        return {"config": self.config.model_dump(), "runs": runs, "slowdowns": slowdowns}


def _numbers_of(case: Case, run: Trajectory) -> dict[str, Any]:
    """A run's numbers in the file.

    `sign_changes` is the share of updates whose sign along the dominant eigenvector differs from
    the previous update's; None if there is only one update."""
    signs = np.sign(run.along_dominant)
    turns = signs[1:] != signs[:-1]
    first, *others = kept(run.updates, None)
    return case._asdict() | {
        "updates": first,
        "sign_changes": round(float(turns.mean()), 4) if len(turns) else None,
        "updates_from_other_starts": others,
    }


def run_quadratic(config: QuadraticConfig) -> QuadraticResult:
    """Descend the quadratic in all cases, from the configured start and from the others."""
    others = random_starts(config.seed, config.other_starts, math.hypot(*config.start))
    runs = {}
    for optimizer, aligned in COMPARISONS:
        basis = rotation(config.degrees(aligned))
        curvature = quadratic_hessians(config.eigenvalues, [config.degrees(aligned)])  # (1, 2, 2)
        starts = np.array([config.start, *others]) @ basis.T  # (1 + N, 2)
        for delay in (0, config.delay):
            trace: list[State] = []
            updates = descend(
                config, curvature, starts[None], config.beta1, delay, optimizer == "AdaSGD", trace
            )[0]
            # The trace goes on until all starts have arrived. The path is of the configured start,
            # the first one, and ends when that has arrived.
            last = int(min(updates[0], config.most_updates))
            path = np.stack([starts[0], *(state.point[0, 0] for state in trace[:last])])
            along_dominant = np.diff(path, axis=0) @ basis[:, 0]
            runs[Case(optimizer, aligned, delay)] = Trajectory(path, along_dominant, updates)
    return QuadraticResult(config, runs)


def draw_quadratic(result: QuadraticResult, path: Path) -> list[Path]:
    """Draw the aligned case (left) and the misaligned one (right); returns the files written.

    Top: the paths on the landscape. Bottom: Adam's updates along the dominant eigenvector.

    Args:
        result: what `run_quadratic` returned.
        path: the figure's path without suffix.
    """
    with new_figure(width=3.6, height=4.8, columns=2) as figure:
        panels = figure.subplots(2, 2, height_ratios=[3, 1.5])
        for column, aligned in enumerate((True, False)):
            _draw_paths(panels[0, column], result, aligned)
            _draw_updates(panels[1, column], result, aligned)
        panels[1, 0].sharey(panels[1, 1])
        panels[1, 0].sharex(panels[1, 1])
        return save(figure, path, _quadratic_caption(result))


def _draw_paths(axes: Axes, result: QuadraticResult, aligned: bool) -> None:
    axes.set_title("eigenbasis aligned with the axes" if aligned else "eigenbasis misaligned")
    _draw_landscape(axes, result, aligned)
    runs = _runs_where(result, aligned)
    for case, run in runs.items():
        delay = f"delay {case.delay}" if case.delay else "no delay"
        label = f"{case.optimizer}, {delay}: {_count(run)}"
        axes.plot(*run.path.T, **_style(case), linewidth=1.0, marker="o", markersize=2, label=label)
    start = next(iter(runs.values())).path[0]  # of all runs
    axes.plot(*start, marker="s", color="black", markersize=4)
    axes.set(xlabel="$w_1$", ylabel="$w_2$" if aligned else None)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.17), ncols=2, fontsize=6)


def _draw_updates(axes: Axes, result: QuadraticResult, aligned: bool) -> None:
    """Draw Adam's updates along the dominant eigenvector."""
    for case, run in _runs_where(result, aligned).items():
        if case.optimizer == "Adam":
            numbers = range(1, len(run.path))
            axes.plot(numbers, run.along_dominant, **_style(case), linewidth=1.0)
    axes.axhline(0.0, color="black", linewidth=0.5)
    axes.set(
        xlabel="update",
        ylabel="Adam's update along\nthe dominant eigenvector" if aligned else None,
    )


def _runs_where(result: QuadraticResult, aligned: bool) -> dict[Case, Trajectory]:
    return {case: run for case, run in result.runs.items() if case.aligned == aligned}


def _style(case: Case) -> dict[str, Any]:
    return {"color": COLORS[case.optimizer], "linestyle": line_style(is_delayed=case.delay > 0)}


def _count(run: Trajectory) -> str:
    """How many updates the configured start needs, as a text."""
    num_updates = run.updates[0]
    return counted(num_updates, "update", ".0f") if np.isfinite(num_updates) else "never there"


def _draw_landscape(axes: Axes, result: QuadraticResult, aligned: bool) -> None:
    """Draw contour lines of the loss around all points, with a thick one at the target loss."""
    config = result.config
    points = np.concatenate([run.path for run in _runs_where(result, aligned).values()])
    middle = (points.min(0) + points.max(0)) / 2
    half = 0.55 * float(np.ptp(points, axis=0).max())  # half the width of the square that is drawn
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
        f"Quadratic with eigenvalues {config.eigenvalues}; updates until the loss is "
        f"{config.target:g} (dark ellipse) without delay and with delay {config.delay}, lr "
        f"{config.lr:g}, beta1 {config.beta1:g}, beta2 {config.beta2:g}. Slowdown: their ratio; in "
        f"brackets its median over {counted(config.other_starts, 'other start')} at the same "
        "distance."
    ]
    for optimizer, aligned in COMPARISONS:
        plain = _count(result.runs[Case(optimizer, aligned, 0)])
        delayed = _count(result.runs[Case(optimizer, aligned, config.delay)])
        slowdown, median = map(_ratio_text, result.slowdowns(optimizer, aligned))
        basis = "aligned" if aligned else "misaligned"
        lines.append(
            f"{optimizer}, {basis}: {plain}, with delay {delayed}, slowdown {slowdown} ({median})"
        )
    return "\n".join(lines)


def _ratio_text(ratio: float) -> str:
    if math.isnan(ratio):
        return "unknown"
    return "infinite" if math.isinf(ratio) else f"{ratio:.2f}"
