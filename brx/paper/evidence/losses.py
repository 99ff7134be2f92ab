"""Which method ends lower: final validation losses (docs/protocol.md, 4)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import combinations

import pandas as pd

from brx.config.loading import Settings
from brx.paper.evidence.base import Ask, Evidence, Margin, need, shared_seeds
from brx.paper.evidence.models import ModelOf, main_model
from brx.paper.scales import COMPENSATIONS, MAIN, Experiments
from brx.runs.comparison import BASELINES
from brx.runs.frames import SEED

Lead = Callable[[Experiments, int], Margin]
"""How far one method ends below others at P stages."""
LEAST_ACCURATE = "basis-rotation 1st/unilateral"
FINER_THAN = (
    ("basis-rotation", "basis-rotation 2nd/unilateral"),
    ("basis-rotation 1st/bilateral", LEAST_ACCURATE),
    ("basis-rotation", "basis-rotation 1st/bilateral"),
    ("basis-rotation 2nd/unilateral", LEAST_ACCURATE),
)
"""Estimation strategies, each with one that is coarser in geometry or in source."""


def final_loss(seeds: pd.DataFrame) -> float:
    """Final validation loss in nats, the mean over seeds."""
    return float(seeds["val_loss"].mean())


def lowest(experiments: Mapping[str, pd.DataFrame]) -> str:
    """The name of the experiment that ends lowest."""
    return min(experiments, key=lambda name: final_loss(experiments[name]))


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


def over_baselines(method: str) -> Lead:
    """How far a method ends below the baseline that ends lowest there."""

    def lead(experiments: Experiments, stages: int) -> Margin:
        asked = [need(experiments, name, stages) for name in (method, *BASELINES)]
        ours, *baselines = shared_seeds(*asked)
        by_name = dict(zip(BASELINES, baselines, strict=True))
        return margin(ours, by_name[lowest(by_name)])

    return lead


def over(method: str, other: str) -> Lead:
    """How far a method ends below another one."""
    return lambda experiments, stages: margin(need(experiments, method, stages), need(experiments, other, stages))


def at_every_depth(*leads: Lead, from_stages: int) -> Ask:
    """All of the methods end below the others, from a number of stages on.

    The text has the smallest lead at each, and the intervals of those that are within chance.
    """

    def ask(experiments: Experiments) -> Evidence:
        depths = [P for P in experiments.scale.depths if from_stages <= P]
        by_depth = {P: [lead(experiments, P) for lead in leads] for P in depths}
        least = {P: min(margins, key=lambda margin: margin.mean) for P, margins in by_depth.items()}
        text = "nats below: " + ", ".join(f"P = {P}: {margin.mean:.3f}" for P, margin in least.items())
        for P, margins in by_depth.items():
            open_ones = [margin.interval for margin in margins if margin.interval and not margin.holds]
            text += "".join("; at P = {} one is [{:+.3f}, {:+.3f}]".format(P, *interval) for interval in open_ones)
        return Evidence(holds=all(margin.holds for margins in by_depth.values() for margin in margins), text=text)

    return ask


def grows(lead: Lead, *, from_stages: int) -> Ask:
    """A method ends below others at the deepest pipeline, and by more than at another number of stages."""

    def ask(experiments: Experiments) -> Evidence:
        deepest = experiments.scale.deepest
        small, large = (lead(experiments, P) for P in (from_stages, deepest))
        difference = large - small
        means = [side.by_seed[difference.by_seed.index].mean() for side in (small, large)]
        text = f"lead {means[0]:.3f} nats at P = {from_stages}, {means[1]:.3f} at P = {deepest}"
        if difference.interval:
            text += ", difference [{:+.3f}, {:+.3f}]".format(*difference.interval)
        return Evidence(holds=difference.holds and large.holds, text=text)

    return ask


def beats_baselines(
    sweep: str = "",
    *,
    shared: Settings | None = None,
    own: Settings | None = None,
    model_of: ModelOf = main_model,
) -> Ask:
    """Basis rotation ends below all baselines at the deepest pipeline.

    Args:
        sweep: that makes the runs; of the main model, by default each method's own.
        shared: settings of all methods.
        own: settings of basis rotation alone, which `sweep` has without baselines.
        model_of: which model.
    """

    def ask(experiments: Experiments) -> Evidence:
        model = model_of(experiments)

        def runs_of(method: str, sweep: str, settings: Settings | None) -> pd.DataFrame:
            everything = {**model.settings, **(shared or {}), **(settings or {})}
            P = experiments.scale.deepest
            return need(experiments, method, P, sweep or model.sweep, preset=model.preset, settings=everything)

        ours = runs_of("basis-rotation", sweep, own)
        return ends_below(
            "basis-rotation", ours, {name: runs_of(name, sweep if shared else "", None) for name in BASELINES}
        )

    return ask


def few_refreshes_cost_little(experiments: Experiments) -> Evidence:
    """Refreshes every 100 iterations lose less than a tenth of the lead over the best baseline.

    The paper says "little", we say a tenth (docs/protocol.md, 6).
    """
    P = experiments.scale.deepest
    usual, *baselines = (need(experiments, name, P) for name in ("basis-rotation", *BASELINES))
    few = need(experiments, "basis-rotation", P, "frequency", settings={"optimizer.frequency": 100})
    usual, few, *baselines = shared_seeds(usual, few, *baselines)
    by_name = dict(zip(BASELINES, baselines, strict=True))
    cost, lead = margin(usual, few), margin(usual, by_name[lowest(by_name)])
    text = f"{cost.mean:.3f} of a lead of {lead.mean:.3f} nats over the best baseline"
    return Evidence(holds=Margin(lead.by_seed / 10 - cost.by_seed).holds, text=text)


def reversed_is_worse(experiments: Experiments) -> Evidence:
    P = experiments.scale.deepest
    other = need(experiments, "basis-rotation", P, "stage-aware", settings={"optimizer.refresh_schedule": "reversed"})
    return ends_below("equal intervals", need(experiments, "basis-rotation", P), {"reversed": other})


def depth(method: str, *, helps: bool) -> Ask:
    """From the shallowest to the deepest model, one block per stage, the final loss falls, or rises."""

    def ask(experiments: Experiments) -> Evidence:
        runs = {
            blocks: need(
                experiments, method, blocks, experiments.sweep_of_depth(method, blocks),
                settings={"model.blocks": blocks},
            )
            for blocks in experiments.scale.blocks
        }  # fmt: skip
        by_blocks = dict(zip(runs, shared_seeds(*runs.values()), strict=True))
        text = ", ".join(f"{blocks} blocks: {final_loss(seeds):.3f}" for blocks, seeds in by_blocks.items())
        shallowest, *_, deepest = by_blocks.values()
        sides = (deepest, shallowest) if helps else (shallowest, deepest)
        return Evidence(holds=margin(*sides).holds, text=text)

    return ask


def loses_less_without_stashing(experiments: Experiments) -> Evidence:
    """Basis rotation's final loss rises less than that of any baseline when weights are not stashed."""
    P = experiments.scale.deepest
    rises = {}
    for method in ("basis-rotation", *BASELINES):
        without = need(experiments, method, P, "stashing", settings={"pipeline.stash": "none"})
        rises[method] = margin(need(experiments, method, P), without)
    ours, *theirs = rises.values()
    text = "rise: " + ", ".join(f"{method} {rise.mean:+.3f}" for method, rise in rises.items()) + " nats"
    return Evidence(holds=all((rise - ours).holds for rise in theirs), text=text)


