"""How many iterations methods need: slowdowns, iterations saved, and the time that these are."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import product

import numpy as np
import pandas as pd

from brx.config.loading import preset_with
from brx.paper.evidence.base import Ask, Evidence, Margin, NotTriedError, need
from brx.paper.evidence.losses import FINER_THAN
from brx.paper.evidence.models import ModelOf, main_model
from brx.paper.scales import Experiments
from brx.runs.comparison import BASELINES, common_target, reached_by_seed, saved_ratio, slowdowns


def slowdown_of(method: str) -> Ask:
    """To the one target of the scale; PipeDream's to its own, since it sets none for the others."""

    def ask(experiments: Experiments) -> Evidence:
        ends = pd.concat([need(experiments, method, P) for P in experiments.ends])
        target = common_target(ends) if method == "pipedream" else _target(experiments)
        (row,) = slowdowns(ends, target).to_dict("records")
        if pd.isna(row["ratio"]):
            raise NotTriedError("the runs without delay never reach the target loss")
        return Evidence(row["ratio"], row["low"], row["high"], is_bound=row["is_censored"])

    return ask


def _target(experiments: Experiments) -> float:
    target = experiments.slowdown_target()
    if target is None:
        raise NotTriedError("no method has runs both without delay and at the deepest pipeline yet")
    return target


def slows_down_less(*pairs: tuple[str, str]) -> Ask:
    """In every pair, the first method slows down less than the second, all to the one target, seed by seed."""

    def ask(experiments: Experiments) -> Evidence:
        methods = list(dict.fromkeys(method for pair in pairs for method in pair))
        logs = {method: _log_slowdowns(experiments, method) for method in methods}
        bounds = {method for method, (_, is_bound) in logs.items() if is_bound}
        margins = {(better, worse): Margin((logs[worse][0] - logs[better][0]).dropna()) for better, worse in pairs}
        text = ", ".join(
            f"{method} {'> ' if method in bounds else ''}{np.exp(logs[method][0].mean()):.2f}" for method in methods
        )
        (better, worse), closest = min(margins.items(), key=lambda item: item[1].mean)
        if closest.interval:
            low, high = np.exp(closest.interval)
            text += f"; {worse} over {better} [{low:.2f}, {high:.2f}]"
        # A method that never got there may be slower than its bound, but not faster.
        holds = all(margin.holds and better not in bounds for (better, _), margin in margins.items())
        return Evidence(holds=holds, text=text)

    return ask


def _log_slowdowns(experiments: Experiments, method: str) -> tuple[pd.Series, bool]:
    """By seed, and whether any is a lower bound."""
    target = _target(experiments)
    reference, delayed = (reached_by_seed(need(experiments, method, P), target) for P in experiments.ends)
    shared = sorted(reference.keys() & delayed.keys())
    if not shared or not all(reference[seed].is_reached for seed in shared):
        raise NotTriedError(f"{method} without delay never reaches the target loss")
    ratios = {seed: delayed[seed].iterations / reference[seed].iterations for seed in shared}
    return np.log(pd.Series(ratios)), not all(delayed[seed].is_reached for seed in shared)


BASELINES_SLOW_DOWN_MORE = slows_down_less(*product(("basis-rotation",), BASELINES))
FINER_STRATEGIES_SLOW_DOWN_LESS = slows_down_less(*FINER_THAN)
EIGENBASIS_SLOWS_DOWN_LESS = slows_down_less(*product(("soap", "basis-rotation"), ("muon", "scion")))
PRECONDITIONED_SLOW_DOWN_LESS = slows_down_less(*product(("muon", "scion"), BASELINES))


def soap_is_close(experiments: Experiments) -> Evidence:
    """SOAP's slowdown is nearer to basis rotation's, as a factor, than Muon's and Scion's (docs/protocol.md, 6)."""
    ours, *others = (_log_slowdowns(experiments, name)[0] for name in ("basis-rotation", "soap", "muon", "scion"))
    soap, muon, scion = ((other - ours).abs().dropna() for other in others)
    text = ", ".join(
        f"{name} {np.exp(distance.mean()):.2f}" for name, distance in (("SOAP", soap), ("Muon", muon), ("Scion", scion))
    )
    holds = all(Margin((other - soap).dropna()).holds for other in (muon, scion))
    return Evidence(holds=holds, text=f"a factor from basis rotation's slowdown: {text}")


