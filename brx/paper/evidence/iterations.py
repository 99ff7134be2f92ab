"""How many iterations methods need: slowdowns, iterations saved, and the time that these are."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import numpy as np
import pandas as pd

from brx.config.loading import preset_with
from brx.paper.evidence.base import Evidence, Margin, NotTriedError, runs_of, shared_seeds
from brx.paper.ladder import PAPER_RELATIVE_DELAY, SLOWDOWN, complete_lengths, ladder_slowdowns
from brx.paper.scales import Experiments
from brx.runs.comparison import BASELINES, EARLY, common_target, reached_by_seed, saved_ratio, slowdowns
from brx.runs.frames import SEED

OVER_MUON_AND_SCION = tuple(product(("soap", "basis-rotation"), ("muon", "scion")))
OVER_BASELINES = tuple(product(("muon", "scion"), BASELINES))


def slowdown_of(experiments: Experiments, method: str) -> Evidence:
    """To the one target of the scale; PipeDream's to its own, since it sets none for the others."""
    ends = pd.concat([runs_of(experiments, method, P) for P in experiments.scale.ends])
    target = common_target(ends) if method == "pipedream" else _target(experiments)
    (row,) = slowdowns(ends, target).to_dict("records")
    if pd.isna(row["ratio"]):
        why = "the target loss is on a plateau" if row["is_plateau"] else "the runs without delay never reach it"
        raise NotTriedError(f"target loss {target:.2f}: {why}")
    early = f"early: without delay in the first {EARLY:.0%} of training" if row["is_early"] else ""
    return Evidence(row["ratio"], row["low"], row["high"], is_bound=row["is_censored"], text=early)


def extrapolated_slowdown(experiments: Experiments, method: str) -> Evidence:
    """What the ladder's power law says of the paper's length of training."""
    rows = ladder_slowdowns(complete_lengths(experiments))
    law = None if rows.empty else SLOWDOWN.law(rows[rows["method"] == method])
    if law is None:
        raise NotTriedError(f"{method} was not trained for several lengths")
    return Evidence(*SLOWDOWN.predicted(law, PAPER_RELATIVE_DELAY))


def _target(experiments: Experiments) -> float:
    target = experiments.slowdown_target()
    if target is None:
        raise NotTriedError("no method has runs both without delay and at the deepest pipeline yet")
    return target


def slows_down_less(experiments: Experiments, pairs: Sequence[tuple[str, str]]) -> Evidence:
    """In every pair, the first method slows down less than the second, all to the one target, seed by seed."""
    methods = list(dict.fromkeys(method for pair in pairs for method in pair))
    logs, bounds = _log_slowdowns(experiments, methods)
    text = ", ".join(f"{name} {'> ' if name in bounds else ''}{np.exp(logs[name].mean()):.2f}" for name in methods)
    margins = {(better, worse): Margin(logs[worse] - logs[better]) for better, worse in pairs}
    (better, worse), closest = min(margins.items(), key=lambda item: item[1].least)
    if closest.interval:
        low, high = np.exp(closest.interval)
        text += f"; {worse} over {better} [{low:.2f}, {high:.2f}]"
    # A method that never got there may be slower than its bound, but not faster.
    return Evidence(holds=closest.holds and not bounds & {better for better, _ in pairs}, text=text)


def _log_slowdowns(experiments: Experiments, methods: Sequence[str]) -> tuple[pd.DataFrame, set[str]]:
    """A row per seed that all have, a column per method; and the methods of which some are lower bounds."""
    target = _target(experiments)
    columns, bounds = {}, set()
    for method in methods:
        ends = experiments.scale.ends
        reference, delayed = (reached_by_seed(runs_of(experiments, method, P), target) for P in ends)
        shared = sorted(reference.keys() & delayed.keys())
        if not all(reference[seed].is_reached for seed in shared):
            raise NotTriedError(f"{method} without delay never reaches the target loss")
        ratios = {seed: delayed[seed].iterations / reference[seed].iterations for seed in shared}
        columns[method] = np.log(pd.Series(ratios, dtype=float))
        if not all(delayed[seed].is_reached for seed in shared):
            bounds.add(method)
    return pd.DataFrame(columns).dropna(), bounds


