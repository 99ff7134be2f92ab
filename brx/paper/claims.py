"""What the paper states, number by number and direction by direction, each beside what our runs say.

A claim is data: the sentence, where it stands, its number, how ours is computed from the runs of a scale, and the rule
of its verdict. Nothing is stored: a run that changes changes its row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import pandas as pd

from brx.curvature.norm_result import measured_norms
from brx.curvature.oscillation import measured_oscillation
from brx.errors import UserError
from brx.paper.scales import COMPENSATIONS, CURVATURE, STRATEGIES, Experiments, Scale, Settings, sweep_of
from brx.planning.optimizer_memory import LLAMA_3_8B, overhead_elements
from brx.planning.stage_count import DEVICES_GB, LLAMAS, stage_count_table
from brx.runs.comparison import BASELINES, common_target, reached_by_seed, slowdowns
from brx.runs.frames import find_runs
from brx.runs.slowdown import Reached, iteration_ratio

FACTOR = 1.25
"""How far our number may be from the paper's, either way, to count as reproduced where no interval holds it."""

# By method, as printed in the tables of slowdown; PipeDream's from the introduction. The table of the estimation
# strategies has 4.24 for PipeDream-LR; the other table and the text give that number to Nesterov.
SLOWDOWNS = {
    "pipedream": 5.81,
    "pipedream-lr": 5.43,
    "nesterov": 4.24,
    "basis-rotation 1st/unilateral": 2.55,
    "basis-rotation 1st/bilateral": 1.77,
    "basis-rotation 2nd/unilateral": 1.66,
    "basis-rotation": 1.27,
    "muon": 1.53,
    "scion": 2.10,
    "soap": 1.34,
}

# Columns: 8, 16, 24, 48, 80 GB.
STAGE_COUNTS = {
    "Llama 3.2 1B": ["16", "6", "4", "2", "1"],
    "Llama 3.2 3B": ["28", "10", "6", "3", "2"],
    "LLaMA 1-7B": ["32", "16", "11", "5", "3"],
    "LLaMA 1-13B": [">= 80", "40", "20", "8", "5"],
    "LLaMA 1-33B": [">= 120", "60", "60", "20", "12"],
    "LLaMA 1-65B": [">= 160", ">= 160", "80", "40", "20"],
    "Llama 3.1 405B": [">= 512", ">= 512", ">= 512", ">= 512", "126"],
}

Rule = Literal["number", "at least", "direction"]
Unit = Literal["times", "percent", "plain"]


class NotTriedError(Exception):
    """What a claim needs is not there; says what."""


@dataclass(frozen=True)
class Evidence:
    """What our runs say.

    Attributes:
        value: our number; for a direction, what decides it is in `holds`.
        low: lower end of its interval, where there are seeds enough for one.
        high: its upper end.
        is_bound: whether `value` is a lower bound.
        holds: whether a direction is as the paper says.
        text: in words, for a direction.
    """

    value: float = float("nan")
    low: float = float("nan")
    high: float = float("nan")
    is_bound: bool = False
    holds: bool | None = None
    text: str = ""


@dataclass(frozen=True)
class Claim:
    """One statement of the paper.

    Attributes:
        name: on the command line.
        statement: what is said, in our words.
        where: the label of its figure, table or section in the paper's source.
        evidence: ours, from the runs of a scale.
        paper: the printed number; None for a direction.
        unit: of the number.
        rule: of the verdict: `number` (our interval holds the paper's number, or ours lies within `FACTOR` of it),
            `at least` (ours is no smaller), `direction`.
        sweeps: that make the runs.
        command: that repeats the evidence, for what no sweep makes.
    """

    name: str
    statement: str
    where: str
    evidence: Callable[[Experiments], Evidence]
    paper: float | None = None
    unit: Unit = "plain"
    rule: Rule = "direction"
    sweeps: Sequence[str] = ("main",)
    command: str = ""


