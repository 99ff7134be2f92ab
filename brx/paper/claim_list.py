"""Every number and direction that the paper states about its own experiments, in its order."""

from __future__ import annotations

from functools import partial

from brx.paper.claims import Claim
from brx.paper.evidence.closed_forms import memory_of_strategies, memory_share, parameter_counts, stage_counts
from brx.paper.evidence.curvature import norm_ratio, oscillates_less, stable_elsewhere, theorem_order
from brx.paper.evidence.iterations import (
    BASELINES_SLOW_DOWN_MORE,
    EIGENBASIS_SLOWS_DOWN_LESS,
    FINER_STRATEGIES_SLOW_DOWN_LESS,
    PRECONDITIONED_SLOW_DOWN_LESS,
    hours_saved,
    saved_by_stage_aware,
    saved_over_baselines,
    saves_more,
    slowdown_of,
    soap_is_close,
)
from brx.paper.evidence.losses import (
    FINER_THAN,
    LEAST_ACCURATE,
    at_every_depth,
    beats_baselines,
    beats_delay_compensation,
    delay_compensation_is_like_pipedream,
    depth,
    few_refreshes_cost_little,
    grows,
    loses_less_without_stashing,
    over,
    over_baselines,
    reversed_is_worse,
    validation_follows_training,
)
from brx.paper.evidence.models import huge_model, larger_model, mixture, smaller_model
from brx.paper.evidence.toys import delay_hurts_where_misaligned, misalignment_slows_on_the_spiral
from brx.paper.printed import SAVED, SLOWDOWNS
from brx.paper.scales import STRATEGY_NAMES
from brx.runs.comparison import BASELINES

SAVED_BY_SMALLER = saved_over_baselines(stages=24, model_of=smaller_model)
SAVED_BY_LARGER = saved_over_baselines(stages=24, model_of=larger_model)
SAVED_BY_HUGE = saved_over_baselines(stages=32, model_of=huge_model)

share_claim = partial(Claim, unit="percent", rule="number")


def _slug(method: str) -> str:
    return method.replace(" ", "-").replace("/", "-")


