"""Schedules over time: closed forms for the idle share, no idle time in the asynchronous one, delays as defined."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from brx.pipeline.delay import pipeline_delays
from brx.pipeline.schedule import (
    Action,
    asynchronous_1f1b,
    bubble_share,
    gpipe,
    steady_state,
    synchronous_1f1b,
    timeline,
    updates_between,
)


def rows(schedule, num_ranks, *arguments):
    return [list(schedule(rank, num_ranks, *arguments)) for rank in range(num_ranks)]


def asynchronous(num_ranks, last):
    return rows(asynchronous_1f1b, num_ranks, 1, lambda: last)


@given(num_ranks=st.integers(1, 8), num_micro_batches=st.integers(1, 12), num_steps=st.integers(1, 3))
@settings(deadline=None)
@pytest.mark.parametrize("schedule", [gpipe, synchronous_1f1b])
def test_idle_share_of_synchronous_schedules_is_the_closed_form(schedule, num_ranks, num_micro_batches, num_steps):
    timed = timeline(rows(schedule, num_ranks, num_micro_batches, num_steps))
    assert bubble_share(timed) == pytest.approx((num_ranks - 1) / (num_micro_batches + num_ranks - 1))


@given(num_ranks=st.integers(1, 10))
@settings(deadline=None)
def test_asynchronous_pipeline_is_never_idle_once_full(num_ranks):
    timed = timeline(asynchronous(num_ranks, 4 * num_ranks + 4))
    start, end = steady_state(timed)
    assert end > start
    assert bubble_share(timed, start, end) == pytest.approx(0.0)


@given(num_ranks=st.integers(1, 10))
@settings(deadline=None)
def test_delay_read_off_the_schedule_is_the_delay_of_the_semantics(num_ranks):
    actions = asynchronous(num_ranks, 3 * num_ranks)
    for rank, row in enumerate(actions):
        for micro_batch in range(num_ranks, 3 * num_ranks + 1):
            assert updates_between(row, micro_batch) == pipeline_delays(num_ranks)[rank].tau
    for row in rows(synchronous_1f1b, num_ranks, 1, 3):
        assert updates_between(row, 2) == 0


@given(num_ranks=st.integers(1, 6), last=st.integers(1, 20))
@settings(deadline=None)
def test_every_micro_batch_is_forwarded_backwarded_and_applied_once_in_order(num_ranks, last):
    for row in asynchronous(num_ranks, last):
        for kind in "FBU":
            assert [a.number for a in row if a.kind == kind] == list(range(1, last + 1))


def test_action_text_is_torchs():
    assert [str(a) for a in asynchronous_1f1b(1, 3, 1, lambda: 2)] == ["1F1", "1F2", "1B1", "1U1", "1B2", "1U2"]


def test_ranks_that_wait_for_each_other_are_told():
    stuck = [[Action(0, "B", 1), Action(0, "F", 1)], [Action(1, "F", 1), Action(1, "B", 1)]]
    with pytest.raises(ValueError, match="wait for each other"):
        timeline(stuck)
