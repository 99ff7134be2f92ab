"""The cost of a delay, from made-up final losses."""

import math

import numpy as np
import pytest

from brx.config.loading import preset_with
from brx.errors import UserError
from brx.paper.causes.arms import (
    ACCUMULATED,
    ADAMW,
    ARMS,
    BASES,
    DEEPEST,
    EIGENBASIS,
    LION,
    NONE,
    PACI,
    SAME,
)
from brx.paper.causes.costs import cost_table
from brx.paper.causes.figure import cost_records
from brx.paper.causes.study import Study
from tests.paper.causes.runs import LENGTH, NOISE, diverge, write_arm, write_arm_run, write_bases
from tests.paper.helpers import write_compact


def test_runs_of_basis_rotation_serve_for_no_turn(tmp_path):
    write_arm(tmp_path, SAME[1], {DEEPEST: 0.2})
    cost = Study.load(tmp_path).cost(EIGENBASIS, DEEPEST)
    assert cost.tolist() == pytest.approx([0.2 + shift for shift in NOISE])


def test_runs_of_no_turn_stay_their_own(tmp_path):
    write_arm(tmp_path, SAME[1], {DEEPEST: 0.2})
    write_arm(tmp_path, EIGENBASIS, {DEEPEST: 0.1})
    cost = Study.load(tmp_path).cost(EIGENBASIS, DEEPEST)
    assert cost.tolist() == pytest.approx([0.1 + shift for shift in NOISE])


def test_paci_costs_what_it_loses_over_accumulation_without_delay(tmp_path):
    for seed in range(3):
        write_arm_run(tmp_path, ACCUMULATED, NONE, seed, final=1.0, slow=1.0)
        write_arm_run(tmp_path, PACI, DEEPEST, seed, final=1.3, slow=2.0)
    cost = Study.load(tmp_path).cost(PACI, DEEPEST)
    assert cost.tolist() == pytest.approx([0.3, 0.3, 0.3])


def test_cost_is_a_difference_by_seed(tmp_path):
    write_arm(tmp_path, LION, {DEEPEST: 0.2})
    cost = Study.load(tmp_path).cost(LION, DEEPEST)
    assert cost.tolist() == pytest.approx([0.2 + shift for shift in NOISE])


def test_diverged_seed_costs_infinitely_much(tmp_path):
    write_arm(tmp_path, LION, {DEEPEST: 0.3})
    diverge(tmp_path, LION, DEEPEST, 1)
    assert Study.load(tmp_path).cost(LION, DEEPEST)[1] == math.inf


def test_two_experiments_of_an_arm_are_refused(tmp_path):
    write_arm(tmp_path, LION, {DEEPEST: 0.3})
    settings = {**ARMS[LION], "pipeline.stages": 1, "training.iterations": LENGTH + 1}
    config = preset_with("similar", settings)
    losses = np.ones(LENGTH + 1)
    summary = {"status": "finished", "data_fingerprint": "f"}
    write_compact(tmp_path / "other", config, losses, {LENGTH + 1: 1.0}, 10.0, summary)
    with pytest.raises(UserError, match="of the same arm"):
        Study.load(tmp_path)


def test_other_runs_alone_are_refused(tmp_path):
    config = preset_with("similar", {"optimizer.method": "nesterov"})
    summary = {"status": "finished", "data_fingerprint": "f"}
    write_compact(tmp_path / "run", config, np.ones(9), {9: 1.0}, 10.0, summary)
    with pytest.raises(UserError, match="no runs of the study"):
        Study.load(tmp_path)


@pytest.mark.parametrize("delays", [(NONE,), (NONE, DEEPEST)])
def test_seed_that_diverged_without_delay_has_no_cost(delays, tmp_path):
    write_arm(tmp_path, LION, {DEEPEST: 0.2})
    for delay in delays:
        diverge(tmp_path, LION, delay, 1)
    assert Study.load(tmp_path).cost(LION, DEEPEST).index.tolist() == [0, 2]


def test_cost_is_unknown_without_a_shared_seed(tmp_path):
    write_arm(tmp_path, LION, {DEEPEST: 0.2})
    write_arm_run(tmp_path, ADAMW, NONE, 7, 1.3, 1)
    write_arm_run(tmp_path, ADAMW, DEEPEST, 8, 1.3, 1)
    assert not Study.load(tmp_path).has(ADAMW, DEEPEST)
    assert cost_table(Study.load(tmp_path))["arm"].tolist() == [LION]


def test_arms_without_a_shared_seed_cannot_be_compared(tmp_path):
    for seed, arm in enumerate((LION, ADAMW)):
        for delay in (NONE, DEEPEST):
            write_arm_run(tmp_path, arm, delay, seed, 1.3, 1)
    with pytest.raises(UserError, match="no seed in common among Lion, AdamW"):
        Study.load(tmp_path).costs([LION, ADAMW], DEEPEST)


def test_slowdowns_to_a_target_on_a_plateau_are_refused(tmp_path, monkeypatch):
    write_bases(tmp_path, (0.1, 0.2, 0.3, 0.4, 0.5))
    monkeypatch.setattr("brx.runs.slowdown.PLATEAU", -1.0)
    with pytest.raises(UserError, match="is on a plateau for turned, theta = 0"):
        Study.load(tmp_path).log_slowdowns(BASES, DEEPEST)


def test_slowdowns_need_a_seed_that_arrives_without_delay(tmp_path):
    write_bases(tmp_path, (0.1, 0.2, 0.3, 0.4, 0.5))
    for seed in range(3):
        diverge(tmp_path, EIGENBASIS, NONE, seed)
    with pytest.raises(UserError, match="no seed has a slowdown of each of turned, theta = 0"):
        Study.load(tmp_path).log_slowdowns(BASES, DEEPEST)


def test_records_of_a_diverged_run_are_json(tmp_path):
    write_arm(tmp_path, LION, {DEEPEST: 0.2}, noise=(0.0, 0.0, 0.0))
    diverge(tmp_path, LION, DEEPEST, 1)
    (record,) = cost_records(Study.load(tmp_path))
    assert record["cost by seed"] == {"0": 0.2, "1": "diverged", "2": 0.2}
