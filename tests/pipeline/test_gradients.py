"""Gradients of all stages at once have the numbers of torch's own functions, stage by stage."""

import pytest
import torch
from torch import nn

from brx.pipeline.delay import StageDelay
from brx.pipeline.gradients import Gradients
from brx.pipeline.versions import StageVersions


def stages_of(accumulation=1, slot_dtype=torch.float32):
    """Three stages of different sizes; the last one has no delay."""
    stages = []
    for index, width in enumerate((3, 17, 5)):
        torch.manual_seed(index)
        module = nn.Sequential(nn.Linear(width, 7), nn.Linear(7, 2, bias=False))
        delay = StageDelay(2 - index, accumulation)
        stages.append(
            StageVersions(module, index, delay, slot_dtype=lambda name, weight: slot_dtype)
        )
    return stages


def backward(stages, micro_batch):
    """Leave random gradients where autograd would, and return them by stage."""
    generator = torch.Generator().manual_seed(micro_batch)
    arrived = []
    for stage in stages:
        own = []
        for weight in stage.in_use:
            gradient = torch.randn(weight.shape, generator=generator).to(weight.dtype)
            loss = (weight * gradient).sum()
            loss.backward()
            own.append(gradient)
        arrived.append(own)
    return arrived


def newest_gradients(stages):
    return [[weight.grad for weight in stage.newest.values()] for stage in stages]


@pytest.mark.parametrize("slot_dtype", [torch.float32, torch.bfloat16])
def test_gradients_arrive_at_the_newest_weights(slot_dtype):
    stages = stages_of(slot_dtype=slot_dtype)
    gradients = Gradients(stages)
    arrived = backward(stages, 1)
    gradients.hand_over(1)
    for own, expected in zip(newest_gradients(stages), arrived, strict=True):
        assert all(torch.equal(a, b.float()) for a, b in zip(own, expected, strict=True))


@pytest.mark.parametrize("slot_dtype", [torch.float32, torch.bfloat16])
def test_update_has_the_mean_of_its_micro_batches(slot_dtype):
    stages = stages_of(3, slot_dtype)
    gradients = Gradients(stages)
    for update in range(2):
        arrived = []
        for micro_batch in range(3 * update + 1, 3 * update + 4):
            arrived.append(backward(stages, micro_batch))
            gradients.hand_over(micro_batch)
            gradients.accumulate(micro_batch)
        for index, own in enumerate(newest_gradients(stages)):
            for place, mean in enumerate(own):
                first, second, third = (each[index][place].float() for each in arrived)
                assert torch.equal(mean, (first + second + third) / 3)
        gradients.drop()


def test_corrected_gradients_are_summed():
    stages = stages_of(2)
    gradients = Gradients(stages)
    arrived = []
    for micro_batch in (1, 2):
        arrived.append(backward(stages, micro_batch))
        gradients.hand_over(micro_batch)
        stages[0].newest["0.weight"].grad.mul_(2)  # as a method's gradient rule does
        gradients.accumulate(micro_batch)
    expected = (2 * arrived[0][0][0] + 2 * arrived[1][0][0]) / 2
    assert torch.equal(stages[0].newest["0.weight"].grad, expected)


@pytest.mark.parametrize("max_norm", [0.1, 3.0, 1e6])
def test_clipping_is_torchs_stage_by_stage(max_norm):
    stages, copies = stages_of(), stages_of()
    gradients = Gradients(stages)
    backward(stages, 1)
    gradients.hand_over(1)
    norms = gradients.clip(max_norm)
    arrived = backward(copies, 1)
    for stage, own in zip(copies, arrived, strict=True):
        for weight, gradient in zip(stage.newest.values(), own, strict=True):
            weight.grad = gradient
    expected = [nn.utils.clip_grad_norm_(s.newest.values(), max_norm) for s in copies]
    assert torch.equal(norms, torch.stack(expected))
    for own, other in zip(newest_gradients(stages), newest_gradients(copies), strict=True):
        assert all(map(torch.equal, own, other))


def test_unused_weight_gets_no_gradient():
    stages = stages_of()
    gradients = Gradients(stages)
    backward(stages, 1)
    gradients.hand_over(1)
    backward(stages, 2)
    stages[0].in_use[0].grad = None
    gradients.hand_over(2)
    assert [gradient is None for gradient in newest_gradients(stages)[0]] == [True, False, False]


@pytest.mark.parametrize("unused_in", [{1}, {2}, {1, 3}, {1, 2, 3}], ids=str)
@pytest.mark.parametrize("slot_dtype", [torch.float32, torch.bfloat16])
def test_unused_weight_adds_nothing_to_the_mean(unused_in, slot_dtype):
    stages = stages_of(3, slot_dtype)
    gradients = Gradients(stages)
    for update in range(2):  # the first update fills the buffers
        total = torch.zeros_like(stages[0].newest["0.weight"])
        for place in (1, 2, 3):
            micro_batch = 3 * update + place
            arrived = backward(stages, micro_batch)
            if update and place in unused_in:
                stages[0].in_use[0].grad = None
            else:
                total += arrived[0][0].float()
            gradients.hand_over(micro_batch)
            gradients.accumulate(micro_batch)
        mean = stages[0].newest["0.weight"].grad
        if update and unused_in == {1, 2, 3}:
            assert mean is None
        else:
            assert torch.equal(mean, total / 3)
        gradients.drop()


def test_unused_weight_does_not_count_in_the_norm():
    stages = stages_of()
    gradients = Gradients(stages)
    backward(stages, 1)
    gradients.hand_over(1)
    arrived = backward(stages, 2)
    stages[0].in_use[0].grad = None
    gradients.hand_over(2)
    expected = torch.cat([gradient.flatten() for gradient in arrived[0][1:]]).norm()
    torch.testing.assert_close(gradients.clip(1.0)[0], expected)


def test_infinite_gradient_shows_in_its_stage_alone():
    stages = stages_of()
    gradients = Gradients(stages)
    backward(stages, 1)
    stages[1].in_use[0].grad.fill_(torch.inf)
    gradients.hand_over(1)
    assert gradients.clip(1.0).isfinite().tolist() == [True, False, True]


def test_stages_without_any_gradient_have_norm_zero():
    """As on a device whose blocks have all taken no part in the loss."""
    stages = stages_of()
    gradients = Gradients(stages)
    gradients.hand_over(1)
    assert gradients.clip(1.0).tolist() == [0.0, 0.0, 0.0]
    assert newest_gradients(stages) == [[None] * 3] * 3
