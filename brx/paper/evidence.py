"""What our runs say about the paper's claims, compared seed by seed: which method ends lower, and
which needs longer.

Every question is a function from a scale's `Experiments` to `Evidence`. It raises a UserError that
names the runs if any are missing. The rules are in docs/protocol.md, sections 4 to 6 and 11; the
sentences are in `brx.paper.evidence_text`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, combinations, product
from typing import Any

import numpy as np
import pandas as pd

from brx.config.loading import Settings, preset_with
from brx.errors import UserError
from brx.paper import evidence_text as texts
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
from brx.runs.tables import seeds_text
from brx.runs.trajectory import SEED

LEAST_ACCURATE = "basis-rotation 1st/unilateral"
FINER_THAN = (
    ("basis-rotation", "basis-rotation 2nd/unilateral"),
    ("basis-rotation 1st/bilateral", LEAST_ACCURATE),
    ("basis-rotation", "basis-rotation 1st/bilateral"),
    ("basis-rotation 2nd/unilateral", LEAST_ACCURATE),
)
"""Estimation strategies, each with one that is coarser in geometry or in source."""
DELAYS_OF_COMPENSATION = (8, 16, 32)  # P at which delay compensation is compared


@dataclass(frozen=True)
class Evidence:
    """Our runs' answer to a claim: a number with its 95 % interval, or whether a direction
    holds."""

    value: float = math.nan
    low: float = math.nan
    high: float = math.nan
    # `value` is a bound: a lower bound of a slowdown, or an upper bound of a share saved.
    is_bound: bool = False
    holds: bool | None = None
    text: str = ""
    num_seeds: int | None = None  # None: as many as the runs that were asked for have
    # The verdict by docs/protocol.md, section 11; None if it follows from the other fields.
    strict: strict.Strict | None = None

    def decisive(self, num_seeds: int | None) -> float:
        """The number that decides: the lower end of the interval if there are at least three seeds,
        else the value. `num_seeds` is None for a claim without seeds."""
        enough_seeds = num_seeds is None or num_seeds >= strict.FEWEST_SEEDS
        has_interval = not math.isnan(self.low)
        return self.low if has_interval and enough_seeds else self.value


class Margin:
    """A difference between two sides for each seed; positive numbers agree with the paper.

    Args:
        by_seed: the differences; index: seed. A difference is infinite if one side diverged. If
            both did, it is NaN, and the seed is left out.

    Attributes:
        mean: over the seeds.
        interval: the mean's 95 % interval; None with fewer than three seeds, or if a seed diverged.
        least: the number that decides. It is the lower end of the interval; without an interval,
            the mean, or if a seed diverged, the smallest difference.
        holds: whether `least` is positive; with three seeds or more, that means by more than
            chance.

    Raises:
        UserError: no seed is left.
    """

    def __init__(self, by_seed: pd.Series) -> None:
        self.by_seed = by_seed.dropna()
        if self.by_seed.empty:
            raise UserError("no seed in common that did not diverge on both sides")
        self.mean = float(self.by_seed.mean())
        self.interval: tuple[float, float] | None = None
        self.least = self.mean if math.isfinite(self.mean) else float(self.by_seed.min())
        over_seeds = strict.interval_over_seeds(self.by_seed.tolist())
        if over_seeds is not None:
            self.interval = over_seeds.low, over_seeds.high
            self.least = over_seeds.low
        self.holds = self.least > 0

    @property
    def strictly(self) -> strict.Strict:
        """The strict verdict on this margin alone."""
        return strict.direction(self.by_seed.tolist())

    def evidence(
        self, text: str, *, holds: bool | None = None, strictly: strict.Strict | None = None
    ) -> Evidence:
        """Evidence on a direction, with this margin's mean and interval.

        Args:
            text: the evidence in words.
            holds: the usual verdict, if not this margin alone decides it.
            strictly: the strict verdict, if not this margin alone decides it.
        """
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
    """The runs of an experiment (`Experiments.find`), including the ones that diverged
    (`with_diverged`).

    UserError if there are none, or if all diverged."""
    seeds = experiments.find(method, stages, sweep, **options)
    if seeds is not None:
        return with_diverged(seeds)
    # `find` has just put the missing experiment at the end.
    missing = list(experiments.missing.values())[-1]
    if missing.all_diverged:
        raise UserError(f"every run of {missing.what} diverged")
    raise UserError(f"no runs of {missing.what} yet")


def _paired(
    experiments: Experiments, methods: Iterable[str], model: str = "main"
) -> list[pd.DataFrame]:
    """The runs of each method with a model of the scale, on the seeds that all of them have."""
    return shared_seeds(*(runs_of(experiments, method, model=model) for method in methods))


# Which method ends lower: final validation losses, unless said otherwise.


def final_loss(seeds: pd.DataFrame, loss: str = "val_loss") -> float:
    """The mean over seeds, in nats."""
    return float(seeds[loss].mean())


def margin(ours: pd.DataFrame, theirs: pd.DataFrame, loss: str = "val_loss") -> Margin:
    """How many nats ours ends below theirs, seed by seed."""
    ours, theirs = shared_seeds(ours, theirs)
    return Margin(losses_by_seed(theirs, loss) - losses_by_seed(ours, loss))


def losses_by_seed(seeds: pd.DataFrame, loss: str = "val_loss") -> pd.Series:
    """A loss of the runs of an experiment, by seed."""
    return pd.Series(seeds[loss].to_numpy(), pd.Index(seeds[SEED]))


def ends_below(name: str, ours: pd.DataFrame, others: Mapping[str, pd.DataFrame]) -> Evidence:
    """Whether ours ends below every other, on the seeds that all have.

    Args:
        name: ours, in the text.
        ours: its runs.
        others: runs by name. The margin and the text are about the one closest to ours, which
            decides.
    """
    ours, *rest = shared_seeds(ours, *others.values())
    theirs = dict(zip(others, rest, strict=True))
    leads = {other: margin(ours, runs) for other, runs in theirs.items()}
    closest = min(leads, key=lambda other: leads[other].least)
    lead = leads[closest]
    text = texts.ends_below_text(
        name, final_loss(ours), closest, final_loss(theirs[closest]), lead.interval
    )
    return lead.evidence(text, strictly=strictly_all(leads.values()))


def _leads(
    experiments: Experiments, method: str, others: Sequence[str], *depths: int
) -> list[Margin]:
    """How many nats a method ends below the lowest of others, seed by seed: a margin per P.

    All margins are over the same seeds, the ones that every experiment has."""
    places = [(name, P) for P in depths for name in (method, *others)]
    runs = _runs_with_shared_seeds(experiments, places)
    leads = []
    for P in depths:
        theirs = [runs[other, P] for other in others]
        leads.append(margin(runs[method, P], best_by_seed(theirs, "val_loss")))
    return leads


def _runs_with_shared_seeds(
    experiments: Experiments, places: Sequence[tuple[str, int]]
) -> dict[tuple[str, int], pd.DataFrame]:
    """The runs of methods at numbers of stages, with the seeds that all of these experiments
    have."""
    runs = shared_seeds(*(runs_of(experiments, method, P) for method, P in places))
    return dict(zip(places, runs, strict=True))


def ends_below_at_every_depth(
    experiments: Experiments, pairs: Sequence[tuple[str, str | Sequence[str]]], from_stages: int
) -> Evidence:
    """In every pair, the first method ends below the second (or below the lowest of several), from
    a number of stages on."""
    leads: dict[int, list[Margin]] = {}
    for P in DEPTHS:
        if from_stages > P:
            continue
        leads[P] = []
        for method, others in pairs:
            rivals = (others,) if isinstance(others, str) else others
            leads[P] += _leads(experiments, method, rivals, P)
    all_leads = list(chain.from_iterable(leads.values()))
    closest = min(all_leads, key=lambda lead: lead.least)
    shown = {P: _smallest_lead(leads_at_depth) for P, leads_at_depth in leads.items()}
    return closest.evidence(texts.leads_by_depth_text(shown), strictly=strictly_all(all_leads))


def _smallest_lead(leads: Sequence[Margin]) -> texts.LeadAtDepth:
    """A summary of the leads at one number of stages, for the text."""
    smallest = min(leads, key=lambda lead: lead.mean)
    within_chance = [lead.interval for lead in leads if lead.interval and not lead.holds]
    return texts.LeadAtDepth(smallest.mean, len(smallest.by_seed), within_chance)


def lead_widens(experiments: Experiments, method: str, others: Sequence[str]) -> Evidence:
    """A method ends below the lowest of others at the deepest pipeline, and its lead rises with the
    number of stages.

    The usual verdict compares the ends; the strict one is a rank test over all numbers of
    stages."""
    depths = DEPTHS[1:]
    ends = lead_grows(experiments, method, others, depths[0])
    try:
        leads = _leads(experiments, method, others, *depths)
    except UserError:  # there are no runs between the ends
        return replace(ends, strict="open")
    table = pd.DataFrame({P: lead.by_seed for P, lead in zip(depths, leads, strict=True)})
    rise = strict.trend(table)
    at_the_deepest = leads[-1].strictly
    text = texts.widening_text(ends.text, table.mean(), rise)
    return replace(ends, text=text, strict=strict.all_of([rise.verdict, at_the_deepest]))


def lead_grows(
    experiments: Experiments, method: str, others: Sequence[str], from_stages: int
) -> Evidence:
    """A method ends below the lowest of others at the deepest pipeline, and its lead is larger
    there than at `from_stages`."""
    small, large = _leads(experiments, method, others, from_stages, DEEPEST)
    difference = large - small
    text = texts.growth_text(small.mean, from_stages, large.mean, DEEPEST, len(difference.by_seed))
    return difference.evidence(
        text + texts.difference_text(difference.interval),
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
    """Basis rotation ends below all baselines at the deepest pipeline.

    Args:
        experiments: the runs.
        sweep: the sweep that makes the runs; with `own`, only basis rotation's.
        shared: settings of all methods.
        own: settings of basis rotation alone.
        model: a name of the scale's models.
    """
    settings = {**(shared or {}), **(own or {})}
    ours = runs_of(experiments, "basis-rotation", sweep=sweep, model=model, settings=settings)
    their_sweep = "" if own else sweep
    theirs = {
        name: runs_of(experiments, name, sweep=their_sweep, model=model, settings=shared)
        for name in BASELINES
    }
    return ends_below("basis-rotation", ours, theirs)


def few_refreshes_cost_little(experiments: Experiments) -> Evidence:
    """Refreshes every 100 iterations lose less than a tenth of the lead over the best baseline.

    (The paper says that they lose little.)"""
    usual = runs_of(experiments, "basis-rotation")
    baselines = [runs_of(experiments, name) for name in BASELINES]
    few = runs_of(
        experiments, "basis-rotation", sweep="frequency", settings={"optimizer.frequency": 100}
    )
    usual, few, *baselines = shared_seeds(usual, few, *baselines)
    cost = margin(usual, few)
    lead = margin(usual, best_by_seed(baselines, "val_loss"))
    text = f"{cost.mean:.3f} of a lead of {lead.mean:.3f} nats over the best baseline"
    return Margin(lead.by_seed / 10 - cost.by_seed).evidence(text)


def reversed_is_worse(experiments: Experiments) -> Evidence:
    """Equal refresh intervals end below the reversed stage-aware ones."""
    settings = {"optimizer.refresh_schedule": "reversed"}
    reversed_ = runs_of(experiments, "basis-rotation", sweep="stage-aware", settings=settings)
    return ends_below(
        "equal intervals", runs_of(experiments, "basis-rotation"), {"reversed": reversed_}
    )


def deeper_ends_lower(experiments: Experiments, method: str, holds: bool) -> Evidence:
    """With one block per stage, the final loss falls from the shallowest to the deepest model; or
    rises, if `holds` is False."""
    runs_by_depth = [
        runs_of(experiments, method, count, model=PER_BLOCK, settings={"model.blocks": count})
        for count in BLOCKS
    ]
    runs = shared_seeds(*runs_by_depth)
    by_seed = [losses_by_seed(seeds) for seeds in runs]
    losses = pd.DataFrame(dict(zip(BLOCKS, by_seed, strict=True)))
    rise = strict.trend(-losses if holds else losses)
    shallowest, *_, deepest = runs
    change = margin(deepest, shallowest) if holds else margin(shallowest, deepest)
    text = texts.by_blocks_text(losses.mean(), rise)
    return change.evidence(text, strictly=rise.verdict)


def loses_less_without_stashing(experiments: Experiments) -> Evidence:
    """Without weight stashing, every baseline's loss rises by more than basis rotation's, seed by
    seed."""
    rises = {}
    for method in ("basis-rotation", *BASELINES):
        without = runs_of(
            experiments, method, sweep="stashing", settings={"pipeline.stash": "none"}
        )
        rises[method] = margin(runs_of(experiments, method), without)
    above = {method: rises[method] - rises["basis-rotation"] for method in BASELINES}
    closest = min(above, key=lambda method: above[method].least)
    means = {method: rise.mean for method, rise in rises.items()}
    text = texts.rises_text(means, closest, above[closest].interval)
    return above[closest].evidence(text, strictly=strictly_all(above.values()))


def _compensated(experiments: Experiments, stages: int) -> tuple[pd.DataFrame, float]:
    """Delay compensation's runs with the best strength, and this strength.

    The best strength ends lowest on the seeds that all strengths have."""
    name = "delay-compensation"
    settings = [{"optimizer.compensation": strength} for strength in COMPENSATIONS]
    # Only the runs with the best strength count as used, as with learning rates.
    tried = experiments.fresh()
    try:
        runs = [runs_of(tried, name, stages, name, settings=each) for each in settings]
    finally:
        experiments.missing |= tried.missing
    losses = [final_loss(seeds) for seeds in shared_seeds(*runs)]
    best = losses.index(min(losses))
    return runs_of(experiments, name, stages, name, settings=settings[best]), COMPENSATIONS[best]


def beats_delay_compensation(experiments: Experiments) -> Evidence:
    """Basis rotation ends below delay compensation with the best strength, at each number of
    stages."""
    leads = []
    lines = []
    for P in DELAYS_OF_COMPENSATION:
        compensated, strength = _compensated(experiments, P)
        lead = margin(runs_of(experiments, "basis-rotation", P), compensated)
        leads.append(lead)
        lines.append(f"P = {P}: {lead.mean:.3f} (strength {strength:g})")
    text = f"nats below the best strength: {', '.join(lines)}"
    closest = min(leads, key=lambda lead: lead.least)
    return closest.evidence(text, strictly=strictly_all(leads))


def delay_compensation_is_like_pipedream(experiments: Experiments) -> Evidence:
    """Delay compensation with the best strength ends nearer to PipeDream than to basis rotation."""
    nearer = []
    lines = []
    for P in DELAYS_OF_COMPENSATION:
        compensated, _ = _compensated(experiments, P)
        pipedream = runs_of(experiments, "pipedream", P)
        ours = runs_of(experiments, "basis-rotation", P)
        compensated, pipedream, ours = shared_seeds(compensated, pipedream, ours)
        below_pipedream = margin(compensated, pipedream)
        above_ours = margin(ours, compensated)
        nearer.append(above_ours - Margin(below_pipedream.by_seed.abs()))
        lines.append(
            f"P = {P}: {below_pipedream.mean:.3f} below PipeDream, {above_ours.mean:.3f} above "
            f"basis rotation"
        )
    closest = min(nearer, key=lambda margin: margin.least)
    return closest.evidence(f"{'; '.join(lines)} nats", strictly=strictly_all(nearer))


def validation_follows_training(experiments: Experiments) -> Evidence:
    """For each pair of main methods whose training losses surely differ, the validation losses
    surely differ in the same direction."""
    runs = dict(zip(MAIN, _paired(experiments, MAIN), strict=True))
    training = {method: final_loss(seeds, "train_loss") for method, seeds in runs.items()}
    by_training = sorted(runs, key=training.__getitem__)
    pairs = list(combinations(by_training, 2))
    # The margins of the validation losses, only for the pairs whose training losses surely differ:
    sure_pairs = []  # by the usual rule
    strictly_sure = []  # by the strict rule, which corrects for the number of pairs
    for lower, higher in pairs:
        by_training_loss = margin(runs[lower], runs[higher], "train_loss")
        by_validation_loss = margin(runs[lower], runs[higher])
        if by_training_loss.holds:
            sure_pairs.append(by_validation_loss)
        if strict.direction(by_training_loss.by_seed.tolist(), len(pairs)) == "yes":
            strictly_sure.append(by_validation_loss)
    confirmed = [pair for pair in sure_pairs if pair.holds]
    text = texts.validation_text(
        {method: training[method] for method in by_training},
        {method: final_loss(runs[method]) for method in by_training},
        len(confirmed),
        len(sure_pairs),
    )
    holds = bool(sure_pairs) and len(confirmed) == len(sure_pairs)
    return Evidence(holds=holds, text=text, strict=strictly_all(strictly_sure))


# How many iterations methods need: slowdowns, iterations saved, and time saved.


def slowdown_of(experiments: Experiments, method: str) -> Evidence:
    """A method's slowdown to the scale's target; for PipeDream, to a target of its own, because
    PipeDream does not count for the scale's (`Experiments.slowdown_target`).

    Only the seeds that both ends have count."""
    ends = pd.concat(shared_seeds(*(runs_of(experiments, method, P) for P in ENDS)))
    target = common_target(ends) if method == "pipedream" else _target(experiments)
    row = _slowdown(ends, target)
    text = f"to {target:.3f} nats, seeds: {seeds_text(row)}"
    if row["is_early"]:
        text += f"; early: without delay in the first {EARLY:.0%} of training"
    return Evidence(
        row["ratio"],
        row["low"],
        row["high"],
        is_bound=row["is_censored"],
        text=text,
        num_seeds=len(row["shared_seeds"]),
    )


def _slowdown(ends: pd.DataFrame, target: float) -> dict[str, Any]:
    """One method's row of `slowdowns`; UserError if it has no ratio."""
    row: dict[str, Any] = slowdowns(ends, target).iloc[0].to_dict()
    if pd.isna(row["ratio"]):
        why = "is on a plateau for" if row["is_plateau"] else "is never reached without delay by"
        raise UserError(f"target loss {target:.2f}: {why} {row['method']}")
    return row


