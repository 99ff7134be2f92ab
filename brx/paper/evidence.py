"""What the runs of a scale say on each of the paper's claims: functions from `Experiments` to `Evidence`."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pandas as pd
from scipy.stats import t

from brx.config.loading import Settings, preset_with
from brx.curvature.norm_result import STRATEGY_SPACES, measured_norms, results_of
from brx.curvature.oscillation import Oscillation, measured_oscillations, with_oscillation
from brx.curvature.strategies import complete_measurements
from brx.paper.llama import DEVICES_GB, LLAMA_3_8B, LLAMAS
from brx.paper.scales import COMPENSATIONS, STRATEGY_NAMES, Experiments, sweep_of
from brx.planning.optimizer_memory import overhead_elements
from brx.planning.stage_count import stage_count_table
from brx.runs.comparison import BASELINES, common_target, saved_ratio, slowdowns
from brx.runs.frames import SEED, find_runs
from brx.runs.reading import Run
from brx.runs.slowdown import CONFIDENCE, geometric_mean

STAGE_COUNTS = {
    "Llama 3.2 1B": ["16", "6", "4", "2", "1"],
    "Llama 3.2 3B": ["28", "10", "6", "3", "2"],
    "LLaMA 1-7B": ["32", "16", "11", "5", "3"],
    "LLaMA 1-13B": [">= 80", "40", "20", "8", "5"],
    "LLaMA 1-33B": [">= 120", "60", "60", "20", "12"],
    "LLaMA 1-65B": [">= 160", ">= 160", "80", "40", "20"],
    "Llama 3.1 405B": [">= 512", ">= 512", ">= 512", ">= 512", "126"],
}
"""As the paper prints them, by model; columns: `DEVICES_GB`."""

SEEDS_FOR_AN_INTERVAL = 3


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
    """Final validation loss, the mean over seeds."""
    return float(seeds["val_loss"].mean())


def _best(experiments: list[pd.DataFrame]) -> pd.DataFrame:
    """The experiment that ends with the lowest loss."""
    return min(experiments, key=_final)


def _best_baseline(experiments: Experiments) -> pd.DataFrame:
    """The baseline that ends with the lowest loss at the deepest pipeline."""
    return _best([_need(experiments, baseline, experiments.scale.deepest) for baseline in BASELINES])


def slowdown_of(method: str) -> Ask:
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
    ratio = saved_ratio(ours, best)
    over = f"over {best['variant'].iloc[0]}"
    if ratio is None or ratio.is_lower_bound:
        return Evidence(0.0, text=f"{over}: its final loss is never reached")
    if ratio.low is None or ratio.high is None:
        return Evidence(1 - ratio.ratio, text=over)
    return Evidence(1 - ratio.ratio, 1 - ratio.high, 1 - ratio.low, text=over)


def saved_over_baselines(
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
            _need(experiments, name, P, sweep, preset=preset, settings=of_model) for name in (method, *baselines)
        ]
        best = _best(others)
        return _saved(ours, best)

    return ask


def saved_by_stage_aware(experiments: Experiments) -> Evidence:
    P = experiments.scale.deepest
    aware = _need(
        experiments, "basis-rotation", P, "stage-aware", settings={"optimizer.refresh_schedule": "stage-aware"}
    )
    return _saved(aware, _need(experiments, "basis-rotation", P))


def reversed_is_worse(experiments: Experiments) -> Evidence:
    P = experiments.scale.deepest
    other = _need(experiments, "basis-rotation", P, "stage-aware", settings={"optimizer.refresh_schedule": "reversed"})
    return _lower("equal intervals", _need(experiments, "basis-rotation", P), {"reversed": other})


def _lower(name: str, ours: pd.DataFrame, others: dict[str, pd.DataFrame]) -> Evidence:
    """Whether ours ends lower than all others; with three seeds or more, than the best of them by more than chance."""
    best = min(others, key=lambda other: _final(others[other]))
    text = f"{name} {_final(ours):.3f}, {best} {_final(others[best]):.3f} nats"
    ours, theirs = (seeds.set_index(SEED)["val_loss"] for seeds in (ours, others[best]))
    differences = (ours - theirs).dropna()
    if len(differences) < SEEDS_FOR_AN_INTERVAL:
        return Evidence(holds=ours.mean() < theirs.mean(), text=text)
    low, high = t.interval(CONFIDENCE, len(differences) - 1, differences.mean(), differences.sem())
    return Evidence(holds=high < 0, text=f"{text}, difference [{low:+.3f}, {high:+.3f}]")


def beats_baselines(method: str, sweep: str = "", *, both: Settings | None = None, own: Settings | None = None) -> Ask:
    """A method ends below all baselines at the deepest pipeline; `both`: settings of all, `own`: of the method."""

    def ask(experiments: Experiments) -> Evidence:
        P = experiments.scale.deepest
        of_baselines = sweep if both else ""
        ours = _need(experiments, method, P, sweep, settings={**(both or {}), **(own or {})})
        others = {name: _need(experiments, name, P, of_baselines, settings=both) for name in BASELINES}
        return _lower(method, ours, others)

    return ask


def beats_baselines_at_every_depth(method: str) -> Ask:
    def ask(experiments: Experiments) -> Evidence:
        gaps = _gaps(experiments, method)
        text = "nats below the best baseline: " + ", ".join(f"P = {P}: {gap:.3f}" for P, gap in gaps.items())
        return Evidence(holds=min(gaps.values()) > 0, text=text)

    return ask


def gap_widens(experiments: Experiments) -> Evidence:
    gaps = list(_gaps(experiments, "basis-rotation").items())
    (first, small), (last, large) = gaps[0], gaps[-1]
    if first == last:
        raise NotTriedError(f"no runs of all methods between P = 1 and P = {last} yet")
    return Evidence(holds=large > small > 0, text=f"gap {small:.3f} nats at P = {first}, {large:.3f} at P = {last}")


def _gaps(experiments: Experiments, method: str) -> dict[int, float]:
    """Final loss of the best baseline minus the method's, by number of stages, as far as there are runs."""
    _need(experiments, method, experiments.scale.deepest)
    gaps = {}
    for P in (depth for depth in experiments.scale.depths if depth > 1):
        ours, *others = (experiments.find(name, P, sweep_of(name)) for name in (method, *BASELINES))
        present = [seeds for seeds in others if seeds is not None]
        if ours is not None and len(present) == len(others):
            gaps[P] = _final(_best(present)) - _final(ours)
    if not gaps:
        raise NotTriedError("no runs of all baselines beside it yet")
    return gaps


