"""Which method ends lower: final validation losses (docs/protocol.md, 4)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations

import pandas as pd

from brx.config.loading import Settings
from brx.paper.evidence.base import Evidence, Margin, runs_of, shared_seeds
from brx.paper.scales import COMPENSATIONS, MAIN, Experiments
from brx.runs.comparison import BASELINES
from brx.runs.frames import SEED

LEAST_ACCURATE = "basis-rotation 1st/unilateral"
FINER_THAN = (
    ("basis-rotation", "basis-rotation 2nd/unilateral"),
    ("basis-rotation 1st/bilateral", LEAST_ACCURATE),
    ("basis-rotation", "basis-rotation 1st/bilateral"),
    ("basis-rotation 2nd/unilateral", LEAST_ACCURATE),
)
"""Estimation strategies, each with one that is coarser in geometry or in source."""
OVER_EACH_BASELINE = tuple(("basis-rotation", baseline) for baseline in BASELINES)
DELAYS_OF_COMPENSATION = (8, 16, 32)


def final_loss(seeds: pd.DataFrame) -> float:
    """Final validation loss in nats, the mean over seeds."""
    return float(seeds["val_loss"].mean())


def margin(ours: pd.DataFrame, theirs: pd.DataFrame, loss: str = "val_loss") -> Margin:
    """How many nats ours ends below theirs."""
    losses, their_losses = (seeds.set_index(SEED)[loss] for seeds in shared_seeds(ours, theirs))
    return Margin(their_losses - losses)


def ends_below(name: str, ours: pd.DataFrame, others: Mapping[str, pd.DataFrame]) -> Evidence:
    """Whether ours ends below every other; the text is about the one that decides."""
    ours, *rest = shared_seeds(ours, *others.values())
    by_name = dict(zip(others, rest, strict=True))
    margins = {other: margin(ours, runs) for other, runs in by_name.items()}
    closest = min(margins, key=lambda other: margins[other].least)
    text = f"{name} {final_loss(ours):.3f}, {closest} {final_loss(by_name[closest]):.3f} nats"
    if interval := margins[closest].interval:
        text += f", difference [{-interval[1]:+.3f}, {-interval[0]:+.3f}]"
    return Evidence(holds=margins[closest].holds, text=text)


def _lead(experiments: Experiments, method: str, others: Sequence[str], stages: int) -> Margin:
    """How far a method ends below the lowest of some others at P stages."""
    ours, *theirs = shared_seeds(*(runs_of(experiments, name, stages) for name in (method, *others)))
    return margin(ours, min(theirs, key=final_loss))


def ends_below_at_every_depth(
    experiments: Experiments, pairs: Iterable[tuple[str, str | Sequence[str]]], from_stages: int
) -> Evidence:
    """In every pair the first method ends below the other, or the lowest of the others, from a number of stages on.

    The text has the smallest lead at each, and the intervals of those that are within chance.
    """
    named = [(method, (others,) if isinstance(others, str) else others) for method, others in pairs]
    by_depth = {
        P: [_lead(experiments, method, others, P) for method, others in named]
        for P in experiments.scale.depths
        if from_stages <= P
    }
    least = {P: min(margins, key=lambda margin: margin.mean) for P, margins in by_depth.items()}
    text = "nats below: " + ", ".join(f"P = {P}: {margin.mean:.3f}" for P, margin in least.items())
    for P, margins in by_depth.items():
        open_ones = [margin.interval for margin in margins if margin.interval and not margin.holds]
        text += "".join("; at P = {} one is [{:+.3f}, {:+.3f}]".format(P, *interval) for interval in open_ones)
    return Evidence(holds=all(margin.holds for margins in by_depth.values() for margin in margins), text=text)


def lead_grows(experiments: Experiments, method: str, others: Sequence[str], from_stages: int) -> Evidence:
    """A method ends below the lowest of others at the deepest pipeline, and by more than at a number of stages."""
    deepest = experiments.scale.deepest
    small, large = (_lead(experiments, method, others, P) for P in (from_stages, deepest))
    difference = large - small
    means = [side.by_seed[difference.by_seed.index].mean() for side in (small, large)]
    text = f"lead {means[0]:.3f} nats at P = {from_stages}, {means[1]:.3f} at P = {deepest}"
    if difference.interval:
        text += ", difference [{:+.3f}, {:+.3f}]".format(*difference.interval)
    return Evidence(holds=difference.holds and large.holds, text=text)


def beats_baselines(
    experiments: Experiments,
    sweep: str = "",
    shared: Settings | None = None,
    own: Settings | None = None,
    model: str = "main",
) -> Evidence:
    """Basis rotation ends below all baselines at the deepest pipeline.

    Args:
        experiments: where the runs are.
        sweep: that makes the runs; by default each method's own.
        shared: settings of all methods.
        own: settings of basis rotation alone, which `sweep` has without baselines.
        model: which.
    """
    settings = {**(shared or {}), **(own or {})}
    ours = runs_of(experiments, "basis-rotation", sweep=sweep, model=model, settings=settings)
    of_baselines = sweep if shared else ""
    theirs = {name: runs_of(experiments, name, sweep=of_baselines, model=model, settings=shared) for name in BASELINES}
    return ends_below("basis-rotation", ours, theirs)


def few_refreshes_cost_little(experiments: Experiments) -> Evidence:
    """Refreshes every 100 iterations lose less than a tenth of the lead over the best baseline.

    The paper says "little", we say a tenth (docs/protocol.md, 6).
    """
    usual, *baselines = (runs_of(experiments, name) for name in ("basis-rotation", *BASELINES))
    few = runs_of(experiments, "basis-rotation", sweep="frequency", settings={"optimizer.frequency": 100})
    usual, few, *baselines = shared_seeds(usual, few, *baselines)
    cost, lead = margin(usual, few), margin(usual, min(baselines, key=final_loss))
    text = f"{cost.mean:.3f} of a lead of {lead.mean:.3f} nats over the best baseline"
    return Evidence(holds=Margin(lead.by_seed / 10 - cost.by_seed).holds, text=text)


def reversed_is_worse(experiments: Experiments) -> Evidence:
    settings = {"optimizer.refresh_schedule": "reversed"}
    other = runs_of(experiments, "basis-rotation", sweep="stage-aware", settings=settings)
    return ends_below("equal intervals", runs_of(experiments, "basis-rotation"), {"reversed": other})


def deeper_ends_lower(experiments: Experiments, method: str, holds: bool) -> Evidence:
    """From the shallowest to the deepest model, one block per stage, the final loss falls; or not `holds`: it rises."""
    blocks = experiments.scale.blocks
    runs = shared_seeds(*(runs_of(experiments, method, count, settings={"model.blocks": count}) for count in blocks))
    finals = zip(blocks, runs, strict=True)
    text = ", ".join(f"{count} blocks: {final_loss(seeds):.3f}" for count, seeds in finals)
    lower, higher = (runs[-1], runs[0]) if holds else (runs[0], runs[-1])
    return Evidence(holds=margin(lower, higher).holds, text=text)


def loses_less_without_stashing(experiments: Experiments) -> Evidence:
    """Basis rotation's final loss rises less than that of any baseline when weights are not stashed."""
    rises = {}
    for method in ("basis-rotation", *BASELINES):
        without = runs_of(experiments, method, sweep="stashing", settings={"pipeline.stash": "none"})
        rises[method] = margin(runs_of(experiments, method), without)
    ours, *theirs = rises.values()
    text = "rise: " + ", ".join(f"{method} {rise.mean:+.3f}" for method, rise in rises.items()) + " nats"
    return Evidence(holds=all((rise - ours).holds for rise in theirs), text=text)


