"""Delay profiles of one mean: does the slowdown follow the effective delay, by itself or times the (1,1)-norm?

Theorem 2.3 bounds convergence by the delay times the norm in the coordinates in which Adam steps, and its stage form
replaces the delay by the effective one, tau'. In a pipeline both grow with P alone; profiles part them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import pandas as pd

from brx.config.loading import load_config
from brx.curvature.effective_delay import EffectiveDelay, effective_delay
from brx.curvature.norm_result import NormResult, Space, results_of
from brx.errors import UserError
from brx.pipeline.delay import stage_delays
from brx.runs.comparison import common_target, slowdowns, with_reference
from brx.runs.experiments import at_best_rates, by_experiment
from brx.runs.frames import DEPTH, comparable
from brx.runs.tables import slowdown_text


@dataclass(frozen=True)
class ProfilePoint:
    """What one delay profile costs one method, beside what the theory makes of it.

    Attributes:
        method: it.
        profile: the stages' delays in micro-batches, for example `8 x 4, 0 x 4`.
        effective: tau', weighted by the rows of the method's run without delay.
        norm: that run's, in the coordinates of the method's steps.
        slowdown: a row of `brx.runs.comparison.slowdowns`.
    """

    method: str
    profile: str
    effective: EffectiveDelay
    norm: NormResult
    slowdown: dict[str, Any]

    @property
    def ratio(self) -> float:
        """The slowdown; a lower bound where a run never got there."""
        return float(self.slowdown["ratio"])

    @property
    def product(self) -> float:
        """tau' times the (1,1)-norm per parameter."""
        return self.effective.delay * self.norm.normalized


def profile_points(runs: pd.DataFrame) -> list[ProfilePoint]:
    """A point per method and profile, at each one's best learning rate and to one loss for all.

    Args:
        runs: rows of `brx.runs.load`: per method runs without delay, one of them with measured norms, and with it.

    Raises:
        UserError: there is no method with both, or a run without delay is not measured.
    """
    chosen = at_best_rates(runs, with_diverged=True)
    compared = with_reference(comparable(chosen)[0]) if len(chosen) else chosen
    delayed = compared[compared["largest_delay"] > 0] if len(chosen) else chosen
    if delayed.empty:
        raise UserError("RUN: no method has a run without delay and one with, at the same settings")
    by_variant = {
        (row["method"], row["stages"]): row for row in slowdowns(compared, common_target(compared)).to_dict("records")
    }
    points = []
    for seeds in by_experiment(delayed):
        first = seeds.iloc[0]
        pipeline = load_config(Path(str(first.name)) / "config.yaml").pipeline
        delays = stage_delays(pipeline)
        norm = _undelayed_norm(first["method"], compared, runs)
        tau = effective_delay(norm, pipeline.stages, delays)
        slowdown = by_variant[first["variant"], first[DEPTH]]
        points.append(ProfilePoint(first["method"], profile_text([one.tau for one in delays]), tau, norm, slowdown))
    return sorted(points, key=lambda point: (point.method, point.effective.delay))


def profile_text(taus: Sequence[int]) -> str:
    """Equal neighbours together: `8 x 4, 0 x 4`, or `4 x 8` for a constant."""
    runs = [(tau, len(list(equal))) for tau, equal in groupby(taus)]
    return ", ".join(f"{tau}" if count == 1 else f"{tau} x {count}" for tau, count in runs)


def rank_correlation(points: Sequence[ProfilePoint], predictor: Sequence[float]) -> float:
    """Spearman's, between slowdowns and what is to predict them; NaN from fewer than three."""
    pairs = [(point.ratio, value) for point, value in zip(points, predictor, strict=True) if point.ratio > 0]
    if len(pairs) < 3:
        return math.nan
    frame = pd.DataFrame(pairs).rank()
    return float(frame[0].corr(frame[1]))


def profile_table(points: Sequence[ProfilePoint]) -> pd.DataFrame:
    """A row per method and profile; texts."""
    return pd.DataFrame(
        {
            "method": point.method,
            "delays": point.profile,
            "tau'": f"{point.effective.delay:.3g} ± {point.effective.standard_error:.1g}",
            "norm / parameter": f"{point.norm.normalized:.3g}",
            "product": f"{point.product:.3g}",
            "slowdown": slowdown_text(point.slowdown),
            "lr": f"{point.slowdown['lr']:g}",
        }
        for point in points
    )


def _undelayed_norm(method: str, compared: pd.DataFrame, runs: pd.DataFrame) -> NormResult:
    """The measurement of a method's run without delay: at its best rate, else at another."""
    space: Space = "rotated" if method.startswith("basis-rotation") else "original"
    undelayed = [frame[(frame["method"] == method) & (frame["largest_delay"] == 0)] for frame in (compared, runs)]
    for run in (*undelayed[0].index, *undelayed[1].index):
        found = results_of(Path(run)).get(space)
        if found is not None:
            return found
    best = undelayed[0].index[0]
    raise UserError(f"{best}: has no norm in {space} coordinates; run `brx hessian-norm {best}` first")
