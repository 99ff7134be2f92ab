"""The runs of a scale at whose checkpoints norms and oscillation were measured."""

from collections.abc import Mapping
from pathlib import Path

from brx.names import path_of_text
from brx.paper.scales import Experiments, Scale
from brx.runs.experiments import at_best_rates, of_main_origin
from brx.runs.folder import has_runs
from brx.runs.frames import load
from brx.runs.trajectory import RATE


def measured_runs(scale: Scale, experiments: Experiments | None = None) -> list[Path]:
    """The folders of a scale's measured runs, each experiment at the learning rate that it has in
    the scale's comparisons.

    An experiment that was not measured at that rate is at the best of those measured. Runs on other
    data or of another trajectory version than most are left out, because a mean over both would be
    of two different methods.

    Args:
        experiments: the scale's experiments, if they have been loaded.
    """
    if experiments is None and has_runs(scale.runs):
        experiments = Experiments.load(scale)
    usual = {} if experiments is None else _rates(experiments)
    runs = load([scale.curvature])
    is_usual = runs[RATE] == runs["experiment"].map(usual)
    is_measured_at_usual = is_usual.groupby(runs["experiment"]).transform("any")
    chosen = at_best_rates(runs[is_usual | ~is_measured_at_usual])
    return [path_of_text(run) for run in of_main_origin(chosen).index]


def _rates(experiments: Experiments) -> Mapping[str, float]:
    """The learning rate of each experiment in the scale's comparisons."""
    rates: dict[str, float] = experiments.chosen.groupby("experiment")[RATE].first().to_dict()
    return rates
