"""How often each stage refreshes its basis: the paper's appendix "Stage-aware basis rotation implementation"."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from brx.pipeline.delay import StageDelay

RefreshSchedule = Literal["uniform", "stage-aware", "reversed", "stage-aware-exact", "reversed-exact"]


def refresh_intervals(delays: Sequence[StageDelay], frequency: int, schedule: RefreshSchedule) -> list[float | None]:
    """Iterations between two refreshes, by stage; None for never again after the first.

    - `uniform`: the same for all stages.
    - `stage-aware`: the larger a stage's delay, the more often; the paper's rule, rounded down to whole iterations.
    - `reversed`: the same intervals, the longest where `stage-aware` has the shortest.
    - `stage-aware-exact`, `reversed-exact`: the rule without rounding, scaled so that the refreshes of all stages
      together are as many as under `uniform`. An interval of 9.5 means 9 and 10 in turn.

    The paper's rule is written for a pipeline's delays, P - 1 to 0, with one micro-batch per update; only their ratios
    count in it, so that with M it is the same. For any other profile a stage is refreshed tau_k / mean(tau) times as
    often as under `uniform` (which is about what the paper's rule comes to): all alike under a constant delay, and a
    stage without delay never again.
    """
    num_stages = len(delays)
    shares = _shares([delay.tau for delay in delays])
    if schedule == "uniform" or shares is None:
        return [frequency] * num_stages
    if schedule.startswith("reversed"):
        shares = _opposite(shares)
    if schedule.endswith("exact"):
        rates = _within_one(shares, num_stages / frequency)
        return [1 / rate if rate else None for rate in rates]
    return [max(1, _floor(frequency / share)) if share else None for share in shares]


def refreshes_per_iteration(intervals: list[float | None]) -> float:
    """The budget: how many stages are refreshed in an iteration, on average."""
    return sum(1 / interval for interval in intervals if interval is not None)


def _shares(taus: list[int]) -> list[float] | None:
    """How many times as often as under `uniform` each stage is refreshed; None where no rule tells them apart."""
    num_stages = len(taus)
    if taus == list(range(num_stages - 1, -1, -1)):
        mid = num_stages // 2 - 1
        # Up to three stages the paper's rule divides by zero.
        return [_share_in_pipeline(tau, mid) for tau in taus] if mid >= 1 else None
    mean = sum(taus) / num_stages
    return [tau / mean for tau in taus] if mean else None


def _opposite(shares: list[float]) -> list[float]:
    """The largest share where the smallest is, and so on; of equal ones, that of the first stage to the last."""
    ascending = sorted(range(len(shares)), key=lambda stage: (shares[stage], -stage))
    opposite = dict(zip(ascending, sorted(shares, reverse=True), strict=True))
    return [opposite[stage] for stage in range(len(shares))]


def _share_in_pipeline(delay: int, mid: int) -> float:
    """1 - n / mid, the paper's; at n = mid that is zero and at n > mid negative: never."""
    n = mid - delay if delay > mid else mid + 1 - delay
    return max(0.0, (mid - n) / mid)


def _floor(interval: float) -> int:
    # 10 / (1 - 14 / 15) is 150, whatever its rounding says.
    return math.floor(interval + 1e-9)


def _within_one(shares: list[float], budget: float) -> list[float]:
    """Rates in proportion to the shares with the given sum; what exceeds one per iteration goes to the others."""
    rates = [0.0] * len(shares)
    open_stages = [stage for stage, share in enumerate(shares) if share]
    while open_stages:
        scale = (budget - sum(rates)) / sum(shares[stage] for stage in open_stages)
        full = [stage for stage in open_stages if shares[stage] * scale >= 1]
        for stage in full or open_stages:
            rates[stage] = 1.0 if full else shares[stage] * scale
        open_stages = [stage for stage in open_stages if stage not in full] if full else []
    return rates
