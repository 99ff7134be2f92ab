"""The cut by time: never slower than any other cut, and measured costs that make sense."""

from itertools import combinations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from brx.planning.balance import assign, measure_stage_costs
from tests.train.helpers import tiny_config


def largest(costs, ranges):
    return max(sum(costs[stage] for stage in part) for part in ranges)


@given(costs=st.lists(st.integers(0, 20).map(float), min_size=1, max_size=9), ranks=st.integers(1, 9))
@settings(deadline=None)
def test_no_other_cut_is_faster(costs, ranks):
    ranks = min(ranks, len(costs))
    found = assign(costs, ranks)
    assert [stage for part in found for stage in part] == list(range(len(costs)))
    assert all(len(part) >= 1 for part in found)
    cuts = combinations(range(1, len(costs)), ranks - 1)
    others = ([range(a, b) for a, b in zip((0, *cut), (*cut, len(costs)), strict=True)] for cut in cuts)
    assert largest(costs, found) == min(largest(costs, other) for other in others)


def test_heavy_head_gets_a_device_almost_for_itself():
    assert assign([1, 1, 1, 1, 1, 1, 1, 7], 2) == [range(7), range(7, 8)]


def test_measured_costs_see_the_head(tmp_path):
    config = tiny_config(tmp_path, "data.tokenizer=gpt2", "model.width=32", "training.batch_size=4")
    costs = measure_stage_costs(config, torch.device("cpu"))
    assert len(costs) == 4
    assert min(costs) > 0
    assert costs[3] > 3 * costs[1]
