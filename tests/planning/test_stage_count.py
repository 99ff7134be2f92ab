"""The paper's formula for the number of stages, by hand."""

import pytest

from brx.errors import UserError
from brx.planning.stage_count import (
    ModelShape,
    block_memory,
    parse_shape,
    stage_count,
    stage_count_notes,
)

TINY = ModelShape("tiny", hidden=10, heads=2, params_per_block=1000, blocks=7)
BLOCK = 418_000


def test_memory_of_a_block_by_hand():
    # 16 1000 + 34 100 3 10 + 5 3 2 100^2
    assert block_memory(TINY, sequence_length=100, batch_size=3) == 16_000 + 102_000 + 300_000


@pytest.mark.parametrize(
    ("memory", "expected"),
    [(BLOCK, "7"), (BLOCK - 1, ">= 14"), (3 * BLOCK, "3"), (100 * BLOCK, "1")],
)
def test_stages_by_hand(memory, expected):
    assert stage_count(TINY, memory, 100, 3) == expected


def test_no_options_are_no_model():
    assert parse_shape(None, None, None, None) is None


def test_missing_options_are_named():
    with pytest.raises(UserError, match="a model of your own needs --heads, --blocks too"):
        parse_shape(8, None, 1e6, None)


def test_notes_have_the_lengths():
    assert "s = 100 tokens and b = 3;" in stage_count_notes(100, 3)[0]
