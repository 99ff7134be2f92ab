"""What our runs say on the paper's claims, compared seed by seed: which method ends lower, and
which needs longer.

Every question is a function from a scale's `Experiments` to `Evidence`, or a UserError that says
what is not there; the rules are in docs/protocol.md, 4 to 6."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

import numpy as np
import pandas as pd
from scipy.special import stdtrit

from brx.config.loading import Settings, preset_with
from brx.errors import UserError
from brx.paper import strict
from brx.paper.scales import (
    BLOCKS,
    COMPENSATIONS,
    DEEPEST,
    DEPTHS,
    ENDS,
    MAIN,
    PER_BLOCK,
    Experiments,
)
from brx.readers import read_json
from brx.runs.comparison import (
    BASELINES,
    EARLY,
    best_by_seed,
    common_target,
    reached_by_seed,
    saved_ratio,
    shared_seeds,
    slowdowns,
    variants_text,
    with_diverged,
)
from brx.runs.frames import SEED
from brx.runs.slowdown import CONFIDENCE
from brx.runs.tables import seeds_text

SEEDS_FOR_AN_INTERVAL = 3
LEAST_ACCURATE = "basis-rotation 1st/unilateral"
FINER_THAN = (
    ("basis-rotation", "basis-rotation 2nd/unilateral"),
    ("basis-rotation 1st/bilateral", LEAST_ACCURATE),
    ("basis-rotation", "basis-rotation 1st/bilateral"),
    ("basis-rotation 2nd/unilateral", LEAST_ACCURATE),
)
"""Estimation strategies, each with one that is coarser in geometry or in source."""
DELAYS_OF_COMPENSATION = (8, 16, 32)


@dataclass(frozen=True)
class Evidence:
    """What our runs say of a number, `value` with its interval, or of a direction, whether it
    `holds`."""

    value: float = math.nan
    low: float = math.nan
    high: float = math.nan
    is_bound: bool = (
        False  # `value` is a bound: of a slowdown a lower one, of a share saved an upper one
    )
    holds: bool | None = None
    text: str = ""
    num_seeds: int | None = None  # None: as many as the runs that were asked for have
    # By docs/protocol.md, section 11; None where that follows from the other fields.
    strict: strict.Strict | None = None

    def decisive(self, num_seeds: int | None) -> float:
        """What decides: the lower end of the interval from three seeds on, else the value."""
        has_interval = not math.isnan(self.low) and (
            num_seeds is None or num_seeds >= SEEDS_FOR_AN_INTERVAL
        )
        return self.low if has_interval else self.value


class Margin:
    """By how much something is as the paper says, by seed; infinite where one side diverged, NaN
    (left out): both."""

    def __init__(self, by_seed: pd.Series) -> None:
        self.by_seed = by_seed.dropna()
        if self.by_seed.empty:
            raise UserError("no seed in common that did not diverge on both sides")
        self.mean, count = float(self.by_seed.mean()), len(self.by_seed)
        self.interval: tuple[float, float] | None = None  # 95 % interval of the mean
        # What decides: the lower end of the interval; without one, the mean, or where a seed
        #     diverged, every seed.
        self.least = self.mean if math.isfinite(self.mean) else float(self.by_seed.min())
        if count >= SEEDS_FOR_AN_INTERVAL and math.isfinite(self.mean):
            # Quantile of Student's t
            half = float(stdtrit(count - 1, (1 + CONFIDENCE) / 2) * self.by_seed.sem())
            self.interval = self.mean - half, self.mean + half
            self.least = self.interval[0]
        self.holds = self.least > 0  # by more than chance, as far as the seeds can say

    @property
    def strictly(self) -> strict.Strict:
        """The strict verdict on this margin alone."""
        return strict.direction(self.by_seed.tolist())

    def evidence(
        self, text: str, *, holds: bool | None = None, strictly: strict.Strict | None = None
    ) -> Evidence:
        """Make Evidence of a direction, with mean and interval; this margin decides it unless
        `holds` and `strictly`, the strict verdict, are given."""
        low, high = self.interval or (math.nan, math.nan)
        return Evidence(
            self.mean,
            low,
            high,
            holds=self.holds if holds is None else holds,
            text=text,
            num_seeds=len(self.by_seed),
            strict=self.strictly if strictly is None else strictly,
        )

    def __sub__(self, other: Margin) -> Margin:
        return Margin(self.by_seed - other.by_seed)


def strictly_all(margins: Iterable[Margin]) -> strict.Strict:
    """The strict verdict on a claim that every margin is above zero."""
    return strict.all_of(margin.strictly for margin in margins)


def runs_of(
    experiments: Experiments,
    method: str,
    stages: int | None = None,
    sweep: str = "",
    **options: Any,
) -> pd.DataFrame:
    """The runs that `Experiments.find` finds, those that diverged among them (`with_diverged`)."""
    seeds = experiments.find(method, stages, sweep, **options)
    if seeds is None:
        what, _, why = list(experiments.missing)[-1].rpartition(": ")
        raise UserError(
            f"every run of {what} diverged" if "diverged" in why else f"no runs of {what} yet"
        )
    return with_diverged(seeds)


def _paired(
    experiments: Experiments, methods: Iterable[str], stages: int | None = None, **options: Any
) -> list[Any]:
    return shared_seeds(*(runs_of(experiments, method, stages, **options) for method in methods))


# Which method ends lower: final validation losses, unless said otherwise.


def final_loss(seeds: pd.DataFrame, loss: str = "val_loss") -> float:
    return float(seeds[loss].mean())


def margin(ours: pd.DataFrame, theirs: pd.DataFrame, loss: str = "val_loss") -> Margin:
    """How many nats ours ends below theirs."""
    losses, their_losses = (seeds.set_index(SEED)[loss] for seeds in shared_seeds(ours, theirs))
    return Margin(their_losses - losses)


def ends_below(name: str, ours: pd.DataFrame, others: Mapping[str, pd.DataFrame]) -> Evidence:
    """Whether ours ends below every other; the text is about the one that decides."""
    ours, *rest = shared_seeds(ours, *others.values())
    leads = [(margin(ours, runs), other, runs) for other, runs in zip(others, rest, strict=True)]
    lead, closest, runs = min(leads, key=lambda each: each[0].least)
    text = f"{name} {final_loss(ours):.3f}, {closest} {final_loss(runs):.3f} nats"
    if lead.interval:
        text += f", difference [{-lead.interval[1]:+.3f}, {-lead.interval[0]:+.3f}]"
    return lead.evidence(text, strictly=strictly_all(each for each, _, _ in leads))


def _leads(
    experiments: Experiments, method: str, others: Sequence[str], *depths: int
) -> list[Margin]:
    """How many nats a method ends below the lowest of others, seed by seed, at each P, over the
    seeds of all there."""
    names = method, *others
    runs = shared_seeds(*(runs_of(experiments, name, P) for P in depths for name in names))
    of_depths = (runs[first : first + len(names)] for first in range(0, len(runs), len(names)))
    return [margin(ours, best_by_seed(theirs, "val_loss")) for ours, *theirs in of_depths]


def _seeds_of(lead: Margin) -> str:
    return f" ({count} seeds)" if (count := len(lead.by_seed)) > 1 else ""


def ends_below_at_every_depth(
    experiments: Experiments, pairs: Iterable[tuple[str, str | Sequence[str]]], from_stages: int
) -> Evidence:
    """In every pair the first method ends below the other, or the lowest of the others, from a
    number of stages on."""
    named = [(method, (others,) if isinstance(others, str) else others) for method, others in pairs]
    depths = [P for P in DEPTHS if from_stages <= P]
    leads = {
        P: [lead for method, others in named for lead in _leads(experiments, method, others, P)]
        for P in depths
    }
    least = {P: min(of_P, key=lambda lead: lead.mean) for P, of_P in leads.items()}
    text = "nats below: " + ", ".join(
        f"P = {P}: {lead.mean:.3f}{_seeds_of(lead)}" for P, lead in least.items()
    )
    for P, of_P in leads.items():
        open_ones = [lead.interval for lead in of_P if lead.interval and not lead.holds]
        text += "".join(
            "; at P = {} one is [{:+.3f}, {:+.3f}]".format(P, *interval) for interval in open_ones
        )
    of_all_depths = [lead for of_P in leads.values() for lead in of_P]
    closest = min(of_all_depths, key=lambda lead: lead.least)
    return closest.evidence(text, strictly=strictly_all(of_all_depths))


def lead_widens(experiments: Experiments, method: str, others: Sequence[str]) -> Evidence:
    """A method ends below the lowest of others at the deepest pipeline, and its lead rises with the
    number of stages: by the ends alone, and strictly by the rank test over all of them."""
    first, *_ = depths = DEPTHS[1:]
    ends = lead_grows(experiments, method, others, first)
    try:
        leads = _leads(experiments, method, others, *depths)
    except UserError:  # between the ends there are no runs
        return replace(ends, strict="open")
    table = pd.DataFrame({P: lead.by_seed for P, lead in zip(depths, leads, strict=True)})
    rise = strict.trend(table)
    of_each = ", ".join(f"{mean:.3f}" for mean in table.mean())
    text = f"{ends.text}; at P = {', '.join(map(str, depths))}: {of_each} {trend_text(rise)}"
    at_the_deepest = leads[-1].strictly
    return replace(ends, text=text, strict=strict.all_of([rise.verdict, at_the_deepest]))


def trend_text(rise: strict.Trend) -> str:
    """The chances of the rank test, in brackets."""
    return (
        f"(rank test: chance {rise.chance:.2g}, without the last point "
        f"{rise.chance_without_last:.2g})"
    )


def lead_grows(
    experiments: Experiments, method: str, others: Sequence[str], from_stages: int
) -> Evidence:
    """A method ends below the lowest of others at the deepest pipeline, and by more than at a
    number of stages."""
    small, large = _leads(experiments, method, others, from_stages, DEEPEST)
    difference = large - small
    text = (
        f"lead {small.mean:.3f} nats at P = {from_stages}, {large.mean:.3f} at P = "
        f"{DEEPEST}{_seeds_of(difference)}"
    )
    if difference.interval:
        text += ", difference [{:+.3f}, {:+.3f}]".format(*difference.interval)
    return difference.evidence(
        text,
        holds=difference.holds and large.holds,
        strictly=strictly_all([difference, large]),
    )


def beats_baselines(
    experiments: Experiments,
    sweep: str = "",
    shared: Settings | None = None,
    own: Settings | None = None,
    model: str = "main",
) -> Evidence:
    """Basis rotation ends below all baselines at the deepest pipeline; `own` are settings that
    these do not have."""
    settings = {**(shared or {}), **(own or {})}
    ours = runs_of(experiments, "basis-rotation", sweep=sweep, model=model, settings=settings)
    usual = "" if own else sweep
    theirs = {
        name: runs_of(experiments, name, sweep=usual, model=model, settings=shared)
        for name in BASELINES
    }
    return ends_below("basis-rotation", ours, theirs)


def few_refreshes_cost_little(experiments: Experiments) -> Evidence:
    """Refreshes every 100 iterations lose less than a tenth of the lead over the best baseline (the
    paper: little)."""
    usual, *baselines = (runs_of(experiments, name) for name in ("basis-rotation", *BASELINES))
    few = runs_of(
        experiments, "basis-rotation", sweep="frequency", settings={"optimizer.frequency": 100}
    )
    usual, few, *baselines = shared_seeds(usual, few, *baselines)
    cost, lead = margin(usual, few), margin(usual, best_by_seed(baselines, "val_loss"))
    text = f"{cost.mean:.3f} of a lead of {lead.mean:.3f} nats over the best baseline"
    return Margin(lead.by_seed / 10 - cost.by_seed).evidence(text)


def reversed_is_worse(experiments: Experiments) -> Evidence:
    settings = {"optimizer.refresh_schedule": "reversed"}
    reversed_ = runs_of(experiments, "basis-rotation", sweep="stage-aware", settings=settings)
    return ends_below(
        "equal intervals", runs_of(experiments, "basis-rotation"), {"reversed": reversed_}
    )


def deeper_ends_lower(experiments: Experiments, method: str, holds: bool) -> Evidence:
    """From the shallowest to the deepest model, one block per stage, the final loss falls; or not
    `holds`: it rises."""
    deeper = [(n, {"model.blocks": n}) for n in BLOCKS]
    runs = shared_seeds(
        *(runs_of(experiments, method, n, model=PER_BLOCK, settings=blocks) for n, blocks in deeper)
    )
    by_seed = [seeds.set_index(SEED)["val_loss"] for seeds in runs]
    losses = pd.DataFrame(dict(zip(BLOCKS, by_seed, strict=True)))
    rise = strict.trend(-losses if holds else losses)
    of_each = ", ".join(f"{count} blocks: {losses[count].mean():.3f}" for count in BLOCKS)
    of_ends = margin(runs[-1], runs[0]) if holds else margin(runs[0], runs[-1])
    return of_ends.evidence(f"{of_each} {trend_text(rise)}", strictly=rise.verdict)


def loses_less_without_stashing(experiments: Experiments) -> Evidence:
    rises = {}
    for method in ("basis-rotation", *BASELINES):
        without = runs_of(
            experiments, method, sweep="stashing", settings={"pipeline.stash": "none"}
        )
        rises[method] = margin(runs_of(experiments, method), without)
    text = (
        "rise: "
        + ", ".join(f"{method} {rise.mean:+.3f}" for method, rise in rises.items())
        + " nats"
    )
    above = {method: rises[method] - rises["basis-rotation"] for method in BASELINES}
    closest = min(above, key=lambda method: above[method].least)
    if interval := above[closest].interval:
        text += ", {}'s above basis rotation's by [{:+.3f}, {:+.3f}]".format(closest, *interval)
    return above[closest].evidence(text, strictly=strictly_all(above.values()))


def _compensated(experiments: Experiments, stages: int) -> tuple[pd.DataFrame, float]:
    """Delay compensation in the strength that ends lowest on the seeds that all strengths have, and
    that strength."""
    name = "delay-compensation"
    settings = [{"optimizer.compensation": strength} for strength in COMPENSATIONS]
    tried = experiments.fresh()  # as with rates, only seeds of the chosen one count
    try:
        runs = [runs_of(tried, name, stages, name, settings=each) for each in settings]
    finally:
        experiments.missing |= tried.missing
    losses = [final_loss(seeds) for seeds in shared_seeds(*runs)]
    best = losses.index(min(losses))
    return runs_of(experiments, name, stages, name, settings=settings[best]), COMPENSATIONS[best]


def beats_delay_compensation(experiments: Experiments) -> Evidence:
    leads, texts = [], []
    for P in DELAYS_OF_COMPENSATION:
        compensated, strength = _compensated(experiments, P)
        leads.append(margin(runs_of(experiments, "basis-rotation", P), compensated))
        texts.append(f"P = {P}: {leads[-1].mean:.3f} (strength {strength:g})")
    return min(leads, key=lambda lead: lead.least).evidence(
        "nats below the best strength: " + ", ".join(texts), strictly=strictly_all(leads)
    )


def delay_compensation_is_like_pipedream(experiments: Experiments) -> Evidence:
    """The best strength ends nearer to PipeDream than to basis rotation."""
    nearer, lines = [], []
    for P in DELAYS_OF_COMPENSATION:
        others = (runs_of(experiments, name, P) for name in ("pipedream", "basis-rotation"))
        compensated, pipedream, ours = shared_seeds(_compensated(experiments, P)[0], *others)
        below_pipedream, above_ours = margin(compensated, pipedream), margin(ours, compensated)
        nearer.append(above_ours - Margin(below_pipedream.by_seed.abs()))
        lines.append(
            f"P = {P}: {below_pipedream.mean:.3f} below PipeDream, {above_ours.mean:.3f} above "
            f"basis rotation"
        )
    return min(nearer, key=lambda margin: margin.least).evidence(
        "; ".join(lines) + " nats", strictly=strictly_all(nearer)
    )


def validation_follows_training(experiments: Experiments) -> Evidence:
    """If the training losses of two main methods surely differ, so do their validation losses, in
    the same direction."""
    runs = dict(zip(MAIN, _paired(experiments, MAIN), strict=True))
    training = {method: final_loss(seeds, "train_loss") for method, seeds in runs.items()}
    by_training = sorted(runs, key=training.__getitem__)
    sure_pairs = [
        margin(runs[lower], runs[higher])  # differences of validation losses
        for lower, higher in combinations(by_training, 2)
        if margin(runs[lower], runs[higher], "train_loss").holds
    ]
    ordered = [pair.holds for pair in sure_pairs]
    finals = [
        f"{method} {training[method]:.3f} / {final_loss(runs[method]):.3f}"
        for method in by_training
    ]
    text = (
        f"training / validation: {', '.join(finals)} nats; by both {sum(ordered)} of "
        f"{len(ordered)} sure pairs"
    )
    return Evidence(
        holds=bool(ordered) and all(ordered), text=text, strict=strictly_all(sure_pairs)
    )


# How many iterations methods need: slowdowns, iterations saved, and the time that these are.


def slowdown_of(experiments: Experiments, method: str) -> Evidence:
    """A method's slowdown to the one target of the scale; PipeDream's to its own: it sets none for
    the others."""
    ends = pd.concat([runs_of(experiments, method, P) for P in ENDS])
    target = common_target(ends) if method == "pipedream" else _target(experiments)
    row = _slowdown(ends, target)
    text = f"to {target:.3f} nats, seeds: {seeds_text(row)}"
    text += (
        f"; early: without delay in the first {EARLY:.0%} of training" if row["is_early"] else ""
    )
    return Evidence(row["ratio"], row["low"], row["high"], is_bound=row["is_censored"], text=text)


def _slowdown(ends: pd.DataFrame, target: float) -> dict[str, Any]:
    """One method's row of `slowdowns`, where that gives a ratio."""
    row: dict[str, Any] = slowdowns(ends, target).iloc[0].to_dict()
    if pd.isna(row["ratio"]):
        why = "is on a plateau for" if row["is_plateau"] else "is never reached without delay by"
        raise UserError(f"target loss {target:.2f}: {why} {row['method']}")
    return row


