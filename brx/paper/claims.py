"""The paper's claims (`CLAIMS`, at the end): every number and direction, compared with the runs of
a scale. No verdict is stored, so a changed run changes the rows that rest on it.
"""

import re
import textwrap
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any, Literal, get_args

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from brx.errors import UserError
from brx.paper import evidence as ours
from brx.paper import measured_evidence as measured
from brx.paper import strict
from brx.paper.evidence import LEAST_ACCURATE, Evidence
from brx.paper.printed import SAVED, SLOWDOWNS
from brx.paper.scales import STRATEGY_NAMES, Experiments, Scale
from brx.paper.strict import Strict
from brx.plot.style import CLAIM_COLORS
from brx.runs.comparison import BASELINES
from brx.runs.trajectory import SEED

# A number is reproduced if ours is within this factor of the paper's (docs/protocol.md, section 5).
FACTOR = 2.0
# The number that a claim would have if there were no effect: a slowdown of 1, or 0 % saved.
NO_EFFECT: dict[str, float] = {"times": 1.0, "percent": 0.0}
GROUPS = ("as in the paper", "not as in the paper", "not tried")
ROW_IN = 0.2  # height of a row in the figure
LINE_CHARACTERS = 64  # most characters in a line of a statement; two lines fit into a row
WIDEST = 8.0  # ratios are drawn up to this factor either way; larger ones are drawn at the edge
RATIO_TICKS = {
    0.125: "1/8",
    0.25: "1/4",
    0.5: "1/2",
    1.0: "1",
    2.0: "2",
    4.0: "4",
    8.0: "8",
}
# Headings of the columns of text in the figure, and their x as a share of the axes' width.
COLUMNS = {"paper": 1.02, "here [95 %]": 1.145}

EvidenceFunction = Callable[[Experiments], Evidence]
ClaimRule = Literal["number", "at least", "direction", "order of norms", "closed form"]
StrictOrUntried = Literal["yes", "no", "open", "not tried"]
Unit = Literal["times", "percent", "plain"]


KINDS: dict[str, tuple[ClaimRule, ...]] = {
    "numbers": ("number", "at least"),
    "directions": ("direction", "order of norms"),
    "formulas": ("closed form",),
}
_BLUE, _RED, _GREY = CLAIM_COLORS
VERDICT_COLORS: dict[StrictOrUntried, str] = {
    "yes": _BLUE,
    "no": _RED,
    "open": _GREY,
    "not tried": "#B0B0B0",
}


@dataclass(frozen=True)
class Claim:
    """One statement of the paper, in our words, and the rule of its verdict (docs/protocol.md,
    section 5).

    The rules:

    - `number`: within `FACTOR` of the paper's number (for a share, 1 - share is), and surely an
      effect: a slowdown above 1, a share above 0;
    - `at least`: not smaller than the paper's number;
    - `closed form`: equal as printed;
    - `direction`, `order of norms`: the evidence says whether it holds.
    """

    name: str
    where: str
    statement: str
    evidence: EvidenceFunction
    paper: float | None = None  # the printed number; None for a direction
    unit: Unit = "plain"
    rule: ClaimRule = "direction"
    # The command that makes what sweeps do not make; `{curvature}` stands for the scale's folder of
    # measured runs.
    command: str = ""

    def is_reproduced(self, evidence: Evidence, num_seeds: int | None) -> bool:
        """The verdict by docs/protocol.md, section 5.

        Args:
            evidence: our number, or whether the direction holds.
            num_seeds: the number of seeds of the experiment that has the fewest; None for a claim
                without seeds.
        """
        if self.rule == "direction" or self.paper is None:
            return bool(evidence.holds)
        surely = evidence.decisive(num_seeds)
        if self.rule == "at least":
            # A bound of a share is an upper bound, which cannot show that the share is large.
            is_upper_bound = evidence.is_bound and self.unit == "percent"
            return surely >= self.paper and not is_upper_bound
        if self.rule == "closed form":
            return number_text(evidence.value, self.unit) == number_text(self.paper, self.unit)
        if evidence.is_bound or pd.isna(evidence.value) or evidence.holds is False:
            return False
        no_effect = NO_EFFECT.get(self.unit)
        if no_effect is not None and not surely > no_effect:
            return False
        if self.unit == "percent":  # compare what is left, not what is saved
            factor = (1 - evidence.value) / (1 - self.paper)
        else:
            factor = evidence.value / self.paper
        return 1 / FACTOR <= factor <= FACTOR

    def strictly(self, evidence: Evidence, num_seeds: int | None) -> Strict:
        """The verdict by docs/protocol.md, section 11. A claim without seeds has the verdict of
        section 5."""
        if evidence.strict is not None:
            return evidence.strict
        if self.rule == "closed form" or num_seeds is None:
            return "yes" if self.is_reproduced(evidence, num_seeds) else "no"
        if self.paper is None or self.rule in ("direction", "order of norms"):
            return "open"
        if evidence.is_bound:
            return "open"
        if self.rule == "at least":
            return strict.bound(evidence.low, evidence.high, self.paper, num_seeds=num_seeds)
        return strict.number(
            evidence.value,
            evidence.low,
            evidence.high,
            self.paper,
            num_seeds=num_seeds,
            is_share=self.unit == "percent",
            no_effect=NO_EFFECT.get(self.unit),
        )


