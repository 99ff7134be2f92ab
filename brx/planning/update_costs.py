"""What a method's update costs beyond AdamW's, as a share of an update's passes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path

import pandas as pd

from brx.errors import UserError, did_you_mean
from brx.planning.iterations import REFERENCE_METHOD, by_method
from brx.readers import read_json
from brx.runs.aspects import comparable
from brx.runs.frames import load
from brx.runs.pace import fastest_paces
from brx.runs.time_to_loss import Experiment, Measurements

RATIO_COLUMN = f"ratio to {REFERENCE_METHOD}"
"""The column of `benchmarks.lab` with the time of an iteration relative to AdamW's."""


def update_costs(experiments: Iterable[Experiment]) -> dict[str, float]:
    """The cost of each method's update beyond AdamW's, as a share of AdamW's iteration, from the
    fastest run of each method.

    Only runs with equal M are compared. If a method has runs with several M, the M at which AdamW
    is fastest counts. For an M without a run of AdamW, the fastest method takes its place."""
    rows = [(one.method, one.micro_batches, one.seconds) for one in experiments]
    measured = pd.DataFrame(rows, columns=["method", "M", "seconds"])
    # A row per method, a column per M.
    seconds = measured.groupby(["method", "M"])["seconds"].min().unstack()
    reference = seconds.reindex([REFERENCE_METHOD]).iloc[0]  # AdamW's seconds by M
    shares = (seconds / reference.fillna(seconds.min()) - 1.0).clip(lower=0.0)
    fastest_first = shares[reference.sort_values().index]
    # The first column in which each method has a number.
    return dict(fastest_first.bfill(axis=1).iloc[:, 0])


def parse_costs(texts: Sequence[str], measurements: Measurements) -> dict[str, float]:
    """Parse texts `METHOD=SHARE` into shares by method.

    Raises:
        UserError: a method is not among the measured ones, or its share is not a number from 0.
    """
    methods = sorted(by_method(measurements))
    costs = {}
    for text in texts:
        method, _, share = text.rpartition("=")
        if method not in methods:
            hint = did_you_mean(method, methods)
            raise UserError(
                f"--cost {text}: write METHOD=SHARE{hint} (METHOD one of: {'; '.join(methods)})"
            )
        costs[method] = _number(share)
        if not 0.0 <= costs[method] < math.inf:
            raise UserError(
                f"--cost {text}: the share of an iteration must be at least 0, for example 0.05"
            )
    return costs


def _number(text: str) -> float:
    """NaN if the text is not a number."""
    try:
        return float(text)
    except ValueError:
        return math.nan


def read_costs(paths: Sequence[Path]) -> dict[str, float]:
    """The cost of each method's update, from folders of other runs (all of one model and batch), or
    from the file that `benchmarks.lab` writes.

    Raises:
        UserError: they do not compare, or lack AdamW.
    """
    if not paths:
        return {}
    is_table = len(paths) == 1 and paths[0].suffix == ".json"
    ratios = _ratios_of_table(paths[0]) if is_table else _ratios_of_runs(paths)
    return dict((ratios - 1.0).clip(lower=0.0))


def _ratios_of_runs(folders: Sequence[Path]) -> pd.Series:
    """By method, the time per iteration of its fastest run, relative to AdamW's."""
    where = f"--cost-from {' '.join(map(str, folders))}"
    runs = load(folders).dropna(subset="seconds_per_iteration")
    without_times = runs.index[~(runs["seconds_per_iteration"] > 0)]
    if len(without_times):
        raise UserError(f"{where}: {without_times[0]}: its metrics have no times above 0")
    sizes = ["architecture", "training.batch_size", "pipeline.accumulation"]
    different = runs[sizes].drop_duplicates()
    if len(different) > 1:
        models = " and ".join(
            f"{name}, batch {batch} x {count}" for name, batch, count in different.to_numpy()
        )
        raise UserError(f"{where}: needs runs of one model and batch, but these are of {models}")
    methods = {}
    for alike in comparable(runs):
        for run, variant in alike["variant"].items():
            methods[run] = variant.partition(", delay ")[0]
    by_method = dict(list(runs.groupby(methods)))
    paces = fastest_paces(list(by_method.values()))
    seconds = pd.Series(paces, index=list(by_method))
    if REFERENCE_METHOD not in seconds:
        raise UserError(f"{where}: has no {REFERENCE_METHOD} (AdamW), and costs are relative to it")
    return seconds / seconds[REFERENCE_METHOD]


def _ratios_of_table(path: Path) -> pd.Series:
    """By method, the time per iteration relative to AdamW's, in a file of `benchmarks.lab`.

    The file also has each method's median time. But the ratio is the median over turns that the
    methods took side by side, which a machine of changing speed does not shift."""
    try:
        content = read_json(path)
        table = pd.DataFrame(content["rows"], columns=content["columns"]).set_index("method")
        ratios = table[RATIO_COLUMN].astype(float)
        if ratios.between(0, math.inf, inclusive="neither").all():
            return ratios
    except (ValueError, KeyError, TypeError, IndexError):
        pass
    raise UserError(f"--cost-from {path}: no table with a column '{RATIO_COLUMN}' by method")
