"""The stages of a device, one after another."""

import logging
from functools import partial
from unittest.mock import patch

import torch
from torch import nn

from brx.model.stage import StageOutput
from brx.pipeline.chain import Chain


class Doubling(nn.Module):
    """Doubles the stream; the last stage also has a loss, and some have an auxiliary one."""

    def __init__(self, auxiliary_loss=None, *, has_loss=False):
        super().__init__()
        self.auxiliary_loss = auxiliary_loss
        self.has_loss = has_loss

    def forward(self, x, targets):
        loss = (2 * x - targets).square().mean() if self.has_loss else None
        auxiliary = None if self.auxiliary_loss is None else torch.tensor(self.auxiliary_loss)
        return StageOutput(2 * x, loss, auxiliary)


def test_stages_run_in_their_order():
    x, targets = torch.ones(2, 3), torch.full((2, 3), 5.0)
    output = Chain([Doubling(), Doubling(has_loss=True)])(x, targets)
    torch.testing.assert_close(output.stream, torch.full((2, 3), 4.0))
    torch.testing.assert_close(output.loss, torch.tensor(1.0))


def test_auxiliary_losses_are_those_of_stages_that_have_one():
    stages = [Doubling(0.5), Doubling(), Doubling(0.25)]
    assert Chain(stages)(torch.ones(1), None).auxiliary_losses.tolist() == [0.5, 0.25]
    assert Chain([Doubling()])(torch.ones(1), None).auxiliary_losses is None


def test_compiled_chain_is_one_graph(caplog):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    chain = Chain([Doubling(), Doubling(has_loss=True)])
    # Kernels, which take long to make, have no part in how many graphs there are.
    with patch("torch.compile", partial(torch.compile, backend="eager")):
        chain.compile()
    for size in (2, 2, 3, 4):
        output = chain(torch.ones(size), torch.zeros(size))
        torch.testing.assert_close(output.stream, torch.full((size,), 4.0))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 3  # one per shape
    warnings = [record for record in caplog.records if record.levelno >= logging.WARNING]
    # Other parts of torch may say that they find no GPU.
    assert [record for record in warnings if record.name.startswith("torch._dynamo")] == []
