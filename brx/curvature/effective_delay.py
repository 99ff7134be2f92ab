"""Slowdowns compared with curvature: the effective delay tau' of delay profiles, and norms of
strategies.

tau'^2 = sum_k tau_k^2 S_k / sum_k S_k, where tau_k is the delay of stage k in updates (P - 1 - k in
a pipeline) and S_k the sum of the squared row norms C_i^2 of its parameters: of the Hessian at one
checkpoint, where the theorem's bound the rows wherever training goes. Theorem 2.3 bounds
convergence by the delay times the norm in the coordinates in which Adam steps, and its stage form
replaces the delay by tau'. In a pipeline both grow with P alone; profiles of one mean delay tell
them apart. Theorem 3.1 orders the norms: bilateral below unilateral below original."""

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
from brx.errors import UserError
from brx.names import path_of_text
from brx.pipeline.delay import StageDelay, pipeline_delays
from brx.runs.comparison import common_target, slowdowns, with_reference
from brx.runs.experiments import at_best_rates, by_experiment
from brx.runs.frames import DEPTH, comparable, read_run
from brx.runs.tables import slowdown_text


class EffectiveDelay(NamedTuple):
    num_stages: int  # P
    delay: float  # tau', in updates
    standard_error: float
    largest: float  # the largest delay of a stage; tau' cannot exceed it


def usual_stages(results: Sequence[NormResult]) -> list[int]:  # powers of two
    return [2**power for power in range(min(result.num_blocks for result in results).bit_length())]


def effective_delay(
    result: NormResult, num_stages: int, delays: Sequence[StageDelay] | None = None
) -> EffectiveDelay:
    """tau' of the measured model, cut into P stages as the trainer cuts it, with a pipeline's
    delays or other ones."""
    if not 1 <= num_stages <= result.num_blocks:
        raise UserError(
            f"--stages {num_stages}: must be from 1 to the model's {result.num_blocks} blocks"
        )
    stages = stage_of_block(result.num_blocks, num_stages)
    in_updates = [delay.tau_updates for delay in delays or pipeline_delays(num_stages)]
    squared_delays = np.array(
        [in_updates[stages[name]] ** 2 for name in result.blocks.names], np.float64
    )
    squares, covariance = np.array(result.blocks.sums[1]), np.array(result.blocks.covariances[1])
    squared = float(squared_delays @ squares / squares.sum())
    slope = (squared_delays - squared) / squares.sum()  # d tau'^2 / d S_k
    delay = math.sqrt(squared)
    error = math.sqrt(max(0.0, slope @ covariance @ slope)) / (2 * delay) if delay else 0.0
    return EffectiveDelay(num_stages, delay, error, max(in_updates))


def uniform_effective_delay(num_stages: int) -> float:
    """tau' if all stages had the same S_k: the root mean square of the delays."""
    return math.sqrt(sum(delay.tau**2 for delay in pipeline_delays(num_stages)) / num_stages)


def delay_table(curves: Sequence[tuple[NormResult, Sequence[EffectiveDelay]]]) -> pd.DataFrame:
    """A row per run's measurement with its tau' by number of stages; at last what equal stages
    would have. Texts."""
    rows = [
        {"tau'": f"{Path(result.run).name}, {result.space}"}
        | {f"P = {one.num_stages}": f"{one.delay:.3g}±{one.standard_error:.1g}" for one in delays}
        for result, delays in curves
    ]
    equal = {
        f"P = {one.num_stages}": f"{uniform_effective_delay(one.num_stages):.3g}"
        for one in curves[0][1]
    }
    return pd.DataFrame([*rows, {"tau'": "equal stages"} | equal])


def measured_points(runs: pd.DataFrame, measured: Sequence[NormResult]) -> tuple[pd.DataFrame, str]:
    """`profile_points` of the methods that were measured, or none and what lacks."""
    try:
        return profile_points(runs[runs["method"].isin([result.method for result in measured])]), ""
    except UserError as error:
        return pd.DataFrame(), str(error)


