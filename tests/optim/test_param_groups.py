"""Models as their authors wrote them: the roles found from names, shapes and use, and each
parameter's update."""

import copy
import gc
import json
import warnings
import weakref

import pytest
import torch
from torch import nn
from torch.distributed.fsdp._common_utils import FSDP_FLATTENED

from brx.optim import BasisRotation, param_groups
from tests.optim.helpers import random, take_steps, train


def kinds(model, **options):
    found = {}
    for group in param_groups(model, **options):
        found |= {name: group["kind"] for name, _ in group["params"]}
    return found


def summary(model, **options):
    return {row.name: row for row in BasisRotation(param_groups(model, **options)).summary()}


def nano_gpt(tied, vocabulary):
    """Width, number of positions and (if `vocabulary` says so) of tokens are the same, as in
    nanoGPT's small runs."""
    block = {"c_attn": nn.Linear(16, 48), "c_proj": nn.Linear(16, 16)}
    block |= {"c_fc": nn.Linear(16, 64), "mlp_proj": nn.Linear(64, 16)}
    tables = {"wte": nn.Embedding(vocabulary, 16), "wpe": nn.Embedding(16, 16)}
    model = nn.ModuleDict({**tables, "h": nn.ModuleList([nn.ModuleDict(block)])})
    if tied != "function":
        model["unembedding"] = nn.Linear(16, vocabulary, bias=False)
    if tied == "module":
        model["unembedding"].weight = model["wte"].weight
    return model


@pytest.mark.parametrize("tied", ["", "module", "function"])
@pytest.mark.parametrize("vocabulary", [16, 50])
def test_last_projection_is_no_head(tied, vocabulary):
    found = kinds(nano_gpt(tied, vocabulary))
    assert found["h.0.mlp_proj.weight"] == "matrices"
    assert found["wte.weight"] == found["wpe.weight"] == "embeddings"
    assert found.get("unembedding.weight", "head") == "head"


LAYERS = nn.Sequential(
    nn.Linear(6, 5), nn.ReLU(), nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3))
)
PAIR = {"a": copy.deepcopy(LAYERS), "b": nn.Linear(4, 2)}
ONE_ATTENTION = nn.ModuleDict({"query": nn.Linear(4, 2), "value": nn.Linear(4, 2)})
ATTENTION = nn.ModuleList([ONE_ATTENTION, copy.deepcopy(ONE_ATTENTION)])
HEAD = nn.ModuleDict({"head": copy.deepcopy(LAYERS)})
TIED = nn.ModuleDict({"proj": nn.Linear(4, 9), "emb": nn.Embedding(9, 4), "last": nn.Linear(4, 5)})
TIED["emb"].weight = TIED["proj"].weight


