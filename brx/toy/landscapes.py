"""The paper's two toy landscapes: a quadratic with eigenvectors at an angle, a spiral valley where
they turn.

The sweep goes over angles and delays on the quadratic, beside the Hessian's (1,1)-norm: theorem 2.3
bounds the cost of delay by tau times that norm, and a rotation changes nothing else."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Self

import numpy as np
import torch
from matplotlib.axes import Axes
from numpy.typing import NDArray
from pydantic import Field, model_validator
from scipy.stats import spearmanr
from torch import Tensor
from torch.func import hessian, vmap

from brx.config.loading import PRESETS, load_yaml_as
from brx.config.schema import Section, refuse
from brx.files import write_json
from brx.plot.style import line_style, new_figure, save, sequence_color

Array = NDArray[np.float64]
OptimizerName = Literal["AdaSGD", "Adam"]

EPS = 1e-8  # torch's
COMPARISONS: list[tuple[OptimizerName, bool]] = [
    ("AdaSGD", True),
    ("Adam", True),
    ("AdaSGD", False),
    ("Adam", False),
]
"""Of the quadratic: optimizer, and whether the eigenvectors are the axes; each is run with delay
and without."""
PHASE_OF_FLOOR = -math.asin(1.0 / 20.0)  # 4 r - theta where the second term of the spiral vanishes
COLORS = {"AdaSGD": "#0072B2", "Adam": "#E69F00"}  # blue and orange, as in the paper
SPECIAL_COLORS = ("#009E73", "#D55E00")  # green: the eigenbasis is aligned, red: misaligned


class ToySection(Section):
    """What every set-up has; the files in configs/toy say which values are the paper's, and why the
    others are so."""

    lr: float = Field(gt=0)
    beta2: float = Field(ge=0, lt=1)
    most_updates: int = Field(ge=1)  # a run that has not arrived by then never does
    seed: int = Field(ge=0)  # of what is drawn at random


class _QuadraticSection(ToySection):
    target: float = Field(gt=0)  # the loss at which a run has converged
    eigenvalues: list[Annotated[float, Field(gt=0)]] = Field(
        min_length=2, max_length=2
    )  # the dominant one first

    def check_loss(self, key: str, loss: float) -> None:
        refuse(
            loss <= self.target,
            f"{key}: the loss there, {loss:g}, must be above the target, {self.target:g}",
        )


class QuadraticConfig(_QuadraticSection):
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


class SweepConfig(_QuadraticSection):
    momenta: list[Annotated[float, Field(ge=0, lt=1)]] = Field(
        min_length=1
    )  # beta1: one sweep for each
    angles_degrees: list[float] = Field(min_length=2)  # between eigenvectors and coordinates
    delays: list[Annotated[int, Field(ge=1)]] = Field(min_length=1)  # tau, in updates
    distance: float = Field(gt=0)  # of the starts from the optimum, in random directions
    starts: int = Field(ge=1)  # how many

    @model_validator(mode="after")
    def _starts_are_above_the_target(self) -> Self:
        self.check_loss("distance", 0.5 * min(self.eigenvalues) * self.distance**2)
        return self


class SpiralConfig(ToySection):
    """Adam along the spiral, with a delay that is introduced at some of its iterations."""

    beta1: float = Field(ge=0, lt=1)
    delay: int = Field(ge=1)  # tau, once it is introduced
    interval_degrees: float = Field(gt=0)  # the angle to be travelled with and without delay
    start_radius: float = Field(gt=0)  # the trajectory starts on the valley's floor at this radius,
    end_radius: float = Field(gt=0)  # and ends at this one, or after `most_updates`
    measurements: int = Field(
        ge=2
    )  # iterations of the trajectory, drawn at random, at which the delay is introduced
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


class State(NamedTuple):
    point: Array  # (..., 2), as its moments
    exp_avg: Array
    exp_avg_sq: Array


@dataclass
class DelayedAdam:
    """Adam on many points (..., 2) at once, each by itself: w(t) = w(t-1) -
    update(gradient(w(t-1-tau))).

    With `one_size` it is AdaSGD (Wang & Wiens 2020, arXiv:2006.16541): the second moment is of the
    mean squared gradient, so that all coordinates have one step size."""

    gradient: Callable[[Array], Array]
    lr: float
    beta1: float
    beta2: float
    recent: list[Array]  # the last tau + 1 points, the newest last; at first all are the start
    exp_avg: Array | float = 0.0
    exp_avg_sq: Array | float = 0.0
    step: Array | int = 0  # updates behind the points: one number, or one per point (..., 1)
    one_size: bool = False
    trace: list[State] | None = None  # every update adds its state

    def update(self) -> Array:
        slope = self.gradient(self.recent[0])
        square = (slope**2).mean(-1, keepdims=True) if self.one_size else slope**2
        self.step = self.step + 1
        self.exp_avg = self.beta1 * self.exp_avg + (1.0 - self.beta1) * slope
        self.exp_avg_sq = self.beta2 * self.exp_avg_sq + (1.0 - self.beta2) * square
        mean = self.exp_avg / (1.0 - self.beta1**self.step)
        root = np.sqrt(self.exp_avg_sq / (1.0 - self.beta2**self.step)) + EPS
        self.recent = [*self.recent[1:], self.recent[-1] - self.lr * mean / root]
        if self.trace is not None:
            self.trace.append(State(self.recent[-1], self.exp_avg, self.exp_avg_sq))
        return self.recent[-1]

    def updates_until(self, has_arrived: Callable[[Array], NDArray[np.bool_]], most: int) -> Array:
        """How many updates each point makes before it first arrives (...); infinite if it has not
        by `most`."""
        needed = np.full(self.recent[-1].shape[:-1], np.inf)
        for count in range(1, most + 1):
            needed[np.isinf(needed) & has_arrived(self.update())] = count
            if np.isfinite(needed).all():
                break
        return needed


def _kept(values: Iterable[float | None], digits: int | None) -> list[float | None]:
    """Numbers as a file keeps them, rounded (no digits: to whole ones); None for one that is not
    finite."""
    return [None if x is None or not math.isfinite(x) else round(float(x), digits) for x in values]


def _ratios(plain: Array, delayed: Array) -> Array:
    """Updates with delay over those without; NaN where the run without never arrives."""
    arrives = np.isfinite(plain)
    return np.where(arrives, delayed / np.where(arrives, plain, 1.0), np.nan)


def rotation(degrees: float) -> Array:  # eigenvectors (2, 2), as columns
    cosine, sine = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    return np.array([[cosine, -sine], [sine, cosine]])


def quadratic_hessians(eigenvalues: Sequence[float], angles_degrees: Sequence[float]) -> Array:
    """Q diag(eigenvalues) Q^T at each angle (A, 2, 2)."""
    bases = np.stack([rotation(angle) for angle in angles_degrees])
    hessians: Array = np.einsum("aij,j,akj->aik", bases, np.array(eigenvalues), bases)
    return hessians


def descend(
    config: QuadraticConfig | SweepConfig,
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
        ratios = _ratios(plain, delayed)
        others = ratios[1:][~np.isnan(ratios[1:])]
        return float(ratios[0]), float(np.median(others)) if len(others) else math.nan

    def numbers(self) -> dict[str, Any]:
        """What is kept in a file; a slowdown of None: never, or unknown; `sign_changes`: the share
        that turns back."""
        runs, slowdowns = [], []
        for case, run in self.runs.items():
            signs = np.sign(run.along_dominant)
            first, *others = _kept(run.updates, None)
            turns = signs[1:] != signs[:-1]
            sign_changes = (
                round(float(turns.mean()), 4) if len(turns) else None
            )  # there at the first update
            counted = {
                "updates": first,
                "sign_changes": sign_changes,
                "updates_from_other_starts": others,
            }
            runs.append(case._asdict() | counted)
        for optimizer, aligned in COMPARISONS:
            ratios = _kept(self.slowdowns(optimizer, aligned), 17)
            names = ("optimizer", "aligned", "slowdown", "median_slowdown_from_other_starts")
            slowdowns.append(dict(zip(names, (optimizer, aligned, *ratios), strict=True)))
        return {"config": self.config.model_dump(), "runs": runs, "slowdowns": slowdowns}


def random_starts(seed: int, count: int, distance: float) -> Array:
    """Points (count, 2) at this distance from the optimum, in random directions."""
    angles = np.random.default_rng(seed).uniform(0.0, 2.0 * math.pi, count)
    return distance * np.stack([np.cos(angles), np.sin(angles)], axis=-1)


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


class SweepResult(NamedTuple):
    config: SweepConfig
    # sum |H_ij| over the sum of the eigenvalues, its minimum over rotations, at each angle (A,)
    norms: Array
    # to the target (momenta, 1 + delays, angles, starts), first without delay; infinite for never
    updates: Array

    @property
    def slowdowns(self) -> Array:
        """Median over the starts of updates with delay over updates without (momenta, delays,
        angles).

        Infinite where more than half of the starts never arrive; those that do not even without
        delay do not count."""
        ratios = _ratios(self.updates[:, :1], self.updates[:, 1:])
        # Of an even number, the upper of the two in the middle: a mean with infinity says nothing.
        medians: Array = np.nanquantile(ratios, 0.5, axis=-1, method="higher")
        return medians

    def correlation(self, momentum: int, delay: int) -> float | None:
        """Spearman's, of norm and slowdown over the angles, by index; None where all slowdowns are
        equal."""
        slowdowns = self.slowdowns[momentum, delay]
        return (
            None
            if np.all(slowdowns == slowdowns[0])
            else float(spearmanr(self.norms, slowdowns).statistic)
        )

    def numbers(self) -> dict[str, Any]:
        sweeps = [
            {
                "beta1": beta1,
                "delay": delay,
                "slowdowns": _kept(self.slowdowns[row, column], 4),
                "spearman_with_norm": _kept([self.correlation(row, column)], 4)[0],
            }
            for row, beta1 in enumerate(self.config.momenta)
            for column, delay in enumerate(self.config.delays)
        ]
        return {"config": self.config.model_dump(), "norms": _kept(self.norms, 4), "sweeps": sweeps}


def run_sweep(config: SweepConfig) -> SweepResult:
    starts = random_starts(config.seed, config.starts, config.distance)
    curvatures = quadratic_hessians(config.eigenvalues, config.angles_degrees)
    bases = np.stack([rotation(angle) for angle in config.angles_degrees])
    # The starts lie alike to the eigenvectors at every angle, so that the landscape alone turns
    # under the optimizer.
    points = np.einsum("aij,sj->asi", bases, starts)
    updates = [
        [descend(config, curvatures, points, beta1, delay) for delay in (0, *config.delays)]
        for beta1 in config.momenta
    ]
    return SweepResult(
        config, np.abs(curvatures).sum((-2, -1)) / sum(config.eigenvalues), np.array(updates)
    )


def draw_sweep(result: SweepResult, path: Path) -> list[Path]:
    """Per momentum: slowdown against the angle beside the (1,1)-norm (top), and against tau x norm
    (bottom)."""
    momenta, delays, angles = (
        result.config.momenta,
        result.config.delays,
        result.config.angles_degrees,
    )
    slowdowns = np.where(
        np.isfinite(result.slowdowns), result.slowdowns, np.nan
    )  # gaps where there is no number
    with new_figure(width=3.4, height=5.2, columns=len(momenta)) as figure:
        panels = figure.subplots(2, len(momenta), squeeze=False, sharey="row")
        for column, beta1 in enumerate(momenta):
            top, bottom = panels[:, column]
            known = [
                one
                for row in range(len(delays))
                if (one := result.correlation(column, row)) is not None
            ]
            finding = (
                f"rank correlation with the norm {min(known):.2f} to {max(known):.2f}"
                if known
                else ""
            )
            top.set_title(f"Adam with $\\beta_1$ = {beta1:g}\n{finding}")
            for index, delay in enumerate(delays):
                look = {"color": sequence_color(index, len(delays)), "marker": "o", "markersize": 3}
                top.plot(angles, slowdowns[column, index], **look, label=f"$\\tau$ = {delay}")
                bottom.plot(
                    delay * result.norms, slowdowns[column, index], **look, linestyle="none"
                )
            top.plot(
                angles, result.norms, color="black", linestyle=":", label="(1,1)-norm / its minimum"
            )
            top.set(yscale="log", xlabel="angle of the eigenvectors to the coordinates (degrees)")
            scale: Literal["log", "linear"] = (
                "log" if np.isfinite(slowdowns).any() else "linear"
            )  # of nothing: none
            bottom.set(
                xscale="log", yscale=scale, xlabel="$\\tau \\times$ (1,1)-norm / its minimum"
            )
        for axes in panels[:, 0]:
            axes.set_ylabel("slowdown (median over starts)")
        figure.legend(
            *top.get_legend_handles_labels(), loc="outside lower center", ncols=len(delays) + 1
        )
        return save(figure, path, _sweep_caption(result))


def _sweep_caption(result: SweepResult) -> str:
    config = result.config
    lines = [
        f"Adam on a quadratic with eigenvalues {config.eigenvalues}, whose eigenvectors stand at "
        f"an angle to the"
        f" coordinates; lr {config.lr:g}, beta2 {config.beta2:g}, from {config.starts} starts at "
        f"distance"
        f" {config.distance:g} to a loss of {config.target:g}. Slowdown: updates with delay over "
        f"updates without,"
        f" median over the starts; a gap: more than half of them never arrive in "
        f"{config.most_updates:,} updates.",
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


class SpiralResult(NamedTuple):
    """What was measured at N iterations; angles in degrees along the way (unwrapped), falling
    towards the centre."""

    config: SpiralConfig
    path: Array  # the trajectory without delay (T + 1, 2)
    angles: Array  # where the delay was introduced (N,)
    plain: Array  # updates for the interval without delay (N,); infinite where it was not travelled
    delayed: Array  # the same with delay
    misalignments: Array  # there (N,)
    special_angles: tuple[
        Array, Array
    ]  # of the floor: the dominant eigenvector lies on an axis; half-way between axes

    @property
    def slowdowns(self) -> Array:  # NaN where the interval was not travelled with delay or without
        ratios = _ratios(self.plain, self.delayed)
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
        aligned, misaligned = (_kept(angles, 2) for angles in self.special_angles)
        return {
            "config": self.config.model_dump(),
            "updates": len(self.path) - 1,
            "arrived": self.arrived,
            "turned_degrees": round(float(way[-1] - way[0]), 2),
            "spearman": _kept([correlation], 4)[0],
            "p_value": None if math.isnan(p_value) else float(f"{p_value:.2g}"),
            "not_travelled_without_delay": int(np.isinf(self.plain).sum()),
            "not_travelled_with_delay": int(np.isinf(self.delayed).sum()),
            "aligned_angles": aligned,
            "misaligned_angles": misaligned,
            "angles": _kept(self.angles, 3),
            "misalignments": _kept(self.misalignments, 4),
            "updates_without_delay": _kept(self.plain, None),
            "updates_with_delay": _kept(self.delayed, None),
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


def angles_along(path: Array) -> Array:  # of points (T, 2), unwrapped
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
    half = 1.3 * max(
        float(distance.max()), result.config.lr
    )  # a little more than the largest distance
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


TOYS: dict[str, tuple[type[Any], Callable[[Any], Any], Callable[[Any, Path], list[Path]]]] = {
    "quadratic": (QuadraticConfig, run_quadratic, draw_quadratic),
    "spiral": (SpiralConfig, run_spiral, draw_spiral),
    "sweep": (SweepConfig, run_sweep, draw_sweep),  # the quadratic over angle and delay
}


def run_toy(
    landscape: Literal["quadratic", "spiral", "sweep"],
    figure: Path,
    config: Path | None = None,
    numbers: Path | None = None,
) -> list[Path]:
    """Run a landscape's descents, by a YAML file or the paper's set-up, draw them, keep their
    numbers as JSON."""
    section, run, draw = TOYS[landscape]
    result = run(load_yaml_as(config or PRESETS / "toy" / f"{landscape}.yaml", section))
    written = draw(result, figure)
    if numbers is not None:
        numbers.parent.mkdir(parents=True, exist_ok=True)
        write_json(numbers, result.numbers())
        written.append(numbers)
    return written
