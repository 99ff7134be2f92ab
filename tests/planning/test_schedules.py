"""The pace of schedules against the closed forms of the papers that introduced them, and against
torch's actions."""

from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.pipelining.schedules import ScheduleDualPipeV, ScheduleZBVZeroBubble

from brx.pipeline.schedule import Action, asynchronous_1f1b, most_in_flight, timeline
from brx.planning.schedules import SYNCHRONOUS, asynchronous_elapsed, synchronous_pace

# Time of an update on P ranks with M micro-batches, in forward passes: 3 M of work and the bubble.
# With M < P, what a rank waits for is the way of M micro-batches through all ranks and back.
PERIODS = {
    "GPipe": lambda p, m: 3 * (m + p - 1),  # arXiv:1811.06965
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


def torchs_rows(schedule, num_ranks, num_micro_batches, num_steps):
    """The actions of torch's schedule, whose methods need no more of it than these numbers."""
    sizes = {"pp_group_size": num_ranks, "_n_microbatches": num_micro_batches, "n_local_stages": 2}
    kinds = {"FORWARD": "F", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W", "FULL_BACKWARD": "B"}
    rows = []
    for rank in range(num_ranks):
        made = SimpleNamespace(
            **sizes, rank=rank, _num_stages=2 * num_ranks, num_stages=2 * num_ranks
        )
        actions = [
            one for one in schedule._calculate_single_rank_operations(made, rank) if one is not None
        ]
        parts = [part for action in actions for part in (action.sub_actions or (action,))]
        row = []
        for step in range(num_steps):
            first = step * num_micro_batches + 1
            row += [
                Action(p.stage_index, kinds[p.computation_type.name], first + p.microbatch_index)
                for p in parts
            ]
            row.append(Action(rank, "U", first + num_micro_batches - 1))
        rows.append(row)
    return rows


@pytest.mark.parametrize(
    ("name", "schedule"), [("ZB-V", ScheduleZBVZeroBubble), ("DualPipeV", ScheduleDualPipeV)]
)
@pytest.mark.parametrize(
    ("num_ranks", "num_micro_batches"), [(2, 4), (3, 7), (4, 8), (4, 20), (8, 16)]
)
def test_v_schedules_are_torchs(name, schedule, num_ranks, num_micro_batches):
    rows = torchs_rows(schedule, num_ranks, num_micro_batches, 3)
    _, second, third = (entry.end for entry in timeline(rows)[0] if entry.action.kind == "U")
    pace = even_pace(name, num_ranks, num_micro_batches)
    assert pace.elapsed == pytest.approx(third - second)
    assert pace.in_flight == tuple(most_in_flight(row, 2) for row in rows)
    for rank, row in enumerate(rows):
        assert {action.stage for action in row if action.kind != "U"} == set(
            SYNCHRONOUS[name].chunks(rank, num_ranks)
        )


def test_activations_in_flight_and_schedules_that_do_not_exist_or_whose_formulas_do_not_hold():
    expected = {
        "GPipe": (16, 16, 16, 16),
        "1F1B": (4, 3, 2, 1),
        "interleaved 1F1B": (
            5.5,
            4.5,
            3.5,
            2.5,
        ),  # (2 (P - 1) + (v - 1) P + 1) / v on the first rank
        "zero-bubble H1": (4, 4, 4, 4),
        "zero-bubble H2": (7, 7, 7, 7),
    }
    assert {name: even_pace(name, 4, 16).in_flight for name in expected} == expected
    for name, count, transfer in (("interleaved 1F1B", 9, 0.0), ("ZB-V", 7, 0.0), ("ZB-V", 8, 0.1)):
        assert even_pace(name, 4, count, transfer) is None
    assert even_pace("interleaved 1F1B", 4, 10) is not None
    assert synchronous_pace("DualPipeV", (0.5,) * 8, 8, recompute=1.0) is None


def test_uneven_stages_wait_for_the_slowest():
    forward = (1.0, 1.0, 2.5, 1.5)
    # All passes of one micro-batch follow each other; each further one takes as long as the slowest
    # rank.
    assert synchronous_pace("GPipe", forward, 6).elapsed == pytest.approx(
        3 * sum(forward) + 5 * 3 * 2.5
    )
    assert synchronous_pace("GPipe", forward, 6, recompute=1.0).elapsed == pytest.approx(
        4 * sum(forward) + 5 * 10
    )
    # One micro-batch: down and up, with P - 1 transfers each way.
    assert synchronous_pace("1F1B", (1.0,) * 4, 1, 0.5).elapsed == pytest.approx(12 + 6 * 0.5)
    # What the slowest rank does, and the way of a micro-batch to it and from it.
    assert (
        6 * 7.5 + 3 * 2
        <= synchronous_pace("1F1B", forward, 6).elapsed
        <= 3 * sum(forward) + 5 * 3 * 2.5
    )
    assert synchronous_pace("ZB-V", forward, 6).elapsed == pytest.approx(6 * 3 * 3.5)


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