def _compensated(experiments: Experiments, stages: int) -> dict[str, pd.DataFrame]:
    """Delay compensation in every strength, by strength."""
    return {
        f"{strength:g}": need(
            experiments, "delay-compensation", stages, "delay-compensation",
            settings={"optimizer.compensation": strength},
        )
        for strength in COMPENSATIONS
    }  # fmt: skip


def beats_delay_compensation(experiments: Experiments) -> Evidence:
    """Basis rotation ends below delay compensation in every strength; the text has the strength that ends lowest."""
    leads, holds = [], True
    for P in (8, 16, 32):
        ours, by_strength = need(experiments, "basis-rotation", P), _compensated(experiments, P)
        best = lowest(by_strength)
        holds = holds and bool(ends_below("", ours, by_strength).holds)
        leads.append(f"P = {P}: {margin(ours, by_strength[best]).mean:.3f} (strength {best})")
    return Evidence(holds=holds, text="nats below the best strength: " + ", ".join(leads))


def delay_compensation_is_like_pipedream(experiments: Experiments) -> Evidence:
    """The best strength ends nearer to PipeDream than to basis rotation (docs/protocol.md, 6)."""
    lines, holds = [], True
    for P in (8, 16, 32):
        by_strength = _compensated(experiments, P)
        best = lowest(by_strength)
        below_pipedream = margin(by_strength[best], need(experiments, "pipedream", P))
        above_ours = margin(need(experiments, "basis-rotation", P), by_strength[best])
        holds = holds and (above_ours - Margin(below_pipedream.by_seed.abs())).holds
        lines.append(f"P = {P}: {below_pipedream.mean:.3f} below PipeDream, {above_ours.mean:.3f} above basis rotation")
    return Evidence(holds=holds, text="; ".join(lines) + " nats")


def validation_follows_training(experiments: Experiments) -> Evidence:
    """The main methods are in the same order by validation as by training loss, at the deepest pipeline.

    Of each pair whose training losses differ by more than chance, the validation losses differ alike, and so, too.
    """
    asked = {method: need(experiments, method, experiments.scale.deepest) for method in MAIN}
    runs = dict(zip(asked, shared_seeds(*asked.values()), strict=True))
    by_training = sorted(runs, key=lambda method: float(runs[method]["train_loss"].mean()))
    ordered = [
        margin(runs[lower], runs[higher]).holds
        for lower, higher in combinations(by_training, 2)
        if margin(runs[lower], runs[higher], "train_loss").holds
    ]
    finals = [
        f"{method} {runs[method]['train_loss'].mean():.3f} / {final_loss(runs[method]):.3f}" for method in by_training
    ]
    text = f"training / validation: {', '.join(finals)} nats; by both {sum(ordered)} of {len(ordered)} sure pairs"
    return Evidence(holds=bool(ordered) and all(ordered), text=text)
