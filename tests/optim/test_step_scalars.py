"""The largest step that Adam can take."""

import math

import pytest
import torch

from brx.optim.step_scalars import largest_adam_step
from tests.optim.helpers import random

BETAS = (0.9, 0.999)


def adam_step(
    gradients,  # (..., t) of one entry
):
    """|m^| / sqrt(v^) after the last gradient, from the averages as sums."""
    beta1, beta2 = BETAS
    t = gradients.shape[-1]
    age = torch.arange(t - 1, -1, -1).double()
    mean = ((1 - beta1) * beta1**age * gradients).sum(dim=-1) / (1 - beta1**t)
    mean_square = ((1 - beta2) * beta2**age * gradients.square()).sum(dim=-1) / (1 - beta2**t)
    return mean.abs() / mean_square.sqrt()


@pytest.mark.parametrize("update", [1, 2, 10, 50, 1000])
def test_some_gradients_reach_the_largest_step(update):
    # Those in proportion to their weights in m over their weights in v (Cauchy-Schwarz).
    age = torch.arange(update - 1, -1, -1).double()
    worst = (BETAS[0] / BETAS[1]) ** age
    assert largest_adam_step(update, BETAS) == pytest.approx(adam_step(worst).item(), rel=1e-12)


@pytest.mark.parametrize("update", [1, 2, 10, 50])
def test_no_gradients_exceed_the_largest_step(update):
    gradients = random(1000, update, dtype=torch.float64)
    assert adam_step(gradients).max() <= largest_adam_step(update, BETAS) * (1 + 1e-12)


def test_slow_momentum_has_no_largest_step():
    assert largest_adam_step(10, (0.9, 0.81)) == math.inf