def _saved(ours: pd.DataFrame, other: pd.DataFrame) -> Evidence:
    """The share of another experiment's iterations that ours saves to its final loss."""
    ratio = saved_ratio(ours, other)
    name = f"over {other['variant'].iloc[0]}"
    if ratio is None or ratio.is_lower_bound:
        return Evidence(0.0, text=f"{name}: its final loss is never reached")
    if ratio.low is None or ratio.high is None:
        return Evidence(1 - ratio.ratio, text=name)
    return Evidence(1 - ratio.ratio, 1 - ratio.high, 1 - ratio.low, text=name)


def _lowest_in_training(experiments: Sequence[pd.DataFrame]) -> pd.DataFrame:
    """The experiment that ends with the lowest training loss: that is the loss to which iterations are saved."""
    return min(experiments, key=lambda seeds: float(seeds["train_loss"].mean()))


def saved_over_baselines(
    method: str = "basis-rotation",
    baselines: Sequence[str] = BASELINES,
    *,
    sweep: str = "",
    stages: int | None = None,
    model: ModelOf = main_model,
) -> Ask:
    """The share of the iterations of the best of `baselines` that a method saves to its final loss."""

    def ask(experiments: Experiments) -> Evidence:
        preset, settings = model(experiments)
        P = stages or experiments.scale.deepest
        ours, *others = [
            need(experiments, name, P, sweep, preset=preset, settings=settings) for name in (method, *baselines)
        ]
        return _saved(ours, _lowest_in_training(others))

    return ask


def saved_by_stage_aware(experiments: Experiments) -> Evidence:
    P = experiments.scale.deepest
    settings = {"optimizer.refresh_schedule": "stage-aware"}
    aware = need(experiments, "basis-rotation", P, "stage-aware", settings=settings)
    return _saved(aware, need(experiments, "basis-rotation", P))


def saves_more(larger: Ask, smaller: Ask) -> Ask:
    """One model saves more than another."""

    def ask(experiments: Experiments) -> Evidence:
        ours, theirs = (ask(experiments).value for ask in (larger, smaller))
        return Evidence(holds=ours > theirs, text=f"smaller {theirs:.1%}, larger {ours:.1%}")

    return ask


def hours_saved(experiments: Experiments) -> Evidence:
    """The share of the best baseline's time that basis rotation saves to its final loss.

    Iterations times the measured time of one, not the clocks of runs that shared a machine.
    """
    P = experiments.scale.deepest
    ours, *baselines = (need(experiments, method, P) for method in ("basis-rotation", *BASELINES))
    baseline = _lowest_in_training(baselines)
    saved = _saved(ours, baseline)
    best = baseline["method"].iloc[0]
    our_time, their_time = (_relative_time(experiments, method) for method in ("basis-rotation", best))
    value, low, high = (1 - (1 - share) * our_time / their_time for share in (saved.value, saved.low, saved.high))
    interval = "" if np.isnan(low) else f" [{low:.1%}, {high:.1%}]"
    text = f"{value:.1%}{interval} over {best}; per iteration {our_time:.2f} against {their_time:.2f} x AdamW's time"
    return Evidence(value, low, high, holds=(value if np.isnan(low) else low) > 0, text=text)


def _relative_time(experiments: Experiments, method: str) -> float:
    """An iteration of the scale's main model over AdamW's, from the benchmark's table."""
    path, blocks = experiments.scale.times, preset_with(experiments.scale.preset, {}).model.blocks
    if path is None or not path.is_file():
        raise NotTriedError("the time of an iteration has not been measured at this scale yet")
    content = json.loads(path.read_text(encoding="utf-8"))
    try:
        table = pd.DataFrame(content["rows"], columns=content["columns"]).set_index(["blocks", "stages", "method"])
        return float(table.loc[(str(blocks), str(blocks), method), "ratio to AdamW"])
    except KeyError:
        raise NotTriedError(f"{path} has no row of {method} at {blocks} blocks, one per stage") from None
