"""Models as their authors wrote them: what is told from names, shapes and use, fused projections, state of others."""

import warnings

import pytest
import torch
from torch import nn

from brx.optim import BasisRotation, param_groups
from tests.optim.test_state_is_the_truth import random, step


def kinds(model, **options):
    return {name: group["kind"] for group in param_groups(model, **options) for name, _ in group["params"]}


def summary(model, **options):
    rows = BasisRotation(param_groups(model, **options)).summary()
    return {row.name: row for row in rows}


class NanoGPT(nn.Module):
    """Width, number of positions and (if `vocabulary` says so) of tokens are the same, as in nanoGPT's small runs."""

    def __init__(self, tied, vocabulary=50):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocabulary, 16), nn.Embedding(16, 16)
        block = {"c_attn": nn.Linear(16, 48), "c_proj": nn.Linear(16, 16)}
        block |= {"c_fc": nn.Linear(16, 64), "mlp_proj": nn.Linear(64, 16)}
        self.h = nn.ModuleList([nn.ModuleDict(block)])
        if tied == "module":
            self.unembedding = nn.Linear(16, vocabulary, bias=False)
            self.unembedding.weight = self.wte.weight
        elif not tied:
            self.unembedding = nn.Linear(16, vocabulary, bias=False)


@pytest.mark.parametrize("tied", ["", "module", "function"])
@pytest.mark.parametrize("vocabulary", [16, 50])
def test_last_projection_is_no_head_where_width_positions_and_tokens_are_as_many(tied, vocabulary):
    found = kinds(NanoGPT(tied, vocabulary))
    assert found["h.0.mlp_proj.weight"] == "matrices"
    assert found["wpe.weight"] == "embeddings"
    assert found.get("unembedding.weight", "head") == "head"


class VisionTransformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.cls_token, self.pos_embed = nn.Parameter(torch.zeros(1, 1, 24)), nn.Parameter(torch.zeros(1, 17, 24))
        self.patches = nn.Conv2d(3, 24, 4)
        self.depthwise = nn.Conv2d(24, 24, 3, groups=24)
        self.qkv, self.scale = nn.Linear(24, 72), nn.LayerNorm((4, 24))
        self.attention = nn.MultiheadAttention(24, 2)
        self.classifier = nn.Sequential(nn.Linear(24, 12), nn.Tanh(), nn.Linear(12, 10))


def test_names_shapes_and_use_decide_and_the_summary_says_what():
    rows = summary(VisionTransformer(), split={"attention.in_proj_weight": 1})
    said = {name: (row.sides, row.why) for name, row in rows.items()}
    both = ("left", "right")
    assert said["cls_token"] == ((), "vector")
    assert said["scale.weight"] == ((), "vector")
    assert said["pos_embed"] == ((), "embedding by its name")
    assert said["patches.weight"] == (both, "kernel")
    assert said["depthwise.weight"] == (both, "kernel")
    assert said["classifier.0.weight"] == (both, "matrix")
    assert said["classifier.2.weight"] == ((), "head: the last of classifier")
    assert rows["qkv.weight"].matrices == (3, 24, 24)
    assert rows["qkv.weight"].num_state == 2 * 72 * 24 + 3 * 4 * 24 * 24
    assert rows["attention.in_proj_weight"].matrices == (1, 72, 24)
    assert rows["cls_token"].num_state == 2 * 24
    text = str(BasisRotation(param_groups(VisionTransformer())).summary())
    assert "3 x 24 x 24, rotated: left and right" in text
    assert text.splitlines()[-1].startswith("6 of 18 parameters rotated")


def test_summary_counts_the_state_that_there_is():
    model = VisionTransformer()
    optimizer = BasisRotation(param_groups(model))
    step(optimizer, list(model.parameters()), 0)
    for row in optimizer.summary():
        state = optimizer.state[model.get_parameter(row.name)]
        assert row.num_state == sum(t.numel() for n, t in state.items() if n not in ("step", "num_failed_refreshes"))
        assert row.sides == tuple(side for side in ("left", "right") if f"{side}_basis" in state)