@pytest.mark.parametrize(
    ("model", "options", "expected"),
    [
        (LAYERS, {}, {"0": "matrices", "2.0": "matrices", "2.2": "head"}),
        (
            nn.ModuleDict({"net": LAYERS}),
            {},
            {"net.0": "matrices", "net.2.0": "matrices", "net.2.2": "head"},
        ),
        (nn.Sequential(nn.Linear(6, 5)), {}, {"0": "matrices"}),
        (
            nn.Sequential(nn.Conv2d(3, 4, 3), nn.Linear(4, 4)),
            {"keep": ["1.*"]},
            {"0": "kernels", "1": "kept"},
        ),
        (
            nn.ModuleDict({"body": nn.Linear(4, 4), "head": nn.Linear(4, 2)}),
            {},
            {"body": "matrices", "head": "head"},
        ),
        (
            # One head per task, or per depth.
            nn.ModuleDict({"body": nn.Linear(4, 4), "heads": nn.ModuleDict(PAIR)}),
            {},
            {"body": "matrices", "heads.a.0": "matrices", "heads.a.2.2": "head", "heads.b": "head"},
        ),
        (
            # The value and the policy of an agent.
            nn.ModuleDict({"actor": HEAD, "critic": copy.deepcopy(HEAD)}),
            {},
            {"actor.head.0": "matrices", "actor.head.2.2": "head", "critic.head.2.2": "head"},
        ),
        (
            nn.ModuleDict({"action_head": nn.Linear(4, 3), "classification_head": HEAD}),
            {},
            {"action_head": "head", "classification_head.head.2.2": "head"},
        ),
        (
            # As in EfficientNet.
            nn.ModuleDict({"conv_head": nn.Conv2d(4, 8, 1), "classifier": nn.Linear(8, 3)}),
            {},
            {"conv_head": "kernels", "classifier": "head"},
        ),
        (
            # The heads of an attention make no outputs of the model.
            nn.ModuleDict({"sa": nn.ModuleDict({"heads": ATTENTION}), "lm_head": nn.Linear(4, 9)}),
            {},
            {"sa.heads.0.query": "matrices", "sa.heads.1.value": "matrices", "lm_head": "head"},
        ),
        (
            nn.ModuleDict({"sa_heads": nn.ModuleDict({"proj": nn.Linear(4, 4)})}),
            {},
            {"sa_heads.proj": "matrices"},
        ),
        (
            # As GPT-J has it.
            nn.Sequential(nn.ModuleDict({"fc_out": nn.Linear(4, 4)}), nn.ReLU()),
            {},
            {"0.fc_out": "matrices"},
        ),
        (
            nn.ModuleDict({"module": LAYERS[2], "net": nn.ModuleDict({"fc": nn.Linear(3, 3)})}),
            {},
            {"net.fc": "head"},
        ),
        (
            # The embedding's weight, by the name it had first.
            TIED,
            {},
            {"proj": "embeddings", "last": "matrices"},
        ),
        (
            nn.ModuleDict({"head": nn.Linear(4, 2)}),
            {"rotate": ["head.weight"]},
            {"head": "matrices"},
        ),
    ],
)
def test_kinds(model, options, expected):
    found = kinds(model, **options)
    assert {name: found[f"{name}.weight"] for name in expected} == expected


def vision_transformer():
    model = nn.ModuleDict(
        {
            "patches": nn.Conv2d(3, 24, 4),
            "depthwise": nn.Conv2d(24, 24, 3, groups=24),
            "qkv": nn.Linear(24, 72),
            "scale": nn.LayerNorm((4, 24)),
            "attention": nn.MultiheadAttention(24, 2),
            "classifier": nn.Sequential(nn.Linear(24, 12), nn.Tanh(), nn.Linear(12, 10)),
        }
    )
    model.cls_token = nn.Parameter(torch.zeros(1, 1, 24))
    model.pos_embed = nn.Parameter(torch.zeros(1, 17, 24))
    return model


BOTH = ("left", "right")
VISION_TRANSFORMER = {
    "cls_token": ((), "vector"),
    "pos_embed": ((), "embedding by its name"),
    "patches.weight": (("left",), "kernel, right: 7.0 numbers per weight > 4 (max_kernel_state)"),
    "depthwise.weight": (("right",), "kernel, left: 8.1 numbers per weight > 4 (max_kernel_state)"),
    "qkv.weight": (BOTH, "matrix"),
    "scale.weight": ((), "vector"),
    "attention.in_proj_weight": (BOTH, "matrix"),
    "attention.out_proj.weight": (BOTH, "matrix"),
    "classifier.0.weight": (BOTH, "matrix"),
    "classifier.2.weight": ((), "head: the last of classifier"),
}
"""The rotated sides of each parameter that is no bias, and why."""


def test_summary_says_why_each_side_is_rotated():
    rows = summary(vision_transformer(), split={"attention.in_proj_weight": 1})
    found = {name: (row.sides, row.why) for name, row in rows.items()}
    assert {name: one for name, one in found.items() if "bias" not in name} == VISION_TRANSFORMER


def test_split_of_one_keeps_a_projection_whole():
    rows = summary(vision_transformer(), split={"attention.in_proj_weight": 1})
    assert rows["attention.in_proj_weight"].matrices == (1, 72, 24)