def _target(experiments: Experiments) -> float:
    """The scale's target; UserError if there is none yet."""
    target = experiments.slowdown_target()
    if target is None:
        raise UserError("no method has runs both without delay and at the deepest pipeline yet")
    return target


def slows_down_less(experiments: Experiments, pairs: Sequence[tuple[str, str]]) -> Evidence:
    """In every pair, the first method slows down less than the second, seed by seed; all to the
    scale's target."""
    methods = list(dict.fromkeys(chain.from_iterable(pairs)))  # each once
    logs, basis = _log_slowdowns(experiments, methods)
    orders = {}
    for better, worse in pairs:
        orders[better, worse] = _Order.of(above=logs[worse], below=logs[better])
    closest_pair = min(orders, key=lambda pair: orders[pair].margin.least)
    closest = orders[closest_pair]
    text = texts.slowdowns_text(
        {method: math.exp(each.numbers.mean()) for method, each in logs.items()},
        {method: bool(each.is_bound.any()) for method, each in logs.items()},
    )
    for (better, worse), order in orders.items():
        if not order.is_known:
            text += f"; whether {worse} is over {better}, the bounds do not tell on every seed"
        elif not math.isfinite(order.margin.mean):
            found = "in" if order.margin.holds else "not in"
            text += f"; {worse} over {better} {found} every seed"
    better, worse = closest_pair
    text += texts.ratio_interval_text(worse, better, closest.margin.interval)
    return _evidence_on_orders(list(orders.values()), f"{text}; {basis}")