@pytest.mark.parametrize(
    ("shape", "options", "sides", "why"),
    [
        ((8, 2048), {}, ("left",), "right: 2048 > 10 x 8 (max_aspect)"),  # LoRA's A
        ((8, 2048), {"max_aspect": None}, ("left", "right"), ""),
        ((1, 6), {}, (), ""),
        ((40, 1), {}, (), ""),
        ((20, 4), {"max_dim": 8}, ("right",), "left: 20 > max_dim"),
        ((20, 12), {"max_dim": 8}, (), ""),
        ((6, 4), {"geometry": "unilateral"}, ("right",), "left: unilateral"),
    ],
)
def test_sides_that_are_too_long_are_not_rotated_and_the_summary_says_so(shape, options, sides, why):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        (row,) = BasisRotation([nn.Parameter(torch.zeros(shape))], **options).summary()
    assert (row.sides, row.why) == (sides, ", ".join(filter(None, ["matrix" if sides else "no matrix to rotate", why])))


def test_last_layer_of_a_sequential_model_is_its_head():
    layers = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3)))
    for model, prefix in ((layers, ""), (nn.ModuleDict({"net": layers}), "net.")):
        found = kinds(model)
        assert [found[f"{prefix}{name}.weight"] for name in ("0", "2.0", "2.2")] == ["matrices", "matrices", "head"]
    assert kinds(layers, rotate=["2.2.weight"])["2.2.weight"] == "matrices"
    assert kinds(nn.Sequential(nn.Linear(6, 5)))["0.weight"] == "matrices"


class Conv1D(nn.Module):
    """transformers' module of that name: y = x W, W (in, out)."""

    def __init__(self, rows, columns):
        super().__init__()
        self.weight = nn.Parameter(random(rows, columns, seed=3))


@pytest.mark.parametrize("options", [{}, {"source": "1st", "geometry": "unilateral"}])
@pytest.mark.parametrize("make", [lambda: Conv1D(6, 18), lambda: nn.Linear(6, 18, bias=False)])
def test_fused_projection_is_trained_as_its_parts_are(make, options):
    fused = nn.ModuleDict({"c_attn": make()})
    weight, dim = fused.c_attn.weight, 1 if isinstance(fused.c_attn, Conv1D) else 0
    parts = [nn.Parameter(part.detach().clone()) for part in weight.chunk(3, dim)]
    whole, apart = (
        BasisRotation(param_groups(fused), frequency=3, **options),
        BasisRotation(parts, frequency=3, **options),
    )
    for time in range(14):
        weight.grad = random(*weight.shape, seed=time)
        for part, gradient in zip(parts, weight.grad.chunk(3, dim), strict=True):
            part.grad = gradient.clone()
        whole.step()
        apart.step()
        if time == 11:  # resumed in the middle
            saved, whole = whole.state_dict(), BasisRotation(param_groups(fused))
            whole.load_state_dict(saved)
    torch.testing.assert_close(weight.detach(), torch.cat(parts, dim).detach(), rtol=0, atol=1e-7)
    assert "left_basis" not in whole.state[weight] or whole.state[weight]["left_basis"].shape == (3, 6, 6)


def test_split_can_be_asked_for_and_what_does_not_divide_is_refused():
    model = nn.ModuleDict({"mixed": nn.Linear(6, 20), "experts": nn.ParameterDict({"up": torch.zeros(4, 6, 10)})})
    assert summary(model, split={"mixed": 2})["mixed.weight"].matrices == (2, 10, 6)
    assert summary(model, split={"experts.up": (2, -1)})["experts.up"].matrices == (4, 2, 6, 5)
    with pytest.raises(ValueError, match=r"mixed.weight of shape \(20, 6\) is not 3 equal matrices"):
        param_groups(model, split={"mixed": 3})
    with pytest.raises(ValueError, match="split='c_attn' matches no parameter"):
        param_groups(model, split={"c_attn": 3})
    with pytest.raises(ValueError, match=r"split=\(3, -2\) does not divide"):
        BasisRotation([{"params": [model["mixed"].weight], "split": (3, -2)}])
    with pytest.raises(ValueError, match=r"Invalid split=3"):
        BasisRotation([{"params": [model["mixed"].weight], "split": 3}])


