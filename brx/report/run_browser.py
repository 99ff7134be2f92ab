"""The runs as the page's browser has them: what can be filtered and sorted by, and thinned loss curves."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import yaml
from matplotlib.colors import to_hex

from brx.config.loading import load_config
from brx.plot.style import METHOD_LOOKS, look_of, sequence_color, thin
from brx.runs.folder import trajectory_of
from brx.runs.frames import DEPTH, RATE, SEED, curves, smoothed_loss

MOST_POINTS = 120
"""Points of a curve: the losses are means over 2 % of a run, which 120 points resolve twice."""
DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
"""Of the variants of a method, which have its colour."""
ORDERED = {
    "stages": ("P", DEPTH),
    "length": ("iterations", "last_iteration"),
    "lr": ("lr", RATE),
    "seed": ("seed", SEED),
}
"""Facets of numbers: by name, their headings and columns."""


class Facet(NamedTuple):
    """What runs can be filtered and coloured by: its key, its heading, and colours by value, in order."""

    name: str
    title: str
    colors: Mapping[str, str]


@dataclass(frozen=True)
class RunEntry:
    """A run on the page.

    Attributes:
        facets: its value of each facet.
        is_chosen: whether its learning rate is the best of those tried.
        dash: of its line.
        numbers: what the table shows, as text, by heading.
        settings: those that are not brx's defaults, as YAML.
        curves: series for the chart, rounded; null where a loss is not finite.
    """

    name: str
    facets: Mapping[str, str]
    is_chosen: bool
    status: str
    dash: str
    numbers: Mapping[str, str]
    settings: str
    curves: Mapping[str, list[float | None]]


def run_entries(runs: pd.DataFrame, chosen: pd.DataFrame) -> list[RunEntry]:
    """All runs, by method, stages, rate and seed.

    Args:
        runs: rows of `brx.runs.load`.
        chosen: those of them whose learning rate is the best of those tried.
    """
    ordered = _by_method(runs)
    of_method: dict[str, list[str]] = {}
    for variant in ordered["variant"].unique():
        of_method.setdefault(_base(variant), []).append(variant)
    dashes = {name: DASHES[place % len(DASHES)] for names in of_method.values() for place, name in enumerate(names)}
    return [_entry(run, run.name in chosen.index, dashes[run["variant"]]) for _, run in ordered.iterrows()]


def comparable_selection(chosen: pd.DataFrame) -> dict[str, str]:
    """What the browser opens with: the deepest pipeline of the model and length that most runs there have."""
    if chosen.empty:
        return {}
    deepest = chosen[chosen[DEPTH] == chosen[DEPTH].max()]
    model = deepest["architecture"].mode().iloc[0]
    length = deepest.loc[deepest["architecture"] == model, "last_iteration"].mode().iloc[0]
    return {"stages": f"{deepest[DEPTH].max()}", "length": f"{length}", "model": model, "chosen": "yes"}


def _base(variant: str) -> str:
    return variant.partition(" ")[0]


def facets_of(runs: pd.DataFrame) -> list[Facet]:
    """The facets with the values that occur."""
    methods = _by_method(runs).drop_duplicates("variant")
    colors = {variant: look_of(_base(variant)).color for variant in methods["variant"]}
    numbers = {name: [_text(value) for value in sorted(runs[column].unique())] for name, (_, column) in ORDERED.items()}
    architectures = runs.sort_values(["model.blocks", "model.width"])["architecture"].unique()
    return [
        Facet("method", "method", colors),
        *(Facet(name, title, _shades(numbers[name])) for name, (title, _) in ORDERED.items()),
        Facet("model", "model", _shades(list(architectures))),
    ]


def _by_method(runs: pd.DataFrame) -> pd.DataFrame:
    """In the order of the figures' legends, variants after the usual form; then by stages, rate and seed."""
    ranks = {method: rank for rank, method in enumerate(METHOD_LOOKS)}
    rank = runs["method"].map(lambda method: ranks.get(method, len(ranks)))
    return runs.assign(rank=rank).sort_values(["rank", "variant", DEPTH, RATE, SEED, "name"])


def _shades(values: Sequence[str]) -> dict[str, str]:
    return {value: to_hex(sequence_color(index, len(values))) for index, value in enumerate(values)}


def _text(value: float) -> str:
    return str(int(value)) if value == int(value) else f"{value:g}"


def _entry(run: pd.Series, is_chosen: bool, dash: str) -> RunEntry:
    ordered = {name: _text(run[column]) for name, (_, column) in ORDERED.items()}
    config = load_config(Path(str(run.name)) / "config.yaml")
    return RunEntry(
        name=run["name"],
        facets={"method": run["variant"], **ordered, "model": run["architecture"]},
        is_chosen=is_chosen,
        status=run["status"],
        dash=dash,
        numbers={
            "train loss": _shown(run["train_loss"], ".3f"),
            "val loss": _shown(run["val_loss"], ".3f"),
            "minutes": f"{run['seconds'] / 60:.1f}",
        },
        settings=yaml.safe_dump(trajectory_of(config, with_defaults=False), sort_keys=False),
        curves=_curves(str(run.name)),
    )


def _shown(value: float, form: str) -> str:
    return f"{value:{form}}" if np.isfinite(value) else "-"


def _curves(run: str) -> dict[str, list[float | None]]:
    losses = curves([run]).set_index("iteration")
    train = thin(smoothed_loss(run), MOST_POINTS)
    val = losses["val_loss"].dropna()
    minutes = losses["seconds"] / 60
    return {
        "iterations": _rounded(train.index, 0),
        "minutes": _rounded(minutes[train.index], 3),
        "train": _rounded(train, 4),
        "val_iterations": _rounded(val.index, 0),
        "val_minutes": _rounded(minutes[val.index], 3),
        "val": _rounded(val, 4),
    }


def _rounded(values: pd.Series | pd.Index, digits: int) -> list[float | None]:
    """As JSON has them: it knows no infinite numbers and none that are not numbers."""
    number: Callable[[Any], float] = int if digits == 0 else partial(round, ndigits=digits)
    return [number(value) if np.isfinite(value) else None for value in values.tolist()]