@dataclass(frozen=True)
class Outcome:
    """A claim beside our runs.

    Attributes:
        claim: which.
        evidence: None where it was not tried.
        reason: why not.
        runs: names of the runs that it is from.
    """

    claim: Claim
    evidence: Evidence | None
    reason: str
    runs: Sequence[str]

    @property
    def verdict(self) -> Literal["yes", "no", "not tried"]:
        """Whether it is reproduced."""
        if self.evidence is None:
            return "not tried"
        return "yes" if _is_reproduced(self.claim, self.evidence) else "no"


def judge(experiments: Experiments, claims: Sequence[Claim]) -> list[Outcome]:
    """Claims beside the runs of a scale."""
    return [_judge(claim, experiments.fresh()) for claim in claims]


def claim_table(outcomes: Sequence[Outcome], scale: Scale) -> pd.DataFrame:
    """A row per claim, texts."""
    return pd.DataFrame(
        {
            "claim": outcome.claim.name,
            "statement": outcome.claim.statement,
            "where": outcome.claim.where,
            "paper": "" if outcome.claim.paper is None else number_text(outcome.claim.paper, outcome.claim.unit),
            "here": evidence_text(outcome),
            "reproduced": outcome.verdict,
            "rule": _rule_text(outcome.claim),
            "runs": str(len(outcome.runs)),
            "command": outcome.claim.command
            or " ".join(("brx sweep", *(scale.sweep(name) for name in outcome.claim.sweeps))),
        }
        for outcome in outcomes
    )


def evidence_text(outcome: Outcome) -> str:
    """Our number with its interval, our finding, or why there is none."""
    claim, ours = outcome.claim, outcome.evidence
    if ours is None:
        return outcome.reason
    if claim.rule == "direction":
        return ours.text
    bound = "> " if ours.is_bound else ""
    interval = ""
    if not pd.isna(ours.low):
        interval = f" [{number_text(ours.low, claim.unit)}, {number_text(ours.high, claim.unit)}]"
    return f"{bound}{number_text(ours.value, claim.unit)}{interval}{ours.text and f' ({ours.text})'}"


def number_text(value: float, unit: Unit) -> str:
    """For example `1.27x` or `71.6%`."""
    return {"times": f"{value:.2f}x", "percent": f"{value:.1%}", "plain": f"{value:.3g}"}[unit]


def _judge(claim: Claim, experiments: Experiments) -> Outcome:
    try:
        evidence = claim.evidence(experiments)
    except (NotTriedError, UserError) as error:
        return Outcome(claim, None, str(error), [])
    runs = [name for seeds in experiments.used.values() for name in seeds["name"]]
    return Outcome(claim, evidence, "", runs)


def _is_reproduced(claim: Claim, ours: Evidence) -> bool:
    if claim.rule == "direction":
        return bool(ours.holds)
    assert claim.paper is not None
    if claim.rule == "at least":
        return ours.value >= claim.paper
    if ours.is_bound or pd.isna(ours.value) or ours.value <= 0:
        return False
    return ours.low <= claim.paper <= ours.high or 1 / FACTOR <= ours.value / claim.paper <= FACTOR


def _rule_text(claim: Claim) -> str:
    return f"interval, or within {FACTOR:g}x" if claim.rule == "number" else claim.rule


# Evidence: each function below gives one that asks the runs.

Ask = Callable[[Experiments], Evidence]


def _need(
    experiments: Experiments,
    method: str,
    stages: int,
    sweep: str = "",
    *,
    preset: str | None = None,
    settings: Settings | None = None,
) -> pd.DataFrame:
    """The runs of an experiment.

    Raises:
        NotTriedError: there are none; names the sweep that makes them.
    """
    sweep = sweep or sweep_of(method)
    seeds = experiments.find(method, stages, sweep, preset=preset, settings=settings)
    if seeds is None:
        raise NotTriedError(f"no runs of {experiments.missing[-1].partition(':')[0]} yet")
    return seeds


def _final(seeds: pd.DataFrame) -> float:
    return float(seeds["train_loss"].mean())


def _best(experiments: list[pd.DataFrame]) -> pd.DataFrame:
    """The experiment that ends with the lowest training loss."""
    return min(experiments, key=_final)


