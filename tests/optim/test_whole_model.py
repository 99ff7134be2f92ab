"""One optimizer for a whole model: groups that get AdamW, longest sides, convolution kernels, `param_groups`."""

import pytest
import torch
from torch import nn
from torch.distributed.fsdp._common_utils import FSDP_FLATTENED

from brx.optim import BasisRotation, param_groups
from tests.optim.test_state_is_the_truth import parameters, random, step


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_group_that_is_not_rotated_equals_adamw(dtype):
    shapes = [(), (5,), (3, 4), (2, 3, 2, 2)]
    ours = [nn.Parameter(random(*shape, seed=k).to(dtype)) for k, shape in enumerate(shapes)]
    theirs = [nn.Parameter(parameter.detach().clone()) for parameter in ours]
    optimizer = BasisRotation(ours, lr=0.01, weight_decay=0.1, rotate=False)
    adamw = torch.optim.AdamW(theirs, lr=0.01, weight_decay=0.1, fused=True)
    for time in range(5):
        for k, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            one.grad = random(*one.shape, seed=10 * time + k).to(dtype)
            other.grad = one.grad.clone()
        optimizer.step()
        adamw.step()
    assert all(map(torch.equal, ours, theirs))
    assert set(optimizer.state[ours[1]]) == {"step", "exp_avg", "exp_avg_sq"}


def test_half_precision_vectors_keep_their_state_in_fp32():
    parameter = nn.Parameter(torch.ones(5, dtype=torch.bfloat16))
    optimizer = BasisRotation([parameter], rotate=False, lr=0.1)
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert optimizer.state[parameter]["exp_avg_sq"].dtype == torch.float32
    torch.testing.assert_close(parameter.detach(), torch.full((5,), 1 - 0.1 - 0.001, dtype=torch.bfloat16))


def test_weights_that_do_not_lie_one_after_another():
    base, plain = random(4, 6), random(4, 6)[:, ::2].contiguous()
    strided = base[:, ::2].detach().requires_grad_()
    plain.requires_grad_()
    for parameter in (strided, plain):
        optimizer = BasisRotation([parameter], rotate=False)
        parameter.grad = random(3, 4, seed=1).T
        optimizer.step()
    assert torch.equal(strided, plain)
    assert torch.equal(base[:, 1::2], random(4, 6)[:, 1::2])


@pytest.mark.parametrize(("max_dim", "sides"), [(3, set()), (4, {"right_basis"}), (6, {"left_basis", "right_basis"})])
def test_sides_longer_than_max_dim_are_not_rotated(max_dim, sides):
    series = parameters(1, 6, 4)
    optimizer = BasisRotation(series, max_dim=max_dim)
    step(optimizer, series, 0)
    state = optimizer.state[series[0]]
    assert {name for name in state if name.endswith("_basis")} == sides
    assert {name for name in state if name.endswith("_covariance")} == {s.replace("basis", "covariance") for s in sides}


def test_vocabulary_is_not_rotated_by_default():
    parameter = nn.Parameter(torch.zeros(50_257, 2))
    optimizer = BasisRotation([parameter])
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert "left_basis" not in optimizer.state[parameter]
    assert optimizer.state[parameter]["right_basis"].shape == (2, 2)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_kernel_is_one_matrix(memory_format):
    kernel = nn.Parameter(random(6, 2, 3, 3).to(memory_format=memory_format))
    matrix = nn.Parameter(random(6, 2, 3, 3).reshape(6, 18))
    optimizers = [BasisRotation([kernel], flatten=True, frequency=2), BasisRotation([matrix], frequency=2)]
    for time in range(13):
        kernel.grad = random(6, 2, 3, 3, seed=time + 1).to(memory_format=memory_format)
        matrix.grad = random(6, 2, 3, 3, seed=time + 1).reshape(6, 18)
        for optimizer in optimizers:
            optimizer.step()
    assert torch.equal(kernel.reshape(6, 18), matrix)
    state = optimizers[0].state[kernel]
    assert state["exp_avg"].shape == kernel.shape
    assert state["left_basis"].shape == (6, 6)
    assert state["right_basis"].shape == (18, 18)


