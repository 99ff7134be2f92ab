"""Refresh intervals by stage: the paper's numbers, the budget, and what the optimizer makes of
them."""

import pytest
import torch

from brx.methods.table import refresh_intervals, refreshes_per_iteration
from brx.optim import BasisRotation
from brx.optim.member import Member
from brx.pipeline.delay import StageDelay, pipeline_delays

RULES = ["stage-aware", "reversed", "stage-aware-exact", "reversed-exact"]


def test_the_papers_numbers():
    by_delay = refresh_intervals(pipeline_delays(32), 10, "stage-aware")[::-1]
    assert {tau: by_delay[tau] for tau in (31, 16, 15, 2, 1, 0)} == {
        31: 4,
        16: 9,
        15: 10,
        2: 150,
        1: None,
        0: None,
    }
    assert refresh_intervals(pipeline_delays(32), 10, "reversed") == by_delay
    assert refresh_intervals(pipeline_delays(32), 10, "uniform") == [10] * 32
    assert refreshes_per_iteration(by_delay) == pytest.approx(3.2 * 1.072, rel=1e-3)
    # Accumulation changes no ratio of delays.
    assert (
        refresh_intervals(
            [StageDelay(delay.tau, 4) for delay in pipeline_delays(32)], 10, "reversed"
        )
        == by_delay
    )


@pytest.mark.parametrize("num_stages", [4, 6, 24, 32])
@pytest.mark.parametrize("frequency", [4, 100])
def test_budget(num_stages, frequency):
    # Without the floor the rule adds up to (P + 1 / mid) / f_0 for even P: n = mid + 1 would have
    # been -1 / mid.
    budget = num_stages / frequency
    mid = num_stages // 2 - 1
    floored = refresh_intervals(pipeline_delays(num_stages), frequency, "stage-aware")
    unfloored = (num_stages + 1 / mid) / frequency
    # Rounding an interval down costs at most 1 / (f (f - 1)) refreshes per iteration.
    excess = sum(1 / (interval * (interval + 1)) for interval in floored if interval is not None)
    assert unfloored <= refreshes_per_iteration(floored) <= unfloored + excess
    for schedule in ("uniform", "stage-aware-exact", "reversed-exact"):
        rate = refreshes_per_iteration(
            refresh_intervals(pipeline_delays(num_stages), frequency, schedule)
        )
        assert rate == pytest.approx(budget, rel=1e-12)


def test_profiles_that_the_papers_rule_does_not_cover():
    def intervals(taus, schedule):
        return refresh_intervals([StageDelay(tau) for tau in taus], 10, schedule)

    for schedule in RULES:
        for taus in (
            [4] * 6,
            [0] * 6,
            [0],
            [1, 0],
            [2, 1, 0],
        ):  # up to three stages the rule divides by zero
            assert intervals(taus, schedule) == [10] * len(taus)
    assert intervals([0, 5, 0, 0], "stage-aware") == [None, 2, None, None]
    assert intervals([8, 4, 4, 0], "stage-aware") == [5, 10, 10, None]
    assert intervals([8, 4, 4, 0], "reversed") == [None, 10, 10, 5]
    assert intervals([4, 0, 8, 4], "reversed") == [10, 5, None, 10]
    assert intervals([9, 3, 3, 1], "stage-aware-exact") == pytest.approx(
        [40 / 9, 40 / 3, 40 / 3, 40]
    )


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
    member = Member(parameter, group, group)
    refreshed = []
    for member.num_updates in range(190):
        refreshed += [member.num_updates + 1] if member.next_refresh()[0] else []
    multiples = (
        []
        if frequency is None
        else [t for t in range(3, 191) if t // frequency > (t - 1) // frequency]
    )
    assert refreshed == [2, *multiples]
    if frequency is not None:
        assert len(multiples) == pytest.approx(188 / frequency, abs=1)
