"""The figure of the study: a panel per question that has runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_hex

from brx.errors import UserError
from brx.paper import strict
from brx.paper.causes.arms import (
    ACCUMULATED,
    ADAMW,
    ADAMW_FEEDBACK,
    ADAN,
    ARMS,
    BASES,
    DEEPEST,
    DELAYED,
    EIGENBASIS,
    LABELS,
    LION,
    MOMENTA,
    MOMENTUM_KEYS,
    MUON,
    MUON_FEEDBACK,
    NAMES,
    ONE_UPDATE,
    PACI,
    RANDOM,
    ROTATED_LION,
    SCION,
    THETAS,
    WITH_FEEDBACK,
    with_momentum,
)
from brx.paper.causes.study import SWEEPS, Study
from brx.plot.style import (
    Look,
    draw_points,
    finish_panel,
    look_of,
    new_figure,
    save,
    sequence_color,
)

COST_LABEL = "cost of delay (nats)"
CAPTION = (
    "What the delay costs in final validation loss: (a) in bases turned away from the eigenbasis, "
    "(b) by the geometry of the step, (c, e) by momentum, (d) with error feedback, (f) with other "
    "corrections. Points: means over seeds; bars: 95 % intervals, from three seeds on; crosses: a "
    "seed diverged."
)


@dataclass(frozen=True)
class Panel:
    """A panel of the figure. It is drawn if the cost of one of `delays` is known for one of
    `arms`."""

    title: str
    arms: Sequence[str]
    delays: Sequence[str]
    draw: Callable[[Study, Axes], None]

    def has_runs(self, study: Study) -> bool:
        """Whether there is anything to draw."""
        return any(study.has(arm, delay) for arm, delay in product(self.arms, self.delays))


def draw_causes(folder: Path, path: Path) -> list[Path]:
    """Draw the panels that have runs; the caption names the others. Returns the files written.

    Args:
        folder: the folder of the study's runs.
        path: the figure's path without suffix.

    Raises:
        UserError: no panel has runs.
    """
    study = Study.load(folder)
    shown = [panel for panel in PANELS if panel.has_runs(study)]
    left_out = [panel.title for panel in PANELS if panel not in shown]
    if not shown:
        raise UserError(
            f"{folder}: no arm has runs both without delay and with it; make them with brx sweep "
            f"{SWEEPS}"
        )
    columns = min(2, len(shown))
    rows = math.ceil(len(shown) / columns)
    with new_figure(width=3.5, height=2.9 * rows, columns=columns) as figure:
        places = figure.subplots(rows, columns, squeeze=False).ravel()
        for panel, axes in zip(shown, places, strict=False):
            panel.draw(study, axes)
        for axes in places[len(shown) :]:
            axes.set_axis_off()
        caption = CAPTION
        if left_out:
            caption += f"\nLeft out, for want of runs: {', '.join(left_out)}."
        details = {"costs": cost_records(study)}
        return save(figure, path, caption, command="brx plot causes", details=details)


def cost_records(study: Study) -> list[dict[str, Any]]:
    """A record per arm and delay whose cost is known: its `arm`, its `delay`, and its `cost by
    seed` in nats."""
    records = []
    for arm, delay in product(ARMS, DELAYED):
        if study.has(arm, delay):
            by_seed = strict.rounded_by_seed(study.cost(arm, delay))
            records.append({"arm": arm, "delay": delay, "cost by seed": by_seed})
    return records


@dataclass(frozen=True)
class Point:
    """An arm's mean cost over seeds in nats, and the ends of its 95 % interval.

    With fewer than three seeds, or if a seed diverged, both ends are the mean. The mean is infinite
    if a seed diverged."""

    mean: float
    low: float
    high: float

    @classmethod
    def of(cls, study: Study, arm: str, delay: str) -> Point:
        """The cost of a delay for an arm; it must be known."""
        costs = study.cost(arm, delay)
        mean = float(costs.mean())
        interval = strict.interval_over_seeds(costs.tolist())
        if interval is None:
            return cls(mean, mean, mean)
        return cls(mean, interval.low, interval.high)


def _draw_costs(
    axes: Axes,
    study: Study,
    places: Mapping[str, float],  # x of each arm
    delay: str,
    look: Look,
    **style: Any,
) -> list[float]:
    """Draw the known costs of a delay for some arms, and return their means. An arm that diverged
    is a cross at the top of the panel."""
    points = {arm: Point.of(study, arm, delay) for arm in places if study.has(arm, delay)}
    finite = {arm: point for arm, point in points.items() if math.isfinite(point.mean)}
    diverged = [places[arm] for arm in points if arm not in finite]
    # x in data, y as a share of the panel's height.
    top = axes.get_xaxis_transform()
    axes.plot(diverged, [0.97] * len(diverged), "x", color=look.color, transform=top)
    if finite:
        x = np.array([places[arm] for arm in finite])
        y = np.array([point.mean for point in finite.values()])
        low = np.array([point.low for point in finite.values()])
        high = np.array([point.high for point in finite.values()])
        draw_points(axes, x, y, (low, high), look, **style)
    return [point.mean for point in points.values()]


def _draw_bases(study: Study, axes: Axes) -> None:
    """Draw the cost of each delay against the angle of the bases, with AdamW at the right end."""
    xs = {arm: float(x) for x, arm in enumerate(BASES)}
    xs[ADAMW] = len(BASES) + 0.2  # set apart: it has no basis
    for index, delay in enumerate(DELAYED):
        look = Look(f"delay: {delay}", to_hex(sequence_color(index, len(DELAYED))), "o")
        base_xs = {arm: xs[arm] for arm in BASES}
        _draw_costs(axes, study, base_xs, delay, look, linestyle="-", label=look.label)
        _draw_costs(axes, study, {ADAMW: xs[ADAMW]}, delay, look, fillstyle="none")
    labels = [f"{theta:g}" if isinstance(theta, float) else theta for theta in THETAS]
    axes.set_xticks(list(xs.values()), [*labels, "AdamW"], fontsize=7)
    title = "(a) bases turned away"
    if study.has(EIGENBASIS, DEEPEST) and study.has(RANDOM, DEEPEST):
        in_eigenbasis = study.cost(EIGENBASIS, DEEPEST).mean()
        in_random = study.cost(RANDOM, DEEPEST).mean()
        title += f": {in_eigenbasis:.2f} nats in the eigenbasis,\n{in_random:.2f} in a random basis"
    finish_panel(axes, "angle theta of the turn (radians)", COST_LABEL, title)


def _draw_momenta(letter: str, delay: str) -> Callable[[Study, Axes], None]:
    """Make a function that draws the cost of a delay against the momentum, a line per method."""

    def draw(study: Study, axes: Axes) -> None:
        changes = []
        for method in MOMENTUM_KEYS:
            look = look_of(method)
            name = NAMES[method]
            places = {with_momentum(method, value): float(i) for i, value in enumerate(MOMENTA)}
            means = _draw_costs(axes, study, places, delay, look, linestyle="-", label=name)
            if len(means) == len(MOMENTA):
                change = round(means[-1] - means[0], 2) + 0.0  # no -0.00
                changes.append(f"{name} {change:+.2f}")
        axes.set_xticks(range(len(MOMENTA)), [f"{value:g}" for value in MOMENTA])
        title = f"({letter}) momentum, {delay}"
        if changes:
            title += f", {MOMENTA[0]:g} to {MOMENTA[-1]:g}:\n{', '.join(changes)}"
        finish_panel(axes, "momentum", COST_LABEL, title, columns=3)

    return draw


def _draw_rows(arms: Sequence[str], question: str, delay: str) -> Callable[[Study, Axes], None]:
    """Make a function that draws a row per arm for which the cost of the delay is known.

    The arm to which the delay costs least is at the top."""

    def draw(study: Study, axes: Axes) -> None:
        points = {arm: Point.of(study, arm, delay) for arm in arms if study.has(arm, delay)}
        ordered = sorted(points, key=lambda arm: points[arm].mean)
        names = []
        for y, arm in enumerate(ordered):
            look = look_of(LOOKS.get(arm, arm))
            point = points[arm]
            axes.plot(point.mean, y, look.marker, color=look.color, markersize=5)
            axes.plot([point.low, point.high], [y, y], color=look.color)
            diverged = "" if math.isfinite(point.mean) else " (diverged)"
            names.append(LABELS.get(arm, arm) + diverged)
        axes.set_yticks(range(len(ordered)), names)
        axes.set_ylim(len(ordered) - 0.5, -0.5)  # from the top down
        axes.axvline(0.0, color="black", linewidth=0.5)
        title = f"{question}, {delay}"
        if ordered:
            first, last = ordered[0], ordered[-1]
            title += f":\n{points[first].mean:.2f} ({names[0]}) to\n"
            title += f"{points[last].mean:.2f} nats ({names[-1]})"
        finish_panel(axes, COST_LABEL, "", title)

    return draw


# The method whose look an arm has.
LOOKS = {
    ADAMW: "pipedream",
    EIGENBASIS: "basis-rotation",
    MUON: "muon",
    SCION: "scion",
    LION: "lion",
    ADAN: "adan",
    ADAMW_FEEDBACK: "pipedream",
    MUON_FEEDBACK: "muon",
}
GEOMETRIES = (ADAMW, LION, ROTATED_LION, MUON, SCION, EIGENBASIS)
CORRECTIONS = (ADAMW, ADAN, PACI, ACCUMULATED, EIGENBASIS)
FEEDBACK = (ADAMW, ADAMW_FEEDBACK, MUON, MUON_FEEDBACK)


def _other_momenta() -> list[str]:
    """The arms whose momentum no other comparison uses."""
    arms = []
    for method, (_, usual) in MOMENTUM_KEYS.items():
        for value in MOMENTA:
            if value != usual:
                arms.append(with_momentum(method, value))
    return arms


OTHER_MOMENTA = _other_momenta()

# The rows' long names all stand in the right column, where they take no width from the left one.
PANELS = (
    Panel("bases", BASES, DELAYED, _draw_bases),
    Panel(
        "geometry",
        [LION, ROTATED_LION, SCION],
        [DEEPEST],
        _draw_rows(GEOMETRIES, "(b) geometry", DEEPEST),
    ),
    Panel(
        "momentum at one update",
        OTHER_MOMENTA,
        [ONE_UPDATE],
        _draw_momenta("c", ONE_UPDATE),
    ),
    Panel(
        "error feedback",
        list(WITH_FEEDBACK),
        [ONE_UPDATE],
        _draw_rows(FEEDBACK, "(d) error feedback", ONE_UPDATE),
    ),
    Panel("momentum under 32 stages", OTHER_MOMENTA, [DEEPEST], _draw_momenta("e", DEEPEST)),
    Panel(
        "corrections",
        [ADAN, PACI, ACCUMULATED],
        [DEEPEST],
        _draw_rows(CORRECTIONS, "(f) corrections", DEEPEST),
    ),
)