@dataclass(frozen=True)
class Outcome:
    """A claim, compared with our runs."""

    claim: Claim
    evidence: Evidence | None  # None if it was not tried
    reason: str  # why it was not tried
    runs: Sequence[str]  # names of the runs behind the evidence
    num_seeds: int | None = None  # fewest seeds of an experiment; None if the claim uses no runs
    sweeps: Sequence[str] = ()  # the files that make the runs, including runs that are missing

    @property
    def command(self) -> str:
        """The commands that make everything that the claim rests on."""
        sweeps = f"brx sweep {' '.join(self.sweeps)}" if self.sweeps else ""
        return "; ".join(filter(None, (sweeps, self.claim.command)))

    @property
    def verdict(self) -> Literal["yes", "no", "not tried"]:
        """The first verdict, by docs/protocol.md, section 5."""
        if self.evidence is None:
            return "not tried"
        return "yes" if self.claim.is_reproduced(self.evidence, self.num_seeds) else "no"

    @property
    def strict_verdict(self) -> StrictOrUntried:
        """The strict verdict, by docs/protocol.md, section 11."""
        if self.evidence is None:
            return "not tried"
        return self.claim.strictly(self.evidence, self.num_seeds)


def in_groups(outcomes: Sequence[Outcome]) -> dict[str, list[Outcome]]:
    """The claims by first verdict; the keys are GROUPS, in this order."""
    groups = {}
    for name, verdict in zip(GROUPS, ("yes", "no", "not tried"), strict=True):
        groups[name] = [outcome for outcome in outcomes if outcome.verdict == verdict]
    return groups


def judge(experiments: Experiments, claims: Sequence[Claim]) -> list[Outcome]:
    """Compare claims with the runs of a scale; an outcome per claim, in their order.

    `experiments` records all experiments that the claims ask for as used or missing."""
    outcomes = []
    for claim in claims:
        outcome, asked = experiments.once(claim, partial(_judge_alone, claim, experiments))
        outcomes.append(outcome)
        experiments.used |= asked.used
        experiments.missing |= asked.missing
    return outcomes


def _judge_alone(claim: Claim, experiments: Experiments) -> tuple[Outcome, Experiments]:
    """A claim's outcome, and a copy of the experiments that records only what this claim asked
    for."""
    asked = experiments.fresh()
    return _judge(claim, asked), asked


def _judge(claim: Claim, experiments: Experiments) -> Outcome:
    """The outcome of one claim; `experiments` must not have been asked for anything yet."""
    try:
        evidence = claim.evidence(experiments)
    except UserError as error:
        return Outcome(claim, None, str(error), [], sweeps=experiments.makers)
    runs: list[str] = []
    seed_counts = []
    for seeds in experiments.used.values():
        runs += seeds["name"].tolist()
        seed_counts.append(seeds[SEED].nunique())
    if evidence.num_seeds is not None:
        seed_counts.append(evidence.num_seeds)
    return Outcome(claim, evidence, "", runs, min(seed_counts, default=None), experiments.makers)


def verdict_counts(outcomes: Sequence[Outcome]) -> list[str]:
    """Two lines: how many claims have each strict verdict, and each first verdict."""
    strict_verdicts = Counter(outcome.strict_verdict for outcome in outcomes)
    verdicts = Counter(outcome.verdict for outcome in outcomes)
    strict_counts = [f"{strict_verdicts[name]} {name}" for name in get_args(StrictOrUntried)]
    counts = [f"{verdicts[name]} {name}" for name in ("yes", "no", "not tried")]
    return [
        f"{len(outcomes)} claims, strict verdicts: {', '.join(strict_counts)}",
        f"first verdicts: {', '.join(counts)}",
    ]


