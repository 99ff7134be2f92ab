"""Idle shares read off the schedules against the closed forms of the papers that introduced them."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from brx.planning.idle import SYNCHRONOUS, asynchronous_idle, synchronous_idle

# Time of an update on P ranks with M micro-batches, in forward passes: 3 M of work and the bubble.
# With M < P, what a rank waits for is the way of M micro-batches through all ranks and back.
PERIODS = {
    "GPipe": lambda p, m: 3 * (m + p - 1),  # arXiv:1811.06965
    "1F1B": lambda p, m: 3 * (m + p - 1),  # arXiv:2006.09503
    "interleaved 1F1B": lambda p, m: 3 * m + 3 * (p - 1) / 2 if m >= p else 3 * p + 3 * (m - 1) / 2,  # arXiv:2104.04473
    "zero-bubble H1": lambda p, m: 3 * m + (p - 1) if m >= p else 2 * m + 2 * p - 1,  # arXiv:2401.10241, table 2
    "zero-bubble H2": lambda p, m: 3 * m,  # the same, with M >= 2 P - 1
}


@given(num_ranks=st.integers(1, 10), num_micro_batches=st.integers(1, 24))
@settings(deadline=None)
@pytest.mark.parametrize("name", SYNCHRONOUS)
def test_idle_share_is_the_closed_form(name, num_ranks, num_micro_batches):
    if name == "zero-bubble H2" and num_micro_batches < 2 * num_ranks - 1:
        num_micro_batches = 2 * num_ranks - 1
    if name == "interleaved 1F1B" and num_micro_batches > num_ranks:
        num_micro_batches = num_micro_batches // num_ranks * num_ranks
    idle = synchronous_idle(name, num_ranks, num_micro_batches)
    period = PERIODS[name](num_ranks, num_micro_batches)
    assert idle.share == pytest.approx(1 - 3 * num_micro_batches / period, abs=1e-9)
    assert idle.time_factor == pytest.approx(period / (3 * num_micro_batches))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("GPipe", (16, 16, 16, 16)),
        ("1F1B", (4, 3, 2, 1)),
        ("interleaved 1F1B", (5.5, 4.5, 3.5, 2.5)),  # (2 (P - 1) + (v - 1) P + 1) / v on the first rank
        ("zero-bubble H1", (4, 4, 4, 4)),
        ("zero-bubble H2", (7, 7, 7, 7)),
    ],
)
def test_activations_in_flight(name, expected):
    assert synchronous_idle(name, 4, 16).in_flight == expected


def test_interleaving_needs_whole_rounds():
    assert synchronous_idle("interleaved 1F1B", 4, 9) is None
    assert synchronous_idle("interleaved 1F1B", 4, 10) is not None


@pytest.mark.parametrize("num_ranks", [1, 2, 5, 8])
def test_asynchronous_pipeline_waits_only_for_transfers_that_it_cannot_hide(num_ranks):
    assert asynchronous_idle(num_ranks).share == 0.0
    assert asynchronous_idle(num_ranks).in_flight == tuple(range(num_ranks, 0, -1))
    # A micro-batch is under way for 3 P and 2 (P - 1) transfers, and P of them are: a round takes the longer time.
    transfer = 2.0
    elapsed = 3 * num_ranks + 2 * (num_ranks - 1) * transfer
    assert asynchronous_idle(num_ranks, transfer).share == pytest.approx(1 - 3 * num_ranks / elapsed)


@pytest.mark.parametrize("name", ["GPipe", "1F1B"])
def test_transfers_lengthen_the_way_through_the_pipeline(name):
    # One micro-batch: down and up, with P - 1 transfers each way.
    idle = synchronous_idle(name, 4, 1, 0.5)
    assert idle.share == pytest.approx(1 - 3 / (12 + 6 * 0.5))
