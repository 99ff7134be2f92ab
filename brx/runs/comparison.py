"""Experiments against each other: what delay costs a method, and what a method saves over the best baseline."""

from __future__ import annotations

from dataclasses import dataclass

import pandas as pd

from brx.runs.experiments import by_experiment
from brx.runs.frames import RATE, SEED, STAGES, comparable, same_but_for, smoothed_loss
from brx.runs.slowdown import reach, slowdown

BASELINES = ("pipedream", "pipedream-lr", "nesterov")
EARLY = 0.05
"""The share of the iterations before which training has not settled."""


@dataclass(frozen=True)
class Comparison:
    """Everything that can be compared among some runs, each set of comparable ones by itself.

    Attributes:
        sets: the experiments, sorted by what makes losses comparable; most runs first.
        slowdowns: see `slowdowns`.
        reductions: see `reductions`.
        notes: a line for everything that does not compare, and for what to be careful with.
    """

    sets: list[pd.DataFrame]
    slowdowns: pd.DataFrame
    reductions: pd.DataFrame
    notes: list[str]


def compare(chosen: pd.DataFrame, target: float | None = None, reference_stages: int = 1) -> Comparison:
    """Slowdowns and reductions of all experiments.

    Args:
        chosen: rows of `at_best_rates`.
        target: training loss to reach, in nats; by default, in each set, the loss that all of its runs reach.
        reference_stages: P that slowdowns are relative to.
    """
    sets = comparable(chosen)
    delays, savings, notes = [], [], []
    if len(sets) > 1:
        notes.append(f"{len(sets)} sets of runs that differ in data, trajectory version, model or budget, each alone")
    for alike in sets:
        compared = with_reference(alike, reference_stages)
        if (compared[STAGES] != reference_stages).any():
            delays.append(slowdowns(compared, slowest_final(compared) if target is None else target, reference_stages))
        savings.append(reductions(alike))
        for seeds in by_experiment(alike.drop(compared.index)):
            where = f"no run of the same settings at P = {reference_stages}"
            notes.append(f"{seeds.index[0]}: {where}: it has no slowdown")
    slowdown_frame = _concat(delays)
    if len(slowdown_frame) and slowdown_frame["is_early"].any():
        notes.append(
            f"a reference reaches the target in its first {EARLY:.0%} of iterations: such a ratio is about the start of"
            " training, and a lower target says more"
        )
    return Comparison(sets, slowdown_frame, _concat(savings), notes)


def _frame(rows: list[dict[str, object]], *numbers: str, by: list[str]) -> pd.DataFrame:
    """Rows in order; None among `numbers` becomes NaN."""
    if not rows:
        return pd.DataFrame()
    return pd.DataFrame(rows).astype(dict.fromkeys(numbers, float)).sort_values(by, ignore_index=True)


def _concat(frames: list[pd.DataFrame]) -> pd.DataFrame:
    filled = [frame for frame in frames if len(frame)]
    return pd.concat(filled, ignore_index=True) if filled else pd.DataFrame()


def losses_by_seed(seeds: pd.DataFrame) -> dict[int, pd.Series]:
    """The smoothed training losses of an experiment's runs, by seed."""
    return {int(seed): smoothed_loss(path) for path, seed in seeds[SEED].items()}


def slowest_final(chosen: pd.DataFrame) -> float:
    """The lowest loss that all runs reach: the highest of their final smoothed training losses."""
    return float(chosen["train_loss"].max())


def with_reference(chosen: pd.DataFrame, reference_stages: int = 1) -> pd.DataFrame:
    """Runs whose method has runs at the reference number of stages, those themselves among them."""
    labels = _but_for_stages(chosen)
    return chosen[labels.isin(labels[chosen[STAGES] == reference_stages])]


def slowdowns(chosen: pd.DataFrame, target: float, reference_stages: int = 1) -> pd.DataFrame:
    """The slowdown of every experiment that has runs at `reference_stages`, by variant and stages.

    Columns: `model`, `method` (the variant), `stages`, `ratio` (NaN where the reference never reached the
    target), `low` and `high` (NaN with one seed), `is_censored` (`ratio` is a lower bound), `is_early` (the reference
    reaches the target before training has settled), `iterations` of each seed, `lr`, `lr_at_edge`, those of the
    reference under `reference_...`, and `target` in nats.

    Args:
        chosen: rows of `at_best_rates`.
        target: training loss to reach, in nats.
        reference_stages: P of the reference.
    """
    rows = []
    for _, alike in chosen.groupby(_but_for_stages(chosen), sort=False):
        references = alike[alike[STAGES] == reference_stages]
        if references.empty:
            continue
        for delayed in by_experiment(alike[alike[STAGES] != reference_stages]):
            rows.append(_slowdown(delayed, references, target))
    return _frame(rows, "ratio", "low", "high", by=["method", "stages"])


def _slowdown(delayed: pd.DataFrame, references: pd.DataFrame, target: float) -> dict[str, object]:
    estimate = slowdown(losses_by_seed(delayed), losses_by_seed(references), target)
    first, reference = delayed.iloc[0], references.iloc[0]
    needed = estimate.reference_reached.mean
    return {
        "model": first["architecture"],
        "method": first["variant"],
        "stages": first[STAGES],
        "ratio": estimate.ratio,
        "low": estimate.low,
        "high": estimate.high,
        "is_censored": estimate.reached.is_censored,
        "is_early": estimate.ratio is not None and needed < EARLY * reference["last_iteration"],
        "iterations": estimate.reached.iterations,
        "lr": first[RATE],
        "lr_at_edge": first["lr_at_edge"],
        "reference_stages": reference[STAGES],
        "reference_is_censored": estimate.reference_reached.is_censored,
        "reference_iterations": estimate.reference_reached.iterations,
        "reference_lr": reference[RATE],
        "reference_lr_at_edge": reference["lr_at_edge"],
        "target": target,
    }


def reductions(chosen: pd.DataFrame) -> pd.DataFrame:
    """How many fewer iterations a method needs to end where the best baseline ends, as the paper's headlines put it.

    A row per experiment that is no baseline and has one: settings but the optimizer's equal. Columns: `model`,
    `method` (the variant), `stages`, `baseline` (the one with the lowest final loss) with `baseline_final_loss`, and
    `share`: 1 - iterations needed / iterations of the baseline, NaN if the method never gets there.

    Args:
        chosen: rows of `at_best_rates`.
    """
    rows = []
    for _, alike in chosen.groupby(same_but_for(chosen, "optimizer", SEED), sort=False):
        is_baseline = alike["method"].isin(BASELINES)
        if not is_baseline.any():
            continue
        finals = alike[is_baseline].groupby("experiment", sort=False)["train_loss"].mean()
        best = alike[alike["experiment"] == finals.idxmin()]
        available = pd.Series([series.index[-1] for series in losses_by_seed(best).values()]).mean()
        for seeds in by_experiment(alike[~is_baseline]):
            needed = reach(losses_by_seed(seeds), finals.min())
            rows.append(
                {
                    "model": seeds["architecture"].iloc[0],
                    "method": seeds["variant"].iloc[0],
                    "stages": seeds[STAGES].iloc[0],
                    "baseline": best["variant"].iloc[0],
                    "baseline_final_loss": finals.min(),
                    "share": None if needed.is_censored else 1.0 - needed.mean / available,
                }
            )
    return _frame(rows, "share", by=["stages", "method"])


def _but_for_stages(chosen: pd.DataFrame) -> pd.Series:
    return same_but_for(chosen, RATE, SEED, STAGES)