def _slowdown_of(method: str) -> Ask:
    """To the one target of the scale; PipeDream's to its own, since it sets none for the others."""

    def ask(experiments: Experiments) -> Evidence:
        ends = pd.concat([_need(experiments, method, P) for P in experiments.ends])
        target = common_target(ends) if method == "pipedream" else experiments.slowdown_target()
        if target is None:
            raise NotTriedError("no method has runs both without delay and at the deepest pipeline yet")
        (row,) = slowdowns(ends, target).to_dict("records")
        if pd.isna(row["ratio"]):
            raise NotTriedError("the runs without delay never reach the target loss")
        return Evidence(row["ratio"], row["low"], row["high"], is_bound=row["is_censored"])

    return ask


def _saved(ours: pd.DataFrame, best: pd.DataFrame) -> Evidence:
    """The share of another experiment's iterations that ours saves to its final loss."""
    needed = reached_by_seed(ours, _final(best))
    available = float(best["last_iteration"].iloc[0])
    over = f"over {best['variant'].iloc[0]}"
    ratio = iteration_ratio(needed, {seed: Reached(available, is_reached=True) for seed in needed})
    if ratio is None or ratio.is_lower_bound:
        return Evidence(0.0, text=f"{over}: its final loss is never reached")
    if ratio.low is None or ratio.high is None:
        return Evidence(1 - ratio.ratio, text=over)
    return Evidence(1 - ratio.ratio, 1 - ratio.high, 1 - ratio.low, text=over)


def _saved_over_baselines(
    method: str = "basis-rotation",
    baselines: Sequence[str] = BASELINES,
    *,
    sweep: str = "",
    stages: int | None = None,
    model: Callable[[Experiments], tuple[str | None, Settings]] = lambda _: (None, {}),
) -> Ask:
    """The share of the iterations of the best of `baselines` that a method saves to its final loss."""

    def ask(experiments: Experiments) -> Evidence:
        preset, of_model = model(experiments)
        P = stages or experiments.scale.deepest
        ours, *others = [
            _need(experiments, one, P, sweep, preset=preset, settings=of_model) for one in (method, *baselines)
        ]
        best = _best(others)
        return _saved(ours, best)

    return ask


def _stage_aware_speedup(experiments: Experiments) -> Evidence:
    P = experiments.scale.deepest
    aware = _need(experiments, "basis-rotation", P, "stage-aware", settings={"optimizer.allocation": "stage-aware"})
    return _saved(aware, _need(experiments, "basis-rotation", P))


def _reversed_is_worse(experiments: Experiments) -> Evidence:
    P = experiments.scale.deepest
    other = _need(experiments, "basis-rotation", P, "stage-aware", settings={"optimizer.allocation": "reversed"})
    return _lower("equal intervals", _need(experiments, "basis-rotation", P), {"reversed": other})


def _lower(name: str, ours: pd.DataFrame, others: dict[str, pd.DataFrame]) -> Evidence:
    """Whether ours ends with a lower training loss than all others."""
    best = min(others, key=lambda other: _final(others[other]))
    text = f"{name} {_final(ours):.3f}, {best} {_final(others[best]):.3f} nats"
    return Evidence(holds=_final(ours) < _final(others[best]), text=text)


def _beats_baselines(method: str, sweep: str = "", *, both: Settings | None = None, own: Settings | None = None) -> Ask:
    """A method ends below all baselines at the deepest pipeline; `both`: settings of all, `own`: of the method."""

    def ask(experiments: Experiments) -> Evidence:
        P = experiments.scale.deepest
        of_baselines = sweep if both else ""
        ours = _need(experiments, method, P, sweep, settings={**(both or {}), **(own or {})})
        others = {one: _need(experiments, one, P, of_baselines, settings=both) for one in BASELINES}
        return _lower(method, ours, others)

    return ask


