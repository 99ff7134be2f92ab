"""Stage counts against a model worked out by hand; tests/paper/test_llama.py has the paper's."""

import pytest

from brx.errors import UserError
from brx.planning.stage_count import ModelShape, block_memory, stage_count

MODEL = ModelShape("tiny", hidden=10, heads=2, params_per_block=1000, blocks=7)


def test_by_hand():
    # 16 1000 + 34 100 3 10 + 5 3 2 100^2
    assert block_memory(MODEL, sequence_length=100, batch_size=3) == 16_000 + 102_000 + 300_000
    assert str(stage_count(MODEL, 418_000, 100, 3)) == "7"  # exactly one block
    assert str(stage_count(MODEL, 417_999, 100, 3)) == ">= 14"
    assert str(stage_count(MODEL, 3 * 418_000, 100, 3)) == "3"
    assert str(stage_count(MODEL, 100 * 418_000, 100, 3)) == "1"


@pytest.mark.parametrize("memory", [0.0, -1.0, float("nan"), float("inf")])
def test_memory_must_be_a_size(memory):
    with pytest.raises(UserError, match="--memory must be more than 0"):
        stage_count(MODEL, memory)
