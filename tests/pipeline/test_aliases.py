"""Whatever refers to a weight finds the version of the window: contents move, tensors do not."""

import warnings
import weakref
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.nn.utils import parametrizations

from brx import delayed
from brx.errors import UserError
from tests.pipeline.loops import (
    LAST,
    Layer,
    Naive,
    assert_same,
    batch,
    flat,
    loss_of,
    make,
    plain_loss,
    sgd,
    simulate,
    train,
)


class WithAliases(nn.Sequential):
    """Four layers whose weights are reached in another way than by attribute."""

    def __init__(self, how):
        super().__init__(*make())
        self.how = how
        linears = [layer.lin for layer in self]
        if how == "list":
            self.weights = [(linear.weight, linear.bias) for linear in linears]
        elif how == "partial":
            self.calls = [partial(F.linear, weight=x.weight, bias=x.bias) for x in linears]
        elif how == "closure":
            self.calls = [lambda x, linear=linear: linear(x) for linear in linears]
        elif how == "weakref":
            self.weights = [(weakref.ref(x.weight), weakref.ref(x.bias)) for x in linears]
        elif how == "view":  # made once, outside of autograd
            self.weights = [(linear.weight.data.view(-1), linear.bias) for linear in linears]
        elif how == "ParameterList":
            self.held = nn.ParameterList([linear.weight for linear in linears])

    def forward(self, x):
        for index, layer in enumerate(self.layers()):
            if self.how in ("partial", "closure"):
                x = torch.tanh(self.calls[index](x))
            elif self.how == "list":
                x = torch.tanh(F.linear(x, *self.weights[index]))
            elif self.how == "weakref":
                weight, bias = self.weights[index]
                x = torch.tanh(F.linear(x, weight(), bias()))
            elif self.how == "ParameterList":
                x = torch.tanh(F.linear(x, self.held[index], layer.lin.bias))
            elif self.how == "view":  # the value of a view, the gradient of the weight
                weight, bias = self.weights[index]
                own = layer.lin.weight
                x = torch.tanh(F.linear(x, weight.view(4, 4) + own - own.detach(), bias))
        return x

    def layers(self):
        return [self[index] for index in range(4)]


STAGES = {str(index): index for index in range(4)}


@pytest.mark.parametrize("how", ["list", "partial", "closure", "weakref", "view", "ParameterList"])
def test_aliases_see_the_version(how):
    stages = STAGES
    if how == "ParameterList":
        stages = lambda name: int(name.split(".")[-1] if "held" in name else name[0])  # noqa: E731
    found, _ = train(WithAliases(how).double(), stages=stages)
    assert_same(found, simulate(), 1e-9 if how == "view" else 1e-12)


class Again(torch.autograd.Function):
    """Activation checkpointing that takes the weights as inputs."""

    @staticmethod
    def forward(ctx, run, x, *weights):
        ctx.run, ctx.x, ctx.weights = run, x, weights
        with torch.no_grad():
            return run(x)

    @staticmethod
    def backward(ctx, gradient):
        x = ctx.x.detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.run(x)
        return None, *torch.autograd.grad(y, [x, *ctx.weights], gradient, allow_unused=True)


class Checkpointed(Layer):
    def forward(self, x):
        return Again.apply(super().forward, x, *self.parameters())


def test_own_checkpoint_function():
    assert_same(train(make(Checkpointed))[0], simulate())


class Reversible(torch.autograd.Function):
    """Coupled pairs of layers, which the backward pass inverts; it runs backward passes of its
    own."""

    @staticmethod
    def forward(ctx, x, pairs):
        with torch.no_grad():
            ctx.pairs, ctx.y = pairs, couple(x, pairs)
        return ctx.y.clone()

    @staticmethod
    def backward(ctx, gradient):
        (a, b), (da, db) = ctx.y.chunk(2, -1), gradient.chunk(2, -1)
        for f, g in reversed(ctx.pairs):
            b, da = invert(g, a, b, da, db)
            a, db = invert(f, b, a, db, da)
        return torch.cat([da, db], -1), None


def couple(x, pairs):
    a, b = x.chunk(2, -1)
    for f, g in pairs:
        a = a + f(b)
        b = b + g(a)
    return torch.cat([a, b], -1)