def _target(experiments: Experiments) -> float:
    target = experiments.slowdown_target()
    if target is None:
        raise UserError("no method has runs both without delay and at the deepest pipeline yet")
    return target


def slows_down_less(experiments: Experiments, pairs: Sequence[tuple[str, str]]) -> Evidence:
    """In every pair, the first method slows down less than the second, all to the one target, seed
    by seed."""
    methods = list(dict.fromkeys(method for pair in pairs for method in pair))
    logs, bounds, basis = _log_slowdowns(experiments, methods)
    slowed = {
        name: f"{'> ' if bounds[name].any() else ''}{np.exp(logs[name].mean()):.2f}"
        for name in methods
    }
    text = ", ".join(f"{name} {ratio}" for name, ratio in slowed.items())
    margins = {(better, worse): logs[worse] - logs[better] for better, worse in pairs}
    # A bound says which is slower, not by how much: it counts as a seed that diverged does.
    sure = {
        pair: Margin(by.mask(bounds[pair[1]] & (by > 0), math.inf)) for pair, by in margins.items()
    }
    for (better, worse), lead in sure.items():
        if math.isinf(lead.mean):
            text += f"; {worse} over {better} {'in' if lead.holds else 'not in'} every seed"
    (better, worse), closest = min(sure.items(), key=lambda item: item[1].least)
    if closest.interval:
        low, high = np.exp(closest.interval)
        text += f"; {worse} over {better} [{low:.2f}, {high:.2f}]"
    is_known = not any(bounds[better].any() for better, _ in pairs)
    strictly = strictly_all(sure.values()) if is_known else "open"
    return closest.evidence(f"{text}; {basis}", holds=closest.holds and is_known, strictly=strictly)