def claim_table(outcomes: Sequence[Outcome], scale: Scale) -> pd.DataFrame:
    """A row per claim: the paper's number, ours, both verdicts, and the commands that make ours.

    All cells are texts."""
    rows = []
    for outcome in outcomes:
        claim = outcome.claim
        row = {
            "claim": claim.name,
            "statement": claim.statement,
            "where": claim.where,
            "paper": "" if claim.paper is None else number_text(claim.paper, claim.unit),
            "here": evidence_text(outcome),
            "strict": outcome.strict_verdict,
            "first": verdict_text(outcome),
            "rule": f"within {FACTOR:g}x" if claim.rule == "number" else claim.rule,
            "runs": str(len(outcome.runs)),
            "command": outcome.command.format(curvature=scale.curvature),
        }
        rows.append(row)
    return pd.DataFrame(rows)


def evidence_text(outcome: Outcome) -> str:
    """Our number with its interval, our finding, or why there is none."""
    claim = outcome.claim
    evidence = outcome.evidence
    if evidence is None:
        return outcome.reason
    if claim.rule == "direction" or claim.paper is None:
        return evidence.text
    text = measured_text(claim, evidence)
    if not few_seeds(outcome) and evidence.low <= claim.paper <= evidence.high:
        text += ", around the paper's"
    if evidence.text:
        text += f" ({evidence.text})"
    return text


def verdict_text(outcome: Outcome) -> str:
    """The verdict and why, for example `yes, one seed` or `no (within chance)`."""
    why = why_not(outcome)
    if why:
        return f"{outcome.verdict} ({why})"
    return outcome.verdict + few_seeds(outcome)


def few_seeds(outcome: Outcome) -> str:
    """`, one seed` or `, two seeds` if these are too few for an interval; else empty."""
    return {1: ", one seed", 2: ", two seeds"}.get(outcome.num_seeds or 0, "")


def why_not(outcome: Outcome) -> str:
    """In a few words, why the first verdict is *no*; empty if it is not *no*, or if the evidence
    does not tell why."""
    claim = outcome.claim
    evidence = outcome.evidence
    if evidence is None or outcome.verdict == "yes":
        return ""
    paper = None if claim.rule == "direction" else claim.paper
    printed = paper or 0.0  # for a direction, only the sign of the margin matters
    is_within = evidence.low <= printed <= evidence.high
    is_apart = evidence.low > printed or evidence.high < printed
    reasons = []
    if paper is None and evidence.value < 0 and not is_within:
        reasons.append("the other way round")
    if is_within:
        reasons.append("within chance")
    if is_apart and not evidence.is_bound:
        reasons.append("apart by more than chance")
    if outcome.num_seeds in (1, 2):
        reasons.append(few_seeds(outcome).removeprefix(", "))
    if evidence.is_bound:
        reasons.append("a bound alone")
    return ", ".join(reasons)


def measured_text(claim: Claim, evidence: Evidence) -> str:
    """Our number with its interval.

    Bounds are marked: `>` is a lower bound of a slowdown, `<` is an upper bound of a share."""
    text = number_text(evidence.value, claim.unit)
    if evidence.is_bound:
        sign = "<" if claim.unit == "percent" else ">"
        text = f"{sign} {text}"
    if not pd.isna(evidence.low):
        low = number_text(evidence.low, claim.unit)
        high = number_text(evidence.high, claim.unit)
        text += f" [{low}, {high}]"
    return text


def number_text(value: float, unit: Unit) -> str:
    """A number with its unit, for example `1.27x` or `71.6%`."""
    match unit:
        case "times":
            return f"{value:.2f}x"
        case "percent":
            return f"{value:.1%}"
        case "plain":
            return f"{value:.3g}"