def invert(layer, given, other, to_given, to_other):
    with torch.enable_grad():
        leaf = given.detach().requires_grad_()
        out = layer(leaf)
        out.backward(to_other)
    return other - out.detach(), to_given + leaf.grad


class Coupled(nn.Module):
    def __init__(self, is_reversible):
        super().__init__()
        self.enter = nn.Linear(4, 8)
        self.blocks = nn.ModuleList(nn.ModuleList([Layer(), Layer()]) for _ in range(4))
        self.is_reversible = is_reversible

    def forward(self, x):
        pairs = [tuple(block) for block in self.blocks]
        x = self.enter(x)
        return Reversible.apply(x, pairs) if self.is_reversible else couple(x, pairs)


def test_reversible_layers():
    found = []
    for is_reversible in (True, False):
        torch.manual_seed(1)
        found.append(train(Coupled(is_reversible).double())[0])
    assert_same(*found, tolerance=1e-9)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_scripted_layers():
    layers = [torch.jit.script(layer) for layer in make()]
    assert_same(train(nn.Sequential(*layers), stages=STAGES)[0], simulate())


def test_functional_call_in_the_forward_pass():
    class Functional(nn.Sequential):
        def forward(self, x):
            for layer in self:
                x = torch.func.functional_call(layer, dict(layer.named_parameters()), (x,))
            return x

    assert_same(train(Functional(*make()))[0], simulate())


def weights_of_simulation(naive, twin, updates=12):
    """All weights of the naive simulation's model after some updates."""
    optimizer = sgd(twin.parameters())
    for t in range(updates):
        naive.begin_update()
        naive.backward(lambda call, t=t: plain_loss(call, t))
        optimizer.step()
        optimizer.zero_grad()
    return flat(twin)


def same_as_naive(make_model, updates=8):
    """An ordinary loop under delay ends where the naive one does. Buffers have no versions."""
    model, twin = make_model(), make_model()
    simulated = weights_of_simulation(Naive(twin), twin, updates)
    assert_same(train(model, updates=updates)[0], simulated)


@pytest.mark.parametrize(
    "reparametrized",
    [parametrizations.weight_norm, parametrizations.spectral_norm, parametrizations.orthogonal],
)
def test_reparametrized_weights_see_the_version(reparametrized):
    class Reparametrized(Layer):
        def __init__(self):
            super().__init__()
            reparametrized(self.lin)

    same_as_naive(lambda: make(Reparametrized))


def test_flat_parameters_see_the_version():
    class FlatLayer(nn.Module):
        def __init__(self):
            super().__init__()
            self.flat = nn.Parameter(0.5 * torch.randn(20))

        def forward(self, x):
            weight, bias = self.flat.split([16, 4])
            return torch.tanh(F.linear(x, weight.view(4, 4), bias))

    same_as_naive(lambda: make(FlatLayer))


def with_shared_memory():
    model = make()
    model[2].lin.weight.data = model[0].lin.weight.data
    return model


def test_shared_memory_under_two_delays_is_refused():
    with pytest.raises(UserError, match=r"0.lin.weight and 2.lin.weight share memory, .* 3 and 1"):
        train(with_shared_memory())


def test_transposed_weight_in_shared_memory_is_refused():
    """As autoencoders tie the weights of their two halves."""
    model = make()
    model[3].lin.weight.data = model[0].lin.weight.data.t()
    with pytest.raises(UserError, match=r"0.lin.weight and 3.lin.weight share memory"):
        train(model)


def test_memory_shared_by_processes_is_refused():
    """As Hogwild shares it."""
    with pytest.raises(UserError, match=r"0.lin.weight is in memory that processes share"):
        train(make().share_memory())


def test_memory_shared_by_processes_is_allowed_without_delay():
    train(make().share_memory(), stages=1)