def _log_slowdowns(
    experiments: Experiments, methods: Sequence[str]
) -> tuple[pd.DataFrame, pd.DataFrame, str]:
    """A row per seed that all have, a column per method; which of them are bounds; a text of target
    and seeds."""
    target = _target(experiments)
    runs = shared_seeds(*(runs_of(experiments, method, P) for method in methods for P in ENDS))
    ends = zip(methods, runs[::2], runs[1::2], strict=True)
    rows = {method: _slowdown(pd.concat(pair), target) for method, *pair in ends}
    logs, bounds = pd.DataFrame(), pd.DataFrame()
    for method, row in rows.items():
        logs[method] = pd.Series(
            np.log(np.divide(row["iterations"], row["reference_iterations"])), row["shared_seeds"]
        )
        bounds[method] = pd.Series(
            np.equal(row["iterations"], row["last_iteration"]), row["shared_seeds"]
        )
    return logs, bounds, f"to {target:.3f} nats, seeds: {len(logs)}"


def soap_is_close(experiments: Experiments) -> Evidence:
    """SOAP's slowdown is nearer to basis rotation's, as a factor, than Muon's and Scion's."""
    logs, bounds, basis = _log_slowdowns(experiments, ("basis-rotation", "soap", "muon", "scion"))
    above = logs.drop(columns="basis-rotation").sub(logs["basis-rotation"], axis="index")
    text = ", ".join(f"{method} {np.exp(above[method].abs().mean()):.2f}" for method in above)
    distances = above.abs().mask(bounds[above.columns] & (above > 0), math.inf)
    nearer = [Margin(distances[method] - distances["soap"]) for method in ("muon", "scion")]
    closest = min(nearer, key=lambda margin: margin.least)
    # What is only known to be slower than a bound may be near, unless the bound is above basis
    # rotation.
    is_unsure = (bounds[above.columns] & (above < 0)).any(axis=None)
    is_known = not (is_unsure or bounds[["soap", "basis-rotation"]].any(axis=None))
    return closest.evidence(
        f"a factor from basis rotation's slowdown: {text}; {basis}",
        holds=closest.holds and is_known,
        strictly=strictly_all(nearer) if is_known else "open",
    )


