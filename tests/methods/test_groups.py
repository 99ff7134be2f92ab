"""The parameter groups of a method's optimizers, and steps of several stages at once."""

import pytest
import torch
from torch import nn
from torch.optim import AdamW

from brx.methods.groups import check_each_parameter_once, stage_groups, step_stages_together
from brx.pipeline.delay import StageDelay
from brx.pipeline.versions import StageVersions


def make_stages():
    stages = []
    for index in range(3):
        torch.manual_seed(index)
        module = nn.ModuleDict({str(index): nn.Linear(4, 3)})
        stages.append(StageVersions(module, index, StageDelay(2 - index)))
    return stages


def make_adamw(stages):
    optimizer = AdamW(stage_groups(stages), lr=0.1, fused=True)
    # Two of the three stages have equal options.
    for group, lr in zip(optimizer.param_groups, (0.1, 0.3, 0.1), strict=True):
        group["lr"] = lr
    return optimizer


def step(stages, optimizer):
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        for stage in stages:
            for weight in stage.newest.values():
                weight.grad = torch.randn(weight.shape, generator=generator)
        optimizer.step()


def test_stages_stepped_together_move_as_alone():
    together, alone = make_stages(), make_stages()
    step(together, step_stages_together(make_adamw(together)))
    step(alone, make_adamw(alone))
    for one, other in zip(together, alone, strict=True):
        assert all(map(torch.equal, one.newest.values(), other.newest.values()))


def test_equal_options_are_one_step(monkeypatch):
    calls, fused = [], torch._fused_adamw_
    monkeypatch.setattr(
        torch, "_fused_adamw_", lambda *args, **kwargs: (calls.append(1), fused(*args, **kwargs))
    )
    stages = make_stages()
    step(stages, step_stages_together(make_adamw(stages)))
    assert len(calls) == 3 * 2  # three steps of two learning rates


@pytest.fixture
def groups_of_a_hook():
    """The groups that a hook sees during a step: stages 0 and 2 together, and stage 1."""
    stages = make_stages()
    optimizer = step_stages_together(make_adamw(stages))
    for group in optimizer.param_groups:
        group["kind"] = "matrix"
    seen = []
    optimizer.register_step_pre_hook(lambda optimizer, *_: seen.extend(optimizer.param_groups))
    optimizer.step()
    return seen


def test_unmerged_group_keeps_its_stage(groups_of_a_hook):
    alone = groups_of_a_hook[1]
    assert (alone["stage"], alone["delay"]) == (1, 1)


def test_merged_group_lacks_what_differs(groups_of_a_hook):
    assert not {"stage", "delay", "param_names"} & set(groups_of_a_hook[0])


def test_merged_group_keeps_what_agrees(groups_of_a_hook):
    assert groups_of_a_hook[0]["kind"] == "matrix"


def test_groups_are_the_stages_again_after_a_step():
    stages = make_stages()
    optimizer = step_stages_together(make_adamw(stages))
    before = optimizer.param_groups
    step(stages, optimizer)
    assert optimizer.param_groups is before
    assert [group["stage"] for group in before] == [0, 1, 2]


def test_other_stages_weight_is_refused():
    stages = make_stages()
    groups = stage_groups(stages)
    (name, weight), (other_name, other_weight) = (group["params"][0] for group in groups[:2])
    groups[0]["params"][0] = name, other_weight
    groups[1]["params"][0] = other_name, weight
    with pytest.raises(ValueError, match="given to an optimizer as a copy"):
        check_each_parameter_once([AdamW(groups, lr=0.1)], stages)
