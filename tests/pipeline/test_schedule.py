"""Schedules over time: closed forms for the idle share, no idle time in the asynchronous one,
delays as defined."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from brx.config.schema import PipelineConfig
from brx.pipeline import schedule
from brx.pipeline.delay import pipeline_delays
from brx.pipeline.schedule import Action, asynchronous_1f1b, synchronous_1f1b, timeline
from brx.pipeline.schedule_text import schedule_lines


def rows(make, num_ranks, *arguments):
    return [list(make(rank, num_ranks, *arguments)) for rank in range(num_ranks)]


@given(
    num_ranks=st.integers(1, 8), num_micro_batches=st.integers(1, 12), num_steps=st.integers(1, 3)
)
@pytest.mark.parametrize("make", [schedule.gpipe, synchronous_1f1b])
def test_synchronous_idle_share_is_the_closed_form(make, num_ranks, num_micro_batches, num_steps):
    timed = timeline(rows(make, num_ranks, num_micro_batches, num_steps))
    assert schedule.bubble_share(timed) == pytest.approx(
        (num_ranks - 1) / (num_micro_batches + num_ranks - 1)
    )


@pytest.mark.parametrize("num_ranks", range(1, 11))
def test_full_asynchronous_pipeline_is_never_idle(num_ranks):
    timed = timeline(asynchronous_rows(num_ranks))
    start, end = schedule.steady_state(timed)
    assert end > start
    assert schedule.bubble_share(timed, start, end) == pytest.approx(0.0)


def asynchronous_rows(num_ranks):
    """A row per rank, for micro-batches 1 to 4 R + 4."""
    return rows(asynchronous_1f1b, num_ranks, 1, lambda: 4 * num_ranks + 4)


@pytest.mark.parametrize("kind", "FBU")
@pytest.mark.parametrize("num_ranks", [1, 2, 5])
def test_each_micro_batch_comes_once_in_order(num_ranks, kind):
    for row in asynchronous_rows(num_ranks):
        numbers = [action.number for action in row if action.kind == kind]
        assert numbers == list(range(1, 4 * num_ranks + 5))


@pytest.mark.parametrize("num_ranks", range(1, 11))
def test_updates_between_passes_are_the_delay(num_ranks):
    delays = pipeline_delays(num_ranks)
    for rank, row in enumerate(asynchronous_rows(num_ranks)):
        for micro_batch in range(num_ranks, 3 * num_ranks + 1):
            assert schedule.updates_between(row, micro_batch) == delays[rank].tau


@pytest.mark.parametrize("num_ranks", range(1, 11))
def test_synchronous_gradients_have_no_delay(num_ranks):
    for row in rows(synchronous_1f1b, num_ranks, 1, 3):
        assert schedule.updates_between(row, 2) == 0


def test_action_text_is_torchs():
    assert [str(a) for a in asynchronous_1f1b(1, 3, 1, lambda: 2)] == [
        "1F1",
        "1F2",
        "1B1",
        "1U1",
        "1B2",
        "1U2",
    ]


def test_ranks_that_wait_for_each_other_are_told():
    stuck = [[Action(0, "B", 1), Action(0, "F", 1)], [Action(1, "F", 1), Action(1, "B", 1)]]
    with pytest.raises(ValueError, match="wait for each other"):
        timeline(stuck)


@pytest.mark.parametrize(
    ("stages", "devices", "share"), [(4, 4, "0.0%"), (5, 3, "16.7%"), (7, 3, "22.2%")]
)
def test_device_with_fewer_stages_is_idle(stages, devices, share):
    # 5 stages on 3 devices: 1, 2 and 2. The busiest device sets the pace, so the first one waits
    # for half of the time: a sixth of all devices' time.
    pipeline = PipelineConfig(stages=stages, devices=devices)
    lines = list(schedule_lines(pipeline, 4, 200))
    assert any(line.endswith(f", {share} once the pipeline is full") for line in lines)


def test_synchronous_schedule_counts_stages_per_device():
    # Devices of 1 and 2 stages, one micro-batch: 9 units of time, of which 3 and 6 are work.
    lines = list(schedule_lines(PipelineConfig(stages=3, devices=2), 1, 200))
    assert "GPipe, one step: idle 50.0% of the time shown" in lines
    assert "stages per device, each of which takes the same time: 1 2" in lines
    lines = list(schedule_lines(PipelineConfig(stages=3, devices=2), 2, 200))
    # The second device ends its two micro-batches after 1 + 12 units, the first 2 later.
    assert f"GPipe, one step: idle {1 - 18 / 30:.1%} of the time shown" in lines