def ordered(better: Sequence[str], worse: Sequence[str]) -> Ask:
    """Every slowdown of `better` is below every one of `worse`."""

    def ask(experiments: Experiments) -> Evidence:
        ratios = {method: slowdown_of(method)(experiments).value for method in (*better, *worse)}
        text = ", ".join(f"{method} {ratio:.2f}" for method, ratio in ratios.items())
        holds = max(ratios[method] for method in better) < min(ratios[method] for method in worse)
        return Evidence(holds=holds, text=text)

    return ask


def strategies_are_ordered(experiments: Experiments) -> Evidence:
    ratios = [slowdown_of(method)(experiments).value for method in STRATEGY_NAMES]
    two_sided, one_sided, first_two_sided, first_one_sided = ratios
    holds = two_sided < one_sided and first_two_sided < first_one_sided  # bilateral below unilateral
    holds = holds and two_sided < first_two_sided and one_sided < first_one_sided  # 2nd below 1st
    names = ("2nd/bilateral", "2nd/unilateral", "1st/bilateral", "1st/unilateral")
    return Evidence(
        holds=holds, text=", ".join(f"{name} {ratio:.2f}" for name, ratio in zip(names, ratios, strict=True))
    )


def depth(method: str, *, helps: bool) -> Ask:
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


def larger_saves_more(experiments: Experiments) -> Evidence:
    smaller, larger = (ask(experiments).value for ask in (SAVED_BY_SMALLER, SAVED_BY_LARGER))
    return Evidence(holds=larger > smaller, text=f"smaller {smaller:.1%}, larger {larger:.1%}")


def loses_less_without_stashing(experiments: Experiments) -> Evidence:
    """Basis rotation's final loss rises less than that of the best baseline when weights are not stashed."""
    P = experiments.scale.deepest
    best = _best_baseline(experiments)["method"].iloc[0]
    rises = {}
    for method in ("basis-rotation", best):
        without = _need(experiments, method, P, "stashing", settings={"pipeline.stash": "none"})
        rises[method] = _final(without) - _final(_need(experiments, method, P))
    ours, theirs = rises.values()
    return Evidence(holds=ours < theirs, text=f"rise: basis rotation {ours:+.3f}, {best} {theirs:+.3f} nats")