@dataclass(frozen=True)
class _WithBounds:
    """A number per seed, some of which are only lower bounds."""

    numbers: pd.Series  # index: seed
    is_bound: pd.Series  # the same index


@dataclass(frozen=True)
class _Order:
    """Whether one number is above another, seed by seed.

    A number that is only a lower bound may still tell which of the two is larger. Then the sign of
    the difference is known but not its size, as if a run had diverged, and the difference is
    infinite. If the bound does not even tell the sign, the difference is minus infinity, as if the
    seed spoke against the paper, and `is_known` is false."""

    margin: Margin
    is_known: bool  # the sign is known on every seed

    @classmethod
    def of(cls, *, above: _WithBounds, below: _WithBounds) -> _Order:
        """Compare the number that should be larger (`above`) with the other one."""
        by_seed = above.numbers - below.numbers
        surely_above = ~below.is_bound & (by_seed > 0)
        surely_below = ~above.is_bound & (by_seed < 0)
        has_bound = above.is_bound | below.is_bound
        is_unknown = has_bound & ~surely_above & ~surely_below
        by_seed = by_seed.mask(has_bound & surely_above, math.inf)
        by_seed = by_seed.mask(has_bound & ~surely_above, -math.inf)
        return cls(Margin(by_seed), is_known=not is_unknown.any())

    @property
    def strictly(self) -> strict.Strict:
        """The strict verdict on this order alone."""
        return self.margin.strictly if self.is_known else "open"


