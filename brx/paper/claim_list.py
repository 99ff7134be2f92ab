"""Every number and direction that the paper states about its own experiments, in its order."""

from __future__ import annotations

from functools import partial

from brx.paper import evidence as ours
from brx.paper import measured_evidence as measured
from brx.paper.claims import Claim
from brx.paper.evidence import FINER_THAN, LEAST_ACCURATE, OVER_EACH_BASELINE
from brx.paper.printed import SAVED, SLOWDOWNS
from brx.paper.scales import STRATEGY_NAMES
from brx.runs.comparison import BASELINES

number = partial(Claim, rule="number")
order_of_norms = partial(Claim, rule="order of norms", command="brx hessian-norm {curvature} --strategies --measured")
oscillation = partial(Claim, command="brx oscillation {curvature} --measured")
closed_form = partial(Claim, rule="closed form")


def _slug(method: str) -> str:
    return method.replace(" ", "-").replace("/", "-")


# Name, place in the paper, statement; then ours, and the paper's number with its unit.
CLAIMS = (
    Claim("toy-quadratic", "Figure 3",
          "delay slows Adam where the eigenvectors lie between the axes, hardly where along them",
          measured.delay_hurts_where_misaligned, command="brx toy quadratic"),
    Claim("toy-spiral", "Figure 4b", "along the spiral, delay slows Adam the more, the more misaligned the Hessian is",
          measured.misalignment_slows_on_the_spiral, command="brx toy spiral"),
    number("teaser-slowdown", "Figure 2a", "PipeDream's slowdown at the deepest pipeline (to its own final loss)",
           partial(ours.slowdown_of, method="pipedream"), SLOWDOWNS["pipedream"], "times"),
    number("teaser-reduction", "Figure 2b", "iterations that basis rotation saves over PipeDream",
           partial(ours.saved_over_baselines, baselines=("pipedream",)), 0.816, "percent"),
    number("main-reduction", "Figure 5b", "iterations saved over the best baseline, deepest pipeline",
           ours.saved_over_baselines, SAVED["main"], "percent"),
    Claim("main-every-depth", "Figure 5a", "basis rotation ends below all baselines at every P > 1",
          partial(ours.ends_below_at_every_depth, pairs=OVER_EACH_BASELINE, from_stages=2)),
    Claim("main-gap-widens", "Figure 5a", "basis rotation's lead over the best baseline widens with P",
          partial(ours.lead_grows, method="basis-rotation", others=BASELINES, from_stages=2)),
    Claim("main-amplified", "Section 4.2", "basis rotation's lead without delay is amplified by delay",
          partial(ours.lead_grows, method="basis-rotation", others=BASELINES, from_stages=1)),
    *(
        number(f"slowdown-{_slug(method)}", "Figure 8a" if method in STRATEGY_NAMES else "Table 3",
               f"slowdown of {method}", partial(ours.slowdown_of, method=method), printed, "times",
               longer=partial(ours.extrapolated_slowdown, method=method))
        for method, printed in SLOWDOWNS.items()
        if method != "pipedream"
    ),
    Claim("slowdown-order", "Figure 5e", "basis rotation slows down less than all baselines",
          partial(ours.slows_down_less, pairs=OVER_EACH_BASELINE)),
    Claim("strategies-order", "Figure 8a",
          "closer estimates slow down less: bilateral below unilateral, 2nd below 1st",
          partial(ours.slows_down_less, pairs=FINER_THAN)),
    Claim("strategies-every-depth", "Figure 16", "closer estimates end lower at every P",
          partial(ours.ends_below_at_every_depth, pairs=FINER_THAN, from_stages=1)),
    Claim("strategies-gap-widens", "Figure 16",
          "the lead of the closest over the least accurate (1st/unilateral) widens with P",
          partial(ours.lead_grows, method="basis-rotation", others=(LEAST_ACCURATE,), from_stages=2)),
    Claim("strategies-least", "Figure 16", "1st/unilateral ends below the best baseline at every P > 1",
          partial(ours.ends_below_at_every_depth, pairs=[(LEAST_ACCURATE, BASELINES)], from_stages=2)),
    Claim("strategies-least-gap-widens", "Figure 16",
          "the lead of 1st/unilateral over the best baseline widens with P",
          partial(ours.lead_grows, method=LEAST_ACCURATE, others=BASELINES, from_stages=2)),
    Claim("strategies-least-reduction", "Appendix H",
          "iterations that 1st/unilateral saves over the best baseline: more than 40 %",
          partial(ours.saved_over_baselines, method=LEAST_ACCURATE), 0.40, "percent", "at least"),
    Claim("preconditioned-order", "Table 3",
          "methods in the eigenbasis (SOAP, basis rotation) slow down less than Muon and Scion",
          partial(ours.slows_down_less, pairs=ours.OVER_MUON_AND_SCION)),
    Claim("preconditioned-baselines", "Table 3", "Muon and Scion slow down less than the baselines",
          partial(ours.slows_down_less, pairs=ours.MUON_AND_SCION_OVER_BASELINES)),
    Claim("soap-close", "Table 3", "SOAP slows down about as basis rotation does: nearer to it than Muon and Scion",
          ours.soap_is_close),
    *(
        Claim(f"depth-{_slug(method)}", "Figure 14",
              f"one block per stage: deeper models end {'lower' if is_ours else 'higher'} with {method}",
              partial(ours.deeper_ends_lower, method=method, holds=is_ours))
        for methods, is_ours in ((BASELINES, False), (STRATEGY_NAMES, True))
        for method in methods
    ),
    number("width-smaller", "Figure 7a", "iterations saved at P = 24, the smaller model",
           partial(ours.saved_over_baselines, model="smaller"), SAVED["smaller"], "percent"),
    number("width-larger", "Figure 7b", "iterations saved at P = 24, the larger model (1B)",
           partial(ours.saved_over_baselines, model="larger"), SAVED["larger"], "percent"),
    Claim("width-order", "Figure 7", "the larger model saves more",
          partial(ours.saves_more, larger="larger", smaller="smaller")),
    number("3b", "Figure 20", "iterations saved with 3B parameters",
           partial(ours.saved_over_baselines, model="3B"), SAVED["3B"], "percent"),
    Claim("3b-order", "Figure 20", "3B parameters save more than 1B",
          partial(ours.saves_more, larger="3B", smaller="larger")),
    number("mixture", "Figure 21", "iterations saved with a mixture of experts",
           partial(ours.saved_over_baselines, model="mixture of experts"), SAVED["mixture of experts"], "percent"),
    Claim("mixture-lowest", "Figure 21", "with a mixture of experts, basis rotation ends below all baselines",
          partial(ours.beats_baselines, model="mixture of experts")),
    Claim("gpu-hours", "Figure 9a", "GPU hours saved over the best baseline",
          ours.hours_saved, 0.543, "percent", command="make bench"),
    Claim("frequency-100", "Figure 9b", "refreshes every 100 iterations still end below all baselines",
          partial(ours.beats_baselines, sweep="frequency", own={"optimizer.frequency": 100})),
    Claim("frequency-100-little", "Figure 9b", "refreshes every 100 iterations instead of every 10 cost little",
          ours.few_refreshes_cost_little),
    number("stage-aware", "Figure 9c", "iterations that stage-aware intervals save over equal ones",
           ours.saved_by_stage_aware, 0.292, "percent"),
    Claim("reversed", "Figure 17", "intervals shared the other way round end above equal ones",
          ours.reversed_is_worse),
    Claim("no-stashing", "Figure 10a", "without stashing, basis rotation ends below all baselines",
          partial(ours.beats_baselines, sweep="stashing", shared={"pipeline.stash": "none"})),
    Claim("no-stashing-robust", "Figure 10", "without stashing, basis rotation loses less than the baselines",
          ours.loses_less_without_stashing),
    Claim("prediction", "Figure 15", "with predicted weights, basis rotation ends below all baselines",
          partial(ours.beats_baselines, sweep="prediction", shared={"pipeline.stash": "predict"})),
    Claim("validation", "Figure 18", "the methods end in the same order by validation as by training loss",
          ours.validation_follows_training),
    Claim("delay-compensation", "Figure 19",
          "basis rotation ends below delay compensation at P = 8, 16, 32, whatever its strength",
          ours.beats_delay_compensation),
    Claim("delay-compensation-like-pipedream", "Figure 19", "delay compensation ends about where PipeDream does",
          ours.delay_compensation_is_like_pipedream),
    number("hessian-norm", "Section 4.3", "the Hessian's (1,1)-norm in basis rotation's coordinates over the original"
           " ones, at one checkpoint (0.1228 / 0.5436)", measured.norm_ratio, 0.1228 / 0.5436,
           command="brx hessian-norm {curvature} --measured"),
    order_of_norms("theorem-order", "Theorem 3.1",
                   "the norm falls from original over unilateral to bilateral coordinates, source 2nd",
                   partial(measured.theorem_order, source="2nd")),
    order_of_norms("theorem-order-1st", "Theorem F.5",
                   "the norm falls from original over unilateral to bilateral coordinates, source 1st",
                   partial(measured.theorem_order, source="1st")),
    oscillation("oscillation", "Figure 11", "updates oscillate less along the dominant eigenvector with basis rotation,"
                " without delay", partial(measured.oscillates_less, delayed=False)),
    oscillation("oscillation-delayed", "Figure 11", "updates oscillate less along the dominant eigenvector with basis"
                " rotation, with delay", partial(measured.oscillates_less, delayed=True)),
    oscillation("oscillation-stable", "Figure 11",
                "along other directions than the dominant one they oscillate little with either",
                measured.stable_elsewhere),
    closed_form("memory-share", "Appendix H", "memory of 1st/unilateral for an MLP matrix, of Adam's",
                measured.memory_share, 0.075, "percent", command="brx memory"),
    closed_form("memory-table", "Table 2", "memory of each strategy for Llama-3-8B's matrices, GiB",
                measured.memory_of_strategies, command="brx memory"),
    closed_form("parameters", "Appendix D.2", "number of parameters: about 96 M, about 1.03 B, 3,047 M",
                measured.parameter_counts, command="brx plan paper-95m"),
    closed_form("stage-counts", "Table 1", "least number of stages of large models by device",
                measured.stage_counts, command="brx stages"),
)  # fmt: skip