def beats_delay_compensation(experiments: Experiments) -> Evidence:
    lines, holds = [], True
    for P in (8, 16, 32):
        ours = _final(_need(experiments, "basis-rotation", P))
        others = [
            experiments.find(
                "delay-compensation", P, "delay-compensation", settings={"optimizer.compensation": strength}
            )
            for strength in COMPENSATIONS
        ]
        tried = [seeds for seeds in others if seeds is not None]
        if not tried:
            raise NotTriedError(f"no runs of delay compensation at P = {P} yet")
        best = _final(_best(tried))
        holds = holds and ours < best
        lines.append(f"P = {P}: {ours:.3f} against {best:.3f}")
    return Evidence(holds=holds, text=", ".join(lines) + " nats")


def norm_ratio(experiments: Experiments) -> Evidence:
    """The rotated norm over the original one, at the checkpoint of basis rotation with the largest delay."""
    norms = measured_norms(find_runs([experiments.scale.curvature]))
    norms = [norm for norm in norms if norm.method == "basis-rotation"]
    P = max((norm.num_stages for norm in norms), default=0)
    by_space = {norm.space: norm for norm in norms if norm.num_stages == P}
    if len(by_space) < 2:
        raise NotTriedError("not measured yet")
    rotated, original = by_space["rotated"], by_space["original"]
    (low, high), (original_low, original_high) = rotated.interval, original.interval
    text = f"{original.normalized:.3g} to {rotated.normalized:.3g}, P = {P}"
    return Evidence(rotated.normalized / original.normalized, low / original_high, high / original_low, text=text)


def theorem_order(experiments: Experiments) -> Evidence:
    """Wherever all coordinates were measured, 2nd/bilateral is below 2nd/unilateral, and that below original.

    By more than their intervals.
    """
    runs = find_runs([experiments.scale.curvature])
    measured = complete_measurements([norm for run in runs for norm in results_of(run, STRATEGY_SPACES).values()])
    if not measured:
        raise NotTriedError("norms by strategy have not been measured on one checkpoint yet")
    lines, holds = [], True
    for run, of_run in measured.items():
        by_space = {norm.space: norm for norm in of_run}
        falling = [by_space["original"], by_space["2nd-unilateral"], by_space["2nd-bilateral"]]
        holds = holds and all(lower.interval[1] < higher.interval[0] for higher, lower in pairwise(falling))
        lines.append(f"{run}: {', '.join(f'{norm.normalized:.3g}' for norm in falling)}")
    return Evidence(holds=holds, text="; ".join(lines))


def oscillates_less(experiments: Experiments) -> Evidence:
    """The variances of basis rotation over PipeDream's at the same checkpoints, seed by seed, at the largest P."""
    folders = with_oscillation(find_runs([experiments.scale.curvature]))
    measured = [(folder, oscillation) for folder in folders for oscillation in measured_oscillations(folder)]
    P = max((oscillation.num_stages for _, oscillation in measured), default=0)
    by_method: dict[str, dict[tuple[int, int], Oscillation]] = {}
    for folder, oscillation in measured:
        if oscillation.num_stages == P:
            seed = Run.load(folder).config.training.seed
            by_method.setdefault(oscillation.method, {})[seed, oscillation.iteration] = oscillation
    ours, theirs = by_method.get("basis-rotation", {}), by_method.get("pipedream", {})
    shared = sorted(ours.keys() & theirs.keys())
    if not shared:
        raise NotTriedError("not measured yet")
    ratios = {key: ours[key].dominant.variance / theirs[key].dominant.variance for key in shared}
    by_seed = np.log(pd.Series(ratios)).groupby(level=0).mean()
    mean_ours, mean_theirs = (
        geometric_mean([side[key].dominant.variance for key in shared]) for side in (ours, theirs)
    )
    text = (
        f"variance along the dominant eigenvector at P = {P}: basis rotation {mean_ours:.2g}, PipeDream"
        f" {mean_theirs:.2g}"
        f" ({len(by_seed)} seed{'s' * (len(by_seed) > 1)}, {len(shared)} checkpoint{'s' * (len(shared) > 1)})"
    )
    if plateaus := sum(theirs[key].eigenvalue < 0 for key in shared):
        text += f"; PipeDream's dominant eigenvalue is negative at {plateaus}: not at like places"
    if len(by_seed) < SEEDS_FOR_AN_INTERVAL:
        return Evidence(holds=by_seed.mean() < 0, text=text)
    low, high = t.interval(CONFIDENCE, len(by_seed) - 1, by_seed.mean(), by_seed.sem())
    return Evidence(holds=high < 0, text=f"{text}, ratio [{np.exp(low):.2g}, {np.exp(high):.2g}]")


