"""The paper's figures that need no sweep: pipelines over time, the toys, and what was measured of the Hessian.

Each is what a command of its own draws (`brx schedule`, `brx toy`, ...), at the paper's settings, at a path without
suffix, from what was measured at a scale.
"""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from brx.curvature.effective_delay import effective_delay, slowdown_points, usual_stages
from brx.curvature.norm_result import STRATEGY_SPACES, measured_norms, results_of
from brx.curvature.oscillation import measured_oscillations
from brx.curvature.strategies import VARIANT_OF_SPACE, StrategySlowdowns, complete_measurements
from brx.errors import UserError
from brx.paper.scales import Experiments, Scale
from brx.paper.toy_figures import run_toy
from brx.plot.curvature import draw_effective_delay, draw_norms, draw_oscillation, draw_strategy_norms
from brx.plot.schedule import draw_schedules
from brx.runs.frames import find_runs, load


def schedule(path: Path, _: Scale) -> list[Path]:
    return draw_schedules(4, 4, path)


def toy_quadratic(path: Path, _: Scale) -> list[Path]:
    return run_toy("quadratic", path)


def toy_spiral(path: Path, _: Scale) -> list[Path]:
    return run_toy("spiral", path)


def oscillation(path: Path, scale: Scale) -> list[Path]:
    oscillations = [one for folder in find_runs([scale.curvature]) for one in measured_oscillations(folder)]
    if not oscillations:
        raise UserError(f"{scale.curvature}: no run of which oscillation was measured; run `brx oscillation RUN...`")
    depths = [oscillation.num_stages for oscillation in oscillations]
    ends = {min(depths), max(depths)}
    return draw_oscillation([oscillation for oscillation in oscillations if oscillation.num_stages in ends], path)


def hessian_norm(path: Path, scale: Scale) -> list[Path]:
    return draw_norms(measured_norms(find_runs([scale.curvature])), path)


def strategy_norms(path: Path, scale: Scale) -> list[Path]:
    norms = [norm for run in find_runs([scale.curvature]) for norm in results_of(run, STRATEGY_SPACES).values()]
    results = [norm for of_run in complete_measurements(norms).values() for norm in of_run]
    if not results:
        raise UserError(
            f"{scale.curvature}: no checkpoint was measured in all coordinates; run `brx hessian-norm RUN --strategies`"
        )
    return draw_strategy_norms(results, _strategy_slowdowns(scale), path)


def _strategy_slowdowns(scale: Scale) -> StrategySlowdowns | None:
    """From the scale's runs, to its target, as far as there are any."""
    if not scale.runs.is_dir():
        return None
    experiments = Experiments.load(scale)
    present = experiments.find_all(*((name, P) for name in VARIANT_OF_SPACE.values() for P in scale.ends))
    target = experiments.slowdown_target()
    return StrategySlowdowns.at_ends(pd.concat(present), target) if present and target is not None else None


def effective_delays(path: Path, scale: Scale) -> list[Path]:
    folders = find_runs([scale.curvature])
    measured = measured_norms(folders)
    stages = usual_stages(measured)
    curves = [(result, [effective_delay(result, count) for count in stages]) for result in measured]
    return draw_effective_delay(curves, slowdown_points(load(folders)), path)
