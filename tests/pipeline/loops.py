"""A user's training loop under `delayed`, and the same loop as a naive simulation that keeps every
version of the weights in a list."""

from typing import get_args

import torch
from torch import nn
from torch.func import functional_call

from brx import delayed
from brx.optim.dtensor import is_sharded
from brx.pipeline.forecasts import StashMode

STASHES = get_args(StashMode)
LAST = 3  # the last of four stages


class Layer(nn.Module):
    """One stage of a net of four."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(4, 4)

    def forward(self, x):
        return torch.tanh(self.lin(x))


def make(layer=Layer):
    """A net of four layers, each a stage: the delays are 3, 2, 1 and 0."""
    torch.manual_seed(1)
    return nn.Sequential(*[layer() for _ in range(4)]).double()


def batch(t):
    """The inputs (8, 4) of iteration t."""
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(100 + t), dtype=torch.float64)


def loss_of(y):
    return (y - 1).square().mean()


def plain_loss(model, t):
    return loss_of(model(batch(t)))


def sgd(parameters, lr=0.3):
    return torch.optim.SGD(list(parameters), lr=lr)


def flat(model):
    """All weights as one vector; sharded ones are gathered first."""
    weights = [weight.detach() for weight in model.parameters()]
    whole = [weight.full_tensor() if is_sharded(weight) else weight for weight in weights]
    return torch.cat([weight.flatten() for weight in whole])


class Naive:
    """Keeps all versions of a model's weights in a list, and computes gradients at old ones.

    Stage k is the k-th child of the model, with delay 3 - k in micro-batches."""

    def __init__(self, model, accumulation=1, stage_of=lambda name: int(name.split(".")[0])):
        self.model = model
        self.accumulation = accumulation
        self.taus = {name: LAST - stage_of(name) for name, _ in model.named_parameters()}
        self.versions = []

    def begin_update(self):
        """The first pass of an update is about to begin: these weights are its version."""
        named = self.model.named_parameters()
        self.versions.append({name: weight.detach().clone() for name, weight in named})

    def used(self, micro_batch=1):
        """The weights that micro-batch number `micro_batch` of the newest update uses, as leaves.

        Micro-batch n of M per update uses version max(0, floor((n - 1 - tau) / M))."""
        n = (len(self.versions) - 1) * self.accumulation + micro_batch
        weights = {}
        for name, tau in self.taus.items():
            version = max(0, (n - 1 - tau) // self.accumulation)
            weights[name] = self.versions[version][name].clone().requires_grad_()
        return weights

    def backward(self, loss, micro_batch=1):
        """Add the gradients of `loss(call)` to the model's; call(x) is the model at old weights."""
        weights = self.used(micro_batch)
        value = loss(lambda *args: functional_call(self.model, weights, args))
        found = torch.autograd.grad(value, list(weights.values()), allow_unused=True)
        for parameter, gradient in zip(self.model.parameters(), found, strict=True):
            if gradient is not None:
                before = 0 if parameter.grad is None else parameter.grad
                parameter.grad = before + gradient
        return value.item()


def simulate(optimizer_of=sgd, *, loss=plain_loss, after=lambda model: None, updates=12, skips=()):
    """The final weights of a naive loop. `after` is called after each step, and iterations in
    `skips` take no step."""
    model = make()
    optimizer = optimizer_of(model.parameters())
    naive = Naive(model)
    is_new = True
    for t in range(updates):
        if is_new:
            naive.begin_update()
        naive.backward(lambda call, t=t: loss(call, t))
        is_new = t not in skips
        if is_new:
            optimizer.step()
            after(model)
        optimizer.zero_grad()
    return flat(model)


def train(
    model=None, optimizer_of=sgd, *, loss=plain_loss, after=lambda model: None, updates=12, **given
):
    """The final weights of an ordinary loop under `delayed`, and its pipeline."""
    model = make() if model is None else model
    optimizer = optimizer_of(model.parameters())
    pipeline = delayed(model, optimizer, given.pop("stages", 4), **given)
    for t in range(updates):
        loss(model, t).backward()
        optimizer.step()
        after(model)
        optimizer.zero_grad()
    return flat(model), pipeline


def train_with_twin(
    model, twin, *, accumulation, loss=plain_loss, lr=0.3, before_pass=lambda j: None, updates=8
):
    """Train a model with `delayed`, and beside it an equal one by `Naive`.

    `before_pass(j)` is called before pass j of an update, from 1. Returns the pipeline."""
    optimizer, twin_optimizer = sgd(model.parameters(), lr), sgd(twin.parameters(), lr)
    pipeline = delayed(model, optimizer, LAST + 1, accumulation=accumulation)
    naive = Naive(twin, accumulation)
    for t in range(updates):
        naive.begin_update()
        for j in range(1, accumulation + 1):
            n = t * accumulation + j
            before_pass(j)
            loss(model, n).backward()
            naive.backward(lambda call, n=n: loss(call, n), j)
        for each in (optimizer, twin_optimizer):
            each.step()
            each.zero_grad()
    return pipeline


def assert_same(found, expected, tolerance=1e-12):
    torch.testing.assert_close(found, expected, rtol=0, atol=tolerance)
