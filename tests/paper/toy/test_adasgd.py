"""AdaSGD against closed forms, against Adam where they are the same, and its checks."""

import pytest
import torch

from brx.paper.toy.adasgd import AdaSGD


def test_constant_gradient_moves_by_lr_over_its_root_mean_square():
    # Bias-corrected averages of constants are the constants: every update is lr g / sqrt(mean g^2).
    parameters = [torch.zeros(2, dtype=torch.float64, requires_grad=True), torch.zeros((), dtype=torch.float64)]
    optimizer = AdaSGD(parameters, lr=0.1, betas=(0.9, 0.99), eps=0.0)
    for _ in range(5):
        parameters[0].grad = torch.tensor([3.0, -4.0], dtype=torch.float64)
        parameters[1].grad = torch.tensor(0.5, dtype=torch.float64)
        optimizer.step()
    root = ((9 + 16 + 0.25) / 3) ** 0.5
    torch.testing.assert_close(parameters[0].detach(), torch.tensor([-1.5, 2.0], dtype=torch.float64) / root)
    torch.testing.assert_close(parameters[1], torch.tensor(-0.25, dtype=torch.float64) / root)


def test_two_steps_by_hand():
    weight = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    optimizer = AdaSGD([weight], lr=1.0, betas=(0.5, 0.75), eps=1e-8)
    for gradient in ([1.0, 7.0], [2.0, -2.0]):
        weight.grad = torch.tensor(gradient, dtype=torch.float64)
        optimizer.step()
    # mean squares 25 and 4: v = 25/4, then 3/4 25/4 + 1/4 4; m = g/2, then g1/4 + g2/2
    first = torch.tensor([1.0, 7.0], dtype=torch.float64) / (5.0 + 1e-8)
    second_root = ((0.75 * 25 / 4 + 1.0) / (1 - 0.75**2)) ** 0.5
    second = torch.tensor([1.25, 0.75], dtype=torch.float64) / 0.75 / (second_root + 1e-8)
    torch.testing.assert_close(weight.detach(), -first - second)


def test_one_number_alone_is_adam():
    ours, torchs = (torch.full((1,), 2.0, dtype=torch.float64, requires_grad=True) for _ in range(2))
    optimizers = [AdaSGD([ours], lr=0.3, betas=(0.8, 0.9)), torch.optim.Adam([torchs], lr=0.3, betas=(0.8, 0.9))]
    for _ in range(20):
        for weight, optimizer in zip((ours, torchs), optimizers, strict=True):
            optimizer.zero_grad()
            (weight**4).sum().backward()
            optimizer.step()
    torch.testing.assert_close(ours, torchs)


def test_parameters_without_gradient_stay_and_do_not_count():
    with_gradient, without = (torch.ones(3, requires_grad=True) for _ in range(2))
    optimizer = AdaSGD([with_gradient, without], lr=0.5, eps=0.0)
    with_gradient.grad = torch.full((3,), 2.0)
    optimizer.step()
    torch.testing.assert_close(with_gradient.detach(), torch.full((3,), 0.5))
    torch.testing.assert_close(without.detach(), torch.ones(3))


@pytest.mark.parametrize("wrong", [{"lr": -1.0}, {"betas": (1.0, 0.9)}, {"betas": (0.9, -0.1)}, {"eps": -1e-8}])
def test_invalid_values(wrong):
    with pytest.raises(ValueError, match="Invalid"):
        AdaSGD([torch.zeros(1, requires_grad=True)], **wrong)