def test_summary_prints_a_table():
    text = str(BasisRotation(param_groups(vision_transformer())).summary())
    assert "3 x 24 x 24, rotated: left and right" in text
    assert text.splitlines()[-1].startswith("6 of 18 parameters rotated")


@pytest.mark.parametrize(
    ("shape", "options", "sides", "why"),
    [
        # LoRA's A
        ((8, 2048), {}, ("left",), "matrix, right: 2048 > 10 x 8 (max_aspect)"),
        ((8, 2048), {"max_aspect": None}, ("left", "right"), "matrix"),
        ((50_257, 2), {}, ("right",), "matrix, left: 50257 > max_dim"),
        ((1, 6), {}, (), "vector"),
        ((40, 1), {}, (), "vector"),
        ((20, 4), {"max_dim": 8}, ("right",), "matrix, left: 20 > max_dim"),
        ((20, 12), {"max_dim": 8}, (), "matrix, left: 20 > max_dim, right: 12 > max_dim"),
        ((6, 4), {"geometry": "unilateral"}, ("right",), "matrix, left: unilateral"),
    ],
)
def test_sides_that_are_too_long_are_not_rotated(shape, options, sides, why):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        (row,) = BasisRotation([nn.Parameter(torch.zeros(shape))], **options).summary()
    assert (row.sides, row.why) == (sides, why)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"rotate": ["tail.*"]}, r"rotate='tail\.\*' matches no parameter; there are body.weight"),
        ({"rotate": ["body.*"]}, r"body\.bias is a vector"),
        ({"rotate": ["head.weight"], "keep": ["head.*"]}, "one of keep"),
        ({"split": {"body": 3}}, r"body.weight of shape \(4, 4\) is not 3 equal matrices"),
        ({"split": {"body": (4, -3)}}, r"body.weight of shape \(4, 4\) is not 4 equal matrices"),
        ({"split": {"c_attn": 3}}, "split='c_attn' matches no parameter"),
        ({"keep": "2.weight"}, "keep='2.weight' matches no parameter"),
    ],
)
def test_corrections_that_cannot_be_are_refused(options, told):
    with pytest.raises(ValueError, match=told):
        param_groups(nn.ModuleDict({"body": nn.Linear(4, 4), "head": nn.Linear(4, 2)}), **options)


