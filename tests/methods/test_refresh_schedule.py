"""Refresh intervals by stage: the paper's numbers, the budget, and what the optimizer makes of
them."""

from itertools import product

import pytest
import torch

from brx.methods.table import refresh_intervals, refreshes_per_iteration
from brx.optim import BasisRotation
from brx.optim.step_member import StepMember
from brx.pipeline.delay import StageDelay, pipeline_delays

RULES = ["stage-aware", "reversed", "stage-aware-exact", "reversed-exact"]


def of_32_stages(schedule, accumulation=1):
    """Intervals by stage, with one refresh per 10 iterations on average."""
    delays = [StageDelay(delay.tau, accumulation) for delay in pipeline_delays(32)]
    return refresh_intervals(delays, 10, schedule)


INTERVALS = {31: 4, 16: 9, 15: 10, 2: 150, 1: None, 0: None}
"""The paper's, by delay."""


@pytest.mark.parametrize("tau", INTERVALS)
def test_interval_is_the_papers(tau):
    assert of_32_stages("stage-aware")[31 - tau] == INTERVALS[tau]


def test_refreshes_add_up_to_the_papers_number():
    rate = refreshes_per_iteration(of_32_stages("stage-aware"))
    assert rate == pytest.approx(3.2 * 1.072, rel=1e-3)


def test_reversed_schedule_runs_the_other_way():
    assert of_32_stages("reversed") == of_32_stages("stage-aware")[::-1]


def test_uniform_schedule_is_the_same_everywhere():
    assert of_32_stages("uniform") == [10] * 32


def test_accumulation_changes_no_interval():
    # Nor any ratio of delays.
    assert of_32_stages("stage-aware", accumulation=4) == of_32_stages("stage-aware")


sizes = pytest.mark.parametrize(("num_stages", "frequency"), [*product((4, 6, 24, 32), (4, 100))])


@sizes
def test_rounding_the_papers_rule_costs_little(num_stages, frequency):
    # Without the floor the rule adds up to (P + 1 / mid) / f_0 for even P: n = mid + 1 would have
    # been -1 / mid.
    mid = num_stages // 2 - 1
    floored = refresh_intervals(pipeline_delays(num_stages), frequency, "stage-aware")
    unfloored = (num_stages + 1 / mid) / frequency
    # Rounding an interval down costs at most 1 / (f (f - 1)) refreshes per iteration.
    excess = sum(1 / (interval * (interval + 1)) for interval in floored if interval is not None)
    assert unfloored <= refreshes_per_iteration(floored) <= unfloored + excess


@sizes
@pytest.mark.parametrize("schedule", ["uniform", "stage-aware-exact", "reversed-exact"])
def test_exact_schedules_keep_to_the_budget(num_stages, frequency, schedule):
    found = refresh_intervals(pipeline_delays(num_stages), frequency, schedule)
    assert refreshes_per_iteration(found) == pytest.approx(num_stages / frequency, rel=1e-12)


def intervals(taus, schedule):
    return refresh_intervals([StageDelay(tau) for tau in taus], 10, schedule)


# With up to three stages the paper's rule divides by zero.
@pytest.mark.parametrize("taus", [[4] * 6, [0] * 6, [0], [1, 0], [2, 1, 0]], ids=str)
@pytest.mark.parametrize("schedule", RULES)
def test_delays_without_a_profile_refresh_alike(taus, schedule):
    assert intervals(taus, schedule) == [10] * len(taus)


@pytest.mark.parametrize(
    ("taus", "schedule", "expected"),
    [
        ([0, 5, 0, 0], "stage-aware", [None, 2, None, None]),
        ([8, 4, 4, 0], "stage-aware", [5, 10, 10, None]),
        ([8, 4, 4, 0], "reversed", [None, 10, 10, 5]),
        ([4, 0, 8, 4], "reversed", [10, 5, None, 10]),
        ([9, 3, 3, 1], "stage-aware-exact", [40 / 9, 40 / 3, 40 / 3, 40]),
    ],
)
def test_other_profiles_have_intervals_too(taus, schedule, expected):
    assert intervals(taus, schedule) == pytest.approx(expected)


@pytest.mark.parametrize("schedule", RULES)
@pytest.mark.parametrize(("num_stages", "frequency"), [(5, 10), (9, 10), (8, 1), (8, 2)])
class TestRules:
    @staticmethod
    def rates(num_stages, frequency, schedule):
        """Refreshes per iteration of each stage."""
        intervals = refresh_intervals(pipeline_delays(num_stages), frequency, schedule)
        return [1 / interval if interval else 0 for interval in intervals]

    def test_rates_follow_the_delay(self, num_stages, frequency, schedule):
        rates = self.rates(num_stages, frequency, schedule)
        assert rates == sorted(rates, reverse=not schedule.startswith("reversed"))

    def test_no_interval_is_below_one_iteration(self, num_stages, frequency, schedule):
        assert max(self.rates(num_stages, frequency, schedule)) <= 1


@pytest.mark.parametrize("schedule", [rule for rule in RULES if rule.endswith("exact")])
def test_exact_rules_spend_all_refreshes(schedule):
    # What the first stages cannot take, at one refresh per iteration, goes to the others.
    intervals = refresh_intervals(pipeline_delays(8), 2, schedule)
    assert refreshes_per_iteration(intervals) == pytest.approx(4)


@pytest.mark.parametrize("frequency", [3, 9.5, 1.25, None])
def test_optimizer_refreshes_as_often_as_told(frequency):
    parameter = torch.nn.Parameter(torch.eye(3))
    (group,) = BasisRotation([parameter], frequency=frequency).param_groups
    member = StepMember(parameter, group, group)
    refreshed = []
    for member.num_updates in range(190):
        refreshed += [member.num_updates + 1] if member.next_due()[0] else []
    multiples = (
        []
        if frequency is None
        else [t for t in range(3, 191) if t // frequency > (t - 1) // frequency]
    )
    assert refreshed == [2, *multiples]
    if frequency is not None:
        assert len(multiples) == pytest.approx(188 / frequency, abs=1)
