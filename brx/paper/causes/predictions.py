"""The verdicts on the predictions of docs/protocol.md, sections 12 and 21."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import pandas as pd

from brx.errors import UserError
from brx.paper import strict
from brx.paper.causes.arms import (
    ADAMW,
    ADAMW_LITTLE,
    BASES,
    DEEPEST,
    EIGENBASIS,
    EIGENBASIS_LITTLE,
    LABELS,
    LION,
    MOMENTA,
    MOMENTUM_KEYS,
    MUON,
    NAMES,
    ONE_UPDATE,
    RANDOM,
    RANDOM_LITTLE,
    ROTATED_LION,
    WITH_FEEDBACK,
    with_momentum,
)
from brx.paper.causes.study import Study

Outcome = Literal["holds", "refuted", "open", "not tried"]


@dataclass(frozen=True)
class Finding:
    """The verdict on a prediction."""

    outcome: Outcome
    text: str


@dataclass(frozen=True)
class Prediction:
    """One prediction. `judge` raises UserError if runs are missing."""

    name: str
    statement: str
    judge: Callable[[Study], Finding]


def cost_rises_with_the_angle(study: Study) -> Finding:
    """Whether both costs and slowdowns rise with the angle of the bases (`strict.trend`)."""
    costs = study.costs(BASES, DEEPEST)
    cost_trend = strict.trend(costs)
    log_slowdowns = study.log_slowdowns(BASES, DEEPEST)
    slowdown_trend = strict.trend(log_slowdowns)
    ends = costs[RANDOM] - costs[EIGENBASIS]
    slowdowns = ", ".join(
        f"{math.exp(mean):.2f} ({arm})" for arm, mean in log_slowdowns.mean().items()
    )
    # The verdict may hang on the slowdowns alone, so they are shown with an interval of their own.
    text = (
        f"cost {_by_arm(costs)}; rank test: chance {cost_trend.chance:.2g} (costs), "
        f"{slowdown_trend.chance:.2g} (slowdowns), without the random basis "
        f"{cost_trend.chance_without_last:.2g} and {slowdown_trend.chance_without_last:.2g}; "
        f"random minus eigenbasis {_text(ends)}; slowdown {slowdowns}; random over eigenbasis "
        f"{_factor_text(log_slowdowns[RANDOM] - log_slowdowns[EIGENBASIS])}"
    )
    holds = strict.all_of([cost_trend.verdict, slowdown_trend.verdict]) == "yes"
    return Finding(_outcome(holds, min(len(costs), len(log_slowdowns))), text)


def random_basis_is_no_better_than_none(study: Study) -> Finding:
    """Whether the cost in a random basis is within chance of AdamW's."""
    costs = study.costs([RANDOM, ADAMW], DEEPEST)
    difference = costs[ADAMW] - costs[RANDOM]
    holds = strict.direction(difference.tolist()) == "open"
    text = f"cost {_by_arm(costs)}; AdamW minus random basis {_text(difference)}"
    return Finding(_outcome(holds, _num_known(difference)), text)


def norm_orders_the_costs(study: Study) -> Finding:
    """Whether costs rise with the norms, by the rank test over the bases and AdamW."""
    arms = [*BASES, ADAMW]
    norms = study.norms(arms, DEEPEST)
    if norms.empty:
        raise UserError("the Hessian's norms have not been measured at half of the training yet")
    costs = study.costs(arms, DEEPEST)
    seeds = norms.index.intersection(costs.index)
    if seeds.empty:
        raise UserError("no seed has both the norms and the costs of all these arms")
    total = 0
    for seed in seeds:
        by_norm = norms.loc[seed].sort_values().index  # the arms, smallest norm first
        total += strict.kendall_s(costs.loc[seed, by_norm].tolist())
    chance = strict.chance_of_s(len(arms), len(seeds), total)
    text = f"norm {_by_arm(norms.loc[seeds])}; rank test: chance {chance:.2g}"
    return Finding(_outcome(chance <= strict.CHANCE, len(seeds)), text)


def momentum_lowers_the_cost(study: Study, method: str) -> Finding:
    """Whether a method's cost at a delay of one update falls with its momentum, by the rank
    test."""
    costs = study.costs([with_momentum(method, value) for value in MOMENTA], ONE_UPDATE)
    chance = strict.chance_of_rise(-costs)
    text = f"cost {_by_arm(costs)}; rank test: chance {chance:.2g}"
    return Finding(_outcome(chance <= strict.CHANCE, len(costs)), text)


def geometry_is_enough(study: Study) -> Finding:
    """Whether delay costs Lion outside the eigenbasis no more than basis rotation, and Muon as much
    as basis rotation: not more by more than chance, and within chance."""
    costs = study.costs([EIGENBASIS, LION, MUON], DEEPEST)
    lion_above = costs[LION] - costs[EIGENBASIS]
    muon_above = costs[MUON] - costs[EIGENBASIS]
    lion_costs_more = strict.direction(lion_above.tolist()) == "yes"
    muon_is_within_chance = strict.direction(muon_above.tolist()) == "open"
    text = f"cost above basis rotation's: Lion {_text(lion_above)}, Muon {_text(muon_above)} nats"
    holds = muon_is_within_chance and not lion_costs_more
    num_seeds = min(_num_known(lion_above), _num_known(muon_above))
    return Finding(_outcome(holds, num_seeds), text)


def eigenbasis_helps_lion(study: Study) -> Finding:
    """Whether delay costs Lion less inside the eigenbasis than outside."""
    return _costs_less(study, ROTATED_LION, LION, DEEPEST)


