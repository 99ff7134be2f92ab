"""Compares slowdowns with curvature: the effective delay tau' of delay profiles (the paper's
section 2.3), and the norms of the strategies.

    tau'^2 = sum_k tau_k^2 S_k / sum_k S_k

where tau_k is the delay of stage k in updates (P - 1 - k in a pipeline), and S_k is the sum of the
squared row norms C_i^2 over the parameters of stage k. Here the C_i are row norms of the Hessian at
one checkpoint; in the paper's theorem they bound the rows at all weights that training reaches.

Theorem 2.3 bounds convergence by the delay times the norm in the coordinates in which Adam steps;
its form for stages replaces the delay by tau'. In a pipeline, both grow with P alone. Delay
profiles with the same mean delay tell them apart. Theorem 3.1 orders the norms: bilateral below
unilateral below original."""

import math
from collections import Counter
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from brx.config.schema import DelayCode
from brx.curvature.norm_result import (
    STRATEGY_SPACES,
    NormResult,
    Space,
    norm_table,
    results_of,
    stage_of_block,
)
from brx.errors import UserError, counted
from brx.names import path_of_text
from brx.pipeline.delay import StageDelay, pipeline_delays
from brx.runs.aspects import comparable
from brx.runs.comparison import common_target, slowdowns, with_reference
from brx.runs.experiments import at_best_rates, by_experiment
from brx.runs.frames import DEPTH
from brx.runs.run import Run, read_run
from brx.runs.tables import slowdown_text


class EffectiveDelay(NamedTuple):
    """tau' of one measured model with one number of stages."""

    num_stages: int  # P
    delay: float  # tau', in updates
    standard_error: float
    largest: float  # the largest delay of a stage; tau' cannot exceed it


def usual_stages(results: Sequence[NormResult]) -> list[int]:
    """The powers of two, from 1 to the number of blocks of the shallowest measured model."""
    fewest_blocks = min(result.num_blocks for result in results)
    return [2**power for power in range(fewest_blocks.bit_length())]


def effective_delay(
    result: NormResult, num_stages: int, delays: Sequence[StageDelay] | None = None
) -> EffectiveDelay:
    """tau' of the measured model, cut into `num_stages` stages as the trainer cuts it.

    Args:
        delays: one per stage; by default a pipeline's, P - 1 - k.

    UserError if the model has fewer blocks than stages."""
    if not 1 <= num_stages <= result.num_blocks:
        raise UserError(
            f"--stages {num_stages}: must be from 1 to the model's "
            f"{counted(result.num_blocks, 'block')}"
        )
    stages = stage_of_block(result.num_blocks, num_stages)
    in_updates = [delay.tau_updates for delay in delays or pipeline_delays(num_stages)]
    squared_delays = np.array(  # tau_k^2 of each block's stage (blocks,)
        [in_updates[stages[name]] ** 2 for name in result.blocks.names], np.float64
    )
    squares = np.array(result.blocks.sums[1])  # the S of each block (blocks,)
    covariance = np.array(result.blocks.covariances[1])  # (blocks, blocks)

    squared = float(squared_delays @ squares / squares.sum())  # tau'^2
    delay = math.sqrt(squared)
    error = 0.0
    if delay:
        # First-order propagation: Var(tau'^2) = slope . covariance . slope, and
        # d tau' = d tau'^2 / (2 tau').
        slope = (squared_delays - squared) / squares.sum()  # d tau'^2 / d S
        error = math.sqrt(max(0.0, slope @ covariance @ slope)) / (2 * delay)
    return EffectiveDelay(num_stages, delay, error, max(in_updates))


def uniform_effective_delay(num_stages: int) -> float:
    """tau' if all stages had the same S_k: the root mean square of the delays."""
    return math.sqrt(sum(delay.tau**2 for delay in pipeline_delays(num_stages)) / num_stages)


def delay_table(curves: Sequence[tuple[NormResult, Sequence[EffectiveDelay]]]) -> pd.DataFrame:
    """tau' by number of stages: one row per measurement, and a last row as if all stages had the
    same S_k. All cells are texts.

    Args:
        curves: each measurement with its effective delays; all with the same numbers of stages."""
    rows = []
    for result, delays in curves:
        row = {"tau'": f"{Path(result.run).name}, {result.space}"}
        for tau in delays:
            row[f"P = {tau.num_stages}"] = f"{tau.delay:.3g}±{tau.standard_error:.1g}"
        rows.append(row)

    equal = {"tau'": "equal stages"}
    _, delays = curves[0]
    for tau in delays:
        equal[f"P = {tau.num_stages}"] = f"{uniform_effective_delay(tau.num_stages):.3g}"
    return pd.DataFrame([*rows, equal])


