"""The example at the top of `brx/pipeline/windows.py`, line by line."""

import torch
from torch import nn

from brx import delayed


def test_the_example_at_the_top_of_windows():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    delayed(model, optimizer, 2)
    newest = [[weights_of(stage)] for stage in model]  # by stage, all versions so far

    def held():
        """The number of the version that each stage's parameters hold."""
        return [find(weights_of(stage), kept) for stage, kept in zip(model, newest, strict=True)]

    found = []
    for _ in range(3):
        loss = model(torch.ones(2, 3)).square().mean()
        found.append(held())
        loss.backward()
        found.append(held())
        optimizer.step()
        for stage, kept in zip(model, newest, strict=True):
            kept.append(weights_of(stage))
        found.append(held())
        optimizer.zero_grad()
    assert found[:7] == [[0, 0], [0, 0], [1, 1], [0, 1], [1, 1], [2, 2], [1, 2]]


def weights_of(stage):
    return stage.weight.detach().clone()


def find(weights, versions):
    return next(index for index, kept in enumerate(versions) if torch.equal(kept, weights))
