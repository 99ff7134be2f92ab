"""What the paper states, number by number and direction by direction, each beside what our runs say.

A claim is data: the sentence, where it stands, its number, how ours is computed from the runs of a scale, and the rule
of its verdict. Nothing is stored: a run that changes changes its row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Literal

import pandas as pd

from brx.errors import UserError
from brx.paper.evidence import Evidence, NotTriedError
from brx.paper.scales import Experiments, Scale
from brx.runs.frames import SEED

FACTOR = 2.0
"""How far our number may be from the paper's, either way, to count as reproduced (docs/protocol.md, 5)."""

Question = Callable[[Experiments], Evidence]
Rule = Literal["number", "at least", "direction", "order of norms", "closed form"]
Unit = Literal["times", "percent", "plain"]


@dataclass(frozen=True)
class Claim:
    """One statement of the paper: its name on the command line, its place in the paper, and its sentence in our words.

    The rules of the verdict (docs/protocol.md, 5): `number` (within `FACTOR` of the paper's, of 1 - share for a share;
    a slowdown above 1, a share above 0, by their intervals where there are any), `at least` (ours is no smaller),
    `closed form` (equal as printed), `direction`, `order of norms` (their intervals apart). Without one number the
    evidence says whether it holds.
    """

    name: str
    where: str
    statement: str
    evidence: Question
    paper: float | None = None  # the printed number; None for a direction
    unit: Unit = "plain"
    rule: Rule = "direction"
    command: str = ""  # repeats what no sweep makes; `{curvature}`: the scale's folder of that
    longer: Question | None = None  # extrapolated from longer training, for a number that is not reproduced without

    def is_reproduced(self, ours: Evidence, num_seeds: int | None) -> bool:
        """By the rule."""
        if self.rule == "direction" or self.paper is None:
            return bool(ours.holds)
        surely = ours.decisive(num_seeds)
        if self.rule == "at least":
            is_at_most = ours.is_bound and self.unit == "percent"  # the bound of a share is an upper one
            return surely >= self.paper and not is_at_most
        if self.rule == "closed form":
            return number_text(ours.value, self.unit) == number_text(self.paper, self.unit)
        if ours.is_bound or pd.isna(ours.value):
            return False
        if self.unit == "percent":
            return surely > 0 and 1 / FACTOR <= (1 - ours.value) / (1 - self.paper) <= FACTOR
        return (self.unit != "times" or surely > 1) and 1 / FACTOR <= ours.value / self.paper <= FACTOR


@dataclass(frozen=True)
class Outcome:
    """A claim beside our runs."""

    claim: Claim
    evidence: Evidence | None  # None where it was not tried, for a `reason`
    reason: str
    runs: Sequence[str]  # names of those that it is from
    num_seeds: int | None = None  # of the experiment with the fewest; None where it is from no runs
    sweeps: Sequence[str] = ()  # the files that make the runs, those that are not there among them
    longer: Evidence | None = None  # what longer training says of a claim that is reproduced only then

    @property
    def command(self) -> str:
        """What repeats it."""
        sweeps = f"brx sweep {' '.join(self.sweeps)}" if self.sweeps else ""
        return "; ".join(filter(None, (sweeps, self.claim.command)))

    @property
    def verdict(self) -> Literal["yes", "no", "not tried"]:
        """Whether it is reproduced."""
        if self.evidence is None:
            return "not tried"
        return "yes" if self.claim.is_reproduced(self.evidence, self.num_seeds) else "no"

    @property
    def verdict_text(self) -> str:
        """The verdict, and that it is from one seed."""
        return f"{self.verdict}{', one seed' if self.num_seeds == 1 else ''}"


GROUPS = ("as in the paper", "as in the paper only with longer training", "not as in the paper", "not tried")


def in_groups(outcomes: Sequence[Outcome]) -> dict[str, list[Outcome]]:
    """Claims by how they came out, in the order of GROUPS."""
    groups: dict[str, list[Outcome]] = {name: [] for name in GROUPS}
    for outcome in outcomes:
        place = {"yes": 0, "no": 1 if outcome.longer else 2, "not tried": 3}[outcome.verdict]
        groups[GROUPS[place]].append(outcome)
    return groups