def _beats_baselines_at_every_depth(method: str) -> Ask:
    def ask(experiments: Experiments) -> Evidence:
        gaps = {}
        for P in (depth for depth in experiments.scale.depths if depth > 1):
            best = _best([_need(experiments, baseline, P) for baseline in BASELINES])
            gaps[P] = _final(best) - _final(_need(experiments, method, P))
        text = "nats below the best baseline: " + ", ".join(f"P = {P}: {gap:.3f}" for P, gap in gaps.items())
        return Evidence(holds=min(gaps.values()) > 0, text=text)

    return ask


def _gap_widens(experiments: Experiments) -> Evidence:
    gaps = {}
    for P in (min(depth for depth in experiments.scale.depths if depth > 1), experiments.scale.deepest):
        best = _best([_need(experiments, baseline, P) for baseline in BASELINES])
        gaps[P] = _final(best) - _final(_need(experiments, "basis-rotation", P))
    (first, small), (last, large) = gaps.items()
    return Evidence(holds=large > small > 0, text=f"gap {small:.3f} nats at P = {first}, {large:.3f} at P = {last}")


def _ordered(better: Sequence[str], worse: Sequence[str]) -> Ask:
    """Every slowdown of `better` is below every one of `worse`."""

    def ask(experiments: Experiments) -> Evidence:
        ratios = {method: _slowdown_of(method)(experiments).value for method in (*better, *worse)}
        text = ", ".join(f"{method} {ratio:.2f}" for method, ratio in ratios.items())
        holds = max(ratios[method] for method in better) < min(ratios[method] for method in worse)
        return Evidence(holds=holds, text=text)

    return ask


def _strategies_are_ordered(experiments: Experiments) -> Evidence:
    ratios = [_slowdown_of(method)(experiments).value for method in STRATEGIES]
    two_sided, one_sided, first_two_sided, first_one_sided = ratios
    holds = two_sided < one_sided and first_two_sided < first_one_sided  # bilateral below unilateral
    holds = holds and two_sided < first_two_sided and one_sided < first_one_sided  # 2nd below 1st
    names = ("2nd/bilateral", "2nd/unilateral", "1st/bilateral", "1st/unilateral")
    return Evidence(holds=holds, text=", ".join(f"{name} {ratio:.2f}" for name, ratio in zip(names, ratios, strict=True)))


def _depth(method: str, *, helps: bool) -> Ask:
    """From the shallowest to the deepest model, one block per stage, the final loss falls, or rises."""

    def ask(experiments: Experiments) -> Evidence:
        finals = {}
        for blocks in experiments.scale.blocks:
            settings = {"model.blocks": blocks}
            finals[blocks] = _final(_need(experiments, method, blocks, "block-scaling", settings=settings))
        losses = list(finals.values())
        text = ", ".join(f"{blocks} blocks: {loss:.3f}" for blocks, loss in finals.items())
        return Evidence(holds=losses[-1] < losses[0] if helps else losses[-1] > losses[0], text=text)

    return ask


def _larger_saves_more(experiments: Experiments) -> Evidence:
    smaller, larger = (ask(experiments).value for ask in (_WIDTH_SMALLER, _WIDTH_LARGER))
    return Evidence(holds=larger > smaller, text=f"smaller {smaller:.1%}, larger {larger:.1%}")


def _loses_less_without_stashing(experiments: Experiments) -> Evidence:
    """Basis rotation's final loss rises less than that of the best baseline when weights are not stashed."""
    P = experiments.scale.deepest
    best = _best([_need(experiments, baseline, P) for baseline in BASELINES])["method"].iloc[0]
    rises = {}
    for method in ("basis-rotation", best):
        without = _need(experiments, method, P, "stashing", settings={"pipeline.stash": "none"})
        rises[method] = _final(without) - _final(_need(experiments, method, P))
    ours, theirs = rises.values()
    return Evidence(holds=ours < theirs, text=f"rise: basis rotation {ours:+.3f}, {best} {theirs:+.3f} nats")


def _beats_delay_compensation(experiments: Experiments) -> Evidence:
    lines, holds = [], True
    for P in (8, 16, 32):
        ours = _final(_need(experiments, "basis-rotation", P))
        others = []
        for strength in COMPENSATIONS:
            settings = {"optimizer.compensation": strength}
            others.append(_need(experiments, "delay-compensation", P, "delay-compensation", settings=settings))
        best = _final(_best(others))
        holds = holds and ours < best
        lines.append(f"P = {P}: {ours:.3f} against {best:.3f}")
    return Evidence(holds=holds, text=", ".join(lines) + " nats")