class Conv1D(nn.Module):
    """transformers' module of that name: y = x W, W (in, out)."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(random(6, 18, seed=3))


@pytest.mark.parametrize("options", [{}, {"source": "1st", "geometry": "unilateral"}])
@pytest.mark.parametrize(("make", "dim"), [(Conv1D, 1), (lambda: nn.Linear(6, 18, bias=False), 0)])
def test_fused_projection_is_trained_as_its_parts(make, dim, options):
    fused = nn.ModuleDict({"c_attn": make()})
    weight = fused.c_attn.weight
    parts = [nn.Parameter(part.detach().clone()) for part in weight.chunk(3, dim)]
    gradients = [random(*weight.shape, seed=time) for time in range(14)]
    by_part = zip(*(gradient.chunk(3, dim) for gradient in gradients), strict=True)
    take_steps(BasisRotation(parts, frequency=3, **options), parts, list(by_part))
    whole = BasisRotation(param_groups(fused), frequency=3, **options)
    take_steps(whole, [weight], [gradients[:12]])
    # Resumed in the middle, from a file that has lists for pairs.
    saved = whole.state_dict()
    saved["param_groups"] = json.loads(json.dumps(saved["param_groups"]))
    whole = BasisRotation(param_groups(fused))
    whole.load_state_dict(saved)
    take_steps(whole, [weight], [gradients[12:]])
    torch.testing.assert_close(weight.detach(), torch.cat(parts, dim).detach(), rtol=0, atol=1e-7)


def test_parts_of_a_fused_projection_have_bases():
    fused = nn.ModuleDict({"c_attn": nn.Linear(6, 18, bias=False)})
    optimizer = BasisRotation(param_groups(fused))
    train(optimizer, [fused.c_attn.weight], 0, 1)
    assert optimizer.state[fused.c_attn.weight]["left_basis"].shape == (3, 6, 6)


@pytest.fixture
def mixed():
    """A projection whose name tells nothing, and a stack of experts."""
    linear = type("NormedLinear", (nn.Linear,), {})(6, 20)  # no norm, whatever its name has
    experts = nn.ParameterDict({"up": torch.zeros(4, 6, 10)})
    return nn.ModuleDict({"mixed": linear, "experts": experts})


@pytest.mark.parametrize(
    ("split", "name", "expected"),
    [
        ({"mixed": 2}, "mixed.weight", (2, 10, 6)),
        ({"experts.up": (2, -1)}, "experts.up", (4, 2, 6, 5)),
        ({"experts.up": [2, -1]}, "experts.up", (4, 2, 6, 5)),
    ],
)
def test_split_can_be_asked_for(mixed, split, name, expected):
    assert summary(mixed, split=split)[name].matrices == expected


def test_split_into_unequal_parts_is_refused(mixed):
    with pytest.raises(ValueError, match=r"split=\(3, -2\) does not divide"):
        BasisRotation([{"params": [mixed["mixed"].weight], "split": (3, -2)}])


def test_single_vector_is_no_plural():
    with pytest.warns(UserWarning, match="1 parameter has no side to rotate and gets AdamW"):
        BasisRotation(torch.nn.Linear(4, 4).parameters(), lr=0.1)


def test_one_group_given_is_one_group_kept():
    model, _ = two_models()
    with pytest.warns(UserWarning, match="4 parameters have no side to rotate") as caught:
        optimizer = BasisRotation(model.parameters(), lr=0.1)
    assert [warning.filename for warning in caught] == [__file__]
    assert "embeddings or heads:" not in str(caught[0].message)  # no parameter is named like one
    (group,) = optimizer.param_groups
    assert group["params"] == list(model.parameters())
    are_matrices = [parameter.ndim == 2 for parameter in model.parameters()]
    assert [row.sides != () for row in optimizer.summary()] == are_matrices


def test_added_group_of_vectors_warns():
    model, _ = two_models()
    vectors = [p for p in model.parameters() if p.ndim == 1]
    optimizer = BasisRotation([p for p in model.parameters() if p.ndim == 2], lr=0.1)
    with pytest.warns(UserWarning, match="4 parameters"):  # as transformers' Trainer groups them
        optimizer.add_param_group({"params": vectors, "weight_decay": 0.0})
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.01, 0]


def test_names_of_tables_are_warned_of():
    model = nano_gpt("", 50)
    with pytest.warns(UserWarning, match="heads: wte.weight, wpe.weight"):
        BasisRotation(model.named_parameters())


def test_groups_of_param_groups_do_not_warn():
    model, _ = two_models()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        BasisRotation(param_groups(model), lr=0.1, rest_lr=0.02)
        BasisRotation(model, lr=0.1)


def test_groups_by_kind_have_the_rest_rate():
    model, _ = two_models()
    groups = param_groups(model, rotate=["2.weight"])
    optimizer = BasisRotation(groups, lr=0.1, rest_lr=0.02)
    rates = {group["kind"]: group["lr"] for group in optimizer.param_groups}
    assert rates == {"matrices": 0.1, "vectors": 0.02}


def test_rest_rate_follows_the_schedule():
    model, twin = two_models()
    options = {"lr": 0.1, "rest_lr": 0.02, "weight_decay": 0.0}
    with pytest.warns(UserWarning, match="4 parameters"):
        one_group = BasisRotation(model.parameters(), **options)
    by_kind = BasisRotation(param_groups(twin, rotate=["2.weight"]), **options)
    for time in range(12):
        for group in (*one_group.param_groups, *by_kind.param_groups):
            group["lr"] *= 0.9  # as a schedule does
        go(model, one_group, time, time + 1)
        go(twin, by_kind, time, time + 1)
    assert_equal(model, twin, rtol=0, atol=1e-7)


def test_rest_rate_without_a_rate_is_refused():
    with pytest.raises(ValueError, match=r"rest_lr=0.1: needs an lr above 0"):
        BasisRotation([nn.Parameter(torch.ones(2, 2))], lr=0.0, rest_lr=0.1)


@pytest.mark.parametrize("name", ["rest_lr", "compiled", "model"])
def test_arguments_for_all_groups_are_refused_in_one(name):
    matrix = nn.Parameter(torch.ones(2, 2))
    with pytest.raises(ValueError, match=f"Invalid {name} in a group: it is an argument for all"):
        BasisRotation([{"params": [matrix], name: 0.1}])


def test_module_decides_as_param_groups_does():
    for model in (nano_gpt("", 50), vision_transformer(), LAYERS):
        by_module = BasisRotation(model).summary()
        assert {row.name: row for row in by_module} == summary(model)


def test_module_trains_as_its_groups_do():
    model, twin = nano_gpt("", 50), nano_gpt("", 50)
    twin.load_state_dict(model.state_dict())
    go(model, BasisRotation(model, frequency=3), 0, 10)
    go(twin, BasisRotation(model.named_parameters(), model=model), 0, 0)
    grouped = BasisRotation(param_groups(twin), frequency=3)
    go(twin, grouped, 0, 10)
    assert_equal(model, twin, rtol=0, atol=0)


def test_decay_groups_with_their_module_leave_embeddings_alone():
    model = nano_gpt("", 50)
    decay = {"params": [p for p in model.parameters() if p.ndim >= 2], "weight_decay": 0.1}
    no_decay = {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0}
    optimizer = BasisRotation([decay, no_decay], model=model)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    go(model, optimizer, 0, 3)
    rotated = [p for p in model.parameters() if "left_basis" in optimizer.state[p]]
    expected = [p for n, p in model.named_parameters() if n.startswith("h.") and p.ndim == 2]
    assert list(map(id, rotated)) == list(map(id, expected))
    assert optimizer.state[model["h"][0]["c_attn"].weight]["left_basis"].shape == (3, 16, 16)


def shard_as_accelerate_does(model, optimizer):
    """Give the model other parameters, as FSDP2 does, and put them into the optimizer's groups."""
    replaced = {}
    for layer in model.modules():
        for name, parameter in layer.named_parameters(recurse=False):
            replaced[parameter] = nn.Parameter(parameter.detach().clone())
            setattr(layer, name, replaced[parameter])
    for group in optimizer.param_groups:
        group["params"] = [replaced[parameter] for parameter in group["params"]]


