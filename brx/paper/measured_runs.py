"""The runs of a scale at whose checkpoints norms and oscillation were measured."""

from collections.abc import Mapping
from pathlib import Path

import pandas as pd

from brx.errors import UserError
from brx.names import path_of_text
from brx.paper.scales import Experiments, Scale
from brx.runs.experiments import at_best_rates, of_main_origin
from brx.runs.folder import has_runs
from brx.runs.frames import DEPTH, load
from brx.runs.trajectory import RATE, SEED


def measured_runs(scale: Scale, experiments: Experiments | None = None) -> list[Path]:
    """The folders of a scale's measured runs, each experiment at the learning rate that it has in
    the scale's comparisons.

    An experiment that was not measured at that rate is at the best of those measured. Runs on other
    data or of another trajectory version than most are left out, because a mean over both would be
    of two different methods.

    Args:
        scale: the scale.
        experiments: the scale's experiments, if they have been loaded.

    Raises:
        UserError: two of these runs have the same method, P and seed.
    """
    if experiments is None and has_runs(scale.runs):
        experiments = Experiments.load(scale)
    usual = {} if experiments is None else _rates(experiments)
    runs = load([scale.curvature])
    is_usual = runs[RATE] == runs["experiment"].map(usual)
    is_measured_at_usual = is_usual.groupby(runs["experiment"]).transform("any")
    chosen = at_best_rates(runs[is_usual | ~is_measured_at_usual])
    measured = of_main_origin(chosen)
    refuse_doubles(measured, "method", DEPTH, SEED)
    return [path_of_text(run) for run in measured.index]


def refuse_doubles(runs: pd.DataFrame, *columns: str) -> None:
    """UserError if two runs are equal in some columns: one of them would silently take the other's
    place, or be averaged with it."""
    is_double = runs.duplicated(list(columns), keep=False)
    for values, alike in runs[is_double].groupby(list(columns), sort=False):
        first, second, *_ = alike.index
        equal = [f"{column} {value}" for column, value in zip(columns, values, strict=True)]
        raise UserError(
            f"{second}: a second measured run like {first} ({', '.join(equal)}), with other "
            f"settings; move one of them away"
        )


def _rates(experiments: Experiments) -> Mapping[str, float]:
    """The learning rate of each experiment in the scale's comparisons."""
    rates: dict[str, float] = experiments.chosen.groupby("experiment")[RATE].first().to_dict()
    return rates