def _norm_ratio(_: Experiments) -> Evidence:
    """The rotated norm over the original one, at the checkpoint of basis rotation with the largest delay."""
    norms = [one for one in measured_norms(find_runs([CURVATURE])) if one.method == "basis-rotation"]
    P = max((one.num_stages for one in norms), default=0)
    by_space = {one.space: one for one in norms if one.num_stages == P}
    if len(by_space) < 2:
        raise NotTriedError("not measured yet")
    rotated, original = by_space["rotated"], by_space["original"]
    (low, high), (original_low, original_high) = rotated.interval, original.interval
    text = f"{original.normalized:.3g} to {rotated.normalized:.3g}, P = {P}"
    return Evidence(rotated.normalized / original.normalized, low / original_high, high / original_low, text=text)


def _oscillates_less(_: Experiments) -> Evidence:
    folders = [folder for folder in find_runs([CURVATURE]) if any((folder / "analysis").glob("oscillation-*.json"))]
    measured = [measured_oscillation(folder) for folder in folders]
    P = max((one.num_stages for one in measured), default=0)
    variances = {one.method: one.dominant.variance for one in measured if one.num_stages == P}
    if not {"pipedream", "basis-rotation"} <= variances.keys():
        raise NotTriedError("not measured yet")
    ours, theirs = variances["basis-rotation"], variances["pipedream"]
    text = f"variance along the dominant eigenvector at P = {P}: basis rotation {ours:.2g}, PipeDream {theirs:.2g}"
    return Evidence(holds=ours < theirs, text=text)


def _memory_share(_: Experiments) -> Evidence:
    """1st/unilateral of an MLP matrix of Llama-3-8B, over what the paper counts for Adam, 4 m n.

    Adam's two moments are 2 m n elements, so that the share of what Adam really keeps is twice as large; our table of
    memory has one attention and one MLP matrix together (n^2 + n^2 over 2 (n^2 + m n)): 22.2 %.
    """
    m, n = LLAMA_3_8B["MLP"]
    overhead = overhead_elements((m, n), "1st", "unilateral")
    text = f"of 4mn as the paper counts; {overhead / (2 * m * n):.1%} of Adam's two moments, 2mn"
    return Evidence(overhead / (4 * m * n), text=text)


def _memory_of_strategies(_: Experiments) -> Evidence:
    sizes = {name: 4 * overhead_elements(shape, "2nd", "bilateral") / 2**30 for name, shape in LLAMA_3_8B.items()}
    text = ", ".join(f"{name} {size:.2f}" for name, size in sizes.items()) + " GiB (2nd/bilateral)"
    return Evidence(holds=[round(size, 2) for size in sizes.values()] == [0.25, 1.66], text=text)


def _stage_counts(_: Experiments) -> Evidence:
    table = stage_count_table(LLAMAS, DEVICES_GB).set_index("model").filter(like=" GB")
    ours = {model: row.tolist() for model, row in table.iterrows()}
    same = [model for model, counts in STAGE_COUNTS.items() if ours[model] == counts]
    text = f"{len(same)} of {len(ours)} models as printed"
    differing = [model for model in STAGE_COUNTS if model not in same]
    if differing:
        text += f"; not {', '.join(differing)}: the paper's formula, P >= 2 L, gives {ours[differing[0]][0]}"
    return Evidence(holds=set(differing) <= {"Llama 3.1 405B"}, text=text)


def _not_here(reason: str) -> Ask:
    def ask(_: Experiments) -> Evidence:
        raise NotTriedError(reason)

    return ask


def _moe(experiments: Experiments) -> tuple[str | None, Settings]:
    return experiments.scale.moe_preset, {}


def _narrow(experiments: Experiments) -> tuple[str | None, Settings]:
    return None, experiments.scale.narrow


