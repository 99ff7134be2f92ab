"""The Hessian's norm in the coordinates of each strategy at one checkpoint, beside what delay costs that strategy.

Theorem 3.1 orders the norms: bilateral below unilateral below original. Its bases are eigenvectors of expectations at
fixed weights, so all four are estimated there, from the same gradients, whatever the run's own method keeps: its own
basis is an average over older weights, and of one strategy alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from brx.curvature.norm_result import STRATEGY_SPACES, NormResult, Space, norm_table
from brx.errors import UserError
from brx.runs.comparison import common_target, slowdowns, with_reference
from brx.runs.experiments import at_best_rates
from brx.runs.frames import DEPTH, comparable
from brx.runs.tables import slowdown_text

VARIANT_OF_SPACE: dict[Space, str] = {
    "original": "pipedream-lr",
    "1st-unilateral": "basis-rotation 1st/unilateral",
    "1st-bilateral": "basis-rotation 1st/bilateral",
    "2nd-unilateral": "basis-rotation 2nd/unilateral",
    "2nd-bilateral": "basis-rotation",
}
"""The method that steps in these coordinates; in the original ones the baseline that the paper has beside them."""


@dataclass(frozen=True)
class StrategySlowdowns:
    """What delay costs each strategy, at one number of stages and to one loss."""

    num_stages: int  # P, the largest that any of them has
    by_space: dict[Space, dict[str, Any]]  # rows of `comparison.slowdowns`, as far as their methods have such runs

    @classmethod
    def of(cls, runs: pd.DataFrame) -> StrategySlowdowns:
        """From rows of `brx.runs.load`: those of the model and length that most of them have.

        Raises:
            UserError: none of the methods has runs at P = 1 and at another P.
        """
        chosen = at_best_rates(runs, with_diverged=True)
        chosen = chosen[chosen["variant"].isin(VARIANT_OF_SPACE.values())]
        for alike in comparable(chosen):
            compared = with_reference(alike)
            ends = compared[compared[DEPTH].isin((1, compared[DEPTH].max()))]
            if ends[DEPTH].nunique() > 1 and (ends["status"] == "finished").any():
                return cls.at_ends(ends, common_target(with_reference(ends)))
        raise UserError("--runs: no strategy has runs there at P = 1 and at another P")

    @classmethod
    def at_ends(cls, ends: pd.DataFrame, target: float) -> StrategySlowdowns:
        """From the runs at P = 1 and at one other P, rows of `at_best_rates`, to a training loss in nats."""
        by_variant = {row["method"]: row for row in slowdowns(ends, target).to_dict("records")}
        by_space = {space: by_variant[variant] for space, variant in VARIANT_OF_SPACE.items() if variant in by_variant}
        return cls(int(ends[DEPTH].max()), by_space)

    def text(self, space: Space) -> str:
        """The slowdown with its interval, or that there is none."""
        return slowdown_text(self.by_space[space]) if space in self.by_space else "not run"


def strategy_table(results: Sequence[NormResult], delays: StrategySlowdowns | None) -> pd.DataFrame:
    """`norm_table` with, if given, the slowdowns; texts."""
    table = norm_table(results)
    if delays is not None:
        column = f"slowdown at P = {delays.num_stages}"
        table[column] = [f"{delays.text(result.space)} ({VARIANT_OF_SPACE[result.space]})" for result in results]
    return table


def complete_measurements(results: Sequence[NormResult]) -> dict[str, list[NormResult]]:
    """By run, the norms at one checkpoint in all of `STRATEGY_SPACES`, in their order; without runs that lack one."""
    by_run: dict[str, dict[Space, NormResult]] = {}
    for result in results:
        by_run.setdefault(result.run, {})[result.space] = result
    return {
        Path(run).name: [of_run[space] for space in STRATEGY_SPACES]
        for run, of_run in by_run.items()
        if of_run.keys() >= set(STRATEGY_SPACES) and len({result.iteration for result in of_run.values()}) == 1
    }