def measured_points(runs: pd.DataFrame, measured: Sequence[NormResult]) -> tuple[pd.DataFrame, str]:
    """`profile_points` of the measured methods and ""; if there are none, an empty table and the
    reason."""
    methods = [result.method for result in measured]
    try:
        return profile_points(runs[runs["method"].isin(methods)]), ""
    except UserError as error:
        return pd.DataFrame(), str(error)


def profile_points(runs: pd.DataFrame) -> pd.DataFrame:
    """The measured slowdown of each method under each delay profile, with the theory's prediction.

    Args:
        runs: rows of `brx.runs.load`.

    Returns a row per method and profile: the columns of `brx.runs.comparison.slowdowns` (at the
    best learning rates, to one loss for all), and

    - `profile`: the delays by stage, such as `8 x 4, 0 x 4`;
    - `tau`, `error`: tau' and its standard error, in updates;
    - `norm`: the norm per parameter in the coordinates of the method's steps;
    - `product`: tau' times the norm.

    tau' and the norm are from the method's run without delay, or from another of its runs if that
    one was not measured. UserError if runs or norms are missing."""
    chosen = at_best_rates(runs, with_diverged=True)
    compared = with_reference(comparable(chosen)[0]) if len(chosen) else chosen
    delayed = compared[compared["largest_delay"] > 0] if len(chosen) else chosen
    if delayed.empty:
        raise UserError("RUN: no method has a run without delay and one with, at the same settings")
    rows = slowdowns(compared, common_target(compared)).to_dict("records")
    by_setting = {row["experiment"]: row for row in rows}
    points = []
    for seeds in by_experiment(delayed):
        first = seeds.iloc[0]
        run = read_run(Path(str(first.name)))
        norm = _norm_of(first["method"], compared, runs)
        tau = effective_delay(norm, run.config.pipeline.stages, run.delays)
        prediction = {
            "method": first["method"],
            "profile": _profile_of(run),
            "tau": tau.delay,
            "error": tau.standard_error,
            "norm": norm.normalized,
            "product": tau.delay * norm.normalized,
        }
        points.append(by_setting[first["experiment"]] | prediction)
    return pd.DataFrame(points).sort_values(["method", "tau"], kind="stable")


def _profile_of(run: Run) -> str:
    """A run's delays as a text; for a rule in the user's own file, the setting itself."""
    pipeline = run.config.pipeline
    if isinstance(pipeline.delay, DelayCode):
        return pipeline.delay_text
    return profile_text([delay.tau for delay in run.delays])


def profile_text(taus: Sequence[int]) -> str:
    """The delays of the stages as a text in which equal neighbours are one entry: `8 x 4, 0 x 4`,
    or `4 x 8` for a constant delay."""
    parts = []
    for tau, equal in groupby(taus):
        count = len(list(equal))
        parts.append(str(tau) if count == 1 else f"{tau} x {count}")
    return ", ".join(parts)


def rank_correlation(points: pd.DataFrame, predictor: str) -> float:
    """Spearman's rank correlation between the slowdowns and a column that predicts them.

    NaN for fewer than three points."""
    known = points[points["ratio"] > 0]
    if len(known) < 3:
        return math.nan
    correlation: float = known["ratio"].corr(known[predictor], method="spearman")
    return correlation


def profile_table(points: pd.DataFrame) -> pd.DataFrame:
    """A row per row of `profile_points`; all cells are texts."""
    return pd.DataFrame(
        {
            "method": point["method"],
            "delays": point["profile"],
            "tau'": f"{point['tau']:.3g} ± {point['error']:.1g}",
            "norm / parameter": f"{point['norm']:.3g}",
            "product": f"{point['product']:.3g}",
            "slowdown": slowdown_text(point),
            "lr": f"{point['lr']:g}",
        }
        for point in points.to_dict("records")
    )


