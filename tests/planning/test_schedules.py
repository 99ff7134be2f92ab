"""The pace of schedules against the closed forms of the papers that introduced them."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from brx.pipeline.schedule import asynchronous_1f1b, timeline
from brx.planning.schedules import SYNCHRONOUS, asynchronous_elapsed, synchronous_pace

# Time of an update on P ranks with M micro-batches, in forward passes: 3 M of work and the bubble.
# With M < P, what a rank waits for is the way of M micro-batches through all ranks and back.
PERIODS = {
    "1F1B": lambda p, m: 3 * (m + p - 1),  # arXiv:2006.09503
    "interleaved 1F1B": lambda p, m: (
        3 * m + 3 * (p - 1) / 2 if m >= p else 3 * p + 3 * (m - 1) / 2
    ),  # arXiv:2104.04473
    "zero-bubble H1": lambda p, m: (
        3 * m + (p - 1) if m >= p else 2 * m + 2 * p - 1
    ),  # arXiv:2401.10241, table 2
    "zero-bubble H2": lambda p, m: 3 * m,  # the same, with M >= 2 P - 1
}


def even_pace(name, num_ranks, num_micro_batches, transfer=0.0):
    chunks = SYNCHRONOUS[name].num_chunks
    return synchronous_pace(name, (1 / chunks,) * num_ranks * chunks, num_micro_batches, transfer)


@given(num_ranks=st.integers(1, 8), num_micro_batches=st.integers(1, 64))
@settings(deadline=None, max_examples=40)
@pytest.mark.parametrize("name", PERIODS)
def test_pace_is_the_closed_form(name, num_ranks, num_micro_batches):
    if name == "zero-bubble H2" and num_micro_batches < 2 * num_ranks - 1:
        num_micro_batches = 2 * num_ranks - 1
    if name == "interleaved 1F1B" and num_micro_batches > num_ranks:
        num_micro_batches = num_micro_batches // num_ranks * num_ranks
    pace = even_pace(name, num_ranks, num_micro_batches)
    assert pace.elapsed == pytest.approx(PERIODS[name](num_ranks, num_micro_batches))


# With 16 micro-batches on 4 ranks.
IN_FLIGHT = {
    "1F1B": (4, 3, 2, 1),
    # (2 (P - 1) + (v - 1) P + 1) / v on the first rank
    "interleaved 1F1B": (5.5, 4.5, 3.5, 2.5),
    "zero-bubble H1": (4, 4, 4, 4),
    "zero-bubble H2": (7, 7, 7, 7),
}


@pytest.mark.parametrize(("name", "expected"), IN_FLIGHT.items())
def test_activations_in_flight(name, expected):
    assert even_pace(name, 4, 16).in_flight == expected


def test_interleaving_needs_whole_rounds():
    assert even_pace("interleaved 1F1B", 4, 9) is None
    assert even_pace("interleaved 1F1B", 4, 8) is not None


UNEVEN = (1.0, 1.0, 2.5, 1.5)


def test_one_micro_batch_goes_down_then_up():
    # With P - 1 transfers each way.
    assert synchronous_pace("1F1B", (1.0,) * 4, 1, 0.5).elapsed == pytest.approx(12 + 6 * 0.5)


def test_recomputation_takes_another_forward_pass():
    pace = synchronous_pace("1F1B", UNEVEN, 1, recompute=UNEVEN)
    assert pace.elapsed == pytest.approx(4 * sum(UNEVEN))


def test_uneven_stages_wait_for_the_slowest():
    # The work of the slowest rank, and the way of a micro-batch to it and from it.
    elapsed = synchronous_pace("1F1B", UNEVEN, 6).elapsed
    assert 6 * 7.5 + 3 * 2 <= elapsed <= 3 * sum(UNEVEN) + 5 * 3 * 2.5


def simulated(passes, updates, accumulation, transfer):
    num_ranks, last = len(passes), 200 * accumulation

    def duration(action):
        part = {"F": 1 / 3, "B": 2 / 3}.get(action.kind)
        return updates[action.stage] if part is None else part * passes[action.stage]

    rows = [
        list(asynchronous_1f1b(rank, num_ranks, 1, lambda: last, accumulation))
        for rank in range(num_ranks)
    ]
    ends = [
        entry.end for entry in timeline(rows, transfer, duration)[0] if entry.action.kind == "U"
    ]
    return (ends[180] - ends[60]) / 120


@pytest.mark.parametrize(
    ("passes", "updates", "accumulation", "transfer", "tolerance"),
    [
        ((3.0,), (0.0,), 1, 2.0, 1e-9),
        ((3.0,) * 5, (0.0,) * 5, 1, 0.0, 1e-9),
        ((3.0,) * 5, (0.0,) * 5, 1, 2.0, 1e-9),
        ((3.0,) * 6, (2.0,) * 6, 4, 0.0, 1e-9),
        ((1.0,) * 4, (0.0, 5.0, 0.0, 0.0), 1, 0.0, 1e-9),  # an update decides
        ((3.0, 1.0, 4.0, 2.0), (0.5, 3.0, 0.0, 2.0), 1, 0.0, 1e-9),
        ((3.0, 1.0, 4.0, 2.0), (0.0,) * 4, 1, 2.0, 1e-9),
        (
            (3.0, 3.0, 1.5, 1.0),
            (0.0,) * 4,
            1,
            0.5,
            1e-9,
        ),  # where ranks before the last wait for each other
        ((3.0, 1.0, 4.0, 2.0), (3.0, 9.0, 0.0, 6.0), 4, 0.0, 0.02),
        ((3.0, 1.0, 4.0, 2.0), (3.0, 0.0, 9.0, 6.0), 3, 0.7, 0.02),
    ],
)
def test_asynchronous_pace_is_the_simulated_one(passes, updates, accumulation, transfer, tolerance):
    elapsed = asynchronous_elapsed(passes, updates, accumulation, transfer)
    assert elapsed == pytest.approx(
        simulated(passes, updates, accumulation, transfer), rel=tolerance
    )