@pytest.mark.parametrize("named", [True, False], ids=["module", "groups"])
def test_replaced_parameters_keep_their_roles(named):
    model, twin = nano_gpt("", 50), nano_gpt("", 50)
    twin.load_state_dict(model.state_dict())
    groups = model if named else [{"params": list(model.parameters())}]
    optimizer = BasisRotation(groups, model=model, frequency=3)
    shard_as_accelerate_does(model, optimizer)
    go(model, optimizer, 0, 10)
    go(twin, BasisRotation(twin, frequency=3), 0, 10)
    assert_equal(model, twin, rtol=0, atol=0)


def test_replaced_parameters_are_freed():
    model = nano_gpt("", 50)
    optimizer = BasisRotation(model)
    go(model, optimizer, 0, 1)
    before = weakref.ref(model["wte"].weight)
    shard_as_accelerate_does(model, optimizer)
    optimizer.state.clear()
    go(model, optimizer, 1, 2)
    gc.collect()
    assert before() is None


def test_layer_that_joins_the_model_has_its_role():
    model = nano_gpt("", 50)
    optimizer = BasisRotation(model)
    model["segments"] = nn.Embedding(20, 16)
    optimizer.add_param_group({"params": model["segments"].named_parameters()})
    assert optimizer.summary()[-1].why == "embedding"


