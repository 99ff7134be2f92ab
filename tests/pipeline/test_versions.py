"""The state of a stage's versions: small to save, and read from earlier versions of brx."""

import pytest
import torch
from torch import nn

from brx.pipeline.delay import StageDelay, VaryingDelay
from brx.pipeline.versions import StageVersions

TAU = 40


@pytest.fixture
def stage():
    """A stage of two weights with 41 slots, after three updates."""
    torch.manual_seed(0)
    versions = StageVersions(nn.Linear(3, 2), 0, StageDelay(TAU))
    for t in range(1, 4):
        for weight in versions.newest.values():
            weight.data += t
        versions.record_update(t)
    return versions


def test_ring_is_a_tensor_per_weight(stage):
    shapes = {name: tuple(each.shape) for name, each in stage.state_dict()["ring"].items()}
    assert shapes == {"weight": (TAU + 1, 2, 3), "bias": (TAU + 1, 2)}


def test_stage_without_delay_saves_no_ring():
    assert StageVersions(nn.Linear(3, 2), 0, StageDelay(0)).state_dict()["ring"] == {}


def as_saved_before(state):
    """The same state as earlier versions of brx wrote it: a list of tensors per slot."""
    ring = state["ring"].values()
    return state | {"ring": [[each[slot].clone() for each in ring] for slot in range(TAU + 1)]}


@pytest.mark.parametrize("as_saved", [dict, as_saved_before])
def test_state_is_restored(as_saved, stage):
    other = StageVersions(nn.Linear(3, 2), 0, StageDelay(TAU))
    other.load_state_dict(as_saved(stage.state_dict()))
    for n in (1, TAU + 2, TAU + 4):
        stage.bind(n)
        other.bind(n)
        assert all(map(torch.equal, stage.in_use, other.in_use))


@pytest.mark.parametrize("accumulation", [1, 2])
def test_falling_delay_finds_each_version(accumulation):
    """The delay falls from the largest to none. Then the version that the stage has used last gives
    its slot to the newest, which the next micro-batch uses."""
    delay = VaryingDelay(2, accumulation, tau_at=lambda n: 2 if n % 4 else 0)
    module = nn.Linear(1, 1, bias=False)
    module.weight.data.zero_()
    stage = StageVersions(module, 0, delay)
    (weight,) = stage.newest.values()
    used = []
    for n in range(1, 25):
        stage.bind(n)
        used.append(stage.in_use[0].item())
        if delay.ends_update(n):
            weight.data.fill_(delay.update_of(n))  # version t is the number t
            stage.record_update(delay.update_of(n))
    assert used == [delay.version_used(n) for n in range(1, 25)]
    assert used[19] == 19 // accumulation


@pytest.mark.parametrize("tau", [0, TAU - 1])
def test_ring_of_another_delay_is_refused(tau, stage):
    other = StageVersions(nn.Linear(3, 2), 0, StageDelay(tau))
    with pytest.raises(ValueError, match="of another stage or delay"):
        other.load_state_dict(stage.state_dict())


@pytest.mark.parametrize("coefficients", [(0.0, 1.0), (1.0, 0.0)])
def test_state_of_another_error_feedback_is_refused(coefficients):
    saved, other = (
        StageVersions(nn.Linear(3, 2), 0, StageDelay(1), error_feedback=each)
        for each in coefficients
    )
    with pytest.raises(ValueError, match="of another error feedback"):
        other.load_state_dict(saved.state_dict())


def after_an_update(**options):
    torch.manual_seed(0)
    stage = StageVersions(nn.Linear(3, 2), 0, StageDelay(2), **options)
    for weight in stage.newest.values():
        weight.data += 1
    stage.record_update(1)
    return stage


def test_state_of_another_stash_mode_is_refused():
    saved = after_an_update(stash="predict").state_dict()
    with pytest.raises(ValueError, match="stage 0: the state is of another stash mode or forecast"):
        StageVersions(nn.Linear(3, 2), 0, StageDelay(2)).load_state_dict(saved)


def test_loaded_state_replaces_what_was_fetched_ahead():
    saved = after_an_update().state_dict()
    stage = StageVersions(nn.Linear(3, 2), 0, StageDelay(2), on_host=True)
    stage.bind(1)  # fetches the version of micro-batch 2
    stage.load_state_dict(saved)
    stage.bind(2)
    initial = after_an_update().state_dict()["ring"]["weight"][StageDelay(2).slot_of(0)]
    assert torch.equal(stage.in_use[0], initial)


@pytest.mark.parametrize("tau", [0, 1])
def test_updates_are_looked_at_only_with_delay(tau):
    seen = []

    def forecast(newest, update, tau_updates, state):
        seen.append(tau_updates)
        return newest

    stage = StageVersions(nn.Linear(3, 2), 0, StageDelay(tau), forecast=forecast)
    stage.record_update(1)
    assert seen == [1] * tau


def test_stage_without_delay_has_no_error_feedback():
    stage = StageVersions(nn.Linear(3, 2), 0, StageDelay(0), error_feedback=1.0)
    assert "last_update" not in stage.state_dict()


@pytest.mark.parametrize("tau", [0, TAU])
def test_hooks_of_a_weight_see_its_gradient(tau):
    module = nn.Linear(3, 2)
    hook = module.weight.register_hook(lambda gradient: 0 * gradient)
    module.bias.register_post_accumulate_grad_hook(lambda bias: (bias.grad.mul_(3), None)[1])
    stage = StageVersions(module, 0, StageDelay(tau))
    weight, bias = stage.in_use
    module(torch.ones(1, 3)).sum().backward()
    assert torch.equal(weight.grad, torch.zeros(2, 3))
    assert torch.equal(bias.grad, torch.full((2,), 3.0))
    hook.remove()
    module(torch.ones(1, 3)).sum().backward()
    assert torch.equal(weight.grad, torch.ones(2, 3))


def test_version_has_the_slot_that_older_checkpoints_gave_it():
    """A checkpoint has a ring by slots, so these may not change."""
    delay = StageDelay(2)
    assert [delay.slot_of(version) for version in range(4)] == [2, 0, 1, 2]
