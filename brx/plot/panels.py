"""What the paper's figures are made of: panels of loss curves of experiments, seeds as bands."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from brx.plot.style import look_of
from brx.runs.experiments import Group
from brx.runs.slowdown import slowdown

MOST_POINTS = 600
"""Points of a drawn curve; more cannot be seen and make large files."""


@dataclass(frozen=True)
class Curve:
    """One experiment in a panel.

    Attributes:
        group: its runs.
        label: in the legend.
        style: keyword arguments for matplotlib's lines; colour and marker are the method's unless given.
    """

    group: Group
    label: str
    style: dict[str, Any]


def curve_of(group: Group, label: str | None = None, **style: Any) -> Curve:
    """A curve in its method's colour."""
    look = look_of(group.method)
    return Curve(group, label or look.label, {"color": look.color, **style})


def draw_curves(axes: Axes, curves: Sequence[Curve], *, title: str = "", target: float | None = None) -> None:
    """Training loss against iterations: mean over seeds, and their range as a band."""
    for curve in curves:
        places = thin(len(curve.group.iterations))
        losses = curve.group.smoothed[:, places]
        iterations = curve.group.iterations[places]
        (line,) = axes.plot(iterations, losses.mean(axis=0), label=curve.label, **curve.style)
        if len(losses) > 1:
            axes.fill_between(
                iterations, losses.min(axis=0), losses.max(axis=0), color=line.get_color(), alpha=0.2, linewidth=0
            )
    if target is not None:
        axes.axhline(target, color="black", linewidth=0.6, linestyle=":")
    finish_panel(axes, "iteration", "training loss (nats)", title)
    limit_losses(axes, curves)


def draw_validation(axes: Axes, curves: Sequence[Curve], *, title: str = "") -> None:
    """Validation loss against iterations, mean over seeds."""
    for curve in curves:
        length = min(len(run.val_loss) for run in curve.group.runs)
        losses = np.stack([run.val_loss[:length] for run in curve.group.runs])
        axes.plot(curve.group.runs[0].val_iterations[:length], losses.mean(axis=0), label=curve.label, **curve.style)
    finish_panel(axes, "iteration", "validation loss (nats)", title)


def draw_against_time(axes: Axes, curves: Sequence[Curve], *, title: str = "") -> None:
    """The first seed's training loss against training time at the undisturbed pace of the method's fastest seed."""
    for curve in curves:
        run = curve.group.runs[0]
        places = thin(len(run.smoothed))
        pace = min(one.undisturbed_pace for one in curve.group.runs)
        minutes = run.iterations[run.centres][places] * pace / 60.0
        axes.plot(minutes, run.smoothed[places], label=curve.label, **curve.style)
    finish_panel(axes, "training time (minutes)", "training loss (nats)", title)
    limit_losses(axes, curves)


def draw_final_losses(axes: Axes, by_method: dict[str, list[Group]], *, title: str = "") -> None:
    """Final training loss against the number of stages, a line a method; bars: range over seeds."""
    for method, groups in by_method.items():
        look = look_of(method)
        stages = [group.stages for group in groups]
        means = np.array([group.final_loss for group in groups])
        below = means - np.array([min(group.final_losses) for group in groups])
        above = np.array([max(group.final_losses) for group in groups]) - means
        axes.errorbar(
            stages, means, yerr=np.stack([below, above]), color=look.color, marker=look.marker, markersize=4,
            capsize=2, label=look.label,
        )  # fmt: skip
    axes.set_xscale("log", base=2)
    ticks = sorted({group.stages for groups in by_method.values() for group in groups})
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    finish_panel(axes, "stages P", "final training loss (nats)", title)


def draw_slowdown(axes: Axes, undelayed: Group, delayed: Group, target: float) -> None:
    """A method with and without delay, and the iterations of each to a target loss."""
    look = look_of(delayed.method)
    curves = [
        curve_of(undelayed, f"P = {undelayed.stages}"),
        curve_of(delayed, f"P = {delayed.stages}", linestyle="--"),
    ]
    found = slowdown(delayed, undelayed, target)
    ratio = "" if found.ratio is None else f": {'> ' if found.is_censored else ''}{found.ratio:.2f}$\\times$"
    draw_curves(axes, curves, title=f"{look.label}{ratio}", target=target)
    for one in (found.reached, found.reference_reached):
        axes.axvline(one.mean, color=look.color, linewidth=0.6, linestyle=":")


def finish_panel(axes: Axes, x_label: str, y_label: str, title: str) -> None:
    """Labels with units, and the legend."""
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.set_title(title)
    axes.legend(fontsize=6)


def limit_losses(axes: Axes, curves: Sequence[Curve]) -> None:
    """Leave the first steep fall and single spikes out of the range; panels that share theirs all fit in."""
    settled = [curve.group.smoothed[:, curve.group.smoothed.shape[1] // 25 :].ravel() for curve in curves]
    finite = np.concatenate(settled)
    finite = finite[np.isfinite(finite)]
    low, high = float(finite.min()) - 0.05, float(np.quantile(finite, 0.995)) + 0.1
    if not axes.get_autoscaley_on():  # a panel that shares this range has set it
        low, high = min(low, axes.get_ylim()[0]), max(high, axes.get_ylim()[1])
    axes.set_ylim(low, high)


def thin(length: int) -> Any:
    """Evenly spread places of a long series, both ends among them."""
    return np.unique(np.linspace(0, length - 1, min(length, MOST_POINTS)).astype(int))


def row_of_axes(made: Figure, count: int, *, share_y: bool = False) -> list[Axes]:
    """Panels side by side."""
    panels = made.subplots(1, count, squeeze=False, sharey=share_y)
    return list(panels[0])