def test_later_groups_need_no_names():
    model = nano_gpt("", 50)
    optimizer = BasisRotation(model)
    model["segments"] = nn.Embedding(20, 16)
    optimizer.add_param_group({"params": model["segments"].parameters()})
    temperature = nn.Parameter(torch.ones(()))  # a loss has it, not the model
    optimizer.add_param_group({"params": temperature})
    names = [group["param_names"] for group in optimizer.param_groups[1:]]
    assert names == [["segments.weight"], ["0 of group 2"]]
    assert [row.why for row in optimizer.summary()[-2:]] == ["embedding", "vector"]


def test_group_without_names_is_refused_where_the_program_gave_earlier_names():
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    groups = [{"params": list(first.named_parameters()), "rotate": False}]
    optimizer = BasisRotation(groups, lr=1e-3)
    with pytest.raises(ValueError, match="with/without names"):
        optimizer.add_param_group({"params": second.parameters()})
    assert len(optimizer.param_groups) == 1


def test_vectors_that_are_not_the_models_do_not_warn():
    model, _ = two_models()
    groups = [{"params": list(model.parameters())}, {"params": [nn.Parameter(torch.ones(()))]}]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        BasisRotation(groups, model=model)


def test_matrices_that_are_not_the_models_warn():
    model, other = two_models()
    both = [*model.parameters(), *other.parameters()]
    with pytest.warns(UserWarning, match="not in the model that was given: parameter 6 of group 0"):
        BasisRotation(both, model=model)


def test_model_that_is_none_is_refused():
    with pytest.raises(ValueError, match=r"Invalid model=3: must be a torch.nn.Module"):
        BasisRotation([nn.Parameter(torch.ones(2, 2))], model=3)


def test_groups_of_a_user_may_have_a_kind():
    model = nano_gpt("", 50)
    optimizer = BasisRotation([{"params": list(model.parameters()), "kind": "main"}], model=model)
    assert optimizer.summary()[0].why == "embedding"
    go(model, optimizer, 0, 2)
    assert "left_basis" not in optimizer.state[model["wte"].weight]


def test_copy_of_a_module_trains_alike():
    model, _ = two_models()
    optimizer = BasisRotation(model, lr=0.01)
    go(model, optimizer, 0, 5)
    copied, its_optimizer = copy.deepcopy((model, optimizer))
    go(model, optimizer, 5, 12)
    go(copied, its_optimizer, 5, 12)
    assert_equal(model, copied, rtol=0, atol=0)


def test_resumed_module_trains_alike():
    model, twin = two_models()
    optimizer = BasisRotation(model, lr=0.01)
    go(model, optimizer, 0, 5)
    resumed = BasisRotation(twin, lr=0.5)
    twin.load_state_dict(model.state_dict())
    resumed.load_state_dict(optimizer.state_dict())
    go(model, optimizer, 5, 12)
    go(twin, resumed, 5, 12)
    assert_equal(model, twin, rtol=0, atol=0)


def test_file_of_two_groups_becomes_one():
    # As they were saved when a group with vectors became two.
    model, twin = two_models()
    with pytest.warns(UserWarning, match="4 parameters"):
        optimizer = BasisRotation(model.parameters(), lr=0.1, rest_lr=0.02)
    with pytest.warns(UserWarning, match="4 parameters"):
        resumed = BasisRotation(twin.parameters())
    go(model, optimizer, 0, 5)
    saved = optimizer.state_dict()
    (group,) = saved["param_groups"]
    shapes = [parameter.ndim for parameter in model.parameters()]
    places = [place for place, ndim in enumerate(shapes) if ndim == 2]
    places += [place for place, ndim in enumerate(shapes) if ndim < 2]
    first = {**group, "params": [0, 1]}
    second = {
        **group,
        "params": [2, 3, 4, 5],
        "rotate": False,
        "lr": 0.02,
        "why": "no matrix to rotate",
    }
    for old in (first, second):
        del old["rest_factor"], old["max_kernel_state"]
    state = {number: saved["state"][place] for number, place in enumerate(places)}
    resumed.load_state_dict({"state": state, "param_groups": [first, second]})
    twin.load_state_dict(model.state_dict())
    go(model, optimizer, 5, 12)
    go(twin, resumed, 5, 12)
    assert_equal(model, twin, rtol=0, atol=0)


