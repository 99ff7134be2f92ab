"""Stage counts against every value that the paper prints, and against a model worked out by hand."""

import pytest

from brx.errors import UserError
from brx.planning.stage_count import DEVICES_GB, GB, LLAMAS, ModelShape, block_memory, stage_count

PRINTED = {
    "Llama 3.2 1B": ["16", "6", "4", "2", "1"],
    "Llama 3.2 3B": ["28", "10", "6", "3", "2"],
    "LLaMA 1-7B": ["32", "16", "11", "5", "3"],
    "LLaMA 1-13B": [">= 80", "40", "20", "8", "5"],
    "LLaMA 1-33B": [">= 120", "60", "60", "20", "12"],
    "LLaMA 1-65B": [">= 160", ">= 160", "80", "40", "20"],
    # The paper prints >= 512 where its own rule, P >= 2 L, gives 252.
    "Llama 3.1 405B": [">= 252", ">= 252", ">= 252", ">= 252", "126"],
}


@pytest.mark.parametrize("model", LLAMAS, ids=lambda model: model.name)
def test_the_papers_table(model):
    assert [str(stage_count(model, GB * memory)) for memory in DEVICES_GB] == PRINTED[model.name]


def test_every_model_is_checked():
    assert [model.name for model in LLAMAS] == list(PRINTED)


def test_by_hand():
    model = ModelShape("tiny", hidden=10, heads=2, params_per_block=1000, blocks=7)
    # 16 1000 + 34 100 3 10 + 5 3 2 100^2
    assert block_memory(model, sequence_length=100, batch_size=3) == 16_000 + 102_000 + 300_000
    assert str(stage_count(model, 418_000, 100, 3)) == "7"  # exactly one block
    assert str(stage_count(model, 417_999, 100, 3)) == ">= 14"
    assert str(stage_count(model, 3 * 418_000, 100, 3)) == "3"
    assert str(stage_count(model, 100 * 418_000, 100, 3)) == "1"


@pytest.mark.parametrize("memory", [0.0, -1.0, float("nan"), float("inf")])
def test_memory_must_be_a_size(memory):
    with pytest.raises(UserError, match="--memory must be more than 0"):
        stage_count(LLAMAS[0], memory)
