"""Loading state: older files, hooks, and what does not fit."""

import copy

import pytest
import torch

from brx.optim import BasisRotation
from tests.optim.test_state_is_the_truth import parameters, step


def trained(num_steps=3, **options):
    series = parameters(2, 6, 4)
    optimizer = BasisRotation(series, lr=0.01, **options)
    for time in range(num_steps):
        step(optimizer, series, time)
    return series, optimizer


def test_options_that_a_checkpoint_lacks_take_their_defaults():
    series, optimizer = trained()
    saved = optimizer.state_dict()
    for group in saved["param_groups"]:
        for name in ("maximize", "rotate", "max_dim", "flatten", "rotation_precision"):
            del group[name]
    other = BasisRotation(series, rotation_precision="bf16")
    other.load_state_dict(saved)
    assert other.param_groups[0]["rotation_precision"] == "bf16"  # of the constructor
    assert other.param_groups[0]["max_dim"] == 16_384
    step(other, series, 3)


def test_hooks_that_return_a_new_dict_are_honoured():
    series, optimizer = trained()

    def with_other_rate(_, state_dict):
        changed = copy.deepcopy(state_dict)
        changed["param_groups"][0]["lr"] = 0.5
        changed["state"][0]["exp_avg"].zero_()
        return changed

    other = BasisRotation(series)
    other.register_load_state_dict_pre_hook(with_other_rate)
    seen = []
    other.register_load_state_dict_post_hook(lambda one: seen.append(one.state[series[1]]["exp_avg"].clone()))
    other.load_state_dict(optimizer.state_dict())
    assert other.param_groups[0]["lr"] == 0.5
    assert other.state[series[0]]["exp_avg"].count_nonzero() == 0
    assert torch.equal(seen[0], optimizer.state[series[1]]["exp_avg"])


def adamw_state(series):
    adamw = torch.optim.AdamW(series)
    adamw.step()
    return adamw.state_dict()


def bilateral_state(series):
    return trained()[1].state_dict()


def too_many_groups(series):
    return BasisRotation([{"params": [p]} for p in parameters(2, 6, 4)]).state_dict()


def bad_option(series):
    saved = trained(geometry="unilateral")[1].state_dict()
    saved["param_groups"][0]["frequency"] = 0
    return saved


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (adamw_state, r"exp_avg \(6, 4\), .*need exp_avg"),
        (too_many_groups, r"\[1, 1\] parameters"),
        (bad_option, "frequency=0"),
    ],
)
def test_load_that_fails_says_why_and_changes_nothing(make, told):
    series, optimizer = trained(geometry="unilateral")
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match=told):
        optimizer.load_state_dict(make(series))
    torch.testing.assert_close(optimizer.state_dict()["state"], before["state"], rtol=0, atol=0)
    assert optimizer.state_dict()["param_groups"] == before["param_groups"]
    step(optimizer, series, 3)


def test_loaded_state_is_a_copy():
    saved = trained()[1].state_dict()
    other = BasisRotation(parameters(2, 6, 4))
    other.load_state_dict(saved)
    kept = saved["state"][0]["exp_avg"].clone()
    step(other, other.param_groups[0]["params"], 0)
    assert torch.equal(saved["state"][0]["exp_avg"], kept)


def test_copy_of_an_optimizer_goes_its_own_way():
    series, optimizer = trained()
    twin_series, twin = copy.deepcopy((series, optimizer))
    step(optimizer, series, 3)
    step(twin, twin_series, 3)
    assert all(map(torch.equal, series, twin_series))
    step(twin, twin_series, 4)
    assert int(optimizer.state[series[0]]["step"]) == 4