def test_lazy_modules_without_a_shape_are_refused():
    model = nn.Sequential(nn.LazyLinear(4), nn.LazyLinear(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(UserError, match=r"0.weight and 3 more are without a shape yet"):
        delayed(model, optimizer, stages=2)
    model(torch.ones(1, 3))
    delayed(model, optimizer, stages=2)


def test_weights_from_inference_mode_are_refused():
    with torch.inference_mode():
        model = make().requires_grad_(False)
    with pytest.raises(UserError, match=r"0.lin.weight and 7 more are from inference mode"):
        train(model)


class Halves(nn.Module):
    """Two weights that are the columns of one matrix, with those of one between the other's."""

    def __init__(self):
        super().__init__()
        both = 0.5 * torch.randn(4, 8, generator=torch.Generator().manual_seed(1)).double()
        self.first = nn.Parameter(both[:, ::2])
        self.second = nn.Parameter(both[:, 1::2])

    def forward(self, x):
        return torch.tanh(x @ self.first) @ self.second


def test_weights_between_each_others_elements_share_no_memory():
    model, twin = Halves(), Halves()
    naive = Naive(twin, stage_of=lambda name: LAST if name == "second" else LAST - 1)
    simulated = weights_of_simulation(naive, twin)
    assert_same(train(model, stages={"first": 0, "second": 1})[0], simulated)


def test_shared_memory_under_one_delay_is_allowed():
    model, twin = with_shared_memory(), with_shared_memory()
    naive = Naive(twin)
    naive.taus = dict.fromkeys(naive.taus, 3)
    assert_same(train(model, delay=3)[0], weights_of_simulation(naive, twin))


# torch.func, which computes with tensors that it is given


def started():
    model = make()
    optimizer = sgd(model.parameters())
    return model, optimizer, delayed(model, optimizer, 4)


@pytest.mark.filterwarnings("ignore:delayed. the passes have not shown in which order")
def test_gradients_per_example_in_the_explicit_form():
    model, optimizer, pipeline = started()

    def loss(weights, x):
        return loss_of(functional_call(model, weights, (x[None],)))

    for t in range(12):
        with pipeline.micro_batch():
            weights = {name: weight.detach() for name, weight in model.named_parameters()}
            found = vmap(grad(loss), in_dims=(None, 0))(weights, batch(t))
        for name, weight in model.named_parameters():
            weight.grad = found[name].mean(0)
        optimizer.step()
    assert_same(flat(model), simulate())


def adapted_loss(model, weights, t):
    """Meta learning: the loss after a step of gradient descent."""
    loss = loss_of(functional_call(model, weights, (batch(t),)))
    gradients = torch.autograd.grad(loss, list(weights.values()), create_graph=True)
    adapted = {}
    for (name, weight), gradient in zip(weights.items(), gradients, strict=True):
        adapted[name] = weight - 0.1 * gradient
    return loss_of(functional_call(model, adapted, (batch(50 + t),)))


def test_meta_learning_in_the_explicit_form():
    model, optimizer, pipeline = started()
    twin = make()
    twin_optimizer, naive = sgd(twin.parameters()), Naive(twin)
    for t in range(12):
        with pipeline.micro_batch():
            adapted_loss(model, dict(model.named_parameters()), t).backward()
        optimizer.step()
        optimizer.zero_grad()

        naive.begin_update()
        weights = naive.used()
        found = torch.autograd.grad(adapted_loss(twin, weights, t), list(weights.values()))
        for weight, gradient in zip(twin.parameters(), found, strict=True):
            weight.grad = gradient
        twin_optimizer.step()
    assert_same(flat(model), flat(twin))


def test_functional_call_outside_a_micro_batch_is_refused():
    model, _, _ = started()
    weights = {name: weight.detach() for name, weight in model.named_parameters()}
    with pytest.raises(UserError, match=r"functional_call within `with pipeline.micro_batch"):
        functional_call(model, weights, (batch(0),))


def test_forward_derivatives_see_the_version():
    def loss(call, t):
        x = batch(t)
        y, slope = torch.func.jvp(call, (x,), (torch.ones_like(x),))
        return loss_of(y) + slope.square().mean()

    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # its backward passes are counted
        found, _ = train(loss=loss)
    assert_same(found, simulate(loss=loss))


def test_address_of_a_weight_never_changes():
    model = make()
    addresses = [weight.data_ptr() for weight in model.parameters()]
    seen = []
    model[0].register_forward_pre_hook(
        lambda *args: seen.append([weight.data_ptr() for weight in model.parameters()])
    )
    train(model, updates=6)
    assert seen == [addresses] * 6