def muon_costs_less_than_adamw(study: Study) -> Finding:
    """Whether AdamW's cost at a delay of one update is above Muon's."""
    return _costs_less(study, MUON, ADAMW, ONE_UPDATE)


def _costs_less(study: Study, better: str, worse: str, delay: str) -> Finding:
    """Whether a delay costs the arm `better` less than the arm `worse`, by more than chance."""
    costs = study.costs([better, worse], delay)
    difference = costs[worse] - costs[better]
    holds = strict.direction(difference.tolist()) == "yes"
    text = f"cost {_by_arm(costs)}; {worse} minus {better} {_text(difference)}"
    return Finding(_outcome(holds, _num_known(difference)), text)


def little_momentum_lowers_adamws_cost(study: Study) -> Finding:
    """Whether the delays of 32 stages cost AdamW less with little momentum."""
    return _costs_less(study, ADAMW_LITTLE, ADAMW, DEEPEST)


def eigenbasis_helps_with_little_momentum(study: Study) -> Finding:
    """Whether delay costs less in the eigenbasis than in a random one, both with little
    momentum."""
    return _costs_less(study, EIGENBASIS_LITTLE, RANDOM_LITTLE, DEEPEST)


def random_basis_helps_with_little_momentum(study: Study) -> Finding:
    """Whether delay costs less in a random basis than in none, both with little momentum."""
    return _costs_less(study, RANDOM_LITTLE, ADAMW_LITTLE, DEEPEST)


def _outcome(holds: bool, num_seeds: int) -> Outcome:
    """*Open* with fewer than three seeds; else *holds* or *refuted*."""
    if num_seeds < strict.FEWEST_SEEDS:
        return "open"
    return "holds" if holds else "refuted"


def _num_known(difference: pd.Series) -> int:
    """The seeds that say something about a difference of two costs. If the runs of both arms
    diverged, the difference of two infinite costs is NaN."""
    return int(difference.notna().sum())


def _by_arm(table: pd.DataFrame) -> str:
    """The mean of each column as a text; a row is a seed, a column an arm."""
    return ", ".join(f"{mean:.3f} ({arm})" for arm, mean in table.mean().items())


def _text(by_seed: pd.Series) -> str:
    """The mean of the known numbers with its interval; `unknown` without any."""
    return strict.mean_text(by_seed.dropna().tolist(), sign="+") or "unknown"


def _factor_text(logs: pd.Series) -> str:
    """A factor with its interval, from its logarithm by seed. Three decimals tell 1.001 from 1."""
    interval = strict.interval_over_seeds(logs.tolist())
    if interval is None:
        return f"{math.exp(logs.mean()):.3f}"
    low = math.exp(interval.low)
    high = math.exp(interval.high)
    return f"{math.exp(interval.mean):.3f} [{low:.3f}, {high:.3f}]"


def _momentum_prediction(method: str) -> Prediction:
    return Prediction(
        f"4, {NAMES[method]}",
        f"with more momentum a delay of one update costs {NAMES[method]} less",
        lambda study: momentum_lowers_the_cost(study, method),
    )


def _feedback_prediction(arm: str, without: str) -> Prediction:
    name = LABELS[without]
    return Prediction(
        f"7, {name}",
        f"with error feedback a delay of one update costs {name} less",
        lambda study: _costs_less(study, arm, without, ONE_UPDATE),
    )


PREDICTIONS = (
    Prediction(
        "1",
        "the further the bases are turned from the eigenbasis, the more the delays of 32 stages "
        "cost",
        cost_rises_with_the_angle,
    ),
    Prediction(
        "2",
        "a random basis is no better than none",
        random_basis_is_no_better_than_none,
    ),
    Prediction(
        "3",
        "the larger the Hessian's (1,1)-norm in the coordinates, the more delay costs",
        norm_orders_the_costs,
    ),
    *map(_momentum_prediction, MOMENTUM_KEYS),
    Prediction(
        "5, geometry",
        "Lion costs no more than basis rotation, and Muon as much as basis rotation",
        geometry_is_enough,
    ),
    Prediction(
        "5, alignment",
        "Lion costs less inside the eigenbasis than outside",
        eigenbasis_helps_lion,
    ),
    Prediction(
        "6",
        "a delay of one update costs AdamW more than Muon",
        muon_costs_less_than_adamw,
    ),
    *(_feedback_prediction(arm, without) for arm, without in WITH_FEEDBACK.items()),
    Prediction(
        "21, AdamW",
        "with little momentum the delays of 32 stages cost AdamW less",
        little_momentum_lowers_adamws_cost,
    ),
    Prediction(
        "21, alignment",
        "with little momentum they cost less in the eigenbasis than in a random one",
        eigenbasis_helps_with_little_momentum,
    ),
    Prediction(
        "21, rotation",
        "with little momentum they cost less in a random basis than in none",
        random_basis_helps_with_little_momentum,
    ),
)


def prediction_table(study: Study) -> pd.DataFrame:
    """A row per prediction: its statement, the verdict, and our numbers. All cells are texts."""
    rows = []
    for prediction in PREDICTIONS:
        try:
            finding = prediction.judge(study)
        except UserError as error:
            finding = Finding("not tried", str(error))
        rows.append(
            {
                "prediction": prediction.name,
                "statement": prediction.statement,
                "verdict": finding.outcome,
                "here": finding.text,
            }
        )
    return pd.DataFrame(rows)
