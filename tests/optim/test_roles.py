"""What lies between a parameter and its layer is looked through: parametrizations, adapters,
wrappers, lazy shapes."""

import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

from brx.optim import BasisRotation, param_groups
from brx.optim.roles import roles
from tests.optim.helpers import random, take_steps


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte = nn.Embedding(50, 16)
        self.c_attn = nn.Linear(16, 48)
        self.mixing = nn.Linear(16, 16)
        self.lm_head = nn.Linear(16, 50)

    def forward(self, tokens):
        hidden = self.c_attn(self.wte(tokens)).unflatten(-1, (3, 16)).sum(-2)
        return self.lm_head(self.mixing(hidden))


PLAIN = {"wte": "embeddings", "c_attn": "matrices", "mixing": "matrices", "lm_head": "head"}


def kinds(model):
    """By layer, the kinds of its parameters of two or more dimensions that are not vectors."""
    found = {}
    for name, role in roles(model).items():
        if role.kind != "vectors":
            layer = next(layer for layer in PLAIN if layer in name)
            found.setdefault(layer, set()).add(role.kind)
    return {layer: kind.pop() if len(kind) == 1 else kind for layer, kind in found.items()}


def parametrized(register):
    model = Block()
    for name in PLAIN:
        register(getattr(model, name))
    return model


@pytest.mark.parametrize(
    "register",
    [
        parametrizations.weight_norm,
        parametrizations.spectral_norm,
        parametrizations.orthogonal,
        pytest.param(nn.utils.weight_norm, marks=pytest.mark.filterwarnings("ignore")),
        nn.utils.spectral_norm,
    ],
)
def test_parametrizations_are_looked_through(register):
    model = parametrized(register)
    assert kinds(model) == PLAIN
    splits = {role.split for name, role in roles(model).items() if role.kind == "matrices"}
    assert splits == {(3, -2), None}


class Merged(nn.Module):
    """LoRA as a parametrization: W + B A."""

    def __init__(self, rows, columns):
        super().__init__()
        self.lora_A = nn.Parameter(random(4, columns))
        self.lora_B = nn.Parameter(random(rows, 4))

    def forward(self, weight):
        return weight + self.lora_B @ self.lora_A


def test_merged_factors_have_the_role_of_their_layer():
    def register(layer):
        parametrize.register_parametrization(layer, "weight", Merged(*layer.weight.shape))

    model = parametrized(register)
    assert kinds(model) == PLAIN
    factors = [role for name, role in roles(model).items() if "c_attn" in name and "lora" in name]
    assert [role.split for role in factors] == [None, None]


def test_peft_layers_have_the_role_of_their_layer():
    peft = pytest.importorskip("peft")
    adapted = peft.LoraConfig(r=4, target_modules=["wte", "c_attn"], modules_to_save=["lm_head"])
    model = peft.get_peft_model(Block(), adapted)
    assert kinds(model) == PLAIN