def judge(experiments: Experiments, claims: Sequence[Claim]) -> list[Outcome]:
    """Claims beside the runs of a scale; what they ask for counts as asked for here."""
    outcomes = []
    for claim in claims:
        asked = experiments.fresh()
        outcomes.append(_judge(claim, asked))
        experiments.used |= asked.used
        experiments.missing += [line for line in asked.missing if line not in experiments.missing]
    return outcomes


def _judge(claim: Claim, experiments: Experiments) -> Outcome:
    try:
        evidence = claim.evidence(experiments)
    except (NotTriedError, UserError) as error:
        return Outcome(claim, None, str(error), [], sweeps=experiments.makers)
    runs = [name for seeds in experiments.used.values() for name in seeds["name"]]
    counts = [seeds[SEED].nunique() for seeds in experiments.used.values()]
    if evidence.num_seeds is not None:
        counts.append(evidence.num_seeds)
    outcome = Outcome(claim, evidence, "", runs, min(counts, default=None), experiments.makers)
    if outcome.verdict == "no" and claim.longer is not None:
        with suppress(NotTriedError, UserError):
            longer = claim.longer(experiments.fresh())
            return replace(outcome, longer=longer if claim.is_reproduced(longer, None) else None)
    return outcome


def claim_table(outcomes: Sequence[Outcome], scale: Scale) -> pd.DataFrame:
    """A row per claim, texts."""
    return pd.DataFrame(
        {
            "claim": outcome.claim.name,
            "statement": outcome.claim.statement,
            "where": outcome.claim.where,
            "paper": "" if outcome.claim.paper is None else number_text(outcome.claim.paper, outcome.claim.unit),
            "here": evidence_text(outcome),
            "reproduced": outcome.verdict_text,
            "rule": f"within {FACTOR:g}x" if outcome.claim.rule == "number" else outcome.claim.rule,
            "runs": str(len(outcome.runs)),
            "command": outcome.command.format(curvature=scale.curvature),
        }
        for outcome in outcomes
    )


def evidence_text(outcome: Outcome) -> str:
    """Our number with its interval, our finding, or why there is none."""
    claim, ours = outcome.claim, outcome.evidence
    if ours is None:
        return outcome.reason
    if claim.rule == "direction" or claim.paper is None:
        return ours.text
    holds = ", which holds the paper's" if ours.low <= claim.paper <= ours.high else ""
    return f"{measured_text(claim, ours)}{holds}{ours.text and f' ({ours.text})'}"


def why_not(outcome: Outcome) -> str:
    """In a few words, what the evidence tells of why a claim is not reproduced; empty for nothing."""
    claim, ours, longer = outcome.claim, outcome.evidence, outcome.longer
    if ours is None or outcome.verdict == "yes":
        return ""
    printed = 0.0 if claim.paper is None else claim.paper  # a direction's margin has a sign alone
    is_within = ours.low <= printed <= ours.high
    reasons = {
        "training too short": longer is not None,
        "the other way round": claim.paper is None and ours.value < 0 and not is_within,
        "within chance": is_within,
        "not by chance": longer is None and (ours.low > printed or ours.high < printed),
        "one seed": outcome.num_seeds == 1,
        "a bound alone": ours.is_bound,
    }
    extrapolated = f" (at the paper's length {number_text(longer.value, claim.unit)}, extrapolated)" if longer else ""
    return ", ".join(reason for reason, applies in reasons.items() if applies) + extrapolated


def measured_text(claim: Claim, ours: Evidence) -> str:
    """Our number with its interval, or as the bound that it is: a lower one of a slowdown, an upper one of a share."""
    bound = "" if not ours.is_bound else "< " if claim.unit == "percent" else "> "
    value, low, high = (number_text(number, claim.unit) for number in (ours.value, ours.low, ours.high))
    return f"{bound}{value}{'' if pd.isna(ours.low) else f' [{low}, {high}]'}"


def number_text(value: float, unit: Unit) -> str:
    """For example `1.27x` or `71.6%`."""
    return {"times": f"{value:.2f}x", "percent": f"{value:.1%}", "plain": f"{value:.3g}"}[unit]