def fill_claims(figure: Figure, outcomes: Sequence[Outcome]) -> None:
    """Draw the claims into an empty figure.

    Above: for each kind of claim, how many have each strict verdict. Below: a row per number that
    both the paper and our runs have."""
    numbers = [outcome for outcome in outcomes if ratio_of(outcome) is not None]
    numbers.sort(key=lambda outcome: list(VERDICT_COLORS).index(outcome.strict_verdict))
    figure.set_size_inches(9.5, 2.6 + ROW_IN * len(numbers))
    counts_axes, ratios_axes = figure.subplots(2, 1, height_ratios=(1.1, 0.22 * len(numbers) + 0.4))
    _draw_counts(counts_axes, outcomes)
    _draw_ratios(ratios_axes, numbers)
    strictly = Counter(outcome.strict_verdict for outcome in outcomes)
    figure.suptitle(
        f"By the strict rules {strictly['yes']} of {len(outcomes)} claims hold, "
        f"{strictly['no']} do not, {strictly['open']} are open",
        fontsize=9,
    )


def _draw_counts(axes: Axes, outcomes: Sequence[Outcome]) -> None:
    """A bar per kind of claim, cut by strict verdict, with the counts."""
    for y, rules in enumerate(KINDS.values()):
        counts = Counter(
            outcome.strict_verdict for outcome in outcomes if outcome.claim.rule in rules
        )
        left = 0
        for verdict, color in VERDICT_COLORS.items():
            count = counts[verdict]
            if not count:
                continue
            axes.barh(y, count, left=left, color=color, alpha=0.75)
            axes.text(left + count / 2, y, str(count), ha="center", va="center", color="white")
            left += count
    for verdict, color in VERDICT_COLORS.items():
        axes.barh(0, 0, color=color, alpha=0.75, label=verdict)
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5))
    axes.set_yticks(range(len(KINDS)), list(KINDS))
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.set_xlabel("claims")


def _draw_ratios(axes: Axes, outcomes: Sequence[Outcome]) -> None:
    """Draw a row per claim: our number divided by the paper's as a point, and both as texts."""
    paper_x, ours_x = COLUMNS.values()
    right_of_axes: dict[str, Any] = {"transform": axes.get_yaxis_transform(), "fontsize": 7}
    for y, outcome in enumerate(outcomes):
        _draw_ratio(axes, outcome, y, VERDICT_COLORS[outcome.strict_verdict])
        # A hollow point already says that there are few seeds.
        text = our_text(outcome).removesuffix(few_seeds(outcome))
        axes.text(paper_x, y, paper_text(outcome), va="center", **right_of_axes)
        axes.text(ours_x, y, text, va="center", **right_of_axes)
    for heading, x in COLUMNS.items():
        axes.text(x, -1.0, heading, weight="bold", **right_of_axes)
    labels = [textwrap.fill(outcome.claim.statement, LINE_CHARACTERS) for outcome in outcomes]
    axes.set_yticks(range(len(outcomes)), labels, fontsize=7, linespacing=0.9)
    axes.set_ylim(len(outcomes) - 0.4, -0.6)
    axes.axvspan(1 / FACTOR, FACTOR, color="black", alpha=0.05, linewidth=0)
    axes.axvspan(1 / strict.CLOSE, strict.CLOSE, color="black", alpha=0.05, linewidth=0)
    axes.axvline(1.0, color="black", linewidth=0.6)
    axes.set_xscale("log", base=2)
    axes.set_xlim(1 / WIDEST, WIDEST)
    axes.set_xticks(list(RATIO_TICKS), list(RATIO_TICKS.values()))
    axes.grid(visible=False, axis="y")
    axes.set_xlabel("our number / the paper's number (saved iterations: the iterations left)")


def ratio_of(outcome: Outcome) -> tuple[float, float, float] | None:
    """Our number divided by the paper's, and the ends of its interval (NaN for none).

    For a share saved, the remaining shares are divided: ours by the paper's."""
    claim = outcome.claim
    evidence = outcome.evidence
    if evidence is None or claim.paper is None or pd.isna(evidence.value):
        return None
    is_share = claim.unit == "percent" and claim.rule != "closed form"
    if is_share:
        left = 1 - claim.paper
        # The more iterations are saved, the fewer are left: the ends change places.
        return (1 - evidence.value) / left, (1 - evidence.high) / left, (1 - evidence.low) / left
    return evidence.value / claim.paper, evidence.low / claim.paper, evidence.high / claim.paper


def paper_text(outcome: Outcome) -> str:
    """The paper's number with its unit; `direction` or `numbers` if the claim does not have a
    single number."""
    claim = outcome.claim
    if claim.paper is None:
        return "numbers" if claim.rule == "closed form" else "direction"
    text = number_text(claim.paper, claim.unit)
    return f"≥ {text}" if claim.rule == "at least" else text


