"""Which device carries which stages: no cut is faster than the one by time."""

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from brx.config.loading import load_config
from brx.errors import UserError
from brx.model.stage import partition
from brx.planning.cuts import assign, planned_ranges
from brx.planning.flops import forward_flops
from brx.planning.plan import plan_memory


def largest(costs, ranges):
    return max(sum(costs[stage] for stage in part) for part in ranges)


@given(
    costs=st.lists(st.integers(0, 20).map(float), min_size=1, max_size=9), ranks=st.integers(1, 9)
)
def test_no_other_cut_is_faster(costs, ranks):
    ranks = min(ranks, len(costs))
    found = assign(costs, ranks)
    assert [stage for part in found for stage in part] == list(range(len(costs)))
    assert all(len(part) >= 1 for part in found)
    cuts = combinations(range(1, len(costs)), ranks - 1)
    others = (
        [range(a, b) for a, b in zip((0, *cut), (*cut, len(costs)), strict=True)] for cut in cuts
    )
    assert largest(costs, found) == min(largest(costs, other) for other in others)


SIX = ["pipeline.devices=6"]


def test_by_count_every_device_has_as_many():
    config = load_config("paper-1b", SIX)
    assert planned_ranges(config) == partition(24, 6)


def test_by_time_the_head_counts():
    # A head of GPT-2's vocabulary weighs two blocks of width 1,728.
    config = load_config("paper-1b", [*SIX, "pipeline.balance=time"])
    ranges = planned_ranges(config)
    costs = [forward_flops(config, [stage]) for stage in range(24)]
    assert len(ranges[-1]) < 4
    assert largest(costs, ranges) < largest(costs, partition(24, 6))


def test_plan_follows_the_cut_by_time():
    config = load_config("paper-1b", [*SIX, "pipeline.balance=time"])
    ranks = plan_memory(config, "cuda")
    assert [list(rank.stages) for rank in ranks] == [list(own) for own in planned_ranges(config)]


def test_cut_that_cannot_run_the_delays_is_refused():
    with pytest.raises(UserError, match="delay"):
        plan_memory(load_config("paper-1b", [*SIX, "pipeline.delay=1"]), "cuda")


def test_recomputed_blocks_weigh_more_than_before():
    # Only blocks are recomputed, so the device with the head gets more of them.
    options = [*SIX, "pipeline.balance=time"]
    plain = planned_ranges(load_config("paper-1b", options))
    recomputing = planned_ranges(load_config("paper-1b", [*options, "pipeline.recompute=true"]))
    assert len(recomputing[-1]) > len(plain[-1])