def _evidence_on_orders(orders: Sequence[_Order], text: str) -> Evidence:
    """Evidence that every order is as in the paper. The one closest to the opposite decides."""
    closest = min(orders, key=lambda order: order.margin.least)
    strictly = strict.all_of(order.strictly for order in orders)
    evidence = closest.margin.evidence(text, strictly=strictly)
    if closest.is_known:
        return evidence
    return replace(evidence, value=math.nan, is_bound=True)


def _log_slowdowns(
    experiments: Experiments, methods: Sequence[str]
) -> tuple[dict[str, _WithBounds], str]:
    """The logarithms of methods' slowdowns to the scale's target, on the seeds that all methods
    have; and a text about target and seeds."""
    target = _target(experiments)
    runs = _runs_with_shared_seeds(experiments, list(product(methods, ENDS)))
    logs = {}
    for method in methods:
        both_ends = pd.concat([runs[method, P] for P in ENDS])
        row = _slowdown(both_ends, target)
        seeds = row["shared_seeds"]
        ratios = np.divide(row["iterations"], row["reference_iterations"])
        # A run that never reaches the target counts with its last iteration.
        is_bound = np.equal(row["iterations"], row["last_iteration"])
        logs[method] = _WithBounds(
            pd.Series(np.log(ratios), seeds), pd.Series(is_bound, seeds, dtype=bool)
        )
    num_seeds = len(logs[methods[0]].numbers)
    return logs, f"to {target:.3f} nats, seeds: {num_seeds}"


