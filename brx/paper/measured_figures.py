"""Figures of what was measured on runs: the Hessian's norms, oscillation, the effective delay.

Each takes the runs of `measured_runs`, over whose seeds it averages."""

from itertools import chain, product
from pathlib import Path

import pandas as pd

from brx.curvature.effective_delay import (
    VARIANT_OF_SPACE,
    complete_measurements,
    effective_delay,
    measured_points,
    slowdowns_at_ends,
    usual_stages,
)
from brx.curvature.norm_result import STRATEGY_SPACES, measured_norms
from brx.curvature.oscillation import oscillations_in, usual_only
from brx.errors import UserError
from brx.paper.measured_runs import measured_runs
from brx.paper.scales import ENDS, Experiments, Scale
from brx.plot.curvature import (
    draw_effective_delay,
    draw_norms,
    draw_oscillation,
    draw_strategy_norms,
)
from brx.runs.folder import has_runs
from brx.runs.frames import load


def draw_norms_of_runs(path: Path, scale: Scale) -> list[Path]:
    """Draw the norms in original and rotated coordinates."""
    return draw_norms(measured_norms(measured_runs(scale)), path)


def draw_oscillations(path: Path, scale: Scale) -> list[Path]:
    """Draw the oscillation at the smallest and the largest P that were measured."""
    measured = usual_only(oscillations_in(measured_runs(scale)))
    if not measured:
        raise UserError(
            f"{scale.curvature}: no oscillation was measured with the usual settings; run `brx "
            f"oscillation RUN`"
        )
    depths = [result.num_stages for result in measured]
    ends = min(depths), max(depths)
    at_ends = [result for result in measured if result.num_stages in ends]
    return draw_oscillation(at_ends, path)


def draw_norms_of_strategies(path: Path, scale: Scale) -> list[Path]:
    """Draw the norms in each strategy's coordinates, with the strategies' slowdowns if there are
    any."""
    norms = measured_norms(measured_runs(scale), STRATEGY_SPACES)
    results = list(chain.from_iterable(complete_measurements(norms)))
    if not results:
        raise UserError(
            f"{scale.curvature}: no checkpoint was measured in all coordinates; run `brx "
            f"hessian-norm RUN --strategies`"
        )
    costs = None
    if has_runs(scale.runs):
        experiments = Experiments.load(scale)
        wanted = product(VARIANT_OF_SPACE.values(), ENDS)
        present = experiments.find_all({"method": name, "stages": P} for name, P in wanted)
        target = experiments.slowdown_target()
        if present and target is not None:
            costs = slowdowns_at_ends(pd.concat(present), target)
    return draw_strategy_norms(results, costs, path)


def draw_effective_delays(path: Path, scale: Scale) -> list[Path]:
    """Draw the effective delay at every usual number of stages, and slowdowns against it."""
    measured = measured_norms(measured_runs(scale))
    stages = usual_stages(measured)
    curves_of_runs = []
    for result in measured:
        by_stages = [effective_delay(result, count) for count in stages]
        curves_of_runs.append((result, by_stages))
    points, _ = measured_points(load([scale.curvature]), measured)
    return draw_effective_delay(curves_of_runs, points, path)
