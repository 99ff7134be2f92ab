"""Iterations to every loss, by method and delay: a summary of the runs of a folder in one small
file.

It is written next to the committed results, so that `brx verdict` need not read two hundred runs.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Self

import pandas as pd
from pydantic import BaseModel, Field, model_validator

from brx.config.loading import validate
from brx.errors import UserError
from brx.files import make_folder, write_text
from brx.readers import read_json
from brx.runs.aspects import comparable, first_names, left_out
from brx.runs.comparison import reached_by_seed
from brx.runs.experiments import at_best_rates, by_experiment
from brx.runs.folder import ENDED
from brx.runs.frames import has_pipeline_delays
from brx.runs.pace import NO_COMMON_SPEED, fastest_paces, have_common_speed
from brx.runs.run import read_run
from brx.runs.slowdown import Reached
from brx.runs.trajectory import RATE

HIGHEST_LOSS = 4.0  # nats
LOSS_STEP = 0.02  # nats; between two stored losses, iterations are interpolated
ROUNDING = 1e-9  # nats; a loss this much above a stored one is the stored one


class Experiment(BaseModel, frozen=True, extra="forbid", allow_inf_nan=False):
    """The seeds of one method under one delay, at the learning rate that was chosen for them."""

    method: str
    """The method's variant (`brx.runs.run.Run.variant`) without its delay."""
    settings: dict[str, Any]
    """The method's settings: the section `optimizer`, and `stash` and `forecast` of `pipeline`.
    """
    delay: float = Field(ge=0)
    """The largest delay of a stage, in updates: 0 without asynchrony."""
    lr: float
    num_rates: int
    """How many learning rates were tried."""
    seconds: float = Field(gt=0)
    """The seconds per iteration of the fastest seed, while nothing else used the machine."""
    micro_batches: int = 1
    """M of these runs. `seconds` may be compared among runs of equal M only."""
    seeds: list[int] = Field(min_length=1)
    iterations: list[list[Annotated[float, Field(gt=0)] | None]]
    """Iterations to each loss (rows, as `Measurements.losses`) by each seed (columns); None if the
    run never got there."""