def _compensated(experiments: Experiments, stages: int) -> tuple[dict[str, pd.DataFrame], str]:
    """Delay compensation by its strength, and the strength that ends lowest."""
    name = "delay-compensation"
    by_strength = {
        f"{strength:g}": runs_of(experiments, name, stages, name, settings={"optimizer.compensation": strength})
        for strength in COMPENSATIONS
    }
    return by_strength, min(by_strength, key=lambda strength: final_loss(by_strength[strength]))


def beats_delay_compensation(experiments: Experiments) -> Evidence:
    """Basis rotation ends below delay compensation in every strength; the text has the strength that ends lowest."""
    leads, holds = [], True
    for P in DELAYS_OF_COMPENSATION:
        ours = runs_of(experiments, "basis-rotation", P)
        by_strength, best = _compensated(experiments, P)
        holds = holds and bool(ends_below("", ours, by_strength).holds)
        leads.append(f"P = {P}: {margin(ours, by_strength[best]).mean:.3f} (strength {best})")
    return Evidence(holds=holds, text="nats below the best strength: " + ", ".join(leads))


def delay_compensation_is_like_pipedream(experiments: Experiments) -> Evidence:
    """The best strength ends nearer to PipeDream than to basis rotation (docs/protocol.md, 6)."""
    lines, holds = [], True
    for P in DELAYS_OF_COMPENSATION:
        by_strength, best = _compensated(experiments, P)
        below_pipedream = margin(by_strength[best], runs_of(experiments, "pipedream", P))
        above_ours = margin(runs_of(experiments, "basis-rotation", P), by_strength[best])
        holds = holds and (above_ours - Margin(below_pipedream.by_seed.abs())).holds
        lines.append(f"P = {P}: {below_pipedream.mean:.3f} below PipeDream, {above_ours.mean:.3f} above basis rotation")
    return Evidence(holds=holds, text="; ".join(lines) + " nats")


def validation_follows_training(experiments: Experiments) -> Evidence:
    """The main methods are in the same order by validation as by training loss, at the deepest pipeline.

    Of each pair whose training losses differ by more than chance, the validation losses differ alike, and so, too.
    """
    runs = dict(zip(MAIN, shared_seeds(*(runs_of(experiments, method) for method in MAIN)), strict=True))
    training = {method: float(seeds["train_loss"].mean()) for method, seeds in runs.items()}
    by_training = sorted(runs, key=training.__getitem__)
    ordered = [
        margin(runs[lower], runs[higher]).holds
        for lower, higher in combinations(by_training, 2)
        if margin(runs[lower], runs[higher], "train_loss").holds
    ]
    finals = [f"{method} {training[method]:.3f} / {final_loss(runs[method]):.3f}" for method in by_training]
    text = f"training / validation: {', '.join(finals)} nats; by both {sum(ordered)} of {len(ordered)} sure pairs"
    return Evidence(holds=bool(ordered) and all(ordered), text=text)
