"""The runs as the page's browser has them: what can be filtered and sorted by, and thinned loss curves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import yaml
from matplotlib.colors import to_hex

from brx.plot.style import METHOD_LOOKS, look_of, sequence_color, thin
from brx.runs.folder import trajectory_of
from brx.runs.frames import DEPTH, RATE, SEED, Run, read_run

MOST_POINTS = 120  # points of a curve: the losses are means over 2 % of a run, which 120 points resolve twice
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
    name: str
    title: str
    colors: Mapping[str, str]  # by value, in order


def run_entries(runs: pd.DataFrame, chosen: pd.DataFrame) -> list[dict[str, Any]]:
    """All runs (rows of `load`) in the page's order, as `_entry` has them; `chosen` are at the best rates."""
    ordered = _by_method(runs)
    variants = ordered["variant"].drop_duplicates()
    places = variants.groupby(variants.map(_base)).cumcount()  # of a variant among those of its method
    dashes = {variant: DASHES[place % len(DASHES)] for variant, place in zip(variants, places, strict=True)}
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


def facets_of(runs: pd.DataFrame) -> list[Facet]:  # with the values that occur
    colors = {variant: look_of(_base(variant)).color for variant in _by_method(runs)["variant"].unique()}
    facets = [Facet("method", "method", colors)]
    for name, (title, column) in ORDERED.items():
        facets.append(Facet(name, title, _shades([_text(value) for value in sorted(runs[column].unique())])))
    architectures = runs.sort_values(["model.blocks", "model.width"])["architecture"].unique()
    return [*facets, Facet("model", "model", _shades(architectures))]


def _by_method(runs: pd.DataFrame) -> pd.DataFrame:
    """In the order of the figures' legends, variants after the usual form; then by stages, rate and seed."""
    order = list(METHOD_LOOKS)
    rank = runs["method"].map(lambda method: order.index(method) if method in order else len(order))
    return runs.assign(rank=rank).sort_values(["rank", "variant", DEPTH, RATE, SEED, "name"])


def _shades(values: Sequence[str]) -> dict[str, str]:
    return {value: to_hex(sequence_color(index, len(values))) for index, value in enumerate(values)}


def _text(value: float) -> str:
    return str(int(value)) if value == int(value) else f"{value:g}"


def _entry(run: pd.Series, is_chosen: bool, dash: str) -> dict[str, Any]:
    ordered = {name: _text(run[column]) for name, (_, column) in ORDERED.items()}
    read = read_run(Path(str(run.name)))
    return {
        "name": run["name"],
        "facets": {"method": run["variant"], **ordered, "model": run["architecture"]},
        "is_chosen": is_chosen,  # its learning rate is the best of those tried
        "status": run["status"],
        "dash": dash,
        "numbers": {  # of the table, by heading
            "train loss": _loss_text(run["train_loss"]),
            "val loss": _loss_text(run["val_loss"]),
            "minutes": f"{run['seconds'] / 60:.1f}",
        },
        "settings": yaml.safe_dump(trajectory_of(read.config, with_defaults=False), sort_keys=False),
        "curves": _curves(read),
    }


def _loss_text(loss: float) -> str:
    return f"{loss:.3f}" if np.isfinite(loss) else "-"


def _curves(run: Run) -> dict[str, list[float | None]]:
    """Series for the chart, rounded; null where a loss is not finite: JSON knows no such numbers."""
    minutes = pd.Series(run.seconds / 60, run.iterations)
    losses = pd.Series(run.smoothed, run.iterations[run.centres]), pd.Series(run.val_loss, run.val_iterations)
    chart: dict[str, list[float | None]] = {}
    for name, prefix, loss in (("train", "", thin(losses[0], MOST_POINTS)), ("val", "val_", losses[1])):
        chart[f"{prefix}iterations"] = loss.index.astype(int).tolist()
        chart[f"{prefix}minutes"] = _rounded(minutes.reindex(loss.index), 3)
        chart[name] = _rounded(loss, 4)
    return chart


def _rounded(values: pd.Series, digits: int) -> list[float | None]:
    return [round(value, digits) if np.isfinite(value) else None for value in values.tolist()]
