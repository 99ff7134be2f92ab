"""What was measured of Hessians and updates at checkpoints, in the scale's folder of such runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pandas as pd

from brx.curvature.bases import Source
from brx.curvature.norm_result import SPACES, STRATEGY_SPACES, NormResult, Space, results_of
from brx.curvature.oscillation import measured_oscillations, with_oscillation
from brx.curvature.strategies import complete_measurements
from brx.paper.evidence.base import Ask, Evidence, Margin, NotTriedError
from brx.paper.scales import Experiments
from brx.runs.frames import find_runs
from brx.runs.reading import Run


def _norms(experiments: Experiments, spaces: Sequence[Space]) -> Iterator[NormResult]:
    """What was measured, with the folder in which it lies as its run: exported ones name where they were made."""
    for folder in find_runs([experiments.scale.curvature]):
        for norm in results_of(folder, spaces).values():
            yield replace(norm, run=str(folder))


def _seed(run: str | Path) -> int:
    return Run.load(Path(run)).config.training.seed


def norm_ratio(experiments: Experiments) -> Evidence:
    """The rotated norm over the original one, at the checkpoint of basis rotation with the largest delay."""
    by_checkpoint: dict[tuple[str, int], dict[Space, NormResult]] = {}
    for norm in _norms(experiments, SPACES):
        if norm.method == "basis-rotation":
            by_checkpoint.setdefault((norm.run, norm.iteration), {})[norm.space] = norm
    pairs = [norms for norms in by_checkpoint.values() if norms.keys() >= set(SPACES)]
    if not pairs:
        raise NotTriedError("not measured in both coordinates at one checkpoint yet")
    deepest = max(pairs, key=lambda norms: norms["original"].num_stages)
    rotated, original = deepest["rotated"], deepest["original"]
    (low, high), (original_low, original_high) = rotated.interval, original.interval
    text = f"{original.normalized:.3g} to {rotated.normalized:.3g}, P = {original.num_stages}"
    ratio = rotated.normalized / original.normalized
    return Evidence(ratio, low / original_high, high / original_low, text=text, num_seeds=1)


def theorem_order(source: Source) -> Ask:
    """Wherever all coordinates were measured, bilateral is below unilateral, and that below original.

    By more than their intervals.
    """

    def ask(experiments: Experiments) -> Evidence:
        measured = complete_measurements(list(_norms(experiments, STRATEGY_SPACES)))
        if not measured:
            raise NotTriedError("norms by strategy have not been measured on one checkpoint yet")
        lines, holds = [], True
        for of_run in measured.values():
            by_space = {str(norm.space): norm for norm in of_run}
            falling = [by_space["original"], by_space[f"{source}-unilateral"], by_space[f"{source}-bilateral"]]
            unsure = [lower for higher, lower in pairwise(falling) if lower.interval[1] >= higher.interval[0]]
            holds = holds and not unsure
            texts = ", ".join(f"{norm.normalized:.3g}" for norm in falling)
            overlaps = "".join(f" ({norm.space}: intervals overlap)" for norm in unsure)
            lines.append(f"{falling[0].method}, P = {falling[0].num_stages}: {texts}{overlaps}")
        seeds = {_seed(of_run[0].run) for of_run in measured.values()}
        return Evidence(holds=holds, text="; ".join(lines), num_seeds=len(seeds))

    return ask


def _variances(experiments: Experiments) -> pd.DataFrame:
    """Logarithms of the variances of updates along two directions.

    Columns: P, method, seed, iteration, dominant, random, and `eigenvalue`, the dominant one's.

    Raises:
        NotTriedError: none was measured.
    """
    rows = [
        {
            "P": measured.num_stages,
            "method": measured.method,
            "seed": _seed(folder),
            "iteration": measured.iteration,
            "dominant": np.log(measured.dominant.variance),
            "random": np.log(measured.random.variance),
            "eigenvalue": measured.eigenvalue,
        }
        for folder in with_oscillation(find_runs([experiments.scale.curvature]))
        for measured in measured_oscillations(folder)
    ]
    if not rows:
        raise NotTriedError("not measured yet")
    return pd.DataFrame(rows)


def oscillates_less(*, delayed: bool) -> Ask:
    """Variances of basis rotation and PipeDream at the same checkpoints: at P = 1, or at the largest P measured."""

    def ask(experiments: Experiments) -> Evidence:
        table = _variances(experiments)
        P = table["P"].max() if delayed else 1
        if delayed and P == 1:
            raise NotTriedError("not measured under delay yet")
        keys = ["seed", "iteration"]
        ours, theirs = (
            table[(table["P"] == P) & (table["method"] == method)].set_index(keys)
            for method in ("basis-rotation", "pipedream")
        )
        both = ours.merge(theirs, left_index=True, right_index=True, suffixes=("", "_of_pipedream"))
        if both.empty:
            raise NotTriedError(f"not measured with both methods at P = {P} yet")
        less = Margin((both["dominant_of_pipedream"] - both["dominant"]).groupby("seed").mean())
        text = (
            f"variance along the dominant eigenvector at P = {P}: basis rotation {np.exp(both['dominant'].mean()):.2g},"
            f" PipeDream {np.exp(both['dominant_of_pipedream'].mean()):.2g}"
        )
        if less.interval:
            text += ", basis rotation over PipeDream [{:.2g}, {:.2g}]".format(*np.exp(-np.array(less.interval[::-1])))
        text += f" ({_plural(len(less.by_seed), 'seed')}, {_plural(len(both), 'checkpoint')})"
        if plateaus := int((both["eigenvalue_of_pipedream"] < 0).sum()):
            text += f"; at {plateaus} PipeDream's dominant eigenvalue is negative: the two do not compare there"
        return Evidence(holds=less.holds, text=text, num_seeds=len(less.by_seed))

    return ask


def stable_elsewhere(experiments: Experiments) -> Evidence:
    """Along a random direction the updates of both methods vary less than along the dominant one, at every P."""
    table = _variances(experiments)
    methods = {"basis-rotation", "pipedream"}
    table = table[table["method"].isin(methods)]
    if set(table["method"]) != methods:
        raise NotTriedError("not measured with both methods yet")
    table = table.assign(less=table["dominant"] - table["random"])
    margins = {key: Margin(rows.groupby("seed")["less"].mean()) for key, rows in table.groupby(["method", "P"])}
    ratios = ", ".join(f"{method} at P = {P} {np.exp(-less.mean):.2g}" for (method, P), less in margins.items())
    return Evidence(
        holds=all(less.holds for less in margins.values()),
        text=f"variance along a random direction over that along the dominant one: {ratios}",
        num_seeds=min(len(less.by_seed) for less in margins.values()),
    )


def _plural(count: int, what: str) -> str:
    return f"{count} {what}{'s' * (count > 1)}"
