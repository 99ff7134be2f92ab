"""The verdicts on the predictions, from made-up final losses."""

import json

import numpy as np
import pytest
from scipy.stats import ttest_1samp

from brx.cli.main import main
from brx.errors import UserError
from brx.paper.causes.arms import (
    ADAMW,
    ADAMW_FEEDBACK,
    BASES,
    DEEPEST,
    EIGENBASIS,
    LION,
    MOMENTA,
    MUON,
    NONE,
    ONE_UPDATE,
    RANDOM,
    ROTATED_LION,
    with_momentum,
)
from brx.paper.causes.predictions import PREDICTIONS
from brx.paper.causes.study import Study
from tests.paper.causes.runs import (
    NOISE,
    diverge,
    write_arm,
    write_arm_run,
    write_bases,
    write_norms,
)


def finding(folder, name):
    (prediction,) = [each for each in PREDICTIONS if each.name == name]
    return prediction.judge(Study.load(folder))


def test_rising_costs_hold_for_the_first(tmp_path):
    write_bases(tmp_path, (0.05, 0.1, 0.15, 0.2, 0.25))
    assert finding(tmp_path, "1").outcome == "holds"


def test_flat_costs_refute_the_first(tmp_path):
    write_bases(tmp_path, (0.1, 0.1, 0.1, 0.1, 0.1))
    assert finding(tmp_path, "1").outcome == "refuted"


def test_two_seeds_leave_the_first_open(tmp_path):
    for arm, cost in zip(BASES, (0.05, 0.1, 0.15, 0.2, 0.25), strict=True):
        write_arm(tmp_path, arm, {DEEPEST: cost}, noise=NOISE[:2])
    assert finding(tmp_path, "1").outcome == "open"


def test_slowdowns_must_rise_as_well(tmp_path):
    for arm, cost in zip(BASES, (0.05, 0.1, 0.15, 0.2, 0.25), strict=True):
        write_arm(tmp_path, arm, {DEEPEST: cost}, slowness=1.0)
    assert finding(tmp_path, "1").outcome == "refuted"


def test_slowdowns_stand_with_their_interval(tmp_path):
    """With equal curves on all seeds, a factor of slowdowns is the same on all of them."""
    write_bases(tmp_path, (0.05, 0.1, 0.15, 0.2, 0.25))
    logs = Study.load(tmp_path).log_slowdowns(BASES, DEEPEST)
    factor = np.exp((logs[RANDOM] - logs[EIGENBASIS]).mean())
    text = finding(tmp_path, "1").text
    assert f"slowdown {np.exp(logs[EIGENBASIS].mean()):.2f} ({EIGENBASIS}), " in text
    assert text.endswith(f"random over eigenbasis {factor:.3f} [{factor:.3f}, {factor:.3f}]")


def test_two_slowdowns_leave_the_first_open(tmp_path):
    """Three seeds have costs, but on one of them no run without delay arrives."""
    write_bases(tmp_path, (0.05, 0.1, 0.15, 0.2, 0.25))
    diverge(tmp_path, EIGENBASIS, NONE, 0)
    assert finding(tmp_path, "1").outcome == "open"


@pytest.mark.parametrize(
    ("name", "arms", "delay"),
    [
        ("2", (RANDOM, ADAMW), DEEPEST),
        ("5, alignment", (LION, ROTATED_LION), DEEPEST),
        ("5, geometry", (MUON, LION, EIGENBASIS), DEEPEST),
        ("6", (MUON, ADAMW), ONE_UPDATE),
    ],
)
def test_arms_that_diverged_together_leave_a_prediction_open(name, arms, delay, tmp_path):
    """Two infinite costs have no difference."""
    for arm in arms:
        write_arm(tmp_path, arm, {delay: 0.3})
        diverge(tmp_path, arm, delay, 0)
    found = finding(tmp_path, name)
    assert found.outcome == "open"
    assert "nan" not in found.text


def test_random_basis_within_chance_of_none_holds(tmp_path):
    write_arm(tmp_path, RANDOM, {DEEPEST: 0.3})
    write_arm(tmp_path, ADAMW, {DEEPEST: 0.301}, noise=(0.002, 0.0, -0.001))
    assert finding(tmp_path, "2").outcome == "holds"


def test_better_random_basis_refutes_the_second(tmp_path):
    write_bases(tmp_path, (0.1,) * 5, adamw=0.3)
    assert finding(tmp_path, "2").outcome == "refuted"


