"""The effective delay tau' of a pipeline (equation "effective delay"): its stages' delays, weighted by curvature.

tau'^2 = sum_k tau_k^2 S_k / sum_k S_k, where tau_k is the delay of stage k in updates: P - 1 - k, k = 0 .. P - 1, in a
pipeline (the paper counts stages from 1 and writes K - k), or what `pipeline.delay` says. S_k is the sum of the
squared row norms C_i^2 of its parameters. The C_i of the theorem bound the rows of the Hessian wherever training goes;
here they are the rows at one checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from rich.table import Table

from brx.config.loading import load_config
from brx.curvature.norm_result import NORMAL_95, NormResult, Space, results_of, stage_of_block
from brx.errors import UserError
from brx.pipeline.delay import StageDelay, pipeline_delays, stage_delays
from brx.runs.comparison import common_target, passage
from brx.runs.experiments import at_best_rates
from brx.runs.frames import DEPTH, RATE, SEED
from brx.runs.reading import ENDED


@dataclass(frozen=True)
class EffectiveDelay:
    """tau' at one number of stages.

    Attributes:
        num_stages: P.
        delay: tau', in iterations.
        standard_error: of it.
        largest: of the stages' delays, which tau' cannot exceed.
    """

    num_stages: int
    delay: float
    standard_error: float
    largest: float

    @property
    def interval(self) -> tuple[float, float]:
        """95 % confidence interval."""
        margin = NORMAL_95 * self.standard_error
        return max(0.0, self.delay - margin), min(self.largest, self.delay + margin)


def usual_stages(results: Sequence[NormResult]) -> list[int]:
    """Powers of two up to the number of blocks of the smallest model."""
    fewest_blocks = min(result.num_blocks for result in results)
    return [2**power for power in range(fewest_blocks.bit_length())]


def effective_delay(result: NormResult, num_stages: int, delays: Sequence[StageDelay] | None = None) -> EffectiveDelay:
    """tau' of the measured model, cut into `num_stages` stages as the trainer cuts it.

    Args:
        result: the measurement.
        num_stages: P.
        delays: of the stages; those of a pipeline by default.

    Raises:
        UserError: there are more stages than blocks.
    """
    if not 1 <= num_stages <= result.num_blocks:
        raise UserError(f"--stages {num_stages}: must be from 1 to the model's {result.num_blocks} blocks")
    stages = stage_of_block(result.num_blocks, num_stages)
    in_updates = [delay.in_updates for delay in delays or pipeline_delays(num_stages)]
    squared_delays = np.array([in_updates[stages[name]] ** 2 for name in result.blocks.names], np.float64)
    squares = np.array(result.blocks.sums[1])
    covariance = np.array(result.blocks.covariances[1])
    squared = float(squared_delays @ squares / squares.sum())
    slope = (squared_delays - squared) / squares.sum()  # d tau'^2 / d S_k
    delay = math.sqrt(squared)
    error = math.sqrt(max(0.0, slope @ covariance @ slope)) / (2 * delay) if delay else 0.0
    return EffectiveDelay(num_stages, delay, error, max(in_updates))


def uniform_effective_delay(num_stages: int) -> float:
    """tau' if all stages had the same S_k: the root mean square of the delays."""
    return math.sqrt(sum(delay.tau**2 for delay in pipeline_delays(num_stages)) / num_stages)


@dataclass(frozen=True)
class SlowdownPoint:
    """One run's measured slowdown beside its effective delay.

    Attributes:
        run: its folder.
        method: its method.
        label: `P = 8`, or its delay profile if that is not a pipeline's.
        estimate: where the norms are from: the run's own measurement, else one of another run of its method.
        delay: tau' of the run.
        slowdown: its iterations to the target over those of its method's run without delay; None if it never gets
            there.
        target: the training loss that all finished runs of the method reach, in nats (`common_target`).
    """

    run: str
    method: str
    label: str
    estimate: NormResult
    delay: EffectiveDelay
    slowdown: float | None
    target: float


def slowdown_points(runs: pd.DataFrame) -> list[SlowdownPoint]:
    """The runs that have finished or diverged, by method and stages.

    Of methods with a finished run without delay and a measurement; of each experiment at its best rate. A run is
    compared with the one without delay of its seed, where there is one. Its coordinates are those that its method takes
    its steps in: rotated ones for basis rotation.

    Args:
        runs: rows of `brx.runs.load`.
    """
    points = []
    best = at_best_rates(runs, with_diverged=True).drop_duplicates("experiment").set_index("experiment")[RATE]
    runs = runs[runs[RATE] == runs["experiment"].map(best)]
    pipelines = {run: load_config(Path(run) / "config.yaml").pipeline for run in runs.index}
    delays = {run: stage_delays(pipeline) for run, pipeline in pipelines.items()}
    for method, alike in runs.sort_values(DEPTH, kind="stable").groupby("method", sort=False):
        space: Space = "rotated" if method.startswith("basis-rotation") else "original"
        results = {run: results_of(Path(run)).get(space) for run in alike.index}
        measured = [result for result in results.values() if result is not None]
        finished = alike[alike["status"] == "finished"]
        fresh = finished[finished["largest_delay"] == 0]
        if fresh.empty or not measured:
            continue
        target = common_target(finished)
        reached = {run: passage(run, target) for run in finished.index}
        bases = {seed: reached[run] for run, seed in fresh[SEED][::-1].items()}
        for run in alike.index[alike["status"].isin(ENDED)]:
            iterations, base = reached.get(run), bases.get(alike.at[run, SEED], reached[fresh.index[0]])
            estimate = results[run] or measured[-1]
            slowdown = None if iterations is None or base is None else iterations / base
            pipeline = pipelines[run]
            delay = effective_delay(estimate, pipeline.stages, delays[run])
            label = f"P = {pipeline.stages}" if pipeline.delay == "pipeline" else f"delay {pipeline.delay_text}"
            points.append(SlowdownPoint(run, method, label, estimate, delay, slowdown, target))
    order = list(dict.fromkeys(runs["method"]))
    return sorted(points, key=lambda point: order.index(point.method))


def delay_table(names: Sequence[str], curves: Sequence[tuple[NormResult, Sequence[EffectiveDelay]]]) -> Table:
    """One row per measurement, one column per number of stages; below them what equal stages would have.

    Args:
        names: of the runs, one per measurement.
        curves: the measurements, each with its tau' at the same numbers of stages.
    """
    counts = [delay.num_stages for delay in curves[0][1]]
    table = Table()
    for column in ("tau'", *(f"P = {count}" for count in counts)):
        table.add_column(column, no_wrap=True)
    for name, (result, delays) in zip(names, curves, strict=True):
        cells = [f"{delay.delay:.3g}±{delay.standard_error:.1g}" for delay in delays]
        table.add_row(f"{name}, {result.space}", *cells)
    table.add_row("equal stages", *(f"{uniform_effective_delay(count):.3g}" for count in counts))
    return table


def slowdown_table(points: Sequence[SlowdownPoint]) -> Table:
    """One row per run: its effective delay and its slowdown."""
    table = Table("run", "method", "delays", "tau'", "slowdown in iterations")
    for point in points:
        slowdown = "never" if point.slowdown is None else f"{point.slowdown:.3g}"
        table.add_row(Path(point.run).name, point.method, point.label, f"{point.delay.delay:.3g}", slowdown)
    return table