class LoraLayer(nn.Module):
    """A layer as peft wraps it."""

    def __init__(self, layer):
        super().__init__()
        self.base_layer = layer
        self.lora_A = nn.ModuleDict({"default": nn.Linear(layer.weight.shape[1], 4, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(4, layer.weight.shape[0], bias=False)})


def test_wrapped_layers_have_the_role_of_their_layer():
    model = nn.ModuleDict({name: LoraLayer(layer) for name, layer in Block().named_children()})
    assert kinds(nn.ModuleDict({"module": model})) == PLAIN


def test_compiled_model_has_the_same_roles():
    assert kinds(torch.compile(Block(), backend="eager")) == PLAIN


def test_pointwise_convolution_called_qkv_is_split():
    model = nn.ModuleDict({"qkv": nn.Conv2d(16, 48, 1), "out": nn.Conv2d(16, 16, 1)})
    rows = {row.name: row for row in BasisRotation(model, max_kernel_state=None).summary()}
    assert rows["qkv.weight"].matrices == (3, 16, 16)
    assert rows["qkv.weight"].sides == ("left", "right")


def test_split_convolution_trains_as_its_parts():
    whole = nn.ModuleDict({"qkv": nn.Conv2d(6, 18, 1, bias=False)})
    weight = whole["qkv"].weight
    parts = [nn.Parameter(p.detach().reshape(6, 6).clone()) for p in weight.chunk(3)]
    gradients = [random(18, 6, 1, 1, seed=time) for time in range(14)]
    take_steps(BasisRotation(whole, max_kernel_state=None, frequency=3), [weight], [gradients])
    of_parts = [[g.chunk(3)[k].reshape(6, 6) for g in gradients] for k in range(3)]
    take_steps(BasisRotation(parts, frequency=3), parts, of_parts)
    torch.testing.assert_close(
        weight.detach().reshape(18, 6), torch.cat(parts).detach(), rtol=0, atol=1e-7
    )


def residual_network():
    """The convolutions of ResNet-18, by their sizes."""
    sizes = [(64, 3, 7)]
    for width, before in ((64, 64), (128, 64), (256, 128), (512, 256)):
        sizes += [(width, before, 3)] + 3 * [(width, width, 3)]
        sizes += [(width, before, 1)] if width != before else []
    with torch.device("meta"):
        layers = [nn.Conv2d(of_in, out, side, bias=False) for out, of_in, side in sizes]
        return nn.Sequential(*layers, nn.Linear(512, 1000))


@pytest.mark.parametrize("with_module", [True, False])
def test_state_of_convolutions_is_bounded(with_module):
    model = residual_network()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optimizer = BasisRotation(model if with_module else model.parameters())
    kernels = [row for row in optimizer.summary() if len(row.shape) == 4]
    weights = sum(torch.Size(row.shape).numel() for row in kernels)
    assert sum(row.num_state for row in kernels) <= 4 * weights
    assert all(row.sides for row in kernels)
    assert all(len(row.matrices) == 2 for row in kernels)  # no stack of tiny matrices


def test_larger_bound_rotates_more_sides():
    kernel = nn.Parameter(torch.zeros(8, 4, 3, 3))
    rows = [BasisRotation([kernel], max_kernel_state=limit).summary()[0] for limit in (4, 20, None)]
    assert [row.sides for row in rows] == [("left",), ("left", "right"), ("left", "right")]
    assert "right: 11.4 numbers per weight > 4 (max_kernel_state)" in rows[0].why


def test_stack_of_stacks_of_matrices_stays_one():
    (row,) = BasisRotation([nn.Parameter(torch.zeros(2, 3, 20, 24))]).summary()
    assert row.matrices == (2, 3, 20, 24)


def lazy_network():
    return nn.Sequential(nn.LazyLinear(8), nn.Tanh(), nn.LazyLinear(6), nn.Linear(6, 4))


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(
            lambda m: BasisRotation(m.parameters()), marks=pytest.mark.filterwarnings("ignore")
        ),
        BasisRotation,
        lambda m: BasisRotation(param_groups(m)),
    ],
    ids=["parameters", "module", "param_groups"],
)
def test_lazy_modules_train_as_others_do(make):
    weights = []
    for when in ("before", "after"):
        torch.manual_seed(0)
        model = lazy_network()
        if when == "before":
            optimizer = make(model)
        torch.manual_seed(1)
        model(random(8, 5))
        if when == "after":
            optimizer = make(model)
        for time in range(12):
            model(random(8, 5, seed=time)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        weights.append(list(model.parameters()))
    torch.testing.assert_close(*weights, rtol=0, atol=0)


def test_saved_state_is_loaded_once_lazy_shapes_are_known():
    def model():
        return nn.ModuleDict({"lm_head": nn.LazyLinear(6)})

    trained, fresh = model(), model()
    optimizers = [BasisRotation(trained), BasisRotation(fresh)]
    trained["lm_head"](random(8, 5)).sum().backward()
    optimizers[0].step()
    fresh["lm_head"](random(8, 5))
    optimizers[1].load_state_dict(optimizers[0].state_dict())
    # A head gets AdamW, so its state has no bases.
    assert optimizers[1].state[fresh["lm_head"].weight].keys() == {"step", "exp_avg", "exp_avg_sq"}


def test_lazy_parameters_are_summarized():
    row, *_ = BasisRotation(lazy_network()).summary()
    assert row.why == "lazy: decided when its shape is known"


def test_lazy_fused_projection_is_refused_in_groups():
    with pytest.raises(ValueError, match=r"qkv.weight may be a fused projection"):
        param_groups(nn.ModuleDict({"qkv": nn.LazyLinear(18)}))


def test_lazy_fused_projection_is_split_with_its_module():
    model = nn.ModuleDict({"qkv": nn.LazyLinear(18)})
    optimizer = BasisRotation(model)
    model["qkv"](random(4, 6)).sum().backward()
    optimizer.step()
    assert optimizer.state[model["qkv"].weight]["left_basis"].shape == (3, 6, 6)
