"""What a verdict is asked with: measurements, from runs or from the file that keeps what they say; costs; replicas."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from brx.config.parsing import parse_bytes
from brx.errors import UserError
from brx.planning.cuts import LocalSteps
from brx.planning.verdict import COST_REFERENCE
from brx.runs.frames import load
from brx.runs.time_to_loss import Measurements, measure_largest_set

if TYPE_CHECKING:
    from brx.planning.planned_run import PlannedRun

COMMITTED = Path("results/tables/laptop/time-to-loss.json")
"""What the committed runs say; `make reproduce-figures` writes it."""


def read_measurements(runs: Sequence[Path]) -> tuple[Measurements, list[str]]:
    """From a file of measurements, or from runs: the largest set of them that compares, and a line for each left out.

    Args:
        runs: one JSON file, or folders of runs; none for the committed ones.

    Raises:
        UserError: there are none, or they say nothing (see `measure_largest_set`).
    """
    if not runs and not COMMITTED.is_file():
        raise UserError(f"RUNS: needed, since {COMMITTED} is not there (it is in a checkout of brx)")
    paths = list(runs) or [COMMITTED]
    if len(paths) == 1 and paths[0].suffix == ".json":
        return Measurements.read(paths[0]), []
    return measure_largest_set(load(paths), ", ".join(map(str, paths)))


def parse_costs(texts: Sequence[str], measurements: Measurements) -> dict[str, float]:
    """`METHOD=SHARE` as numbers.

    Raises:
        UserError: a method is not among those measured, or its share is none.
    """
    methods = {experiment.method for experiment in measurements.experiments}
    costs = {}
    for text in texts:
        method, _, share = text.rpartition("=")
        if method not in methods:
            raise UserError(f"--cost {text}: write METHOD=SHARE, METHOD one of: {'; '.join(sorted(methods))}")
        costs[method] = _number(share)
        if not 0.0 <= costs[method] < math.inf:
            raise UserError(
                f"--cost {text}: the share of an iteration must be a number from 0, for example 0.05 for 5 %"
            )
    return costs


def parse_local_steps(
    steps: int | None, averaging: str | None, slowdown: float, num_replicas: int, run: PlannedRun | None
) -> LocalSteps | None:
    """The third rival: replicas that average their weights every `steps` steps; None if it is not asked for.

    Args:
        steps: H.
        averaging: the time of one: in units of an update's passes (`3`); with a run and its throughput, in seconds
            (`0.5s`), or as the bandwidth of the replicas' links (`1GB`), over which a ring sends each 2 (P - 1) / P
            times the fp32 weights.
        slowdown: iterations over those of synchronous training, as the user expects them.
        num_replicas: P.
        run: what throughput and weights are of.

    Raises:
        UserError: one of them is missing or none.
    """
    if steps is None and averaging is None:
        return None
    if steps is None or averaging is None:
        raise UserError("--local-steps and --averaging: give both; how long an averaging takes is yours to say")
    if not 1.0 <= slowdown < math.inf:
        raise UserError(f"--local-slowdown {slowdown:g}: must be a ratio of iterations from 1")
    units = _number(averaging)
    if units < 0.0:
        if run is None or run.throughput is None:
            raise UserError(
                f"--averaging {averaging}: write units of an update's passes, for example 3; seconds (0.5s) and"
                " bandwidths (1GB) need --config and --throughput"
            )
        seconds = _number(averaging.removesuffix("s"))
        if seconds < 0.0:
            sent = 2 * (num_replicas - 1) / num_replicas * run.weight_bytes
            seconds = sent / parse_bytes(averaging, "--averaging")
        units = seconds * run.throughput / run.unit
    return LocalSteps(steps, units, slowdown)


def _number(text: str) -> float:
    """-1 for what is none."""
    try:
        number = float(text)
    except ValueError:
        return -1.0
    return number if number >= 0 else -1.0


def read_costs(paths: Sequence[Path]) -> dict[str, float]:
    """What a method's update takes beyond AdamW's, as a share of AdamW's iteration: by method with its variant.

    Args:
        paths: folders of runs of one model and batch, or the file of `benchmarks.lab`; none for no costs.

    Raises:
        UserError: they are of different models, none is of AdamW, or the file is none.
    """
    if not paths:
        return {}
    where = f"--cost-from {' '.join(map(str, paths))}"
    is_table = len(paths) == 1 and paths[0].suffix == ".json"
    seconds = _seconds_of_table(paths[0]) if is_table else _seconds_of_runs(paths, where)
    if COST_REFERENCE not in seconds:
        raise UserError(f"{where}: has no {COST_REFERENCE} (AdamW), which costs are relative to")
    return {method: max(0.0, one / seconds[COST_REFERENCE] - 1.0) for method, one in seconds.items()}


def _seconds_of_runs(folders: Sequence[Path], where: str) -> dict[str, float]:
    """Per iteration of the fastest run of each method."""
    runs = load(folders).dropna(subset="seconds_per_iteration")
    of_one = ["architecture", "training.batch_size", "pipeline.accumulation"]
    if len(different := runs[of_one].drop_duplicates()) > 1:
        models = " and ".join(
            f"{name}, batch {batch} x {count}" for name, batch, count in different.itertuples(index=False)
        )
        raise UserError(f"{where}: runs of one model and batch are needed, these are of {models}")
    methods = runs["variant"].map(lambda variant: variant.partition(", delay ")[0])
    return dict(runs["seconds_per_iteration"].groupby(methods).min())


def _seconds_of_table(path: Path) -> dict[str, float]:
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
        time = next(place for place, name in enumerate(table["columns"]) if name.startswith("ms / iteration"))
        method = table["columns"].index("method")
        seconds = {row[method]: 1e-3 * float(row[time]) for row in table["rows"]}
        if not all(0 < one < math.inf for one in seconds.values()):
            raise ValueError("a time must be above 0")
        return seconds
    except (OSError, ValueError, KeyError, TypeError, AttributeError, StopIteration, IndexError):
        raise UserError(f"--cost-from {path}: no table of milliseconds per iteration by method") from None