def soap_is_close(experiments: Experiments) -> Evidence:
    """SOAP's slowdown is nearer to basis rotation's, as a factor, than Muon's and Scion's."""
    rivals = ("soap", "muon", "scion")
    logs, basis = _log_slowdowns(experiments, ("basis-rotation", *rivals))
    ours = logs["basis-rotation"]
    distances = {}
    factors = []
    for method in rivals:
        distances[method] = _distance(logs[method], ours)
        mean_distance = (logs[method].numbers - ours.numbers).abs().mean()
        factors.append(f"{method} {math.exp(mean_distance):.2f}")
    orders = []
    for method in ("muon", "scion"):
        orders.append(_Order.of(above=distances[method], below=distances["soap"]))
    text = f"a factor from basis rotation's slowdown: {', '.join(factors)}; {basis}"
    return _evidence_on_orders(orders, text)


def _distance(theirs: _WithBounds, ours: _WithBounds) -> _WithBounds:
    """How far two logarithms are apart, whichever is larger.

    If theirs is a bound above ours, they are at least as far apart as the bound says. Any other
    bound says nothing about the distance, which is then at least zero."""
    above = theirs.numbers - ours.numbers
    is_bound = theirs.is_bound | ours.is_bound
    is_known_part = ~is_bound | (~ours.is_bound & (above > 0))
    return _WithBounds(above.abs().where(is_known_part, 0.0), is_bound)


