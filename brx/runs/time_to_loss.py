"""Iterations to every loss, by method and delay: a folder's results about delay in one small file.
It is written next to the committed results, so that `brx verdict` need not read two hundred runs.
"""

import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

import numpy as np
import pandas as pd
from pydantic import BaseModel, Field, model_validator

from brx.config.loading import validate
from brx.errors import UserError
from brx.files import write_text
from brx.readers import read_json
from brx.runs.comparison import reached_by_seed
from brx.runs.experiments import at_best_rates, by_experiment
from brx.runs.frames import (
    RATE,
    comparable,
    first_names,
    has_pipeline_delays,
    left_out,
    read_run,
)
from brx.runs.slowdown import Reached

# In nats. Between two stored losses, iterations are interpolated.
LOSS_STEP, HIGHEST_LOSS = (
    0.02,
    4.0,
)


class Experiment(BaseModel, frozen=True, extra="forbid"):
    """The seeds of one method (with what tells its variants apart) under one delay, at the rate
    chosen for them."""

    method: str
    settings: dict[str, Any]
    """The method's settings: the section `optimizer`, and `stash` and `forecast` of `pipeline`.
    """
    delay: float = Field(ge=0)
    """The largest delay of a stage, in updates: 0 without asynchrony."""
    lr: float
    num_rates: int
    seconds: float = Field(gt=0)
    """Per iteration of the fastest seed while nothing else used the machine."""
    micro_batches: int = 1
    """M of these runs: the pace of runs compares among equal M."""
    seeds: list[int] = Field(min_length=1)
    iterations: list[list[float | None]]
    """Iterations to each loss (rows, as `Measurements.losses`) by each seed (columns); None: it
    never got there."""


class Measurements(BaseModel, frozen=True, extra="forbid"):
    """Runs that compare: on the same data, model and budget."""

    source: str
    model: str
    examples: int = Field(gt=0)
    """Per update."""
    last_iteration: int = Field(gt=0)
    losses: list[float] = Field(min_length=1)
    """Losses in nats, descending by `LOSS_STEP`."""
    experiments: list[Experiment] = Field(min_length=1)

    @model_validator(mode="after")
    def _check_tables(self) -> Self:
        if any(higher <= lower for higher, lower in pairwise(self.losses)):
            raise ValueError("losses: must descend")
        for one in self.experiments:
            if len(one.iterations) != len(self.losses) or {len(row) for row in one.iterations} != {
                len(one.seeds)
            }:
                rows = f"a row per loss, {len(self.losses)}, of a number per seed"
                raise ValueError(
                    f"{one.method} at delay {one.delay:g}: iterations must have {rows}"
                )
        return self

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a file that `write` made; UserError where it is none."""
        try:
            content = read_json(path)
        except ValueError as error:
            raise UserError(f"{path}: not readable: {error}") from None
        return validate(content, cls, str(path))

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, self.model_dump_json(exclude_defaults=True) + "\n")

    def reached(self, experiment: Experiment, loss: float) -> dict[int, Reached]:
        """When each seed passed a loss; UserError where the loss is above those that were
        measured."""
        if loss > self.losses[0]:
            raise UserError(
                f"--loss {loss:g}: above {self.losses[0]:g}, where these measurements begin"
            )
        never = Reached(float(self.last_iteration), False)
        below = next((index for index, kept in enumerate(self.losses) if kept <= loss + 1e-9), None)
        if below is None:
            return dict.fromkeys(experiment.seeds, never)
        above = max(0, below - 1)
        share = (self.losses[above] - loss) / LOSS_STEP if above < below else 0.0
        pairs = zip(
            experiment.seeds,
            experiment.iterations[above],
            experiment.iterations[below],
            strict=True,
        )
        return {
            seed: never
            if before is None or after is None
            else Reached(before + share * (after - before), True)
            for seed, before, after in pairs
        }


def measure_largest_set(runs: pd.DataFrame, source: str) -> tuple[Measurements, list[str]]:
    """What the largest set of runs that compare says about pipelines' delays, and lines on those
    that are left out.

    Of several experiments of one method and delay (with other moments or decays) the one that ends
    lowest counts. UserError where runs (rows of `load`, at `source`) say nothing."""
    finished = at_best_rates(runs)
    if finished.empty:
        raise UserError(f"{source}: no run is finished")
    is_pipeline = has_pipeline_delays(finished) | (finished["largest_delay"] == 0)
    if not is_pipeline.any():
        raise UserError(
            f"{source}: no run has a pipeline's delays (pipeline.delay: pipeline or like) or none "
            f"at all"
        )
    measured, *others = comparable(finished[is_pipeline], any_split=True)
    differing = left_out(measured, others, any_split=True)
    lacking = {f"differ in {aspects}": list(runs["name"]) for aspects, runs in differing.items()}
    if not is_pipeline.all():
        lacking["have delays that are no pipeline's"] = list(finished.loc[~is_pipeline, "name"])
    notes = [
        f"Left out: {len(names)} run(s) that {why}: {first_names(names)}."
        for why, names in lacking.items()
    ]
    first, lowest = measured.iloc[0], measured["train_loss"].min()
    if pd.isna(first["examples_per_update"]):
        raise UserError(
            f"{source}: how many examples an update takes is not known; record them with "
            f"batch_size="
        )
    steps = range(round(HIGHEST_LOSS / LOSS_STEP), math.floor(lowest / LOSS_STEP), -1)
    if not steps:
        above = (
            f"a training loss of {HIGHEST_LOSS:g} nats, where measurements begin (the lowest "
            f"ends at {lowest:.2f})"
        )
        raise UserError(f"{source}: no run falls to {above}")
    losses = [round(step * LOSS_STEP, 4) for step in steps]
    best: dict[tuple[str, float], pd.DataFrame] = {}
    for seeds in by_experiment(measured):
        one = seeds.iloc[0]
        key = (str(one["variant"]).partition(", delay ")[0], float(one["largest_delay"]))
        if key not in best or seeds["train_loss"].mean() < best[key]["train_loss"].mean():
            best[key] = seeds
    measurements = Measurements(
        source=source,
        model=first["architecture"],
        examples=int(first["examples_per_update"]),
        last_iteration=int(first["last_iteration"]),
        losses=losses,
        experiments=[_experiment(*key, best[key], losses) for key in sorted(best)],
    )
    return measurements, notes


def _experiment(
    method: str, delay: float, seeds: pd.DataFrame, losses: Sequence[float]
) -> Experiment:
    by_loss = [reached_by_seed(seeds, loss) for loss in losses]
    config = read_run(Path(str(seeds.index[0]))).config
    optimizer = config.optimizer.model_dump(
        mode="json", exclude_defaults=True, exclude={"lr", "facts"}
    )
    pipeline = config.pipeline.model_dump(mode="json", include={"stash", "forecast"})
    return Experiment(
        method=method,
        settings={
            "optimizer": {"method": config.optimizer.method, **optimizer},
            "pipeline": pipeline,
        },
        delay=delay,
        lr=seeds[RATE].iloc[0],
        num_rates=int(seeds["num_rates"].iloc[0]),
        seconds=float(np.round(seeds["seconds_per_iteration"].min(), 6)),
        micro_batches=int(seeds["pipeline.accumulation"].iloc[0]),
        seeds=list(by_loss[0]),
        iterations=[
            [round(run.iterations, 1) if run.is_reached else None for run in row.values()]
            for row in by_loss
        ],
    )