def test_eps_of_zero_with_tiny_and_zero_gradients():
    for rotate in (True, False):
        for scale in (0.0, 1e-30, 1e-20, 1.0):
            parameter = nn.Parameter(torch.ones(4, 4))
            optimizer = BasisRotation([parameter], eps=0.0, lr=0.1, weight_decay=0.0, frequency=2, rotate=rotate)
            for time in range(13):
                parameter.grad = scale * random(4, 4, seed=time)
                optimizer.step()
            assert torch.isfinite(parameter).all()
            assert (parameter - 1).abs().max() < 13 * 0.1 * 4


def test_maximize_is_the_negative_gradient():
    up, down = parameters(2, 6, 4), parameters(2, 6, 4)
    ascent = BasisRotation([{"params": up[:1]}, {"params": up[1:], "rotate": False}], maximize=True)
    descent = BasisRotation([{"params": down[:1]}, {"params": down[1:], "rotate": False}])
    for time in range(13):
        for k in range(2):
            up[k].grad = random(6, 4, seed=10 * time + k)
            down[k].grad = -up[k].grad
        ascent.step()
        descent.step()
    assert all(map(torch.equal, up, down))


class Language(nn.Module):
    def __init__(self, tied=False):
        super().__init__()
        self.embedding = nn.Embedding(32, 8)
        self.positions = nn.Embedding(16, 8)
        self.norm = nn.LayerNorm(8)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)  # as many rows as there are positions
        self.experts = nn.Parameter(torch.zeros(2, 8, 8))
        self.unembedding = nn.Linear(8, 32, bias=False)
        if tied:
            self.unembedding.weight = self.embedding.weight


def kinds(groups):
    return {name: group["kind"] for group in groups for name, _ in group["params"]}


@pytest.mark.parametrize("tied", [False, True])
def test_param_groups_of_a_language_model(tied):
    expected = {
        "experts": "matrices",
        "embedding.weight": "embeddings",
        "positions.weight": "embeddings",
        "norm.weight": "vectors",
        "norm.bias": "vectors",
        "up.weight": "matrices",
        "up.bias": "vectors",
        "down.weight": "matrices",
        "down.bias": "vectors",
    }
    assert kinds(param_groups(Language(tied))) == expected | ({} if tied else {"unembedding.weight": "head"})


def test_param_groups_can_be_corrected():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(16, 4), nn.Linear(4, 2))
    assert kinds(param_groups(model))["0.weight"] == "kernels"
    groups = param_groups(model, keep=["3.*"])
    assert kinds(groups)["3.weight"] == "kept"
    named = nn.ModuleDict({"body": nn.Linear(4, 4), "head": nn.Linear(4, 2)})
    assert kinds(param_groups(named))["head.weight"] == "head"
    assert kinds(param_groups(named, rotate=["head.weight"]))["head.weight"] == "matrices"
    with pytest.raises(ValueError, match=r"rotate='tail\.\*' matches no parameter; there are body.weight"):
        param_groups(named, rotate=["tail.*"])
    with pytest.raises(ValueError, match=r"body\.bias is a vector"):
        param_groups(named, rotate=["body.*"])
    with pytest.raises(ValueError, match="one of keep"):
        param_groups(named, rotate=["head.weight"], keep=["head.*"])


def test_one_optimizer_trains_a_whole_model():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(11, 8), nn.Flatten(), nn.Linear(24, 16), nn.GELU(), nn.Linear(16, 11))
    optimizer = BasisRotation(param_groups(model), lr=1e-2)
    inputs, targets = torch.randint(11, (64, 3)), torch.randint(11, (64,))
    losses = []
    for _ in range(40):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 2
    assert len(optimizer.state) == len(list(model.parameters()))


@pytest.mark.parametrize("mark", ["_is_flat_param", FSDP_FLATTENED])  # the second with use_orig_params
def test_parameters_of_fsdp1_are_refused_with_advice(mark):
    flat = nn.Parameter(torch.ones(12))
    setattr(flat, mark, True)
    with pytest.raises(ValueError, match="fully_shard"):
        BasisRotation([flat], rotate=False)
    with pytest.raises(ValueError, match="fully_shard"):
        BasisRotation([flat])