def _saved(
    ours: pd.DataFrame, other: pd.DataFrame, times: Mapping[str, float] | None = None
) -> Evidence:
    """The share of another experiment's iterations (or of their `times`) that ours saves to its
    final loss."""
    ours, other = shared_seeds(ours, other)
    ratio = saved_ratio(ours, other, times)
    name, num_seeds = variants_text(other), other[SEED].nunique()
    if ratio is None:
        raise UserError(
            f"{name} diverged, or ends above the loss that it has in the mean of its last quarter"
        )
    if ratio.is_lower_bound:
        text = f"over {name}, whose final loss is never reached"
        return Evidence(1 - ratio.ratio, is_bound=True, text=text, num_seeds=num_seeds)
    low, high = (math.nan if end is None else 1 - end for end in (ratio.high, ratio.low))
    return Evidence(1 - ratio.ratio, low, high, text=f"over {name}", num_seeds=num_seeds)


def _with_best_baseline(
    experiments: Experiments, method: str, baselines: Sequence[str], model: str = "main"
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """A method's runs, and of each seed the baseline's of the lowest training loss: iterations are
    saved to that."""
    ours, *others = _paired(experiments, (method, *baselines), model=model)
    return ours, best_by_seed(others, "train_loss")


def saved_over_baselines(
    experiments: Experiments,
    method: str = "basis-rotation",
    baselines: Sequence[str] = BASELINES,
    model: str = "main",
) -> Evidence:
    return _saved(*_with_best_baseline(experiments, method, baselines, model))


def saved_by_stage_aware(experiments: Experiments) -> Evidence:
    settings = {"optimizer.refresh_schedule": "stage-aware"}
    stage_aware = runs_of(experiments, "basis-rotation", sweep="stage-aware", settings=settings)
    return _saved(stage_aware, runs_of(experiments, "basis-rotation"))


def saves_more(experiments: Experiments, larger: str, smaller: str) -> Evidence:
    """One model saves more than another; by their means, since the models have no seed in common
    but in name."""
    ours, theirs = (saved_over_baselines(experiments, model=model) for model in (larger, smaller))
    text = f"smaller {theirs.value:.1%}, larger {ours.value:.1%}"
    # What is left of the iterations, as logarithms: less of the larger model's.
    of_larger, of_smaller = (_log_left(experiments, model) for model in (larger, smaller))
    return Evidence(
        holds=ours.value > theirs.value and not ours.is_bound,
        text=text,
        strict=strict.welch(of_smaller, of_larger),
    )


def _log_left(experiments: Experiments, model: str) -> list[float]:
    """For each seed: the logarithm of basis rotation's iterations to the best baseline's final
    loss, divided by the baseline's. It is infinite if one of them never reaches this loss."""
    ours, other = _with_best_baseline(experiments, "basis-rotation", BASELINES, model)
    target = common_target(other)
    passed, their_passed = reached_by_seed(ours, target), reached_by_seed(other, target)
    logs = []
    for seed in sorted(passed.keys() & their_passed.keys()):
        is_known = passed[seed].is_reached and their_passed[seed].is_reached
        ratio = passed[seed].iterations / their_passed[seed].iterations
        logs.append(math.log(ratio) if is_known else math.inf)
    return logs


def time_saved(experiments: Experiments) -> Evidence:
    """The share of time saved: iterations times the measured time of one, as the runs' own clocks
    shared a machine. The times are a CPU's, which decide nothing on GPU hours: strictly open."""
    ours, baseline = _with_best_baseline(experiments, "basis-rotation", BASELINES)
    times = {
        method: _relative_time(experiments, method)
        for method in ("basis-rotation", *baseline["method"].unique())
    }
    hours = _saved(ours, baseline, times)
    interval = "" if np.isnan(hours.low) else f" [{hours.low:.1%}, {hours.high:.1%}]"
    of_each = ", ".join(f"{method} {time:.2f}" for method, time in times.items())
    text = (
        f"{'< ' if hours.is_bound else ''}{hours.value:.1%}{interval} {hours.text}; time of an "
        f"iteration: {of_each}"
    )
    text += " x AdamW's"
    return replace(
        hours,
        text=text,
        holds=not hours.is_bound and hours.decisive(hours.num_seeds) > 0,
        strict="open",
    )


def _relative_time(experiments: Experiments, method: str) -> float:
    """An iteration of the scale's main model over AdamW's, from the benchmark's table."""
    path, model = experiments.scale.times, preset_with(experiments.scale.preset, {}).model
    size = (str(model.width), str(model.blocks), str(model.blocks))  # one block per stage
    if not path.is_file():
        raise UserError("the time of an iteration has not been measured at this scale yet")
    try:
        content = read_json(path)
        table = pd.DataFrame(content["rows"], columns=content["columns"])
        return float(
            table.set_index(["width", "blocks", "stages", "method"]).loc[
                (*size, method), "ratio to AdamW"
            ]
        )
    except (KeyError, TypeError, ValueError):
        raise UserError(
            f"{path} has no single row of {method} at width, blocks, stages {', '.join(size)}"
        ) from None