def _saved(
    ours: pd.DataFrame, other: pd.DataFrame, times: Mapping[str, float] | None = None
) -> Evidence:
    """The share of another experiment's iterations that ours saves on the way to the other's final
    training loss.

    With `times`, the time of an iteration by method, it is the share of time."""
    ours, other = shared_seeds(ours, other)
    ratio = saved_ratio(ours, other, times)
    name = variants_text(other)
    num_seeds = other[SEED].nunique()
    if ratio is None:
        raise UserError(
            f"{name} diverged, or ends above the loss that it has in the mean of its last quarter"
        )
    if ratio.is_lower_bound:
        text = f"over {name}, whose final loss is never reached"
        return Evidence(1 - ratio.ratio, is_bound=True, text=text, num_seeds=num_seeds)
    # The more iterations are needed, the fewer are saved: the ends change places.
    low = math.nan if ratio.high is None else 1 - ratio.high
    high = math.nan if ratio.low is None else 1 - ratio.low
    return Evidence(1 - ratio.ratio, low, high, text=f"over {name}", num_seeds=num_seeds)


def _with_best_baseline(
    experiments: Experiments, method: str, baselines: Sequence[str], model: str = "main"
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """A method's runs, and for each seed the run of the baseline with the lowest training loss."""
    ours, *others = _paired(experiments, (method, *baselines), model=model)
    return ours, best_by_seed(others, "train_loss")


def saved_over_baselines(
    experiments: Experiments,
    method: str = "basis-rotation",
    baselines: Sequence[str] = BASELINES,
    model: str = "main",
) -> Evidence:
    """The share of the best baseline's iterations that a method saves."""
    return _saved(*_with_best_baseline(experiments, method, baselines, model))


def saved_by_stage_aware(experiments: Experiments) -> Evidence:
    """The share of iterations that stage-aware refresh intervals save over equal ones."""
    settings = {"optimizer.refresh_schedule": "stage-aware"}
    stage_aware = runs_of(experiments, "basis-rotation", sweep="stage-aware", settings=settings)
    return _saved(stage_aware, runs_of(experiments, "basis-rotation"))


def saves_more(experiments: Experiments, larger: str, smaller: str) -> Evidence:
    """Basis rotation saves more with the larger model than with the smaller one.

    The means are compared, because equal seeds mean nothing for different models."""
    larger_saves = saved_over_baselines(experiments, model=larger)
    smaller_saves = saved_over_baselines(experiments, model=smaller)
    # The more is saved, the smaller is the share that is left.
    left_of_larger = _log_left(experiments, larger)
    left_of_smaller = _log_left(experiments, smaller)
    return Evidence(
        holds=larger_saves.value > smaller_saves.value and not larger_saves.is_bound,
        text=f"smaller {smaller_saves.value:.1%}, larger {larger_saves.value:.1%}",
        strict=strict.welch(left_of_smaller, left_of_larger),
    )


def _log_left(experiments: Experiments, model: str) -> list[float]:
    """For each seed, log(ours / theirs): basis rotation's and the best baseline's iterations to the
    baseline's final loss. It is infinite if one of them never reaches this loss."""
    ours, other = _with_best_baseline(experiments, "basis-rotation", BASELINES, model)
    target = common_target(other)
    reached = reached_by_seed(ours, target)
    their_reached = reached_by_seed(other, target)
    logs = []
    for seed in sorted(reached.keys() & their_reached.keys()):
        is_known = reached[seed].is_reached and their_reached[seed].is_reached
        ratio = reached[seed].iterations / their_reached[seed].iterations
        logs.append(math.log(ratio) if is_known else math.inf)
    return logs


def time_saved(experiments: Experiments) -> Evidence:
    """The share of time saved over the best baseline.

    Time is iterations times the benchmark's time of an iteration, because the runs shared their
    machine with others. It is a CPU's time, which cannot decide a claim about GPU hours, so the
    strict verdict is open."""
    ours, baseline = _with_best_baseline(experiments, "basis-rotation", BASELINES)
    times = {
        method: _relative_time(experiments, method)
        for method in ("basis-rotation", *baseline["method"].unique())
    }
    hours = _saved(ours, baseline, times)
    bound = "< " if hours.is_bound else ""
    interval = "" if np.isnan(hours.low) else f" [{hours.low:.1%}, {hours.high:.1%}]"
    share = f"{bound}{hours.value:.1%}{interval}"
    return replace(
        hours,
        text=texts.time_text(share, hours.text, times),
        holds=not hours.is_bound and hours.decisive(hours.num_seeds) > 0,
        strict="open",
    )


def _relative_time(experiments: Experiments, method: str) -> float:
    """The time of an iteration of the scale's main model, divided by AdamW's, from the benchmark's
    table."""
    path = experiments.scale.times
    model = preset_with(experiments.scale.preset, {}).model
    size = (str(model.width), str(model.blocks), str(model.blocks))  # one block per stage
    if not path.is_file():
        raise UserError("the time of an iteration has not been measured at this scale yet")
    try:
        content = read_json(path)
        table = pd.DataFrame(content["rows"], columns=content["columns"])
        by_size = table.set_index(["width", "blocks", "stages", "method"])
        return float(by_size.loc[(*size, method), "ratio to AdamW"])
    except (KeyError, TypeError, ValueError):
        raise UserError(
            f"{path} has no single row of {method} at width, blocks, stages {', '.join(size)}"
        ) from None