def our_text(outcome: Outcome) -> str:
    """Our number with its interval, or whether a direction holds."""
    claim = outcome.claim
    evidence = outcome.evidence
    if evidence is None:
        return ""
    if claim.paper is not None:
        text = measured_text(claim, evidence)
    elif claim.rule == "closed form":
        text = "as printed" if evidence.holds else "not all as printed"
    else:
        text = "holds" if evidence.holds else "does not hold"
    return text + few_seeds(outcome)


def _draw_ratio(axes: Axes, outcome: Outcome, y: float, color: str) -> None:
    """Draw a point with its interval: hollow if there are few seeds, an arrow if it is a bound or
    lies beyond the axis."""
    ratios = ratio_of(outcome)
    if ratios is None or outcome.evidence is None:
        return
    ratio, low, high = (float(np.clip(value, 1 / WIDEST, WIDEST)) for value in ratios)
    marker = "o"
    if outcome.evidence.is_bound or ratios[0] > WIDEST:
        marker = ">"
    elif ratios[0] < 1 / WIDEST:
        marker = "<"
    face = "white" if few_seeds(outcome) else color
    if not pd.isna(ratios[1]):
        axes.plot([low, high], [y, y], color=color, linewidth=1.5)
    axes.plot(ratio, y, marker, color=color, markerfacecolor=face, markersize=5, clip_on=False)


OVER_BASELINES = tuple(product(("basis-rotation",), BASELINES))
number_claim = partial(Claim, rule="number")
oscillation_claim = partial(Claim, command="brx oscillation {curvature} --measured")
closed_form_claim = partial(Claim, rule="closed form")


def slowdown_claims() -> list[Claim]:
    """A claim about the slowdown of each method in the paper's tables except PipeDream."""
    claims = []
    for method, printed in SLOWDOWNS.items():
        if method == "pipedream":
            continue
        claim = number_claim(
            f"slowdown-{_in_name(method)}",
            "Figure 8a" if method in STRATEGY_NAMES else "Table 3",
            f"slowdown of {method}",
            partial(ours.slowdown_of, method=method),
            printed,
            "times",
        )
        claims.append(claim)
    return claims


def depth_claims(methods: Sequence[str], change: Literal["lower", "higher"]) -> list[Claim]:
    """A claim about each method: whether deeper models end lower or higher with it."""
    return [
        Claim(
            f"depth-{_in_name(method)}",
            "Figure 14",
            f"one block per stage: deeper models end {change} with {method}",
            partial(ours.deeper_ends_lower, method=method, holds=change == "lower"),
        )
        for method in methods
    ]


def _in_name(method: str) -> str:
    """A method, written as a part of a claim's name: without spaces and slashes."""
    return re.sub("[ /]", "-", method)


def saved_claim(name: str, where: str, statement: str, model: str) -> Claim:
    """A claim about the share of iterations that basis rotation saves over the best baseline, with
    one of the scale's models."""
    return number_claim(
        name,
        where,
        statement,
        partial(ours.saved_over_baselines, model=model),
        SAVED[model],
        "percent",
    )


def norm_order_claim(name: str, where: str, source: str) -> Claim:
    """A claim about the order of the Hessian's norms in the coordinates of the strategies with one
    source, `1st` or `2nd`."""
    return Claim(
        name,
        where,
        f"the norm falls from original over unilateral to bilateral coordinates, source {source}",
        partial(measured.theorem_order, source=source),
        rule="order of norms",
        command="brx hessian-norm {curvature} --strategies --measured",
    )


