"""Synchronous or asynchronous? Time to a loss on P devices with M micro-batches per update.

A synchronous pipeline takes the fewest iterations and waits in each of them; an asynchronous one never waits and takes
more of them. With the time of an update's passes as the unit,

    time = iterations x (1 / (1 - idle share) + cost),

where `cost` is what the method's update takes beyond AdamW's, as a share of an iteration. What is assumed: the same
number of examples per update (so M splits them up), equal stages, one per device, updates that are not overlapped with
passes, and iterations to the loss as measured at the same delay in updates, tau_k / M <= (P - 1) / M.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise, product

from brx.errors import UserError
from brx.planning.idle import SYNCHRONOUS, Idle, asynchronous_idle, synchronous_idle
from brx.runs.time_to_loss import Experiment, Measurements

ASYNCHRONOUS = "asynchronous"
COST_REFERENCE = "pipedream"
"""AdamW, whose update counts as part of an iteration."""

WIDEST_GAP = 4.0
"""Between two measured delays, iterations are interpolated if 1 + delay grows by no more than this factor."""


@dataclass(frozen=True)
class Question:
    """What is asked.

    Attributes:
        loss: training loss to reach, in nats.
        num_stages: P.
        num_micro_batches: M per update.
        transfer_time: from one device to the next, in units of a micro-batch's forward pass.
        costs: of methods, as shares of an iteration, in place of what the runs say.
        excluded: schedules that are no option, for want of memory.
    """

    loss: float
    num_stages: int
    num_micro_batches: int
    transfer_time: float = 0.0
    costs: Mapping[str, float] = field(default_factory=dict)
    excluded: Collection[str] = ()

    @property
    def delay(self) -> float:
        """The largest delay of a stage, in updates."""
        return (self.num_stages - 1) / self.num_micro_batches

    @property
    def synchronous_schedules(self) -> dict[str, Idle]:
        """Those that exist for P and M and fit into memory, with their idle time."""
        candidates = [name for name in SYNCHRONOUS if name not in self.excluded]
        shape = (self.num_stages, self.num_micro_batches, self.transfer_time)
        return {name: idle for name in candidates if (idle := synchronous_idle(name, *shape)) is not None}

    @property
    def asynchronous_idle(self) -> Idle:
        """Of the asynchronous schedule: none where transfers take no time."""
        return asynchronous_idle(self.num_stages, self.transfer_time)

    @property
    def is_memory_short(self) -> bool:
        """Whether memory leaves no synchronous schedule, or not the asynchronous one: nothing is to be compared."""
        return ASYNCHRONOUS in self.excluded or not self.synchronous_schedules


@dataclass(frozen=True)
class Iterations:
    """How many iterations a method needs under a delay.

    Attributes:
        count: mean over seeds.
        is_lower_bound: whether a run never got there.
        delays: the measured delays that it is from: one, or two for an interpolation.
        num_rates: learning rates tried, the fewest of those experiments.
    """

    count: float
    is_lower_bound: bool
    delays: tuple[float, ...]
    num_rates: int


@dataclass(frozen=True)
class Option:
    """One way to train.

    Attributes:
        schedule: a key of `SYNCHRONOUS`, or `ASYNCHRONOUS`.
        method: with what tells its variants apart.
        iterations: to the loss.
        idle_share: of the time.
        cost: of the method's update beyond AdamW's, as a share of an iteration.
        time: to the loss, in units of the passes of an update.
    """

    schedule: str
    method: str
    iterations: Iterations
    idle_share: float
    cost: float
    time: float

    @property
    def time_per_update(self) -> float:
        """In units of the passes of an update."""
        return self.time / self.iterations.count


@dataclass(frozen=True)
class Verdict:
    """The answer.

    Attributes:
        question: what was asked.
        synchronous: the options, fastest first.
        asynchronous: the options, fastest first.
        unmeasured: methods that no run measures at this delay, with the delays at which runs do.
        has_runs_without_delay: whether there are any, which synchronous options are from.
    """

    question: Question
    synchronous: Sequence[Option]
    asynchronous: Sequence[Option]
    unmeasured: Mapping[str, tuple[float, ...]]
    has_runs_without_delay: bool

    @property
    def advantage(self) -> float | None:
        """Time of the best synchronous option over that of the best asynchronous one; None if there is none of either.

        An upper bound where the asynchronous time is a lower bound.
        """
        if not (self.synchronous and self.asynchronous):
            return None
        return self.synchronous[0].time / self.asynchronous[0].time

    @property
    def is_upper_bound(self) -> bool:
        """Whether the best asynchronous option never reached the loss."""
        return bool(self.asynchronous) and self.asynchronous[0].iterations.is_lower_bound

    def break_even(self, option: Option) -> float:
        """The slowdown in iterations, against the best synchronous option, at which an asynchronous one is as fast.

        `schedule_break_even` where neither method's update costs more than AdamW's.
        """
        return self.synchronous[0].time_per_update / option.time_per_update

    def schedule_break_even(self, option: Option) -> float:
        """The slowdown in iterations at which a synchronous option is as fast as an asynchronous one of equal costs.

        1 / (1 - idle share), times the share of time in which the asynchronous pipeline does not wait for transfers.
        """
        return (1.0 - self.question.asynchronous_idle.share) / (1.0 - option.idle_share)

    def slowdown(self, option: Option) -> float:
        """The iterations of an asynchronous option over those of the best synchronous one."""
        return option.iterations.count / self.synchronous[0].iterations.count


Grid = dict[tuple[int, int], Verdict | None]
"""Answers by P and M; None where the question cannot be asked."""


def answer(measurements: Measurements, question: Question) -> Verdict:
    """Compare every synchronous schedule and every method without delay with every method under this delay."""
    by_method = _by_method(measurements.experiments)
    costs = {**update_costs(measurements.experiments), **question.costs}
    synchronous = [
        _option(name, method, iterations, idle.share, costs)
        for name, idle in question.synchronous_schedules.items()
        for method, experiments in by_method.items()
        if (iterations := iterations_at(measurements, experiments, 0.0, question.loss))
        # A method that never gets there is no synchronous option: its lower bound would win by never arriving.
        and not iterations.is_lower_bound
    ]
    idle = question.asynchronous_idle
    asynchronous, unmeasured = [], {}
    for method, experiments in by_method.items() if ASYNCHRONOUS not in question.excluded else ():
        iterations = iterations_at(measurements, experiments, question.delay, question.loss)
        if iterations is None:
            unmeasured[method] = tuple(sorted(experiment.delay for experiment in experiments))
        else:
            asynchronous.append(_option(ASYNCHRONOUS, method, iterations, idle.share, costs))
    has_runs_without_delay = any(experiment.delay == 0.0 for experiment in measurements.experiments)
    return Verdict(
        question,
        sorted(synchronous, key=_rank),
        sorted(asynchronous, key=_rank),
        unmeasured,
        has_runs_without_delay,
    )


def iterations_at(
    measurements: Measurements, experiments: Sequence[Experiment], delay: float, loss: float
) -> Iterations | None:
    """The iterations of one method's experiments to a loss at a delay, linear in log(1 + delay) between measured ones.

    Returns:
        None beyond the measured delays, or between two that are further apart than `WIDEST_GAP`.
    """
    ordered = sorted(experiments, key=lambda experiment: experiment.delay)
    exact = next((measured for measured in ordered if math.isclose(measured.delay, delay, abs_tol=1e-9)), None)
    if exact is not None:
        count, is_bound = measurements.reached(exact, loss)
        return Iterations(count, is_bound, (exact.delay,), exact.num_rates)
    for low, high in pairwise(ordered):
        if low.delay < delay < high.delay and (1 + high.delay) / (1 + low.delay) <= WIDEST_GAP:
            below, low_is_bound = measurements.reached(low, loss)
            above, high_is_bound = measurements.reached(high, loss)
            share = math.log((1 + delay) / (1 + low.delay)) / math.log((1 + high.delay) / (1 + low.delay))
            num_rates = min(low.num_rates, high.num_rates)
            count = below + share * (above - below)
            return Iterations(count, low_is_bound or high_is_bound, (low.delay, high.delay), num_rates)
    return None


def update_costs(experiments: Iterable[Experiment]) -> dict[str, float]:
    """What each method's update takes beyond AdamW's, as a share of AdamW's iteration, from the fastest run of each.

    The delay does not change the work of an iteration, so that the fastest of all delays counts. The number of
    micro-batches does, so that only runs of equal M compare: of several M, that at which AdamW is fastest. Without
    AdamW's runs of an M, the fastest method stands for it.
    """
    fastest: dict[int, dict[str, float]] = {}
    for experiment in experiments:
        alike = fastest.setdefault(experiment.micro_batches, {})
        alike[experiment.method] = min(experiment.seconds, alike.get(experiment.method, math.inf))
    costs: dict[str, float] = {}
    # The last that has a method decides its cost.
    for alike in sorted(fastest.values(), key=lambda alike: alike.get(COST_REFERENCE, math.inf), reverse=True):
        reference = alike.get(COST_REFERENCE, min(alike.values()))
        costs |= {method: max(0.0, seconds / reference - 1.0) for method, seconds in alike.items()}
    return costs


def default_loss(measurements: Measurements) -> float:
    """The lowest loss that some method still reaches under the longest delay: there, the verdict is no bound.

    Raises:
        UserError: none reaches any loss that was measured.
    """
    longest = max(experiment.delay for experiment in measurements.experiments)
    delayed = [experiment for experiment in measurements.experiments if experiment.delay == longest]
    lowest = min(measurements.lowest_loss(experiment) for experiment in delayed)
    if lowest == math.inf:
        raise UserError(
            f"--loss: needed, since no run falls to {measurements.losses[0]:g} nats under the longest delay,"
            f" {longest:g} updates"
        )
    return lowest


def grid(
    measurements: Measurements,
    question: Question,
    stages: Iterable[int],
    micro_batches: Sequence[int],
    fitted: Callable[[Question], Question | None] | None = None,
) -> Grid:
    """The same question for every P and M.

    Args:
        measurements: what the answers are from.
        question: the loss and the costs.
        stages: the P.
        micro_batches: the M.
        fitted: what a model makes of the question at a P and M; None if it cannot be split up so. By default, nothing.
    """
    cells: Grid = {}
    for num_stages, num_micro_batches in product(stages, micro_batches):
        asked = replace(question, num_stages=num_stages, num_micro_batches=num_micro_batches)
        own = asked if fitted is None else fitted(asked)
        cells[num_stages, num_micro_batches] = None if own is None else answer(measurements, own)
    return cells


def _by_method(experiments: Iterable[Experiment]) -> dict[str, list[Experiment]]:
    methods: dict[str, list[Experiment]] = {}
    for experiment in experiments:
        methods.setdefault(experiment.method, []).append(experiment)
    return methods


def _option(
    schedule: str, method: str, iterations: Iterations, idle_share: float, costs: Mapping[str, float]
) -> Option:
    cost = costs[method]
    time = iterations.count * (1.0 / (1.0 - idle_share) + cost)
    return Option(schedule, method, iterations, idle_share, cost, time)


def _rank(option: Option) -> tuple[bool, float]:
    """Fastest first; those that never got there last."""
    return option.iterations.is_lower_bound, option.time
