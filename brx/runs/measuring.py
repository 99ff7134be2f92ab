"""From runs to what they say about delay (`brx.runs.time_to_loss`)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd

from brx.errors import UserError
from brx.runs.comparison import reached_by_seed
from brx.runs.experiments import at_best_rates, by_experiment, tried_rates
from brx.runs.frames import RATE, comparable, first_names, has_pipeline_delays, left_out
from brx.runs.time_to_loss import HIGHEST_LOSS, LOSS_STEP, Experiment, Measurements


def measure_largest_set(runs: pd.DataFrame, source: str) -> tuple[Measurements, list[str]]:
    """What the largest set of runs that compare says about delay, and lines on those that are left out.

    Runs compare whatever the micro-batches are into which they split up an update's examples.

    Args:
        runs: rows of `load`.
        source: where the runs are.

    Raises:
        UserError: they say nothing: none is finished, none has a pipeline's delays, or none falls to `HIGHEST_LOSS`.
    """
    finished = at_best_rates(runs)
    if finished.empty:
        raise UserError(f"{source}: no run is finished")
    is_pipeline = has_pipeline_delays(finished) | (finished["largest_delay"] == 0)
    if not is_pipeline.any():
        raise UserError(
            f"{source}: no run has a pipeline's delays (pipeline.delay: pipeline or like) or is without any"
        )
    measured, *others = comparable(finished[is_pipeline], any_split=True)
    differing = left_out(measured, others, any_split=True)
    notes = [_left_out(f"differ in {aspects}", runs["name"].tolist()) for aspects, runs in differing.items()]
    if not is_pipeline.all():
        notes.append(_left_out("have delays that are no pipeline's", list(finished.loc[~is_pipeline, "name"])))
    num_rates = tried_rates(runs).groupby("experiment").size().to_dict()
    return measure(measured, num_rates, source), notes


def measure(chosen: pd.DataFrame, num_rates: Mapping[str, int], source: str) -> Measurements:
    """What comparable runs say about delay.

    Args:
        chosen: rows of `at_best_rates`, of one of the sets of `comparable`; their delays are those of pipelines.
        num_rates: learning rates tried, by experiment.
        source: where the runs are.

    Raises:
        UserError: none falls to `HIGHEST_LOSS`.
    """
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
    by_loss = [reached_by_seed(seeds, loss).values() for loss in losses]
    return Experiment(
        method=method,
        delay=delay,
        lr=seeds[RATE].iloc[0],
        num_rates=num_rates,
        seconds=float(np.round(seeds["seconds_per_iteration"].min(), 6)),
        micro_batches=int(seeds["pipeline.accumulation"].iloc[0]),
        iterations=[[round(run.iterations, 1) if run.is_reached else None for run in row] for row in by_loss],
    )


def _left_out(why: str, names: Sequence[str]) -> str:
    """How many finished runs take no part, and the names of the first few."""
    return f"Left out: {len(names)} run(s) that {why}: {first_names(names)}."