def test_text_has_the_interval_of_the_difference(tmp_path):
    write_arm(tmp_path, RANDOM, {DEEPEST: 0.1})
    write_arm(tmp_path, ADAMW, {DEEPEST: 0.3}, noise=(0.0, 0.01, 0.02))
    differences = np.subtract((0.3, 0.31, 0.32), np.add(0.1, NOISE))
    interval = ttest_1samp(differences, 0.0).confidence_interval(0.95)
    expected = f"{differences.mean():+.3f} [{interval.low:+.3f}, {interval.high:+.3f}]"
    assert finding(tmp_path, "2").text.endswith(expected)


@pytest.mark.parametrize(
    ("norms", "outcome"), [((1, 2, 3, 4, 5, 6), "holds"), ((6, 5, 4, 3, 2, 1), "refuted")]
)
def test_norms_in_the_order_of_costs_hold(norms, outcome, tmp_path):
    write_bases(tmp_path, (0.05, 0.1, 0.15, 0.2, 0.25))
    write_norms(tmp_path, dict(zip([*BASES, ADAMW], norms, strict=True)))
    assert finding(tmp_path, "3").outcome == outcome


def test_unmeasured_norms_are_not_tried(tmp_path):
    write_bases(tmp_path, (0.05, 0.1, 0.15, 0.2, 0.25))
    with pytest.raises(UserError, match="norms have not been measured"):
        finding(tmp_path, "3")


@pytest.mark.parametrize(
    ("costs", "outcome"), [((0.3, 0.2, 0.1), "holds"), ((0.1, 0.2, 0.3), "refuted")]
)
def test_momentum_is_judged_at_one_update(costs, outcome, tmp_path):
    for value, cost in zip(MOMENTA, costs, strict=True):
        arm = with_momentum("muon", value)
        write_arm(tmp_path, arm, {ONE_UPDATE: cost, DEEPEST: 0.5 - cost})
    assert finding(tmp_path, "4, Muon").outcome == outcome


@pytest.mark.parametrize(
    ("lion", "muon", "outcome"),
    [(0.1, 0.1, "holds"), (0.05, 0.1, "holds"), (0.2, 0.1, "refuted"), (0.1, 0.2, "refuted")],
)
def test_geometry_needs_both_methods(lion, muon, outcome, tmp_path):
    write_arm(tmp_path, EIGENBASIS, {DEEPEST: 0.1})
    write_arm(tmp_path, LION, {DEEPEST: lion}, noise=(0.003, 0.0, -0.002))
    write_arm(tmp_path, MUON, {DEEPEST: muon}, noise=(0.002, 0.001, -0.001))
    assert finding(tmp_path, "5, geometry").outcome == outcome


def test_lion_costs_less_in_the_eigenbasis(tmp_path):
    write_arm(tmp_path, LION, {DEEPEST: 0.3})
    write_arm(tmp_path, ROTATED_LION, {DEEPEST: 0.1})
    assert finding(tmp_path, "5, alignment").outcome == "holds"


def test_muon_costs_less_at_one_update(tmp_path):
    write_arm(tmp_path, ADAMW, {ONE_UPDATE: 0.2})
    write_arm(tmp_path, MUON, {ONE_UPDATE: 0.01})
    assert finding(tmp_path, "6").outcome == "holds"


@pytest.mark.parametrize(("corrected", "outcome"), [(0.1, "holds"), (0.3, "refuted")])
def test_error_feedback_is_compared_without_it(corrected, outcome, tmp_path):
    write_arm(tmp_path, ADAMW, {ONE_UPDATE: 0.2})
    write_arm_run_with_feedback(tmp_path, corrected)
    assert finding(tmp_path, "7, AdamW").outcome == outcome


def write_arm_run_with_feedback(folder, cost):
    """Runs of AdamW with error feedback; without delay they are AdamW's."""
    for seed, shift in enumerate(NOISE):
        final = 1.3 + cost + 0.01 * seed + shift / 2
        write_arm_run(folder, ADAMW_FEEDBACK, ONE_UPDATE, seed, final, slow=1 + cost)


def test_table_says_what_was_not_tried(tmp_path, capsys):
    write_bases(tmp_path, (0.05, 0.1, 0.15, 0.2, 0.25))
    assert main(["tables", "causes", "--runs", str(tmp_path), "--format", "json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    verdicts = {row["prediction"]: row["verdict"] for row in rows}
    assert (verdicts["1"], verdicts["6"]) == ("holds", "not tried")
