"""Whatever a model returns, the window lasts until its backward pass has ended."""

import warnings
from collections import namedtuple
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.func import functional_call

from brx import delayed
from brx.errors import UserError
from brx.pipeline.hooks import tensors_with_gradient
from tests.pipeline.loops import (
    Naive,
    assert_same,
    batch,
    flat,
    loss_of,
    make,
    sgd,
    simulate,
    train,
    train_with_twin,
)

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
def test_output_of_any_kind(kind):
    class Returning(nn.Sequential):
        def forward(self, x):
            return RETURNED[kind](super().forward(x))

    def loss(call, t):
        out = call(batch(t))
        return loss_of(TAKEN[kind](out) if isinstance(call, nn.Module) else out)

    assert_same(train(Returning(*make()), loss=loss)[0], simulate(loss=loss))


class Keeping(nn.Sequential):
    """Returns nothing."""

    def forward(self, x):
        self.loss = loss_of(super().forward(x))


def test_loss_kept_as_an_attribute():
    def loss(call, t):
        if isinstance(call, nn.Module):
            call(batch(t))
            return call.loss
        return loss_of(call(batch(t)))

    assert_same(train(Keeping(*make()), loss=loss)[0], simulate(loss=loss))


def test_unknown_output_without_stash_is_refused():
    class Hidden(nn.Sequential):
        def forward(self, x):
            return iter([super().forward(x)])

    with pytest.raises(UserError, match="output holds no tensor with a gradient"):
        train(Hidden(*make()), loss=lambda call, t: next(call(batch(t))).sum(), stash="none")


def of_kept(call, n):
    if not isinstance(call, Keeping):
        return loss_of(call(batch(n)))
    call(batch(n))
    return call.loss


def of_generator(call, n):
    out = call(batch(n))
    return loss_of(next(out) if isinstance(out, Iterator) else out)


def of_slots(call, n):
    out = call(batch(n))
    return loss_of(out.prediction if isinstance(out, WithSlots) else out)


def of_forces(call, n, energy_share=0.0):
    """Matching of forces, the gradients with respect to the input: the backward pass does not go
    through the output, unless the loss has a share of the energy."""
    x = batch(n).requires_grad_()
    out = call(x)
    energy = out if isinstance(call, Energy) else out.square().sum()
    (force,) = torch.autograd.grad(energy, x, create_graph=True)
    loss = loss_of(force)
    return loss + energy_share * energy if energy_share else loss


class Energy(nn.Sequential):
    """Returns a sum, whose own derivative is no function of the weights."""

    def forward(self, x):
        return super().forward(x).square().sum()


class Generating(nn.Sequential):
    def forward(self, x):
        return iter([super().forward(x)])


class Slotted(nn.Sequential):
    def forward(self, x):
        return WithSlots(super().forward(x))


@pytest.mark.parametrize("accumulation", [1, 2, 3])
@pytest.mark.parametrize(
    ("kind", "loss"),
    [
        (Keeping, of_kept),
        (Generating, of_generator),
        (Slotted, of_slots),
        (Energy, of_forces),
        (Energy, partial(of_forces, energy_share=0.01)),
    ],
)
def test_micro_batches_whose_backward_pass_no_output_shows(kind, loss, accumulation):
    """Each has the version of its own, and an ordinary loop is told nothing."""
    model, twin = kind(*make()), make()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pipeline = train_with_twin(model, twin, accumulation=accumulation, loss=loss, lr=0.03)
    assert_same(flat(model), flat(twin))
    assert pipeline.updates == 8


def test_assigned_gradients_of_forces_are_told():
    """Neither an output nor a parameter shows the end of a backward pass."""
    model = Energy(*make())
    optimizer = sgd(model.parameters())
    delayed(model, optimizer, 4, accumulation=2)

    def update(t):
        for j in range(2):
            found = torch.autograd.grad(of_forces(model, 2 * t + j), list(model.parameters()))
            for weight, gradient in zip(model.parameters(), found, strict=True):
                weight.grad = gradient if weight.grad is None else weight.grad + gradient
        optimizer.step()
        optimizer.zero_grad()

    update(0)
    with pytest.warns(UserWarning, match=r"seen to end, .* into `with pipeline.micro_batch\(\):`"):
        update(1)


def test_gradient_of_a_gradient_across_two_passes():
    """`create_graph` leaves the window open: the pass that follows shares it, and the version."""
    model, twin = make(), make()
    optimizer, twin_optimizer = sgd(model.parameters(), 0.03), sgd(twin.parameters(), 0.03)
    delayed(model, optimizer, 4, accumulation=2)
    naive = Naive(twin, accumulation=2)

    def penalty(weights, call, n):
        found = torch.autograd.grad(loss_of(call(batch(n))), weights, create_graph=True)
        return sum(gradient.square().sum() for gradient in found) + loss_of(call(batch(n + 50)))

    for t in range(8):
        naive.begin_update()
        for j in (1, 2):
            n = 2 * t + j
            penalty(list(model.parameters()), model, n).backward()
            used = naive.used(j)
            leaves = list(used.values())
            value = penalty(leaves, lambda x, w=used: functional_call(twin, w, (x,)), n)
            for weight, gradient in zip(
                twin.parameters(), torch.autograd.grad(value, leaves), strict=True
            ):
                weight.grad = gradient if weight.grad is None else weight.grad + gradient
        for each in (optimizer, twin_optimizer):
            each.step()
            each.zero_grad()
    assert_same(flat(model), flat(twin))


def test_no_output_without_stash_is_refused():
    def loss(call, t):
        call(batch(t))
        return call.loss

    with pytest.raises(UserError, match="output holds no tensor with a gradient"):
        train(Keeping(*make()), loss=loss, stash="none")


def test_tensors_are_found_once():
    y = torch.ones(2, requires_grad=True) * 2
    held = SimpleNamespace(y=y)
    held.itself = held
    assert len(tensors_with_gradient({"a": held, "b": torch.ones(1)})) == 1


def test_modules_of_python_are_not_searched():
    y = torch.ones(2, requires_grad=True) * 2
    held = SimpleNamespace(y=y, library=torch)
    assert len(tensors_with_gradient(held)) == 1
