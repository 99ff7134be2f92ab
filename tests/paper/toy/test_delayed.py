"""Descent with delay against its recurrence."""

import pytest
import torch

from brx.paper.toy.delayed import DelayedDescent


@pytest.mark.parametrize("delay", [0, 1, 3])
def test_gradient_is_taken_at_the_older_point(delay):
    descent = DelayedDescent(
        lambda point: (point**2).sum() / 2,
        torch.tensor([4.0], dtype=torch.float64),
        lambda points: torch.optim.SGD(points, lr=0.25),
        delay,
    )
    expected = [4.0]
    for _ in range(12):
        descent.update()
        expected.append(expected[-1] - 0.25 * expected[max(0, len(expected) - 1 - delay)])
    torch.testing.assert_close(torch.cat(descent.path), torch.tensor(expected, dtype=torch.float64))


def test_until_counts_updates_and_gives_up():
    def descent():
        start = torch.tensor([8.0], dtype=torch.float64)
        return DelayedDescent(lambda point: (point**2).sum() / 2, start, lambda p: torch.optim.SGD(p, lr=0.5))

    assert descent().until(lambda point: point.item() <= 1.0, most=10) == 3
    assert descent().until(lambda point: point.item() <= 1.0, most=2) is None
