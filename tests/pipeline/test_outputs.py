"""Whatever a model returns, the window lasts until its backward pass has ended."""

from collections import namedtuple
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from brx.errors import UserError
from brx.pipeline.hooks import tensors_with_gradient
from tests.pipeline.loops import assert_same, batch, loss_of, make, simulate, train

Pair = namedtuple("Pair", ["prediction", "extra"])


@dataclass
class Output:
    prediction: torch.Tensor
    extra: dict = field(default_factory=dict)


class WithSlots:
    __slots__ = ("prediction",)

    def __init__(self, prediction):
        self.prediction = prediction


RETURNED = {
    "tuple": lambda y: (y, None),
    "dict": lambda y: {"prediction": [y]},
    "named tuple": lambda y: Pair(y, "text"),
    "data class": lambda y: Output(y, {"again": y}),
    "nested objects": lambda y: SimpleNamespace(inner=SimpleNamespace(prediction=y)),
    "slots": WithSlots,
    "distribution": lambda y: torch.distributions.Normal(y, 1.0),
    "generator": lambda y: iter([y]),
}
TAKEN = {
    "tuple": lambda out: out[0],
    "dict": lambda out: out["prediction"][0],
    "named tuple": lambda out: out.prediction,
    "data class": lambda out: out.extra["again"],
    "nested objects": lambda out: out.inner.prediction,
    "slots": lambda out: out.prediction,
    "distribution": lambda out: out.loc,
    "generator": next,
}


@pytest.mark.parametrize("kind", RETURNED)
@pytest.mark.filterwarnings("ignore:delayed. the first 3 updates")
def test_output_of_any_kind(kind):
    class Returning(nn.Sequential):
        def forward(self, x):
            return RETURNED[kind](super().forward(x))

    def loss(call, t):
        out = call(batch(t))
        return loss_of(TAKEN[kind](out) if isinstance(call, nn.Module) else out)

    assert_same(train(Returning(*make()), loss=loss)[0], simulate(loss=loss))


@pytest.mark.filterwarnings("ignore:delayed. the first 3 updates")
def test_loss_kept_as_an_attribute():
    class Keeping(nn.Sequential):
        def forward(self, x):
            self.loss = loss_of(super().forward(x))

    def loss(call, t):
        if isinstance(call, nn.Module):
            call(batch(t))
            return call.loss
        return loss_of(call(batch(t)))

    assert_same(train(Keeping(*make()), loss=loss)[0], simulate(loss=loss))


def test_unknown_output_without_stash_is_refused():
    class Hidden(nn.Sequential):
        def forward(self, x):
            return WithSlots(super().forward(x))

    with pytest.raises(UserError, match="output holds no tensor with a gradient"):
        train(Hidden(*make()), loss=lambda call, t: call(batch(t)).prediction.sum(), stash="none")


def test_tensors_are_found_once():
    y = torch.ones(2, requires_grad=True) * 2
    held = SimpleNamespace(y=y)
    held.itself = held
    assert len(tensors_with_gradient({"a": held, "b": torch.ones(1)})) == 1
