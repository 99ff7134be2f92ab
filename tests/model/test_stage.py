"""The model: partition, initialization, and the stages put together (parameter counts:
tests/train/test_presets.py)."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from brx.config.schema import GPTConfig, MoEConfig
from brx.model.stage import make_stage, partition, whole_model

SMALL = GPTConfig(blocks=5, width=8, heads=2, sequence_length=6)


@given(items=st.integers(1, 100), parts=st.integers(1, 100))
def test_partition_has_even_parts(items, parts):
    parts = min(items, parts)
    ranges = partition(items, parts)
    assert [item for part in ranges for item in part] == list(range(items))
    sizes = [len(part) for part in ranges]
    assert max(sizes) - min(sizes) <= 1
    assert min(sizes) >= 1


@pytest.mark.parametrize("num_stages", [1, 3, 5])
def test_stages_in_a_row_are_the_model(num_stages):
    tokens = torch.randint(11, (3, 7), generator=torch.Generator().manual_seed(0))
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    whole = whole_model(SMALL, 11, seed=0)
    weights = {}
    x = inputs
    for blocks in partition(SMALL.blocks, num_stages):
        stage = make_stage(SMALL, 11, blocks, seed=0)
        weights |= dict(stage.named_parameters())
        x, loss, _ = stage(x, targets)
    assert torch.equal(loss, whole(inputs, targets).loss)
    expected = dict(whole.named_parameters())
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


def initial_weights(seed):
    config = GPTConfig(blocks=2, width=64, heads=2, sequence_length=6)
    return dict(whole_model(config, 256, seed).named_parameters())


def test_initial_weights_follow_the_seed():
    first, second = (initial_weights(seed)["head.linear.weight"] for seed in (0, 1))
    assert not torch.equal(first, second)


def test_initial_weights_follow_gpt2():
    first = initial_weights(0)
    assert first["blocks.0.mlp.up.weight"].std().item() == pytest.approx(0.02, rel=0.05)
    assert first["blocks.1.mlp.down.weight"].std().item() == pytest.approx(0.01, rel=0.05)
    assert first["blocks.0.attention.projection.bias"].abs().max() == 0
    assert torch.equal(first["head.norm.weight"], torch.ones(64))


def test_attention_is_causal():
    whole = whole_model(SMALL, 11, seed=0)
    hidden = []
    whole.head.register_forward_pre_hook(lambda module, args: hidden.append(args[0]))
    whole.head.loss = lambda x, targets: whole.head(x)
    for tokens in ([0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 9, 5]):
        whole(torch.tensor([tokens]), torch.zeros(1, 6))
    assert torch.equal(hidden[0][:, :4], hidden[1][:, :4])
    assert not torch.equal(hidden[0][:, 4:], hidden[1][:, 4:])


def test_matrices_are_those_of_the_blocks():
    stage = whole_model(SMALL.model_copy(update={"moe": MoEConfig(experts=4, every=2)}), 11, seed=0)
    matrices = [f"attention.{name}" for name in ("query", "key", "value", "projection")] + [
        "mlp.up",
        "mlp.down",
    ]
    assert stage.matrices == {
        f"blocks.{block}.{name}.weight" for block in range(SMALL.blocks) for name in matrices
    }
    assert dict(stage.named_parameters())["blocks.1.mlp.up.weight"].shape == (4, 32, 8)
