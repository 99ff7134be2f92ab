"""A model of the user's own: what is read off it, how it begins, what is refused in one line."""

import random
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from brx.config.loading import apply_overrides
from brx.config.schema import OwnModelConfig
from brx.config.user_code import allowed
from brx.errors import UserError
from brx.model import head as head_module
from brx.model.checks import check_model
from brx.model.description import one_model
from brx.model.head import loss_of
from brx.model.sizes import block_activation_bytes, count_parameters, stage_forward_flops
from brx.model.stage import make_stage, partition, whole_model

EXAMPLES = Path(__file__).parents[2] / "examples/models"
EXAMPLE = f"{EXAMPLES}/conv_mixer.py:ConvMixer"
ROPE_GPT = f"{EXAMPLES}/rope_gpt.py:RopeGPT"
MODEL = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width)
        BLOCK

    def forward(self, x):
        return FORWARD

class Mine(nn.Module):
    def __init__(self, vocabulary_size, sequence_length, blocks, width, scale: float = 1.0):
        super().__init__()
        self.embed = nn.Embedding(vocabulary_size, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.head = nn.Linear(width, vocabulary_size)
        MODEL
"""
SETTINGS = {"blocks": 4, "width": 8, "sequence_length": 6}


@pytest.fixture(autouse=True)
def _may_run_code():
    with allowed():
        yield


def own(name, **options):
    return OwnModelConfig(**{"class": name}, **(SETTINGS | options))


def written(folder, *, block="pass", forward="x + self.linear(x)", model="pass"):
    text = MODEL.replace("BLOCK", block).replace("FORWARD", forward).replace("MODEL", model)
    (folder / "mine.py").write_text(text)
    return f"{folder / 'mine.py'}:Mine"


def logits(stage, token_ids):
    x = stage.embedding(token_ids)
    for block in stage.blocks.values():
        x = block(x)
    return stage.head(x)


def test_matrices_are_those_inside_blocks():
    stage = whole_model(own(EXAMPLE), 11, seed=0)
    inside = {
        f"blocks.{block}.{name}.weight"
        for block in range(4)
        for name in ("value", "gate", "up", "down")
    }
    assert stage.matrices == inside == stage.cast


def test_model_says_which_matrices_there_are(tmp_path):
    model = "self.matrices = lambda: ['blocks.1.linear.weight']"
    stage = whole_model(own(written(tmp_path, model=model)), 11, seed=0)
    assert stage.matrices == {"blocks.1.linear.weight"}


@pytest.mark.parametrize("name", [EXAMPLE, ROPE_GPT])
def test_initial_weights_do_not_depend_on_the_cut(name):
    config, weights = own(name), {}
    for blocks in partition(config.blocks, 3):
        torch.rand(3)  # other numbers are drawn in between
        weights |= dict(make_stage(config, 11, blocks, seed=5).named_parameters())
    expected = dict(whole_model(config, 11, seed=5).named_parameters())
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


def test_norms_of_rope_gpt_begin_with_one():
    stage = whole_model(own(ROPE_GPT), 11, seed=0)
    norms = [weight for name, weight in stage.named_parameters() if "norm" in name]
    assert len(norms) == 2 * 4 + 1
    assert all((weight == 1).all() for weight in norms)


@pytest.mark.parametrize("name", [EXAMPLE, ROPE_GPT])
def test_examples_see_no_later_token(name):
    stage = whole_model(own(name), 11, seed=0).double()
    token_ids = torch.randint(11, (2, 6))
    changed = token_ids.clone()
    changed[:, 4:] = (changed[:, 4:] + 1) % 11
    first, second = logits(stage, token_ids), logits(stage, changed)
    torch.testing.assert_close(first[:, :4], second[:, :4], rtol=0, atol=1e-12)
    assert not torch.allclose(first[:, 4:], second[:, 4:])


def test_rope_gpt_sees_the_order_of_tokens():
    # Without positions, a single block's last token would see the tokens before it as a set.
    stage = whole_model(own(ROPE_GPT, blocks=1), 11, seed=0).double()
    last = [logits(stage, torch.tensor([ids]))[0, -1] for ids in ([3, 7, 5], [7, 3, 5])]
    assert not torch.allclose(*last, rtol=0, atol=1e-12)


def test_initial_weights_follow_the_seed():
    first, second = (whole_model(own(EXAMPLE), 11, seed) for seed in (0, 1))
    name = "blocks.0.value.weight"
    assert not torch.equal(first.get_parameter(name), second.get_parameter(name))


def test_constructor_leaves_the_random_numbers_alone():
    state = torch.get_rng_state()
    whole_model(own(EXAMPLE), 11, seed=3)
    assert torch.equal(torch.get_rng_state(), state)


def test_counts_are_the_real_models():
    config = own(EXAMPLE, kernel=3)
    stage = whole_model(config, 11, seed=0)
    total = sum(parameter.numel() for parameter in stage.parameters())
    in_blocks = sum(parameter.numel() for parameter in stage.blocks.parameters())
    assert count_parameters(config, 11) == (total, in_blocks)


def test_noted_counts_serve_who_may_not_run_code(monkeypatch):
    facts = {"num_parameters": 7, "num_in_blocks": 5}
    config = OwnModelConfig.model_validate({"class": EXAMPLE, **SETTINGS, "facts": facts})
    monkeypatch.setattr("brx.model.sizes.is_allowed", lambda: False)
    assert count_parameters(config, 11) == (7, 5)


def test_flops_are_the_closed_form():
    config = own(EXAMPLE, kernel=3)
    linear = 2 * 8 * 8 * (2 + 4 + 4)
    convolution = 2 * 8 * 3  # per channel
    per_token = 4 * (linear + convolution) + 2 * 8 * 11
    # The convolution sees the kernel's zeros as well, and gives one output per token.
    assert stage_forward_flops(config, 11, range(4), 2) == 2 * 6 * per_token


@pytest.mark.parametrize("examples_at_once", [1, 2])
def test_loss_in_chunks_is_the_loss(examples_at_once, monkeypatch):
    stage = whole_model(own(EXAMPLE), 11, seed=0).double()
    generator = torch.Generator().manual_seed(0)
    stream = torch.randn(5, 6, 8, generator=generator, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(11, (5, 6), generator=generator)
    wanted = [stream, *stage.head.parameters()]
    expected = torch.nn.functional.cross_entropy(
        stage.head(stream).flatten(0, 1), targets.flatten()
    )
    monkeypatch.setattr(head_module, "CHUNK_LOGITS", examples_at_once * 6 * 11)
    found = loss_of(stage.head, stream, targets, 11)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(
        torch.autograd.grad(found, wanted), torch.autograd.grad(expected, wanted)
    )


def test_loss_in_chunks_keeps_the_forward_passes_weights(monkeypatch):
    head = torch.nn.Linear(8, 11)
    stream, targets = torch.randn(3, 6, 8), torch.zeros(3, 6, dtype=torch.int64)
    monkeypatch.setattr(head_module, "CHUNK_LOGITS", 66)
    plain = torch.nn.functional.cross_entropy(head(stream).flatten(0, 1), targets.flatten())
    (expected,) = torch.autograd.grad(plain, head.weight)
    loss, weight = loss_of(head, stream, targets, 11), head.weight
    head._parameters["weight"] = torch.nn.Parameter(torch.zeros(11, 8))  # as the engine binds
    (found,) = torch.autograd.grad(loss, weight)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    ("parts", "options", "message"),
    [
        ({"model": "del self.head"}, {}, "has no part `head`"),
        ({"model": "self.blocks = nn.Sequential(*self.blocks)"}, {}, "torch.nn.ModuleList"),
        ({"model": "self.blocks.append(Block(width))"}, {}, "has 5 blocks where model.blocks is 4"),
        (
            {"forward": "self.linear(x)[..., :4]"},
            {},
            "blocks.0 returns a stream of shape (2, 6, 4), must be (2, 6, 8): examples, tokens,"
            " model.width",
        ),
        (
            {"model": "self.head = nn.Linear(width, 5)"},
            {},
            "head returns logits of shape (2, 6, 5), must be (2, 6, 11)",
        ),
        (
            {"model": "self.head.weight = self.embed.weight"},
            {},
            "embed.weight and head.weight are one weight, used in stages 0 and 1",
        ),
        (
            {"model": "self.blocks[3].linear.weight = self.blocks[0].linear.weight"},
            {},
            "blocks.0.linear.weight and blocks.3.linear.weight are one weight",
        ),
        (
            {},
            {"kernel": 3},
            "takes no option 'kernel' (known: sequence_length, blocks, width, scale)",
        ),
        ({}, {"scale": "large"}, "model.scale: input should be a valid number, got 'large'"),
        ({"forward": "x @ self.linear.weight[:3]"}, {}, "mine.py:12: RuntimeError"),
        ({"model": "self.extra = nn.Linear(3, 3)"}, {}, "extra.weight is in none of embed, blocks"),
        (
            {"block": "self.linear.bias.requires_grad_(False)"},
            {},
            "blocks.0.linear.bias does not train; register it as a buffer",
        ),
        (
            {"block": "self.unused = nn.Linear(3, 3)"},
            {},
            "blocks.0: unused.weight and 1 more are without effect",
        ),
        (
            {"forward": "nn.functional.dropout(self.linear(x), 0.1)"},
            {},
            "blocks.0 draws random numbers (bernoulli_)",
        ),
        (
            {
                "block": "self.register_buffer('seen', torch.zeros(()))",
                "forward": "x + self.linear(x) + self.seen.add_(1)",
            },
            {},
            "blocks.0.seen is changed by the forward pass",
        ),
        (
            {
                "forward": "(self.register_buffer('cache', x.detach()), x + self.linear(x))[1]",
            },
            {},
            "blocks.0.cache is changed by the forward pass",
        ),
        (
            {
                "block": "self.register_buffer('seen', torch.zeros(()))",
                "forward": "(delattr(self, 'seen'), x + self.linear(x))[1]",
            },
            {},
            "blocks.0.seen is changed by the forward pass",
        ),
        (
            {
                "block": "self.passes = 0",
                "forward": "(setattr(self, 'passes', self.passes + 1), x + self.linear(x))[1]",
            },
            {},
            "blocks.0.passes is changed by each forward pass",
        ),
        (
            {
                "block": "self.linear.norms = []",
                "forward": "(self.linear.norms.append(0.0), x + self.linear(x))[1]",
            },
            {},
            "blocks.0.linear.norms is changed by each forward pass",
        ),
        (
            {
                "block": "self.memory = None",
                "forward": "(x + self.linear(x) + (0 if self.memory is None else self.memory),"
                " setattr(self, 'memory', x.detach()))[0]",
            },
            {},
            "blocks.0.memory is changed by each forward pass and read by the next one",
        ),
        (
            {
                "block": "self.memory = ()",
                "forward": "(x + self.linear(x) + sum(self.memory),"
                " setattr(self, 'memory', (x.detach(),)))[0]",
            },
            {},
            "blocks.0.memory is changed by each forward pass and read by the next one",
        ),
        (
            {
                "block": "self.table = torch.ones(width)",
                "forward": "x + self.linear(x) * self.table",
            },
            {},
            "where the tensor table is not: register it as a buffer",
        ),
        (
            {"forward": "x + self.linear(x) * torch.ones(x.shape[-1])"},
            {},
            "where a tensor that it uses is not: register it as a buffer, or make it on x.device",
        ),
        (
            {"forward": "x + self.linear(x) * x.sum().item()"},
            {},
            "without numbers; docs/models.md says what to do if it needs them",
        ),
        (
            {
                "model": "kept = []; self.embed.register_forward_hook("
                "lambda module, given, stream: kept.append(given[0]));"
                " [block.register_forward_pre_hook("
                "lambda module, given: (given[0] + kept[-1][..., None],)) for block in self.blocks]"
            },
            {},
            "blocks.0 uses what a part before it has kept",
        ),
        ({"forward": "(self.linear(x), x.sum())"}, {}, "set has_auxiliary_loss = True"),
        (
            {"forward": "(x + self.linear(x), None)"},
            {},
            "returns a tuple (Tensor, NoneType), must be the stream alone, or a pair",
        ),
        (
            {"block": "self.linear.bfloat16()"},
            {},
            "blocks.0.linear.weight is in torch.bfloat16, must be torch.float32; runtime.precision",
        ),
        ({"block": "raise ValueError('no')"}, {}, "mine.py:9: ValueError: no"),
        ({"block": "raise SystemExit(0)"}, {}, "mine.py:9: SystemExit: 0"),
        (
            {
                "model": "shared = nn.Parameter(torch.randn(vocabulary_size, width));"
                " self.embed.weight = shared; self.head.weight = shared"
            },
            {},
            "embed.weight and head.weight are one weight, used in stages 0 and 1",
        ),
        (
            {"model": "self.head.weight.data = self.embed.weight.data"},
            {},
            "embed.weight and head.weight share memory",
        ),
        (
            {
                "block": "self.scale = torch.tensor(1.0, requires_grad=True)",
                "forward": "x + self.linear(x) * self.scale",
            },
            {},
            "blocks.0 trains a tensor of shape () that is none of its parameters",
        ),
        (
            {
                "block": "self.kept = [self.linear.weight]",
                "forward": "x + self.linear(x) @ self.kept[0]",
            },
            {},
            "blocks.0 trains a tensor of shape (8, 8) that is none of its parameters",
        ),
        (
            {
                "model": "[setattr(block, 'kept', [self.embed]) for block in self.blocks]",
                "forward": "x + self.linear(x) + self.kept[0].weight[0]",
            },
            {},
            "blocks.2 is in stage 1 and uses embed.weight, a weight of stage 0",
        ),
        (
            {"forward": "x + self.linear(x) * __import__('random').random()"},
            {},
            "blocks.0 draws random numbers (random)",
        ),
        (
            {"forward": "x + self.linear(x) * __import__('numpy').random.rand()"},
            {},
            "blocks.0 draws random numbers (numpy.random)",
        ),
        (
            {"forward": "x + self.linear(x) + self.linear.weight.data.mul_(0.9)[0]"},
            {},
            "blocks.0.linear.weight is changed by the forward pass",
        ),
        (
            {"model": "self.embed = nn.Embedding(vocabulary_size, width, max_norm=1.0)"},
            {},
            "embed.weight is changed by the forward pass",
        ),
        (
            {"model": "self.embed = nn.Embedding(vocabulary_size, width, sparse=True)"},
            {},
            "embed.weight has sparse gradients",
        ),
        (
            {"forward": "x.detach() + self.linear(x.detach())"},
            {},
            "blocks.0 lets no gradient through to its input",
        ),
        (
            {"model": "self.blocks[1] = nn.LazyLinear(width)"},
            {},
            "blocks.1.weight gets its shape in the first forward pass",
        ),
        (
            {"model": "self.matrices = lambda: ['blocks.1.line.weight']"},
            {},
            "matrices(): blocks.1.line.weight is no weight, did you mean 'blocks.1.linear.weight'?",
        ),
        (
            {"model": "self.matrices = lambda: ['blocks.1.linear.bias']"},
            {},
            "matrices(): blocks.1.linear.bias has the shape (8,); a matrix has two dimensions",
        ),
        (
            {"model": "self.matrices = lambda: None"},
            {},
            "matrices() must give a list of names of weights, gave None",
        ),
        (
            {"model": "self.matrices = lambda: 1 / 0"},
            {},
            "mine.py:20: ZeroDivisionError: division by zero",
        ),
    ],
)
def test_what_cannot_train_is_one_line(parts, options, message, tmp_path):
    config = own(written(tmp_path, **parts), **options)
    with pytest.raises(UserError, match=rf"\A[^\n]*{re.escape(message)}[^\n]*\Z"):
        check_model(config, 11, partition(4, 2))


INITIALIZE = """pass

    def initialize(self, seed):
        """


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        (
            "self.head.weight = self.embed.weight",
            "initialize ties or unties head.weight; only the constructor may decide",
        ),
        (
            "self.blocks[0].linear.bias = None",
            "initialize adds or removes the weight blocks.0.linear.bias",
        ),
        (
            "self.head.bias = nn.Parameter(torch.zeros(3))",
            "initialize changes the shape of head.bias from (11,) to (3,)",
        ),
    ],
)
def test_initialize_may_change_values_only(statement, message, tmp_path):
    config = own(written(tmp_path, model=INITIALIZE + statement))
    with pytest.raises(UserError, match=rf"\A[^\n]*{re.escape(message)}[^\n]*\Z"):
        whole_model(config, 11, seed=0)


def test_initialize_may_replace_a_weight(tmp_path):
    statement = "self.head.bias = nn.Parameter(torch.ones(11))"
    stage = whole_model(own(written(tmp_path, model=INITIALIZE + statement)), 11, seed=0)
    assert torch.equal(stage.head.bias, torch.ones(11))


@pytest.mark.parametrize(
    "values", ["torch.empty(width)", "torch.Tensor(width)", "torch.full((width,), float('nan'))"]
)
def test_weight_without_initial_values_is_one_line(values, tmp_path):
    parts = {
        "block": f"self.scale = nn.Parameter({values})",
        "forward": "self.linear(x) * self.scale",
    }
    config = own(written(tmp_path, **parts))
    check_model(config, 11, partition(4, 2))
    with pytest.raises(UserError, match=r"\A[^\n]*blocks\.0\.scale begins with nan[^\n]*\Z"):
        whole_model(config, 11, seed=0)


def test_file_that_is_not_there_has_no_options():
    with pytest.raises(UserError, match=r"\A[^\n]*gone\.py cannot be read[^\n]*\Z"):
        one_model("gone.py:Mine")


def test_example_can_train():
    check_model(own(EXAMPLE), 11, partition(4, 4))


def test_cache_that_the_first_pass_fills_can_train(tmp_path):
    forward = "(setattr(self, 'length', x.shape[1]), x + self.linear(x))[1]"
    parts = {"block": "self.length = 0; self.limit = float('nan')", "forward": forward}
    check_model(own(written(tmp_path, **parts)), 11, partition(4, 2))


@pytest.mark.parametrize(
    "value", ["__import__('time').time()", "x + 1", "(x + 1, 'text')", "[x + 1]"]
)
def test_block_may_keep_what_it_does_not_read_again(value, tmp_path):
    forward = f"(setattr(self, 'kept', {value}), x + self.linear(x))[1]"
    check_model(own(written(tmp_path, forward=forward)), 11, partition(4, 2))


CHECKPOINT = "__import__('torch.utils.checkpoint').utils.checkpoint.checkpoint"


def test_checkpoint_in_a_block_needs_every_weight_version(tmp_path):
    forward = f"x + {CHECKPOINT}(self.linear, x, use_reentrant=False)"
    config = own(written(tmp_path, forward=forward))
    check_model(config, 11, partition(4, 2))
    with pytest.raises(UserError, match=r"blocks\.0 computes activations again") as refusal:
        check_model(config, 11, partition(4, 2), may_recompute=False)
    assert "\n" not in str(refusal.value)


def test_attention_may_be_checkpointed(tmp_path):
    attention = "lambda y: nn.functional.scaled_dot_product_attention(y, y, y)"
    forward = f"self.linear({CHECKPOINT}({attention}, x, use_reentrant=False))"
    config = own(written(tmp_path, forward=forward))
    check_model(config, 11, partition(4, 2))
    check_model(config, 11, partition(4, 2), recomputes=True)


def test_block_that_cannot_be_recomputed_is_one_line(tmp_path):
    model = "self.blocks = nn.ModuleList(torch.jit.script(block) for block in self.blocks)"
    config = own(written(tmp_path, model=model))
    check_model(config, 11, partition(4, 2))
    with pytest.raises(UserError, match=r"\A[^\n]*with pipeline\.recompute: [^\n]*\Z"):
        check_model(config, 11, partition(4, 2), recomputes=True)


def test_long_error_of_a_block_is_cut(tmp_path):
    forward = "(_ for _ in ()).throw(ValueError(5000 * 'no '))"
    with pytest.raises(UserError, match=r"ValueError: (no )+\.\.\. ") as refusal:
        check_model(own(written(tmp_path, forward=forward)), 11, partition(4, 2))
    assert len(str(refusal.value)) < 1000


def test_scripted_block_is_a_block(tmp_path):
    model = "self.blocks = nn.ModuleList(torch.jit.script(block) for block in self.blocks)"
    expected = {f"blocks.{index}.linear.weight" for index in range(4)}
    stage = whole_model(own(written(tmp_path, model=model)), 11, seed=0)
    assert stage.matrices == expected
    assert not stage.cast  # what a script casts is not known


@pytest.mark.parametrize(
    "block",
    [
        "self.scale = float(self.linear.weight.detach().std())",
        "nn.utils.parametrizations.orthogonal(self.linear)",
    ],
)
def test_constructor_may_ask_for_values(block, tmp_path):
    config = own(written(tmp_path, block=block, model="self.blocks[1] = self.blocks[0]"))
    check_model(config, 11, partition(4, 2))
    sizes = {name: weight.numel() for name, weight in whole_model(config, 11, 0).named_parameters()}
    assert count_parameters(config, 11)[0] == sum(sizes.values())


def test_function_that_a_plan_cannot_cast_is_planned_in_fp32(tmp_path):
    block = "self.rnn = nn.GRU(width, width, batch_first=True)"
    config = own(written(tmp_path, block=block, forward="x + self.linear(self.rnn(x)[0])"))
    sizes = [
        block_activation_bytes(config, 0, 2, bf16=bf16, device_type="cpu") for bf16 in (True, False)
    ]
    assert sizes[0] == sizes[1] > 0


def test_block_without_checkpoint_needs_no_old_weights(tmp_path):
    check_model(own(written(tmp_path)), 11, partition(4, 2), may_recompute=False)


def test_shared_weight_in_one_stage_can_train(tmp_path):
    model = "self.head.weight = self.embed.weight"
    check_model(own(written(tmp_path, model=model)), 11, [range(4)])


NO_WEIGHTS_AT_THE_END = "self.blocks[3] = nn.GELU()"
FIRST_BLOCK_TWICE = "self.blocks[1] = self.blocks[0]"


@pytest.mark.parametrize("model", [NO_WEIGHTS_AT_THE_END, FIRST_BLOCK_TWICE])
def test_stage_with_some_weights_of_its_own_can_train(model, tmp_path):
    check_model(own(written(tmp_path, model=model)), 11, partition(4, 2))


def test_stage_without_weights_is_one_line(tmp_path):
    config = own(written(tmp_path, model="self.blocks[1] = nn.GELU()"))
    with pytest.raises(UserError, match=r"stage 1 \(blocks 1 to 1\) has no weights"):
        check_model(config, 11, partition(4, 4))


def test_block_that_only_its_list_tells_apart_is_tried(tmp_path):
    parts = {
        "model": "self.blocks[2].rates = [0.5]",
        "block": "self.rates = [0.0]",
        "forward": "x + nn.functional.dropout(self.linear(x), self.rates[0])",
    }
    config = own(written(tmp_path, **parts))
    with pytest.raises(UserError, match=r"blocks\.2 draws random numbers"):
        check_model(config, 11, partition(4, 2))


def test_trained_attention_mask_has_an_effect(tmp_path):
    block = "self.bias = nn.Parameter(torch.zeros(6, 6))"
    forward = (
        "x + nn.functional.scaled_dot_product_attention(*[self.linear(x)] * 3, attn_mask=self.bias)"
    )
    check_model(own(written(tmp_path, block=block, forward=forward)), 11, partition(4, 2))


def test_shared_parameter_counts_once(tmp_path):
    model = (
        "shared = nn.Parameter(torch.randn(vocabulary_size, width));"
        " self.embed.weight = shared; self.head.weight = shared"
    )
    config = own(written(tmp_path, model=model))
    stage = whole_model(config, 11, seed=0)
    assert count_parameters(config, 11)[0] == sum(weight.numel() for weight in stage.parameters())


def test_numpys_and_pythons_numbers_follow_the_seed(tmp_path):
    model = "import random, numpy; self.head.bias.data.fill_(random.random() + numpy.random.rand())"
    config = own(written(tmp_path, model=model))
    first, again, other = (whole_model(config, 11, seed).head.bias for seed in (3, 3, 4))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_constructor_leaves_numpys_and_pythons_numbers_alone(tmp_path):
    model = "import random, numpy; random.random(); numpy.random.rand()"
    random.seed(5)
    np.random.seed(5)  # noqa: NPY002
    whole_model(own(written(tmp_path, model=model)), 11, seed=3)
    found = random.random(), np.random.rand()  # noqa: NPY002
    random.seed(5)
    np.random.seed(5)  # noqa: NPY002
    assert found == (random.random(), np.random.rand())  # noqa: NPY002


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_stream_has_the_weights_dtype(dtype, tmp_path):
    model = (
        f"self.embed.register_forward_hook(lambda module, given, stream: stream.to(torch.{dtype}))"
    )
    stage = whole_model(own(written(tmp_path, model=model)), 11, seed=0)
    tokens = torch.zeros(2, 6, dtype=torch.int64)
    assert stage(tokens, tokens).stream.dtype == torch.float32


def test_weight_that_autocast_does_not_cast_keeps_its_older_versions_exact(tmp_path):
    forward = "x + nn.functional.linear(x, self.linear.weight * 1.3) + self.other(x)"
    block = "self.other = nn.Linear(width, width)"
    stage = whole_model(own(written(tmp_path, block=block, forward=forward)), 11, seed=0)
    assert stage.cast == {f"blocks.{index}.other.weight" for index in range(4)}


@pytest.mark.parametrize("device", ["x.device.type", "'cpu'"])
def test_weight_that_is_used_without_autocast_keeps_its_older_versions_exact(device, tmp_path):
    # As mixtures of experts do with their router.
    forward = f"x + self.linear(x) + torch.autocast({device}, enabled=False)(self.other)(x)"
    block = "self.other = nn.Linear(width, width)"
    config = own(written(tmp_path, block=block, forward=forward))
    check_model(config, 11, partition(4, 2), recomputes=True)
    stage = whole_model(config, 11, seed=0)
    assert stage.cast == {f"blocks.{index}.linear.weight" for index in range(4)}


def test_weight_whose_use_is_not_seen_keeps_its_older_versions_exact(tmp_path):
    forward = "self.linear(x) if x.is_meta else self.linear(self.other(x))"
    block = "self.other = nn.Linear(width, width)"
    stage = whole_model(own(written(tmp_path, block=block, forward=forward)), 11, seed=0)
    assert stage.cast == {f"blocks.{index}.linear.weight" for index in range(4)}


def test_plans_cast_nothing_where_a_block_switches_autocast_off(tmp_path):
    settings = {"bf16": True, "device_type": "cpu"}
    kept = []
    for forward in (
        "x + torch.autocast(x.device.type, enabled=False)(self.linear)(x.float())",
        "x + self.linear(x.float())",
    ):
        config = own(written(tmp_path, forward=forward))
        kept.append(block_activation_bytes(config, 0, 2, **settings))
    assert kept[0] > kept[1]


REVERSIBLE = """

class Again(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, linear):
        ctx.x, ctx.linear = x.detach(), linear
        return linear(x)

    @staticmethod
    def backward(ctx, gradient):
        with torch.enable_grad():
            x = ctx.x.requires_grad_()
            torch.autograd.backward(ctx.linear(x), gradient)
        return x.grad, None
"""


def test_gradients_from_an_inner_backward_pass_are_refused(tmp_path):
    name = written(tmp_path, forward="x + Again.apply(x, self.linear)")
    with (tmp_path / "mine.py").open("a") as file:
        file.write(REVERSIBLE)
    message = r"\A[^\n]*linear.weight and 1 more are given gradients by a backward pass [^\n]*\Z"
    with pytest.raises(UserError, match=message):
        check_model(own(name), 11, partition(4, 2))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere.py:Mine", "nowhere.py cannot be read: No such file or directory"),
        ("llamma", "unknown model 'llamma', did you mean 'llama'?"),
        ("mine.py", "class must name a class of the file, mine.py:CLASS"),
    ],
)
def test_wrong_class_is_one_line(name, message):
    with pytest.raises(UserError, match=rf"\A[^\n]*{re.escape(message)}[^\n]*\Z"):
        apply_overrides({"model": {"class": name}}, [], "here")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("Mine = 3", "Mine is no torch.nn.Module of"),
        (
            "import nowhere_at_all",
            "No module named 'nowhere_at_all' (install it, or put its folder",
        ),
        ("from .other import Mine", "for relative imports, name package.module:NAME"),
    ],
)
def test_class_that_cannot_be_had_is_one_line(text, message, tmp_path):
    (tmp_path / "mine.py").write_text(text)
    with pytest.raises(UserError, match=rf"\A[^\n]*{re.escape(message)}[^\n]*\Z"):
        check_model(own(f"{tmp_path / 'mine.py'}:Mine"), 11, [range(4)])


def test_file_does_not_see_another_folders_file(tmp_path):
    for folder, text in (("first", "class Mine: pass"), ("second", "from .other import Mine")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / ("other.py" if folder == "first" else "mine.py")).write_text(text)
    with pytest.raises(UserError, match="Mine is no torch"):
        check_model(own(f"{tmp_path / 'first' / 'other.py'}:Mine"), 11, [range(4)])
    with pytest.raises(UserError, match="for relative imports, name package"):
        check_model(own(f"{tmp_path / 'second' / 'mine.py'}:Mine"), 11, [range(4)])


def test_edited_file_is_another_model(tmp_path):
    config = own(written(tmp_path))
    written(tmp_path, forward="x - self.linear(x)")
    with pytest.raises(UserError, match="its file has changed since this run was set up"):
        check_model(config, 11, [range(4)])