class Measurements(BaseModel, frozen=True, extra="forbid", allow_inf_nan=False):
    """Measurements of runs that can be compared: on the same data, model and budget."""

    source: str
    """The folder of the runs."""
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
        for experiment in self.experiments:
            iterations = experiment.iterations
            has_all_losses = len(iterations) == len(self.losses)
            has_all_seeds = all(len(row) == len(experiment.seeds) for row in iterations)
            if not has_all_losses or not has_all_seeds:
                rows = f"a row per loss, {len(self.losses)}, of a number per seed"
                raise ValueError(
                    f"{experiment.method} at delay {experiment.delay:g}: iterations must have "
                    f"{rows}"
                )
        return self

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a file that `write` made.

        Raises:
            UserError: it is not such a file.
        """
        try:
            content = read_json(path)
        except ValueError as error:
            raise UserError(
                f"{path}: not readable: {error}; brx verdict RUNS --save {path} writes it again"
            ) from None
        return validate(content, cls, str(path))

    def write(self, path: Path) -> None:
        """Write the file, and its folder if there is none."""
        make_folder(path.parent)
        write_text(path, self.model_dump_json(exclude_defaults=True) + "\n")

    def reached(self, experiment: Experiment, loss: float) -> dict[int, Reached]:
        """When each seed of an experiment passed a loss (nats), interpolated between stored losses.

        Raises:
            UserError: the loss is above all stored ones.
        """
        if loss > self.losses[0]:
            raise UserError(
                f"--loss {loss:g}: above {self.losses[0]:g}, where these measurements begin"
            )
        never = Reached(float(self.last_iteration), False)
        if self.losses[-1] > loss + ROUNDING:  # it is below all stored losses
            return dict.fromkeys(experiment.seeds, never)
        # The rows of the stored losses around `loss`, which descend by `LOSS_STEP`, and how far
        # `loss` lies from the one above to the one below. At the first row, both are the same.
        below = 0
        while self.losses[below] > loss + ROUNDING:
            below += 1
        above = max(0, below - 1)
        share = (self.losses[above] - loss) / LOSS_STEP if above < below else 0.0
        reached = {}
        for column, seed in enumerate(experiment.seeds):
            before = experiment.iterations[above][column]
            after = experiment.iterations[below][column]
            if before is None or after is None:
                reached[seed] = never
            else:
                reached[seed] = Reached(before + share * (after - before), True)
        return reached


def measure_largest_set(runs: pd.DataFrame, source: str) -> tuple[Measurements, list[str]]:
    """Measure the largest set of comparable runs under the delays of pipelines.

    If there are several experiments of one method and delay (with other moments or decays), the one
    that ends lowest is measured.

    Args:
        runs: rows of `load`.
        source: where they are, for messages and for the file.

    Returns:
        The measurements, and a line for each reason why runs are left out or times do not compare.

    Raises:
        UserError: no run can be measured.
    """
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
    names_left_out: dict[str, list[str]] = {}  # by the reason
    for aspects, alike in differing.items():
        names_left_out[f"different in {aspects}"] = list(alike["name"])
    names_left_out |= _without_result(runs, finished)
    if not is_pipeline.all():
        reason = "with delays that are no pipeline's"
        names_left_out[reason] = list(finished.loc[~is_pipeline, "name"])
    notes = [
        f"left out, {reason}: {first_names(names)}" for reason, names in names_left_out.items()
    ]
    best = _best_experiments(measured)
    if not have_common_speed(list(best.values())):
        notes.append(NO_COMMON_SPEED)
    return _measurements(measured, best, source), notes


def _without_result(runs: pd.DataFrame, finished: pd.DataFrame) -> dict[str, list[str]]:
    """The names of runs that say nothing about iterations, by the reason.

    Args:
        runs: rows of `load`.
        finished: rows of `at_best_rates` from these.
    """
    has_ended = runs["status"].isin(ENDED)
    has_diverged = runs["status"] == "diverged"
    is_measured = runs["experiment"].isin(finished["experiment"])
    reasons = {
        "not finished": ~has_ended,
        "diverged as all of the same settings": has_diverged & ~is_measured,
    }
    return {why: list(runs.loc[wanted, "name"]) for why, wanted in reasons.items() if wanted.any()}


def _measurements(
    measured: pd.DataFrame, best: Mapping[tuple[str, float], pd.DataFrame], source: str
) -> Measurements:
    """The measurements of runs (rows of `at_best_rates`) that compare, and of their
    `_best_experiments`."""
    first = measured.iloc[0]
    if pd.isna(first["examples_per_update"]):
        raise UserError(
            f"{source}: how many examples an update takes is not known; record them with "
            f"batch_size="
        )
    losses = _losses_above(measured["train_loss"].min(), source)
    paces = fastest_paces(list(best.values()))
    seconds = {key: round(float(pace), 6) for key, pace in zip(best, paces, strict=True)}
    return Measurements(
        source=source,
        model=first["architecture"],
        examples=int(first["examples_per_update"]),
        last_iteration=int(first["last_iteration"]),
        losses=losses,
        experiments=[_experiment(*key, best[key], losses, seconds[key]) for key in sorted(best)],
    )


def _losses_above(lowest: float, source: str) -> list[float]:
    """The losses from `HIGHEST_LOSS` down to the last multiple of `LOSS_STEP` above `lowest`."""
    steps = range(round(HIGHEST_LOSS / LOSS_STEP), math.floor(lowest / LOSS_STEP), -1)
    if not steps:
        raise UserError(
            f"{source}: no run falls to a training loss of {HIGHEST_LOSS:g} nats, where "
            f"measurements begin (the lowest ends at {lowest:.2f})"
        )
    return [round(step * LOSS_STEP, 4) for step in steps]


def _best_experiments(measured: pd.DataFrame) -> dict[tuple[str, float], pd.DataFrame]:
    """The experiment that ends lowest for each method and delay."""
    best: dict[tuple[str, float], pd.DataFrame] = {}
    for seeds in by_experiment(measured):
        first = seeds.iloc[0]
        method = str(first["variant"]).partition(", delay ")[0]
        key = (method, float(first["largest_delay"]))
        if key not in best or seeds["train_loss"].mean() < best[key]["train_loss"].mean():
            best[key] = seeds
    return best


def _experiment(
    method: str, delay: float, seeds: pd.DataFrame, losses: Sequence[float], seconds: float
) -> Experiment:
    if not seconds > 0:
        raise UserError(
            f"{seeds.index[0]}: an iteration takes {seconds:g} s by its metrics; times must be "
            f"above 0"
        )
    by_loss = [reached_by_seed(seeds, loss) for loss in losses]
    iterations = []
    for by_seed in by_loss:
        iterations.append([_rounded(run) for run in by_seed.values()])
    config = read_run(Path(str(seeds.index[0]))).config
    optimizer = config.optimizer.beyond_defaults()
    for key in ("lr", "facts"):
        optimizer.pop(key, None)
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
        seconds=seconds,
        micro_batches=int(seeds["pipeline.accumulation"].iloc[0]),
        seeds=list(by_loss[0]),
        iterations=iterations,
    )


def _rounded(run: Reached) -> float | None:
    return round(run.iterations, 1) if run.is_reached else None
