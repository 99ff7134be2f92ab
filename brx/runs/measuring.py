"""From runs to what they say about delay (`brx.runs.time_to_loss`)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd

from brx.errors import UserError
from brx.runs.comparison import passage
from brx.runs.experiments import by_experiment
from brx.runs.frames import RATE, has_pipeline_delays
from brx.runs.time_to_loss import HIGHEST_LOSS, LOSS_STEP, Experiment, Measurements


def measure(chosen: pd.DataFrame, num_rates: Mapping[str, int], source: str) -> Measurements:
    """What comparable runs say about delay.

    Args:
        chosen: rows of `at_best_rates`, of one of the sets of `comparable`.
        num_rates: learning rates tried, by experiment.
        source: where the runs are.

    Raises:
        UserError: they say nothing: none is there, none has a pipeline's delays, or none falls to `HIGHEST_LOSS`.
    """
    if chosen.empty:
        raise UserError(f"{source}: no run is finished")
    chosen = chosen[has_pipeline_delays(chosen) | (chosen["largest_delay"] == 0)]
    if chosen.empty:
        raise UserError(
            f"{source}: no run has a pipeline's delays (pipeline.delay: pipeline or like) or is without any"
        )
    first, lowest = chosen.iloc[0], chosen["train_loss"].min()
    steps = range(round(HIGHEST_LOSS / LOSS_STEP), math.floor(lowest / LOSS_STEP), -1)
    if not steps:
        raise UserError(
            f"{source}: no run falls to a training loss of {HIGHEST_LOSS:g} nats, where measurements begin (the lowest"
            f" ends at {lowest:.2f})"
        )
    losses = [round(step * LOSS_STEP, 4) for step in steps]
    return Measurements(
        source=source,
        model=first["architecture"],
        last_iteration=int(first["last_iteration"]),
        losses=losses,
        experiments=[
            _experiment(method, delay, seeds, num_rates[seeds["experiment"].iloc[0]], losses)
            for (method, delay), seeds in _by_method_and_delay(chosen).items()
        ],
    )


def _by_method_and_delay(chosen: pd.DataFrame) -> dict[tuple[str, float], pd.DataFrame]:
    """One experiment each: of several (with other moments or decays), that with the lowest final loss."""
    best: dict[tuple[str, float], pd.DataFrame] = {}
    for seeds in by_experiment(chosen):
        first = seeds.iloc[0]
        key = (str(first["variant"]).partition(", delay ")[0], float(first["largest_delay"]))
        if key not in best or seeds["train_loss"].mean() < best[key]["train_loss"].mean():
            best[key] = seeds
    return dict(sorted(best.items(), key=lambda entry: entry[0]))


def _experiment(method: str, delay: float, seeds: pd.DataFrame, num_rates: int, losses: Sequence[float]) -> Experiment:
    by_loss = [[passage(run, loss) for run in seeds.index] for loss in losses]
    return Experiment(
        method=method,
        delay=delay,
        lr=seeds[RATE].iloc[0],
        num_rates=num_rates,
        seconds=float(np.round(seeds["seconds_per_iteration"].min(), 6)),
        iterations=[[None if iteration is None else round(iteration, 1) for iteration in row] for row in by_loss],
    )