def test_parameters_without_groups_are_divided_with_one_warning():
    model = nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5), nn.Linear(5, 4))
    with pytest.warns(UserWarning, match="4 parameters have no side to rotate") as caught:
        optimizer = BasisRotation(model.parameters(), lr=0.1, rest_lr=0.02)
    assert len(caught) == 1
    assert [(group["rotate"], group["lr"]) for group in optimizer.param_groups] == [(True, 0.1), (False, 0.02)]
    decay = [p for p in model.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if p.ndim < 2]
    with pytest.warns(UserWarning, match="4 parameters"):  # as transformers' Trainer groups them
        optimizer = BasisRotation([{"params": decay}, {"params": others, "weight_decay": 0.0}], lr=0.1)
    assert [(group["rotate"], group["weight_decay"]) for group in optimizer.param_groups] == [(True, 0.01), (False, 0)]
    step(optimizer, list(model.parameters()), 0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        grouped = BasisRotation(param_groups(model), lr=0.1, rest_lr=0.02)
    assert {group["kind"]: group["lr"] for group in grouped.param_groups}["vectors"] == 0.02


def train(model, optimizer, first, last):
    for time in range(first, last):
        step(optimizer, list(model.parameters()), time)


def two_models():
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5), nn.Linear(5, 4)))
    return models


def assert_equal(model, other, **tolerance):
    for parameter, twin in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(parameter, twin, **tolerance)


def test_adamw_is_continued_and_its_bases_come_later():
    model, other = two_models()
    adamw = torch.optim.AdamW(model.parameters(), lr=0.01)
    train(model, adamw, 0, 20)
    other.load_state_dict(model.state_dict())
    twin = torch.optim.AdamW(other.parameters(), lr=0.01)
    twin.load_state_dict(adamw.state_dict())
    optimizer = BasisRotation(param_groups(model), lr=0.01, frequency=10, first_refresh=5)
    optimizer.take_over(adamw)
    for one, its in ((model, optimizer), (other, twin)):
        train(one, its, 20, 24)  # the first basis is due at the fifth update from here
    assert_equal(model, other, rtol=0, atol=1e-6)
    train(model, optimizer, 24, 25)
    state = optimizer.state[model[0].weight]
    U, L = state["left_basis"], state["left_covariance"]
    torch.testing.assert_close(U.T @ U, torch.eye(5), rtol=0, atol=1e-5)
    rotated = U.T @ L @ U
    torch.testing.assert_close(rotated, rotated.diag().diag(), rtol=0, atol=1e-6 * float(rotated.max()))


def test_soap_is_continued_in_its_bases():
    soap = pytest.importorskip("pytorch_optimizer").SOAP
    options = {"lr": 0.01, "betas": (0.9, 0.999), "weight_decay": 0.0, "eps": 1e-12}
    model, other = two_models()
    first, twin = (soap(one.parameters(), precondition_frequency=100, **options) for one in (model, other))
    train(model, first, 0, 15)
    train(other, twin, 0, 15)
    optimizer = BasisRotation(param_groups(model, rotate=["2.weight"]), frequency=None, **options)
    optimizer.take_over(first)
    train(model, optimizer, 15, 18)
    train(other, twin, 15, 18)
    assert_equal(model, other, rtol=0, atol=1e-5)


def test_state_that_cannot_be_taken_over_is_refused():
    (model, _), options = two_models(), {"lr": 0.1}
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = BasisRotation(param_groups(model))
    with pytest.raises(ValueError, match="SGD has no state"):
        optimizer.take_over(sgd)
    train(model, sgd, 0, 1)
    with pytest.raises(ValueError, match=r"0.weight of shape \(5, 6\): its state has momentum_buffer"):
        optimizer.take_over(sgd)
    soap = pytest.importorskip("pytorch_optimizer").SOAP(model.parameters(), **options)
    train(model, soap, 0, 2)
    with pytest.raises(ValueError, match="bases of left, right are no state of left"):
        BasisRotation(param_groups(model), geometry="unilateral").take_over(soap)
    assert not optimizer.state


def test_state_can_be_written_as_safetensors(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    model, _ = two_models()
    optimizer = BasisRotation(param_groups(model))
    train(model, optimizer, 0, 11)
    saved = optimizer.state_dict()
    flat = {f"{number}.{name}": value for number, own in saved["state"].items() for name, value in own.items()}
    safetensors.save_file(flat, tmp_path / "state.safetensors")
    read = safetensors.load_file(tmp_path / "state.safetensors")
    for key, value in flat.items():
        assert torch.equal(read[key], value), key


def test_compiled_train_step_leaves_the_optimizer_out():
    (model, other), tokens = two_models(), random(8, 6)
    optimizers = [BasisRotation(param_groups(one), lr=0.01, frequency=3) for one in (model, other)]

    def train_step(one, optimizer):
        optimizer.zero_grad()
        one(tokens).square().mean().backward()
        optimizer.step()

    compiled = torch.compile(train_step, backend="eager")
    for _ in range(13):
        compiled(model, optimizers[0])
        train_step(other, optimizers[1])
    assert_equal(model, other)