def _norm_of(method: str, compared: pd.DataFrame, runs: pd.DataFrame) -> NormResult:
    """The first measurement among a method's runs, in the coordinates of the method's steps.

    The runs are tried in this order: without delay at the best rate, without delay at another rate,
    any other of the same model."""
    space: Space = "rotated" if method.startswith("basis-rotation") else "original"
    is_same_model = runs["architecture"] == compared["architecture"].iloc[0]
    own = runs[(runs["method"] == method) & is_same_model]
    best_own = compared[compared["method"] == method]
    undelayed_at_best = best_own[best_own["largest_delay"] == 0]
    undelayed = own[own["largest_delay"] == 0]
    for run in (*undelayed_at_best.index, *undelayed.index, *own.index):
        result = results_of(path_of_text(run)).get(space)
        if result is not None:
            return result
    best = undelayed_at_best.index[0]
    raise UserError(
        f"{best}: has no norm in {space} coordinates; run `brx hessian-norm {best}` first"
    )


VARIANT_OF_SPACE: dict[Space, str] = {
    "original": "pipedream-lr",
    "1st-unilateral": "basis-rotation 1st/unilateral",
    "1st-bilateral": "basis-rotation 1st/bilateral",
    "2nd-unilateral": "basis-rotation 2nd/unilateral",
    "2nd-bilateral": "basis-rotation",
}
"""The method that steps in these coordinates; for the original ones, the paper's baseline."""


StrategySlowdowns = dict[Space, dict[str, Any]]
"""Each strategy's row of `comparison.slowdowns` at the largest P; only strategies that have such
runs."""


def strategy_slowdowns(runs: pd.DataFrame) -> StrategySlowdowns:
    """The strategies' slowdowns from the largest group of comparable runs that has any.

    Args:
        runs: rows of `brx.runs.load`.

    UserError if no strategy has runs at P = 1 and at another P."""
    for alike in comparable(at_best_rates(runs, with_diverged=True)):
        compared = with_reference(alike[alike["variant"].isin(VARIANT_OF_SPACE.values())])
        ends = compared[compared[DEPTH].isin((1, compared[DEPTH].max()))]
        if ends[DEPTH].nunique() > 1 and (ends["status"] == "finished").any():
            return slowdowns_at_ends(ends, common_target(with_reference(ends)))
    raise UserError("--runs: no strategy has runs there at P = 1 and at another P")


def slowdowns_at_ends(ends: pd.DataFrame, target: float) -> StrategySlowdowns:
    """The strategies' slowdowns between P = 1 and one other P.

    Args:
        ends: runs at both, rows of `at_best_rates`.
        target: the training loss to reach, in nats.

    UserError if a strategy has runs with several settings."""
    rows = slowdowns(ends, target).to_dict("records")
    by_variant = {row["method"]: row for row in rows}
    if len(by_variant) < len(rows):
        several = Counter(row["method"] for row in rows).most_common(1)[0][0]
        raise UserError(
            f"--runs: {several} has runs with several settings there; name a folder of one"
        )
    return {
        space: by_variant[variant]
        for space, variant in VARIANT_OF_SPACE.items()
        if variant in by_variant
    }


def stages_of(slowdown_by_space: StrategySlowdowns) -> int:
    """The P at which the slowdowns were measured; all have the same."""
    return int(next(iter(slowdown_by_space.values()))["stages"])


def strategy_table(
    results: Sequence[NormResult], slowdown_by_space: StrategySlowdowns | None
) -> pd.DataFrame:
    """`norm_table` with a column of slowdowns, if there are any; all cells are texts."""
    table = norm_table(results)
    if slowdown_by_space:
        texts = []
        for result in results:
            slowdown = slowdown_by_space.get(result.space)
            text = "not run" if slowdown is None else slowdown_text(slowdown)
            texts.append(f"{text} ({VARIANT_OF_SPACE[result.space]})")
        table[f"slowdown at P = {stages_of(slowdown_by_space)}"] = texts
    return table


def complete_measurements(
    results: Sequence[NormResult], spaces: Sequence[Space] = STRATEGY_SPACES
) -> list[list[NormResult]]:
    """Each run's measurements in the order of `spaces`.

    Runs that lack a measurement in one of the spaces are left out, as are runs with measurements at
    different checkpoints."""
    by_run: dict[str, dict[Space, NormResult]] = {}
    for result in results:
        by_run.setdefault(result.run, {})[result.space] = result
    complete = []
    for by_space in by_run.values():
        iterations = {result.iteration for result in by_space.values()}
        if by_space.keys() >= set(spaces) and len(iterations) == 1:
            complete.append([by_space[space] for space in spaces])
    return complete