def soap_is_close(experiments: Experiments) -> Evidence:
    """SOAP's slowdown is nearer to basis rotation's, as a factor, than Muon's and Scion's (docs/protocol.md, 6)."""
    logs, bounds = _log_slowdowns(experiments, ("basis-rotation", "soap", "muon", "scion"))
    distances = logs.drop(columns="basis-rotation").sub(logs["basis-rotation"], axis="index").abs()
    text = ", ".join(f"{method} {np.exp(distances[method].mean()):.2f}" for method in distances)
    nearer = [Margin(distances[method] - distances["soap"]) for method in ("muon", "scion")]
    holds = all(margin.holds for margin in nearer) and not bounds & {"soap", "basis-rotation"}
    return Evidence(holds=holds, text=f"a factor from basis rotation's slowdown: {text}")


def _saved(ours: pd.DataFrame, other: pd.DataFrame) -> Evidence:
    """The share of another experiment's iterations that ours saves to its final loss, over the seeds that both have."""
    ours, other = shared_seeds(ours, other)
    ratio = saved_ratio(ours, other)
    name, num_seeds = other["variant"].iloc[0], other[SEED].nunique()
    if ratio is None:
        raise NotTriedError(f"{name} ends above the loss that it has in the mean of its last quarter")
    if ratio.is_lower_bound:
        text = f"over {name}, whose final loss is never reached"
        return Evidence(1 - ratio.ratio, is_bound=True, text=text, num_seeds=num_seeds)
    low, high = (math.nan if end is None else 1 - end for end in (ratio.high, ratio.low))
    return Evidence(1 - ratio.ratio, low, high, text=f"over {name}", num_seeds=num_seeds)


def _with_best_baseline(
    experiments: Experiments, method: str, baselines: Sequence[str], model: str = "main"
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """A method's runs, and those of the baseline with the lowest training loss: iterations are saved to that."""
    ours, *others = shared_seeds(*(runs_of(experiments, name, model=model) for name in (method, *baselines)))
    return ours, min(others, key=lambda seeds: float(seeds["train_loss"].mean()))


def saved_over_baselines(
    experiments: Experiments,
    method: str = "basis-rotation",
    baselines: Sequence[str] = BASELINES,
    model: str = "main",
) -> Evidence:
    """The share of the iterations of the best of `baselines` that a method saves to its final loss."""
    return _saved(*_with_best_baseline(experiments, method, baselines, model))


def saved_by_stage_aware(experiments: Experiments) -> Evidence:
    settings = {"optimizer.refresh_schedule": "stage-aware"}
    aware = runs_of(experiments, "basis-rotation", sweep="stage-aware", settings=settings)
    return _saved(aware, runs_of(experiments, "basis-rotation"))


def saves_more(experiments: Experiments, larger: str, smaller: str) -> Evidence:
    """One model saves more than another; by their means, since the models have no seed in common but in name."""
    ours, theirs = (saved_over_baselines(experiments, model=model) for model in (larger, smaller))
    text = f"smaller {theirs.value:.1%}, larger {ours.value:.1%}"
    return Evidence(holds=ours.value > theirs.value and not ours.is_bound, text=text)


def hours_saved(experiments: Experiments) -> Evidence:
    """The share of the best baseline's time that basis rotation saves to its final loss.

    Iterations times the measured time of one, not the clocks of runs that shared a machine.
    """
    ours, baseline = _with_best_baseline(experiments, "basis-rotation", BASELINES)
    saved = _saved(ours, baseline)
    best = baseline["method"].iloc[0]
    our_time, their_time = (_relative_time(experiments, method) for method in ("basis-rotation", best))
    value, low, high = (1 - (1 - share) * our_time / their_time for share in (saved.value, saved.low, saved.high))
    interval = "" if np.isnan(low) else f" [{low:.1%}, {high:.1%}]"
    bound = "< " if saved.is_bound else ""
    text = f"{bound}{value:.1%}{interval} over {best}; iterations of {our_time:.2f} and {their_time:.2f} x AdamW's"
    hours = replace(saved, value=value, low=low, high=high, text=text)
    return replace(hours, holds=not hours.is_bound and hours.decisive(hours.num_seeds) > 0)


def _relative_time(experiments: Experiments, method: str) -> float:
    """An iteration of the scale's main model over AdamW's, from the benchmark's table."""
    path, blocks = experiments.scale.times, preset_with(experiments.scale.preset, {}).model.blocks
    if path is None or not path.is_file():
        raise NotTriedError("the time of an iteration has not been measured at this scale yet")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        table = pd.DataFrame(content["rows"], columns=content["columns"]).set_index(["blocks", "stages", "method"])
        return float(table.loc[(str(blocks), str(blocks), method), "ratio to AdamW"])
    except (KeyError, TypeError, ValueError):
        raise NotTriedError(f"{path} has no single row of {method} at {blocks} blocks, one per stage") from None
