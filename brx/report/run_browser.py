"""The runs as the page's browser has them: what can be filtered and sorted by, and thinned loss curves."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import yaml
from matplotlib.colors import to_hex

from brx.plot.style import METHOD_LOOKS, look_of, sequence_color
from brx.report.provenance import status_of
from brx.runs.experiments import Results
from brx.runs.folder import trajectory_of
from brx.runs.reading import Run, Series
from brx.runs.tables import model_text

MOST_POINTS = 300
"""Points of a curve: the losses are means over 2 % of a run, which 300 points resolve sixfold."""


@dataclass(frozen=True)
class Facet:
    """What runs can be filtered and coloured by.

    Attributes:
        name: its key.
        title: its heading.
        colors: by value, in the order in which values are listed.
    """

    name: str
    title: str
    colors: Mapping[str, str]


@dataclass(frozen=True)
class RunEntry:
    """A run on the page.

    Attributes:
        name: of its folder.
        facets: its value of each facet.
        is_chosen: whether its learning rate is the best of those tried.
        status: finished, failed, ...
        numbers: what the table shows, as text, by heading.
        settings: those that are not brx's defaults, as YAML.
        curves: series for the chart, rounded; null where a loss is not finite.
    """

    name: str
    facets: Mapping[str, str]
    is_chosen: bool
    status: str
    numbers: Mapping[str, str]
    settings: str
    curves: Mapping[str, list[float | None]]


def run_entries(results: Results) -> list[RunEntry]:
    """All runs, by method, stages, rate and seed."""
    chosen = {run.path for group in results.groups for run in group.runs}
    ordered = sorted(results.runs, key=_order)
    return [_entry(run, run.path in chosen) for run in ordered]


def _order(run: Run) -> tuple[Any, ...]:
    return *_method_order(run), *(value(run) for _, value in _ORDERED_FACETS.values()), run.path.name


def facets_of(runs: Sequence[Run]) -> list[Facet]:
    """The facets with the values that occur."""
    by_method = sorted(runs, key=_method_order)
    facets = [Facet("method", "method", {run.variant: look_of(run.method).color for run in by_method})]
    for name, (title, value) in _ORDERED_FACETS.items():
        values = list(dict.fromkeys(f"{one:g}" for one in sorted({value(run) for run in runs})))
        facets.append(Facet(name, title, _shades(values)))
    by_size = sorted(runs, key=lambda run: (run.config.model.blocks, run.config.model.width))
    models = list(dict.fromkeys(model_text(run.config) for run in by_size))
    return [*facets, Facet("model", "model", _shades(models))]


_ORDERED_FACETS: dict[str, tuple[str, Callable[[Run], float]]] = {
    "stages": ("P", lambda run: run.stages),
    "lr": ("lr", lambda run: run.config.optimizer.lr),
    "seed": ("seed", lambda run: run.config.training.seed),
}


def _shades(values: Sequence[str]) -> dict[str, str]:
    return {value: to_hex(sequence_color(place, len(values))) for place, value in enumerate(values)}


def _method_order(run: Run) -> tuple[int, str]:
    """As the legends of the figures have them; variants after the usual form."""
    place = list(METHOD_LOOKS).index(run.method) if run.method in METHOD_LOOKS else len(METHOD_LOOKS)
    return place, run.variant


def _entry(run: Run, is_chosen: bool) -> RunEntry:
    ordered = {name: f"{value(run):g}" for name, (_, value) in _ORDERED_FACETS.items()}
    return RunEntry(
        name=run.path.name,
        facets={"method": run.variant, **ordered, "model": model_text(run.config)},
        is_chosen=is_chosen,
        status=status_of(run),
        numbers={
            "train loss": _shown(run.smoothed[-1], ".3f"),
            "val loss": _shown(run.final_val_loss, ".3f"),
            "iterations": f"{run.iterations[-1]:.0f}",
            "minutes": f"{run.seconds[-1] / 60:.1f}",
        },
        settings=yaml.safe_dump(trajectory_of(run.config, with_defaults=False), sort_keys=False),
        curves=_curves(run),
    )


def _shown(value: float, form: str) -> str:
    return f"{value:{form}}" if np.isfinite(value) else "-"


def _curves(run: Run) -> dict[str, list[float | None]]:
    places = np.unique(np.linspace(0, len(run.smoothed) - 1, min(len(run.smoothed), MOST_POINTS)).astype(int))
    val_seconds = np.interp(run.val_iterations, run.iterations, run.seconds)
    return {
        "iterations": _rounded(run.iterations[run.centres][places], 0),
        "minutes": _rounded(run.seconds[run.centres][places] / 60, 3),
        "train": _rounded(run.smoothed[places], 4),
        "val_iterations": _rounded(run.val_iterations, 0),
        "val_minutes": _rounded(val_seconds / 60, 3),
        "val": _rounded(run.val_loss, 4),
    }


def _rounded(values: Series, digits: int) -> list[float | None]:
    """As JSON has them: it knows no infinite numbers and none that are not numbers."""
    number: Callable[[Any], float] = int if digits == 0 else partial(round, ndigits=digits)
    return [number(value) if np.isfinite(value) else None for value in values.tolist()]