def memory_share(_: Experiments) -> Evidence:
    """1st/unilateral of an MLP matrix of Llama-3-8B, over what the paper counts for Adam, 4 m n.

    Adam's two moments are 2 m n elements, so that the share of what Adam really keeps is twice as large; our table of
    memory has one attention and one MLP matrix together (n^2 + n^2 over 2 (n^2 + m n)): 22.2 %.
    """
    m, n = LLAMA_3_8B["MLP"]
    overhead = overhead_elements((m, n), "1st", "unilateral")
    text = (
        f"of 4mn as the paper counts, {1 / 16:.2%} with its m = 4n; {overhead / (2 * m * n):.1%} of Adam's two moments"
    )
    return Evidence(overhead / (4 * m * n), text=text)


def memory_of_strategies(_: Experiments) -> Evidence:
    sizes = {name: 4 * overhead_elements(shape, "2nd", "bilateral") / 2**30 for name, shape in LLAMA_3_8B.items()}
    text = ", ".join(f"{name} {size:.2f}" for name, size in sizes.items()) + " GiB (2nd/bilateral)"
    return Evidence(holds=[round(size, 2) for size in sizes.values()] == [0.25, 1.66], text=text)


def stage_counts(_: Experiments) -> Evidence:
    table = stage_count_table(LLAMAS, DEVICES_GB).set_index("model").filter(like=" GB")
    ours = {model: row.tolist() for model, row in table.iterrows()}
    same = [model for model, counts in STAGE_COUNTS.items() if ours[model] == counts]
    text = f"{len(same)} of {len(ours)} models as printed"
    differing = [model for model in STAGE_COUNTS if model not in same]
    if differing:
        text += f"; not {', '.join(differing)}: the paper's formula, P >= 2 L, gives {ours[differing[0]][0]}"
    return Evidence(holds=set(differing) <= {"Llama 3.1 405B"}, text=text)


def hours_saved(experiments: Experiments) -> Evidence:
    """The share of the best baseline's time that basis rotation saves to its final loss.

    Iterations times the measured time of one, not the clocks of runs that shared a machine.
    """
    baseline = _best_baseline(experiments)
    saved = _saved(_need(experiments, "basis-rotation", experiments.scale.deepest), baseline)
    best = baseline["method"].iloc[0]
    ours, theirs = (_relative_time(experiments, method) for method in ("basis-rotation", best))
    of_time = [1 - (1 - share) * ours / theirs for share in (saved.value, saved.low, saved.high)]
    value, low, high = of_time
    interval = "" if np.isnan(low) else f" [{low:.1%}, {high:.1%}]"
    text = f"{value:.1%}{interval} over {best}; per iteration {ours:.2f} against {theirs:.2f} x AdamW's time"
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


def mixture(experiments: Experiments) -> tuple[str | None, Settings]:
    return experiments.scale.moe_preset, {}


def smaller_model(experiments: Experiments) -> tuple[str | None, Settings]:
    return None, experiments.scale.narrow


def larger_model(experiments: Experiments) -> tuple[str | None, Settings]:
    return experiments.scale.wide_preset, experiments.scale.wide


def huge_model(experiments: Experiments) -> tuple[str | None, Settings]:
    if experiments.scale.huge_preset is None:
        raise NotTriedError("a model of 3B parameters: at the paper's scale alone")
    return experiments.scale.huge_preset, {}


SAVED_BY_SMALLER = saved_over_baselines(sweep="width", stages=24, model=smaller_model)
SAVED_BY_LARGER = saved_over_baselines(sweep="width", stages=24, model=larger_model)
