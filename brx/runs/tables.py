"""Tables of runs: for the terminal, and as rows to be written in any format."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.table import Table

from brx.config.schema import RunConfig
from brx.runs.experiments import Group
from brx.runs.reading import Run, iterations_to_target
from brx.runs.slowdown import Reduction, Slowdown

Rows = tuple[list[str], list[list[str]]]
"""Headings, and cells by row."""


def loss_table(runs: list[Run], target: float) -> Table:
    """A row a run: losses, speed, and the iterations until the smoothed training loss stays at or below `target`."""
    columns = ("method", "P", "final training loss", "validation loss", "iterations/s", f"iterations to {target:.2f}")
    table = Table(*columns)
    for run in runs:
        reached = iterations_to_target(run, target)
        table.add_row(
            run.method,
            str(run.stages),
            f"{run.smoothed[-1]:.3f}",
            f"{run.val_loss[-1]:.3f}",
            f"{run.iterations_per_second:.1f}",
            "never" if reached is None else f"{reached:.0f}",
        )
    return table


def slowdown_rows(found: Sequence[Slowdown]) -> Rows:
    """A row a method and number of stages."""
    columns = [
        "model",
        "method",
        "P",
        "slowdown",
        "iterations",
        "reference P",
        "its iterations",
        "lr",
        "its lr",
        "seeds",
    ]
    columns.append("target loss")
    rows = [
        [
            model_text(one.group.config),
            one.group.variant,
            str(one.group.stages),
            one.text,
            f"{'> ' if one.is_censored else ''}{one.reached.mean:.0f}",
            str(one.reference.stages),
            f"{'> ' if one.reference_reached.is_censored else ''}{one.reference_reached.mean:.0f}",
            rate_text(one.group),
            rate_text(one.reference),
            seeds_text(one),
            f"{one.target:.4f}",
        ]
        for one in found
    ]
    return columns, rows


def slowdown_numbers(found: Sequence[Slowdown]) -> list[dict[str, Any]]:
    """The same for programs: numbers, None where there is none; `is_censored`: `ratio` is a lower bound."""
    return [
        {
            "model": model_text(one.group.config),
            "method": one.group.variant,
            "stages": one.group.stages,
            "ratio": one.ratio,
            "low": one.low,
            "high": one.high,
            "is_censored": one.is_censored,
            "iterations": one.reached.iterations,
            "reference_stages": one.reference.stages,
            "reference_iterations": one.reference_reached.iterations,
            "lr": one.group.lr,
            "lr_at_edge": one.group.is_at_edge,
            "reference_lr": one.reference.lr,
            "reference_lr_at_edge": one.reference.is_at_edge,
            "target": one.target,
        }
        for one in found
    ]


def reduction_numbers(found: Sequence[Reduction]) -> list[dict[str, Any]]:
    """As `reduction_rows`, for programs; `share`: of the baseline's iterations, None if the method never gets there."""
    return [
        {
            "model": model_text(one.group.config),
            "method": one.group.variant,
            "stages": one.group.stages,
            "baseline": one.baseline.variant,
            "baseline_final_loss": one.baseline.final_loss,
            "share": one.share,
        }
        for one in found
    ]


def reduction_rows(found: Sequence[Reduction]) -> Rows:
    """A row a method and number of stages."""
    columns = ["model", "method", "P", "best baseline", "its final loss", "iterations saved"]
    rows = [
        [
            model_text(one.group.config),
            one.group.variant,
            str(one.group.stages),
            one.baseline.variant,
            f"{one.baseline.final_loss:.3f}",
            "never gets there" if one.share is None else f"{one.share:.1%}",
        ]
        for one in found
    ]
    return columns, rows


def model_text(config: RunConfig) -> str:
    """A model in a few words."""
    model = config.model
    mixture = f", {model.moe.experts} experts" if model.moe else ""
    return f"{model.blocks} blocks, d {model.width}{mixture}"


def seeds_text(slowdown: Slowdown) -> str:
    """How many seeds it is from; under delay / without where they differ, and there is no interval."""
    ours, theirs = len(slowdown.reached.iterations), len(slowdown.reference_reached.iterations)
    return str(ours) if ours == theirs else f"{ours} / {theirs}"


def rate_text(group: Group) -> str:
    """The chosen learning rate; with a star when it is the lowest or highest of those tried."""
    return f"{group.lr:g}{'*' if group.is_at_edge else ''}"
