"""Products in TF32 against fp32, from made-up final losses: harms, and what the rule decides."""

import math
import shutil
from collections import Counter
from itertools import product
from pathlib import Path

import pytest

from brx.errors import UserError
from brx.paper.precision import (
    ARMS,
    FP32,
    INTERVAL,
    SWEEP,
    TF32,
    TF32_COVARIANCES,
    TF32_ROTATIONS,
    arm_of,
    decision,
    harm,
    losses_in,
    precision_table,
    verdict,
)
from brx.paper.scales import ENDS
from brx.pipeline.delay import depth
from brx.sweep.spec import Sweep
from tests.paper.helpers import write_experiment

# fp32's losses on three seeds: the standard error of their mean is 0.01 / sqrt(3).
REFERENCES = (1.30, 1.31, 1.32)
STANDARD_ERROR = 0.01 / math.sqrt(3)


def losses_with(**shifts):
    """Losses of fp32, and of some arms whose loss is higher by a shift at P = 32."""
    losses = {(FP32, P): dict(enumerate(REFERENCES)) for P in ENDS}
    for name, shift in shifts.items():
        arm = name.replace("_", " ")
        losses[arm, 1] = dict(enumerate(REFERENCES))
        losses[arm, 32] = {seed: loss + shift for seed, loss in enumerate(REFERENCES)}
    return losses


def test_harm_is_a_difference_by_seed():
    losses = losses_with(TF32=0.004)
    losses[TF32, 32][1] += 0.003
    found = harm(losses, TF32, 32)
    assert found.mean == pytest.approx(0.005)
    assert found.standard_error == pytest.approx(STANDARD_ERROR)


@pytest.mark.parametrize(
    ("shift", "expected"),
    [
        (-0.1, "yes"),
        (0.99 * STANDARD_ERROR, "yes"),
        (1.01 * STANDARD_ERROR, "no"),
        (math.inf, "no"),
    ],
)
def test_one_standard_error_passes(shift, expected):
    assert verdict(losses_with(TF32=shift), TF32) == expected


def test_harm_without_delay_fails_too():
    losses = losses_with(TF32=0.0)
    losses[TF32, 1] = {seed: loss + 0.1 for seed, loss in enumerate(REFERENCES)}
    assert verdict(losses, TF32) == "no"


def test_diverged_run_fails_whatever_the_others():
    losses = losses_with(TF32=0.0)
    losses[TF32, 32] = {0: math.inf}
    assert verdict(losses, TF32) == "no"


def test_diverged_fp32_leaves_the_rule_open():
    """Nothing can be compared with a run that diverged."""
    losses = losses_with(TF32=0.0)
    losses[FP32, 32][0] = math.inf
    assert verdict(losses, TF32) == "open"
    assert decision(losses) == "open: fp32 itself diverged"


def test_two_seeds_are_open():
    losses = losses_with(TF32=0.0)
    del losses[TF32, 32][2]
    assert verdict(losses, TF32) == "open"


@pytest.mark.parametrize(
    ("both", "rotations", "covariances", "expected"),
    [
        (0.0, 0.1, 0.1, "TF32 on CUDA"),
        (0.1, 0.0, 0.0, "TF32 rotations on CUDA"),
        (0.1, 0.1, 0.0, "TF32 covariances on CUDA"),
        (0.1, 0.1, 0.1, "fp32 everywhere"),
    ],
)
def test_rule_tries_both_first(both, rotations, covariances, expected):
    losses = losses_with(TF32=both, TF32_rotations=rotations, TF32_covariances=covariances)
    assert decision(losses) == expected


def test_missing_runs_leave_the_rule_open():
    assert decision(losses_with(TF32=0.1, TF32_rotations=0.1)) == "open: runs are missing"


def write_arm(folder, arm, P, losses):
    for seed, loss in enumerate(losses):
        settings = {**ARMS[arm], "pipeline.stages": P}
        write_experiment(folder, "laptop", settings, seeds=(seed,), val_loss=loss)


def test_table_of_runs(tmp_path):
    for P in ENDS:
        write_arm(tmp_path, FP32, P, REFERENCES)
        write_arm(tmp_path, TF32, P, [loss + 0.002 for loss in REFERENCES])
    table = precision_table(losses_in(tmp_path)).set_index("setting")
    assert table.loc[TF32, "harm, P = 32"] == "+0.0020 (standard error 0.0058)"
    assert table.loc[TF32, "passes"] == "yes"
    assert table.loc[TF32_ROTATIONS, "passes"] == "open"
    assert table.loc["the rule", "passes"] == "TF32 on CUDA"


@pytest.mark.parametrize("arm", [TF32_ROTATIONS, TF32_COVARIANCES, TF32, INTERVAL])
def test_arms_are_told_apart(arm, tmp_path):
    write_arm(tmp_path, arm, 32, REFERENCES[:1])
    assert losses_in(tmp_path) == {(arm, 32): {0: REFERENCES[0]}}


def test_other_runs_alone_are_refused(tmp_path):
    write_experiment(tmp_path, "laptop", {"optimizer.method": "muon"})
    with pytest.raises(UserError, match="no runs of the study"):
        losses_in(tmp_path)


def test_second_run_of_a_seed_is_refused(tmp_path):
    write_arm(tmp_path, FP32, 32, REFERENCES[:1])
    [run] = tmp_path.iterdir()
    shutil.copytree(run, tmp_path / "again")
    with pytest.raises(UserError, match="a second run of fp32 with seed 0"):
        losses_in(tmp_path)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"optimizer.lr": 3e-4}, "optimizer.lr is .*0.0003"),
        ({"optimizer.weight_decay": 0.2}, "optimizer.weight_decay is .*0.2"),
        ({"model.width": 128}, "differ in model"),
    ],
)
def test_runs_of_another_kind_are_refused(settings, message, tmp_path):
    write_arm(tmp_path, FP32, 32, REFERENCES[:1])
    write_experiment(tmp_path, "laptop", {**ARMS[TF32], "pipeline.stages": 32, **settings})
    with pytest.raises(UserError, match=message):
        losses_in(tmp_path)


def test_further_seeds_do_not_count(tmp_path):
    write_arm(tmp_path, FP32, 32, (*REFERENCES, 1.33))
    assert losses_in(tmp_path) == {(FP32, 32): dict(enumerate(REFERENCES))}


def test_sweep_runs_each_arm_at_both_ends():
    sweep = Sweep.load(Path(SWEEP))
    places = [(arm_of(cell.config), depth(cell.config.pipeline)) for cell in sweep.cells]
    assert Counter(places) == dict.fromkeys(product(ARMS, ENDS), 3)