def _wide(experiments: Experiments) -> tuple[str | None, Settings]:
    return experiments.scale.wide_preset, experiments.scale.wide


def _huge(experiments: Experiments) -> tuple[str | None, Settings]:
    if experiments.scale.huge_preset is None:
        raise NotTriedError("a model of 3B parameters: at the paper's scale alone")
    return experiments.scale.huge_preset, {}


_WIDTH_SMALLER = _saved_over_baselines(sweep="width", stages=24, model=_narrow)
_WIDTH_LARGER = _saved_over_baselines(sweep="width", stages=24, model=_wide)

CLAIMS = (
    Claim(
        "teaser-slowdown", "PipeDream's slowdown at the deepest pipeline", "fig:teaser-stages",
        _slowdown_of("pipedream"), 5.81, "times", "number",
    ),
    Claim(
        "teaser-reduction", "iterations that basis rotation saves over PipeDream, deepest pipeline", "fig:teaser-rotation",
        _saved_over_baselines(baselines=("pipedream",)), 0.816, "percent", "number",
    ),
    Claim(
        "main-reduction", "iterations saved over the best baseline, deepest pipeline", "fig:result-main-stage32",
        _saved_over_baselines(), 0.716, "percent", "number",
    ),
    Claim(
        "main-every-depth", "basis rotation ends below all baselines at every P > 1", "fig:result-main-numstages",
        _beats_baselines_at_every_depth("basis-rotation"),
    ),
    Claim("main-gap-widens", "its lead widens with P", "fig:result-main-numstages", _gap_widens),
    *(
        Claim(
            f"slowdown-{method.replace(' ', '-').replace('/', '-')}", f"slowdown of {method}",
            "tab:result-preconditioned-slowdown" if method in ("pipedream-lr", "nesterov", "muon", "scion", "soap")
            else "tab:result-rotation-slowdown",
            _slowdown_of(method), printed, "times", "number", (sweep_of(method),),
        )
        for method, printed in SLOWDOWNS.items()
        if method != "pipedream"
    ),
    Claim(
        "slowdown-order", "basis rotation slows down less than all baselines", "fig:result-main-slowdown-rotatedadam",
        _ordered(("basis-rotation",), BASELINES),
    ),
    Claim(
        "strategies-order", "closer estimates slow down less: bilateral below unilateral, 2nd below 1st",
        "tab:result-rotation-slowdown", _strategies_are_ordered, sweeps=("main", "strategies"),
    ),
    Claim(
        "strategies-least", "the least accurate strategy (1st/unilateral) ends below the best baseline at every P > 1",
        "fig:result-appendix-optrotated", _beats_baselines_at_every_depth("basis-rotation 1st/unilateral"),
        sweeps=("main", "strategies"),
    ),
    Claim(
        "strategies-least-reduction", "iterations that 1st/unilateral saves over the best baseline: more than 40 %",
        "tab:memory_overhead", _saved_over_baselines("basis-rotation 1st/unilateral"), 0.40, "percent", "at least",
        ("main", "strategies"),
    ),
    Claim(
        "preconditioned-order", "methods in the eigenbasis (SOAP, basis rotation) slow down less than Muon and Scion",
        "tab:result-preconditioned-slowdown", _ordered(("soap", "basis-rotation"), ("muon", "scion")),
        sweeps=("main", "preconditioned"),
    ),
    *(
        Claim(
            f"depth-{method.replace(' ', '-').replace('/', '-')}",
            f"one block per stage: deeper models end {'lower' if method in STRATEGIES else 'higher'} with {method}",
            "fig:result-appendix-blockscaling", _depth(method, helps=method in STRATEGIES), sweeps=("block-scaling",),
        )
        for method in (*BASELINES, *STRATEGIES)
    ),
    Claim(
        "width-smaller", "iterations saved at P = 24, the smaller model", "fig:result-main-24layers-small",
        _WIDTH_SMALLER, 0.624, "percent", "number", ("width",),
    ),
    Claim(
        "width-larger", "iterations saved at P = 24, the larger model (1B)", "fig:result-main-24layers-large",
        _WIDTH_LARGER, 0.768, "percent", "number", ("width",),
    ),
    Claim("width-order", "the larger model saves more", "fig:result-main-1b", _larger_saves_more, sweeps=("width",)),
    Claim(
        "3b", "iterations saved with 3B parameters", "fig:result-appendix-3b",
        _saved_over_baselines(sweep="3b", stages=32, model=_huge), 0.817, "percent", "number", ("3b",),
    ),
    Claim(
        "mixture", "iterations saved with a mixture of experts", "fig:result-appendix-moe",
        _saved_over_baselines(sweep="moe", model=_moe), 0.468, "percent", "number", ("moe",),
    ),
    Claim(
        "gpu-hours", "GPU hours saved over the best baseline", "fig:result-main-efficiency-runtime",
        _not_here("on a laptop's model an optimizer step costs as much as the rest; docs/benchmarks.md has the costs"),
        0.543, "percent", "number", command="make bench",
    ),
    Claim(
        "frequency-100", "refreshes every 100 iterations still end below all baselines",
        "fig:result-main-efficiency-frequency", _beats_baselines("basis-rotation", "frequency", own={"optimizer.frequency": 100}),
        sweeps=("main", "frequency"),
    ),
    Claim(
        "stage-aware", "iterations that stage-aware intervals save over equal ones", "fig:result-main-layerwise_freqeuncy",
        _stage_aware_speedup, 0.292, "percent", "number", ("main", "stage-aware"),
    ),
    Claim(
        "reversed", "intervals shared the other way round end above equal ones", "fig:reverse-stage-wise-frequency",
        _reversed_is_worse, sweeps=("main", "stage-aware"),
    ),
    Claim(
        "no-stashing", "without stashing, basis rotation ends below all baselines", "fig:result-main-wows",
        _beats_baselines("basis-rotation", "stashing", both={"pipeline.stash": "none"}), sweeps=("stashing",),
    ),
    Claim(
        "no-stashing-robust", "without stashing, basis rotation loses less than the best baseline",
        "fig:result-main-weightstashing-basisrotation", _loses_less_without_stashing, sweeps=("main", "stashing"),
    ),
    Claim(
        "prediction", "with predicted weights, basis rotation ends below all baselines", "fig:result-appendix-pipemare",
        _beats_baselines("basis-rotation", "prediction", both={"pipeline.stash": "predict"}), sweeps=("prediction",),
    ),
    Claim(
        "delay-compensation", "basis rotation ends below delay compensation at P = 8, 16, 32, whatever its strength",
        "fig:result-appendix-dc", _beats_delay_compensation, sweeps=("main", "delay-compensation"),
    ),
    Claim(
        "hessian-norm", "the Hessian's (1,1)-norm in rotated over original coordinates (0.1228 / 0.5436)",
        "sec:exp-analysis", _norm_ratio, 0.1228 / 0.5436, "plain", "number",
        command="brx hessian-norm results/curvature/basis-rotation-p8 --measured",
    ),
    Claim(
        "theorem-order", "the norm falls from original over unilateral to bilateral coordinates (theorem 3.1)",
        "thm:rotation", _not_here("norms by strategy have not been measured on one checkpoint yet"),
        command="brx hessian-norm RUN",
    ),
    Claim(
        "oscillation", "with delay, updates oscillate less along the dominant eigenvector under basis rotation",
        "fig:result-main-oscillation", _oscillates_less, command="brx oscillation results/curvature/*-p8 --measured",
    ),
    Claim(
        "memory-share", "memory of 1st/unilateral for an MLP matrix, of Adam's", "tab:memory_overhead",
        _memory_share, 0.075, "percent", "number", command="brx memory",
    ),
    Claim(
        "memory-table", "memory of each strategy for Llama-3-8B's matrices, GiB", "tab:memory_overhead",
        _memory_of_strategies, command="brx memory",
    ),
    Claim(
        "stage-counts", "least number of stages of large models by device", "tab:stages_s4096", _stage_counts,
        command="brx stages",
    ),
)  # fmt: skip
"""In the order of the paper."""
