"""Divides the stages among devices, by their number or by time (`pipeline.balance`)."""

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import accumulate

from brx.config.schema import RunConfig
from brx.model.stage import partition
from brx.pipeline.delay import cannot_run, stage_delays
from brx.planning.flops import pass_flops


def assign(costs: Sequence[float], num_ranks: int) -> list[range]:
    """Cut stages into contiguous runs, one per rank, so that the largest sum of costs is as small
    as possible.

    Args:
        costs: the cost of each stage, in any unit.
        num_ranks: R, at most the number of stages.
    """
    num_stages = len(costs)
    sums = [0.0, *accumulate(costs)]

    @cache
    def best(first: int, ranks: int) -> tuple[float, int]:
        """For the stages from `first` on, divided among `ranks` ranks: the smallest possible
        largest sum, and the end of the first rank's stages."""
        if ranks == 1:
            return sums[num_stages] - sums[first], num_stages
        candidates = []
        # Each of the other ranks needs a stage, too.
        for stop in range(first + 1, num_stages - ranks + 2):
            cost_of_first = sums[stop] - sums[first]
            largest_of_others, _ = best(stop, ranks - 1)
            candidates.append((max(cost_of_first, largest_of_others), stop))
        return min(candidates)

    ranges = []
    first = 0
    for ranks in range(num_ranks, 0, -1):
        _, stop = best(first, ranks)
        ranges.append(range(first, stop))
        first = stop
    return ranges


def planned_ranges(config: RunConfig, num_ranks: int | None = None) -> list[range]:
    """The stages of each rank, by default of `pipeline.devices` ranks.

    With `balance: time`, a run measures its stages before it begins. A plan may be made on another
    machine, so it takes the operations of their passes instead."""
    num_ranks = num_ranks or config.pipeline.devices
    num_stages = config.pipeline.stages
    if config.pipeline.balance == "count":
        return partition(num_stages, num_ranks)
    return assign([pass_flops(config, [stage]) for stage in range(num_stages)], num_ranks)


def possible_cuts(config: RunConfig) -> Iterator[list[range]]:
    """The planned cuts that can run the configured delays, on 1, 2, ... devices."""
    delays = stage_delays(config.pipeline)
    for num_ranks in range(1, config.pipeline.stages + 1):
        ranges = planned_ranges(config, num_ranks)
        if cannot_run(delays, ranges) is None:
            yield ranges