CLAIMS = (
    Claim(
        "toy-quadratic", "delay slows Adam where the eigenvectors lie between the axes, hardly where along them",
        "Figure 3", delay_hurts_where_misaligned, command="brx toy quadratic",
    ),
    Claim(
        "toy-spiral", "along the spiral, delay slows Adam the more, the more misaligned the Hessian is",
        "Figure 4b", misalignment_slows_on_the_spiral, command="brx toy spiral",
    ),
    Claim(
        "teaser-slowdown", "PipeDream's slowdown at the deepest pipeline (to its own final loss)", "Figure 2a",
        slowdown_of("pipedream"), SLOWDOWNS["pipedream"], "times", "number",
    ),
    share_claim(
        "teaser-reduction", "iterations that basis rotation saves over PipeDream", "Figure 2b",
        saved_over_baselines(baselines=("pipedream",)), 0.816,
    ),
    share_claim(
        "main-reduction", "iterations saved over the best baseline, deepest pipeline", "Figure 5b",
        saved_over_baselines(), SAVED["main"],
    ),
    Claim(
        "main-every-depth", "basis rotation ends below all baselines at every P > 1", "Figure 5a",
        at_every_depth(*(over("basis-rotation", baseline) for baseline in BASELINES), from_stages=2),
    ),
    Claim(
        "main-gap-widens", "its lead widens with P", "Figure 5a",
        grows(over_baselines("basis-rotation"), from_stages=2),
    ),
    Claim(
        "main-amplified", "its lead without delay is amplified by delay", "Section 4.2",
        grows(over_baselines("basis-rotation"), from_stages=1),
    ),
    *(
        Claim(
            f"slowdown-{_slug(method)}", f"slowdown of {method}",
            "Figure 8a" if method in STRATEGY_NAMES else "Table 3",
            slowdown_of(method), printed, "times", "number",
        )
        for method, printed in SLOWDOWNS.items()
        if method != "pipedream"
    ),
    Claim(
        "slowdown-order", "basis rotation slows down less than all baselines", "Figure 5e",
        BASELINES_SLOW_DOWN_MORE,
    ),
    Claim(
        "strategies-order", "closer estimates slow down less: bilateral below unilateral, 2nd below 1st",
        "Figure 8a", FINER_STRATEGIES_SLOW_DOWN_LESS,
    ),
    Claim(
        "strategies-every-depth", "closer estimates end lower at every P", "Figure 16",
        at_every_depth(*(over(finer, coarser) for finer, coarser in FINER_THAN), from_stages=1),
    ),
    Claim(
        "strategies-gap-widens", "the lead of the closest over the least accurate (1st/unilateral) widens with P",
        "Figure 16", grows(over("basis-rotation", LEAST_ACCURATE), from_stages=2),
    ),
    Claim(
        "strategies-least", "1st/unilateral ends below the best baseline at every P > 1",
        "Figure 16", at_every_depth(over_baselines(LEAST_ACCURATE), from_stages=2),
    ),
    Claim(
        "strategies-least-gap-widens", "the lead of 1st/unilateral over the best baseline widens with P",
        "Figure 16", grows(over_baselines(LEAST_ACCURATE), from_stages=2),
    ),
    Claim(
        "strategies-least-reduction", "iterations that 1st/unilateral saves over the best baseline: more than 40 %",
        "Appendix H", saved_over_baselines(LEAST_ACCURATE), 0.40, "percent", "at least",
    ),
    Claim(
        "preconditioned-order", "methods in the eigenbasis (SOAP, basis rotation) slow down less than Muon and Scion",
        "Table 3", EIGENBASIS_SLOWS_DOWN_LESS,
    ),
    Claim(
        "preconditioned-baselines", "Muon and Scion slow down less than the baselines",
        "Table 3", PRECONDITIONED_SLOW_DOWN_LESS,
    ),
    Claim(
        "soap-close", "SOAP slows down about as basis rotation does: nearer to it than Muon and Scion",
        "Table 3", soap_is_close,
    ),
    *(
        Claim(
            f"depth-{_slug(method)}",
            f"one block per stage: deeper models end {'lower' if method in STRATEGY_NAMES else 'higher'} with {method}",
            "Figure 14", depth(method, helps=method in STRATEGY_NAMES),
        )
        for method in (*BASELINES, *STRATEGY_NAMES)
    ),
    share_claim(
        "width-smaller", "iterations saved at P = 24, the smaller model", "Figure 7a",
        SAVED_BY_SMALLER, SAVED["smaller"],
    ),
    share_claim(
        "width-larger", "iterations saved at P = 24, the larger model (1B)", "Figure 7b",
        SAVED_BY_LARGER, SAVED["larger"],
    ),
    Claim(
        "width-order", "the larger model saves more", "Figure 7",
        saves_more(SAVED_BY_LARGER, SAVED_BY_SMALLER),
    ),
    share_claim("3b", "iterations saved with 3B parameters", "Figure 20", SAVED_BY_HUGE, 0.817),
    Claim(
        "3b-order", "3B parameters save more than 1B", "Figure 20",
        saves_more(SAVED_BY_HUGE, SAVED_BY_LARGER),
    ),
    share_claim(
        "mixture", "iterations saved with a mixture of experts", "Figure 21",
        saved_over_baselines(model_of=mixture), SAVED["mixture of experts"],
    ),
    Claim(
        "mixture-lowest", "with a mixture of experts, basis rotation ends below all baselines",
        "Figure 21", beats_baselines(model_of=mixture),
    ),
    Claim(
        "gpu-hours", "GPU hours saved over the best baseline", "Figure 9a",
        hours_saved, 0.543, "percent", "direction", command="make bench",
    ),
    Claim(
        "frequency-100", "refreshes every 100 iterations still end below all baselines",
        "Figure 9b",
        beats_baselines("frequency", own={"optimizer.frequency": 100}),
    ),
    Claim(
        "frequency-100-little", "refreshes every 100 iterations instead of every 10 cost little",
        "Figure 9b", few_refreshes_cost_little,
    ),
    share_claim(
        "stage-aware", "iterations that stage-aware intervals save over equal ones",
        "Figure 9c", saved_by_stage_aware, 0.292,
    ),
    Claim(
        "reversed", "intervals shared the other way round end above equal ones", "Figure 17",
        reversed_is_worse,
    ),
    Claim(
        "no-stashing", "without stashing, basis rotation ends below all baselines", "Figure 10a",
        beats_baselines("stashing", shared={"pipeline.stash": "none"}),
    ),
    Claim(
        "no-stashing-robust", "without stashing, basis rotation loses less than the baselines",
        "Figure 10", loses_less_without_stashing,
    ),
    Claim(
        "prediction", "with predicted weights, basis rotation ends below all baselines", "Figure 15",
        beats_baselines("prediction", shared={"pipeline.stash": "predict"}),
    ),
    Claim(
        "validation", "the methods end in the same order by validation as by training loss", "Figure 18",
        validation_follows_training,
    ),
    Claim(
        "delay-compensation", "basis rotation ends below delay compensation at P = 8, 16, 32, whatever its strength",
        "Figure 19", beats_delay_compensation,
    ),
    Claim(
        "delay-compensation-like-pipedream", "delay compensation ends about where PipeDream does",
        "Figure 19", delay_compensation_is_like_pipedream,
    ),
    Claim(
        "hessian-norm", "the Hessian's (1,1)-norm in basis rotation's coordinates over the original ones, at one"
        " checkpoint (0.1228 / 0.5436)", "Section 4.3", norm_ratio, 0.1228 / 0.5436, "plain", "number",
        command="brx hessian-norm {curvature} --measured",
    ),
    Claim(
        "theorem-order", "the norm falls from original over unilateral to bilateral coordinates, source 2nd",
        "Theorem 3.1", theorem_order("2nd"), rule="order of norms",
        command="brx hessian-norm {curvature} --strategies --measured",
    ),
    Claim(
        "theorem-order-1st", "the norm falls from original over unilateral to bilateral coordinates, source 1st",
        "Theorem F.5", theorem_order("1st"), rule="order of norms",
        command="brx hessian-norm {curvature} --strategies --measured",
    ),
    Claim(
        "oscillation", "updates oscillate less along the dominant eigenvector with basis rotation, without delay",
        "Figure 11", oscillates_less(delayed=False),
        command="brx oscillation {curvature} --measured",
    ),
    Claim(
        "oscillation-delayed", "updates oscillate less along the dominant eigenvector with basis rotation, with delay",
        "Figure 11", oscillates_less(delayed=True),
        command="brx oscillation {curvature} --measured",
    ),
    Claim(
        "oscillation-stable", "along other directions than the dominant one they oscillate little with either",
        "Figure 11", stable_elsewhere, command="brx oscillation {curvature} --measured",
    ),
    Claim(
        "memory-share", "memory of 1st/unilateral for an MLP matrix, of Adam's", "Appendix H",
        memory_share, 0.075, "percent", "closed form", "brx memory",
    ),
    Claim(
        "memory-table", "memory of each strategy for Llama-3-8B's matrices, GiB", "Table 2",
        memory_of_strategies, rule="closed form", command="brx memory",
    ),
    Claim(
        "parameters", "number of parameters: about 96 M, about 1.03 B, 3,047 M", "Appendix D.2",
        parameter_counts, rule="closed form", command="brx plan paper-95m",
    ),
    Claim(
        "stage-counts", "least number of stages of large models by device", "Table 1", stage_counts,
        rule="closed form", command="brx stages",
    ),
)  # fmt: skip