# Each has a name, the place in the paper, the statement, and the function that evaluates our runs;
# a number also has the paper's number and its unit.
CLAIMS = (
    Claim(
        "toy-quadratic",
        "Figure 3",
        "delay slows Adam where the eigenvectors lie between the axes, hardly where along them",
        measured.delay_hurts_where_misaligned,
        command="brx toy quadratic",
    ),
    Claim(
        "toy-spiral",
        "Figure 4b",
        "along the spiral, delay slows Adam the more, the more misaligned the Hessian is",
        measured.misalignment_slows_on_the_spiral,
        command="brx toy spiral",
    ),
    number_claim(
        "teaser-slowdown",
        "Figure 2a",
        "PipeDream's slowdown at the deepest pipeline (to its own final loss)",
        partial(ours.slowdown_of, method="pipedream"),
        SLOWDOWNS["pipedream"],
        "times",
    ),
    number_claim(
        "teaser-reduction",
        "Figure 2b",
        "iterations that basis rotation saves over PipeDream",
        partial(ours.saved_over_baselines, baselines=("pipedream",)),
        0.816,
        "percent",
    ),
    saved_claim(
        "main-reduction",
        "Figure 5b",
        "iterations saved over the best baseline, deepest pipeline",
        "main",
    ),
    Claim(
        "main-every-depth",
        "Figure 5a",
        "basis rotation ends below all baselines at every P > 1",
        partial(ours.ends_below_at_every_depth, pairs=OVER_BASELINES, from_stages=2),
    ),
    Claim(
        "main-gap-widens",
        "Figure 5a",
        "basis rotation's lead over the best baseline widens with P",
        partial(ours.lead_widens, method="basis-rotation", others=BASELINES),
    ),
    Claim(
        "main-amplified",
        "Section 4.2",
        "basis rotation's lead without delay is amplified by delay",
        partial(ours.lead_grows, method="basis-rotation", others=BASELINES, from_stages=1),
    ),
    *slowdown_claims(),
    Claim(
        "slowdown-order",
        "Figure 5e",
        "basis rotation slows down less than all baselines",
        partial(ours.slows_down_less, pairs=OVER_BASELINES),
    ),
    Claim(
        "strategies-order",
        "Figure 8a",
        "closer estimates slow down less: bilateral below unilateral, 2nd below 1st",
        partial(ours.slows_down_less, pairs=ours.FINER_THAN),
    ),
    Claim(
        "strategies-every-depth",
        "Figure 16",
        "closer estimates end lower at every P",
        partial(ours.ends_below_at_every_depth, pairs=ours.FINER_THAN, from_stages=1),
    ),
    Claim(
        "strategies-gap-widens",
        "Figure 16",
        "the lead of the closest over the least accurate (1st/unilateral) widens with P",
        partial(ours.lead_widens, method="basis-rotation", others=(LEAST_ACCURATE,)),
    ),
    Claim(
        "strategies-least",
        "Figure 16",
        "1st/unilateral ends below the best baseline at every P > 1",
        partial(ours.ends_below_at_every_depth, pairs=[(LEAST_ACCURATE, BASELINES)], from_stages=2),
    ),
    Claim(
        "strategies-least-gap-widens",
        "Figure 16",
        "the lead of 1st/unilateral over the best baseline widens with P",
        partial(ours.lead_widens, method=LEAST_ACCURATE, others=BASELINES),
    ),
    Claim(
        "strategies-least-reduction",
        "Appendix H",
        "iterations that 1st/unilateral saves over the best baseline: more than 40 %",
        partial(ours.saved_over_baselines, method=LEAST_ACCURATE),
        0.40,
        "percent",
        "at least",
    ),
    Claim(
        "preconditioned-order",
        "Table 3",
        "methods in the eigenbasis (SOAP, basis rotation) slow down less than Muon and Scion",
        partial(
            ours.slows_down_less,
            pairs=tuple(product(("soap", "basis-rotation"), ("muon", "scion"))),
        ),
    ),
    Claim(
        "preconditioned-baselines",
        "Table 3",
        "Muon and Scion slow down less than the baselines",
        partial(ours.slows_down_less, pairs=tuple(product(("muon", "scion"), BASELINES))),
    ),
    Claim(
        "soap-close",
        "Table 3",
        "SOAP slows down about as basis rotation does: nearer to it than Muon and Scion",
        ours.soap_is_close,
    ),
    *depth_claims(BASELINES, "higher"),
    *depth_claims(STRATEGY_NAMES, "lower"),
    saved_claim(
        "width-smaller", "Figure 7a", "iterations saved at P = 24, the smaller model", "smaller"
    ),
    saved_claim(
        "width-larger", "Figure 7b", "iterations saved at P = 24, the larger model (1B)", "larger"
    ),
    Claim(
        "width-order",
        "Figure 7",
        "the larger model saves more",
        partial(ours.saves_more, larger="larger", smaller="smaller"),
    ),
    saved_claim("3b", "Figure 20", "iterations saved with 3B parameters", "3B"),
    Claim(
        "3b-order",
        "Figure 20",
        "3B parameters save more than 1B",
        partial(ours.saves_more, larger="3B", smaller="larger"),
    ),
    saved_claim(
        "mixture", "Figure 21", "iterations saved with a mixture of experts", "mixture of experts"
    ),
    Claim(
        "mixture-lowest",
        "Figure 21",
        "with a mixture of experts, basis rotation ends below all baselines",
        partial(ours.beats_baselines, model="mixture of experts"),
    ),
    Claim(
        "cpu-time",
        "Figure 9a",
        "time saved over the best baseline: here milliseconds of a CPU, in the paper GPU hours",
        ours.time_saved,
        0.543,
        "percent",
        command="make bench",
    ),
    Claim(
        "frequency-100",
        "Figure 9b",
        "refreshes every 100 iterations still end below all baselines",
        partial(ours.beats_baselines, sweep="frequency", own={"optimizer.frequency": 100}),
    ),
    Claim(
        "frequency-100-little",
        "Figure 9b",
        "refreshes every 100 iterations instead of every 10 cost little",
        ours.few_refreshes_cost_little,
    ),
    number_claim(
        "stage-aware",
        "Figure 9c",
        "iterations that stage-aware intervals save over equal ones",
        ours.saved_by_stage_aware,
        0.292,
        "percent",
    ),
    Claim(
        "reversed",
        "Figure 17",
        "intervals shared the other way round end above equal ones",
        ours.reversed_is_worse,
    ),
    Claim(
        "no-stashing",
        "Figure 10a",
        "without stashing, basis rotation ends below all baselines",
        partial(ours.beats_baselines, sweep="stashing", shared={"pipeline.stash": "none"}),
    ),
    Claim(
        "no-stashing-robust",
        "Figure 10",
        "without stashing, basis rotation loses less than the baselines",
        ours.loses_less_without_stashing,
    ),
    Claim(
        "prediction",
        "Figure 15",
        "with predicted weights, basis rotation ends below all baselines",
        partial(ours.beats_baselines, sweep="prediction", shared={"pipeline.stash": "predict"}),
    ),
    Claim(
        "validation",
        "Figure 18",
        "the methods end in the same order by validation as by training loss",
        ours.validation_follows_training,
    ),
    Claim(
        "delay-compensation",
        "Figure 19",
        "basis rotation ends below delay compensation at P = 8, 16, 32, whatever its strength",
        ours.beats_delay_compensation,
    ),
    Claim(
        "delay-compensation-like-pipedream",
        "Figure 19",
        "delay compensation ends about where PipeDream does",
        ours.delay_compensation_is_like_pipedream,
    ),
    number_claim(
        "hessian-norm",
        "Section 4.3",
        "the Hessian's (1,1)-norm in basis rotation's coordinates over the original ones, at one "
        "checkpoint (0.1228 / 0.5436)",
        measured.norm_ratio,
        0.1228 / 0.5436,
        command="brx hessian-norm {curvature} --measured",
    ),
    norm_order_claim("theorem-order", "Theorem 3.1", "2nd"),
    norm_order_claim("theorem-order-1st", "Theorem F.5", "1st"),
    oscillation_claim(
        "oscillation",
        "Figure 11",
        "updates oscillate less along the dominant eigenvector with basis rotation, without delay",
        partial(measured.oscillates_less, delayed=False),
    ),
    oscillation_claim(
        "oscillation-delayed",
        "Figure 11",
        "updates oscillate less along the dominant eigenvector with basis rotation, with delay",
        partial(measured.oscillates_less, delayed=True),
    ),
    oscillation_claim(
        "oscillation-stable",
        "Figure 11",
        "along other directions than the dominant one they oscillate little with either",
        measured.stable_elsewhere,
    ),
    closed_form_claim(
        "memory-share",
        "Appendix H",
        "memory of 1st/unilateral for an MLP matrix, of Adam's",
        measured.memory_share,
        0.075,
        "percent",
        command="brx memory",
    ),
    closed_form_claim(
        "memory-table",
        "Table 2",
        "memory of each strategy for Llama-3-8B's matrices, GiB",
        measured.memory_of_strategies,
        command="brx memory",
    ),
    closed_form_claim(
        "parameters",
        "Appendix D.2",
        "number of parameters: about 96 M, about 1.03 B, 3,047 M",
        measured.parameter_counts,
        command="brx plan paper-95m",
    ),
    closed_form_claim(
        "stage-counts",
        "Table 1",
        "least number of stages of large models by device",
        measured.stage_counts,
        command="brx stages",
    ),
)
