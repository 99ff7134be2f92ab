"""The launches of an iteration do not grow with the number of stages, except for the copies of
weights."""

from functools import cache

import pytest

from benchmarks.launches import (
    ADAMW,
    BIND_STORE,
    CLIP,
    COLLECT,
    PASSES,
    ROTATION,
    VARIANTS,
    config_for,
    count,
)

STAGES = 8

pytestmark = pytest.mark.parametrize("variant", VARIANTS)


@cache
def counts(variant, stages):
    return count(config_for(stages, VARIANTS[variant], blocks=STAGES))


def test_a_stage_adds_at_most_four_operations(variant):
    assert counts(variant, STAGES).total() <= counts(variant, 1).total() + 4 * STAGES


def test_clipping_takes_at_most_ten_operations(variant):
    assert 0 < counts(variant, STAGES)[CLIP] <= 10


def test_adamw_steps_all_stages_at_once(variant):
    assert counts(variant, STAGES)[ADAMW] == counts(variant, 1)[ADAMW] == 2


def test_gradients_are_collected_once_per_dtype(variant):
    assert counts(variant, STAGES)[COLLECT] <= 2


def test_without_delay_nothing_is_bound(variant):
    assert counts(variant, 1)[BIND_STORE] == 0


def test_passes_do_not_depend_on_the_stages(variant):
    one, many = counts(variant, 1), counts(variant, STAGES)
    assert many[PASSES] <= one[PASSES]  # fewer: bf16 weights in use need no cast


def test_rotation_does_not_depend_on_the_stages(variant):
    assert counts(variant, STAGES)[ROTATION] == counts(variant, 1)[ROTATION]
