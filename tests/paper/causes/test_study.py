"""The cost of a delay, from made-up final losses."""

import json
import math

import numpy as np
import pytest

from brx.config.loading import preset_with
from brx.errors import UserError
from brx.paper.causes.arms import (
    ACCUMULATED,
    ARMS,
    DEEPEST,
    EIGENBASIS,
    LION,
    NONE,
    PACI,
    SAME,
)
from brx.paper.causes.study import Study
from tests.paper.causes.runs import LENGTH, NOISE, write_arm, write_arm_run
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
    delayed = Study.load(tmp_path).runs_by_place[LION, DEEPEST].index[1]
    (tmp_path / str(delayed).rpartition("/")[2] / "summary.json").write_text(
        json.dumps({"status": "diverged", "data_fingerprint": "f"})
    )
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
