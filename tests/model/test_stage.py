"""The model: the paper's parameter counts, partition, initialization, and the stages put together."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from brx.config.schema import ModelConfig, MoEConfig
from brx.model.stage import Stage, count_parameters, initialize, is_block_matrix, partition, whole_model

SMALL = ModelConfig(blocks=5, width=8, heads=2, sequence_length=6)


@pytest.mark.parametrize(
    ("width", "blocks", "heads", "expected"),
    [(384, 32, 6, 95_590_993), (1728, 24, 27, 1_035_004_753), (2688, 32, 42, 3_047_005_777)],
)
def test_parameter_count_of_the_papers_models(width, blocks, heads, expected):
    with torch.device("meta"):
        model = whole_model(ModelConfig(width=width, blocks=blocks, heads=heads), vocabulary_size=50257)
    assert count_parameters([model]) == expected


@given(items=st.integers(1, 100), parts=st.integers(1, 100))
def test_partition_is_contiguous_and_even(items, parts):
    parts = min(items, parts)
    ranges = partition(items, parts)
    assert [item for part in ranges for item in part] == list(range(items))
    sizes = [len(part) for part in ranges]
    assert max(sizes) - min(sizes) <= 1
    assert min(sizes) >= 1


@pytest.mark.parametrize("stages", [1, 2, 3, 5])
def test_initial_weights_do_not_depend_on_the_partition(stages):
    whole = whole_model(SMALL, 11)
    initialize(whole, SMALL.blocks, seed=3)
    expected = dict(whole.named_parameters())
    found = {}
    for blocks in partition(SMALL.blocks, stages):
        stage = Stage(SMALL, 11, blocks)
        initialize(stage, SMALL.blocks, seed=3)
        found |= dict(stage.named_parameters())
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_initial_weights_follow_the_seed_and_the_scheme():
    config = ModelConfig(blocks=2, width=64, heads=2, sequence_length=6)
    first, second = whole_model(config, 256), whole_model(config, 256)
    initialize(first, 2, seed=0)
    initialize(second, 2, seed=1)
    weights = dict(first.named_parameters())
    assert not torch.equal(weights["head.linear.weight"], dict(second.named_parameters())["head.linear.weight"])
    assert weights["blocks.0.mlp.up.weight"].std().item() == pytest.approx(0.02, rel=0.05)
    assert weights["blocks.1.mlp.down.weight"].std().item() == pytest.approx(0.01, rel=0.05)
    assert weights["blocks.0.attention.projection.bias"].abs().max() == 0
    assert torch.equal(weights["head.norm.weight"], torch.ones(64))


def test_stages_in_a_row_are_the_model():
    tokens = torch.randint(11, (3, 7), generator=torch.Generator().manual_seed(0))
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    whole = whole_model(SMALL, 11)
    initialize(whole, SMALL.blocks, seed=0)
    expected = whole(inputs, targets).loss
    x = inputs
    for blocks in partition(SMALL.blocks, 3):
        stage = Stage(SMALL, 11, blocks)
        initialize(stage, SMALL.blocks, seed=0)
        x, loss, _ = stage(x, targets)
    assert torch.equal(loss, expected)


def test_attention_is_causal():
    whole = whole_model(SMALL, 11)
    initialize(whole, SMALL.blocks, seed=0)
    hidden = []
    whole.head.register_forward_pre_hook(lambda module, args: hidden.append(args[0]))
    whole.head.loss = lambda x, targets: whole.head(x)
    tokens = torch.arange(6).unsqueeze(0)
    changed = tokens.clone()
    changed[0, 4] = 9
    whole(tokens, tokens)
    whole(changed, tokens)
    assert torch.equal(hidden[0][:, :4], hidden[1][:, :4])
    assert not torch.equal(hidden[0][:, 4:], hidden[1][:, 4:])


def test_rotated_parameters_are_the_matrices_of_attention_and_mlp():
    config = SMALL.model_copy(update={"moe": MoEConfig(experts=4, every=2)})
    stage = whole_model(config, 11)
    rotated = {name for name, _ in stage.named_parameters() if is_block_matrix(name)}
    assert {name.partition(".")[2].partition(".")[2] for name in rotated} == {
        "attention.query.weight",
        "attention.key.weight",
        "attention.value.weight",
        "attention.projection.weight",
        "mlp.up.weight",
        "mlp.down.weight",
    }
    assert len(rotated) == 6 * SMALL.blocks
    assert dict(stage.named_parameters())["blocks.1.mlp.up.weight"].shape == (4, 32, 8)