# The second is FSDP's mark with `use_orig_params`.
@pytest.mark.parametrize("mark", ["_is_flat_param", FSDP_FLATTENED])
@pytest.mark.parametrize("options", [{"rotate": False}, {}], ids=str)
def test_parameters_of_fsdp1_are_refused(mark, options):
    flat = nn.Parameter(torch.ones(12))
    setattr(flat, mark, True)
    with pytest.raises(ValueError, match="fully_shard"):
        BasisRotation([flat], **options)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_kernel_is_one_matrix(memory_format):
    kernels = [random(6, 2, 3, 3, seed=seed).to(memory_format=memory_format) for seed in range(14)]
    kernel, matrix = nn.Parameter(kernels[0]), nn.Parameter(kernels[0].reshape(6, 18).clone())
    optimizer = BasisRotation([kernel], max_kernel_state=None, frequency=2)
    take_steps(optimizer, [kernel], [kernels[1:]])
    flattened = [gradient.reshape(6, 18) for gradient in kernels[1:]]
    take_steps(BasisRotation([matrix], frequency=2), [matrix], [flattened])
    assert torch.equal(kernel.reshape(6, 18), matrix)
    state = optimizer.state[kernel]
    assert state["exp_avg"].shape == (6, 2, 3, 3)
    assert state["left_basis"].shape == (6, 6)
    assert state["right_basis"].shape == (18, 18)


def two_models():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5), nn.Linear(5, 4))
    return model, copy.deepcopy(model)


def go(model, optimizer, first, last):
    train(optimizer, list(model.parameters()), first, last)


def assert_equal(model, other, **tolerance):
    torch.testing.assert_close(list(model.parameters()), list(other.parameters()), **tolerance)


@pytest.mark.parametrize("rotate", [True, False])
def test_tensors_with_gaps_are_trained_alike(rotate):
    base, plain = random(4, 6), random(4, 6)[:, ::2].contiguous().requires_grad_()
    strided = base[:, ::2].detach().requires_grad_()
    for parameter, layout in ((strided, torch.Tensor.clone), (plain, torch.Tensor.contiguous)):
        optimizer = BasisRotation([parameter], rotate=rotate)
        for time in range(12):
            parameter.grad = layout(random(3, 4, seed=time).T)
            optimizer.step()
    assert torch.equal(strided, plain)
    assert torch.equal(base[:, 1::2], random(4, 6)[:, 1::2])


@pytest.mark.parametrize("rotate", [True, False])
@pytest.mark.parametrize("scale", [0.0, 1e-30, 1e-20, 1.0])
def test_eps_of_zero_bounds_the_steps(scale, rotate):
    parameter = nn.Parameter(torch.ones(4, 4))
    options = {"eps": 0.0, "lr": 0.1, "weight_decay": 0.0, "frequency": 2}
    optimizer = BasisRotation([parameter], rotate=rotate, **options)
    gradients = [scale * random(4, 4, seed=time) for time in range(13)]
    take_steps(optimizer, [parameter], [gradients])
    assert torch.isfinite(parameter).all()
    assert (parameter - 1).abs().max() < 13 * 0.1 * 4


def test_compiled_train_step_leaves_the_optimizer_out():
    (model, other), inputs = two_models(), random(8, 6)
    optimizers = [BasisRotation(param_groups(one), lr=0.01, frequency=3) for one in (model, other)]

    def train_step(one, optimizer):
        optimizer.zero_grad()
        one(inputs).square().mean().backward()
        optimizer.step()

    compiled = torch.compile(train_step, backend="eager")
    for _ in range(13):
        compiled(model, optimizers[0])
        train_step(other, optimizers[1])
    assert_equal(model, other)