def profile_points(runs: pd.DataFrame) -> pd.DataFrame:
    """The cost of each delay profile of `runs` (rows of `brx.runs.load`) per method, and the
    theory's prediction.

    Rows of `brx.runs.comparison.slowdowns`, at the best rates and to one loss for all, with the
    profile (`8 x 4, 0 x 4`: delays by stage), and of the method's run without delay (another one,
    if that was not measured) tau', the norm per parameter in the coordinates of the method's steps,
    and their product. UserError where such runs or norms lack."""
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
        pipeline, delays = run.config.pipeline, run.delays
        norm = _norm_of(first["method"], compared, runs)
        tau = effective_delay(norm, pipeline.stages, delays)
        of_code = isinstance(pipeline.delay, DelayCode)
        profile = pipeline.delay_text if of_code else profile_text([one.tau for one in delays])
        slowdown = by_setting[first["experiment"]]
        about = {
            "method": first["method"],
            "profile": profile,
            "tau": tau.delay,
            "error": tau.standard_error,
        }
        points.append(
            slowdown | about | {"norm": norm.normalized, "product": tau.delay * norm.normalized}
        )
    return pd.DataFrame(points).sort_values(["method", "tau"], kind="stable")


def profile_text(taus: Sequence[int]) -> str:
    """Equal neighbours together: `8 x 4, 0 x 4`, or `4 x 8` for a constant."""
    runs = [(tau, len(list(equal))) for tau, equal in groupby(taus)]
    return ", ".join(f"{tau}" if count == 1 else f"{tau} x {count}" for tau, count in runs)


def rank_correlation(points: pd.DataFrame, predictor: str) -> float:
    """Spearman's, between slowdowns and the column that is to predict them; NaN from fewer than
    three."""
    known = points[points["ratio"] > 0]
    return known["ratio"].corr(known[predictor], method="spearman") if len(known) >= 3 else math.nan


def profile_table(points: pd.DataFrame) -> pd.DataFrame:
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
    """The measurement of a method's run without delay: at its best rate, else at another; else of
    any of its runs."""
    space: Space = "rotated" if method.startswith("basis-rotation") else "original"
    own = runs[
        (runs["method"] == method) & (runs["architecture"] == compared["architecture"].iloc[0])
    ]
    undelayed = [
        frame[(frame["method"] == method) & (frame["largest_delay"] == 0)]
        for frame in (compared, own)
    ]
    for run in (*undelayed[0].index, *undelayed[1].index, *own.index):
        found = results_of(path_of_text(run)).get(space)
        if found is not None:
            return found
    best = undelayed[0].index[0]
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
"""What delay costs each strategy that has such runs, to one loss at the largest P: rows of
`comparison.slowdowns`."""


def strategy_slowdowns(runs: pd.DataFrame) -> StrategySlowdowns:
    """The rows of `brx.runs.load` that have the most frequent model and length."""
    for alike in comparable(at_best_rates(runs, with_diverged=True)):
        compared = with_reference(alike[alike["variant"].isin(VARIANT_OF_SPACE.values())])
        ends = compared[compared[DEPTH].isin((1, compared[DEPTH].max()))]
        if ends[DEPTH].nunique() > 1 and (ends["status"] == "finished").any():
            return slowdowns_at_ends(ends, common_target(with_reference(ends)))
    raise UserError("--runs: no strategy has runs there at P = 1 and at another P")


def slowdowns_at_ends(ends: pd.DataFrame, target: float) -> StrategySlowdowns:
    """From the runs at P = 1 and at one other P, rows of `at_best_rates`, to a training loss in
    nats."""
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


def stages_of(delays: StrategySlowdowns) -> int:
    return int(next(iter(delays.values()))["stages"])


def strategy_table(results: Sequence[NormResult], delays: StrategySlowdowns | None) -> pd.DataFrame:
    """`norm_table` with, if there are any, the slowdowns; texts."""
    table = norm_table(results)
    if delays:
        known = {space: slowdown_text(row) for space, row in delays.items()}
        texts = [
            f"{known.get(one.space, 'not run')} ({VARIANT_OF_SPACE[one.space]})" for one in results
        ]
        table[f"slowdown at P = {stages_of(delays)}"] = texts
    return table


def complete_measurements(
    results: Sequence[NormResult], spaces: Sequence[Space] = STRATEGY_SPACES
) -> list[list[NormResult]]:
    """Per run, the norms at one checkpoint in all of some coordinates, in their order; without runs
    that lack one."""
    by_run: dict[str, dict[Space, NormResult]] = {}
    for result in results:
        by_run.setdefault(result.run, {})[result.space] = result
    return [
        [of_run[space] for space in spaces]
        for of_run in by_run.values()
        if of_run.keys() >= set(spaces)
        and len({result.iteration for result in of_run.values()}) == 1
    ]
