"""Synchronous or asynchronous? Time to a loss on P devices with M micro-batches per update.

A synchronous pipeline takes the fewest iterations and waits in each of them; an asynchronous one never waits and takes
more of them:

    time = iterations x time of an update (`brx.planning.cuts`).

The synchronous side may split up an update's examples as it likes, and takes the schedule that is fastest so. What is
assumed: equal examples per update, a device per stage, updates that are not overlapped with passes, and iterations to
the loss as measured at the same delay in updates, tau_k / M <= (P - 1) / M. Delay never helps: a method that was
measured to need fewer iterations with delay than without is taken to need as many.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from brx.errors import UserError
from brx.planning.cuts import Cut, EqualStages, LocalSteps, first_that_fits
from brx.runs.slowdown import IterationRatio, Reached, geometric_mean, iteration_ratio
from brx.runs.time_to_loss import Experiment, Measurements

if TYPE_CHECKING:
    from brx.planning.planned_run import PlannedRun

COST_REFERENCE = "pipedream"
"""AdamW, whose update counts as part of an iteration."""

WIDEST_GAP = 4.0
"""Between two measured delays, iterations are interpolated if 1 + delay grows by no more than this factor."""

ASSUMED_SPREAD = 0.05
"""Standard deviation of the logarithm of iterations between seeds, where no experiment has two seeds to tell it."""

NORMAL_QUANTILE = 1.96
"""Of the 95 % interval of a slowdown from one seed, whose spread is that of the other experiments' seeds."""


@dataclass(frozen=True)
class Question:
    """What is asked.

    Attributes:
        loss: training loss to reach, in nats.
        num_stages: P.
        num_micro_batches: M per update, of the asynchronous pipeline.
        costs: of methods' updates, as shares of an update's passes, in place of what the runs or the model say.
        local: the third rival, data-parallel replicas with local steps; None: not asked for.
    """

    loss: float
    num_stages: int
    num_micro_batches: int
    devices: EqualStages | PlannedRun
    costs: Mapping[str, float] = field(default_factory=dict)
    local: LocalSteps | None = None

    @property
    def delay(self) -> float:
        """The largest delay of a stage, in updates."""
        return (self.num_stages - 1) / self.num_micro_batches


@dataclass(frozen=True)
class Iterations:
    """How many iterations a method needs under a delay.

    Attributes:
        by_seed: a run that never got there counts all of its iterations.
        delays: the measured delays that they are from: one, or two for an interpolation.
        num_rates: learning rates tried, the fewest of those experiments.
    """

    by_seed: Mapping[int, Reached]
    delays: tuple[float, ...]
    num_rates: int

    @property
    def is_lower_bound(self) -> bool:
        """Whether a run never got there."""
        return not all(run.is_reached for run in self.by_seed.values())

    @property
    def count(self) -> float:
        """Geometric mean over the seeds."""
        return geometric_mean([run.iterations for run in self.by_seed.values()])


@dataclass(frozen=True)
class Option:
    """One way to train.

    Attributes:
        cut: how the devices run it.
        method: with what tells its variants apart.
        iterations: as measured.
        slowdown: in iterations, over the method's own without delay, seed by seed; None without such runs, or where
            they do not reach the loss.
        noise: half the 95 % interval of the logarithm of its count.
        count: of the iterations that it is taken to need: without delay times the slowdown, if that is above 1.
        cost: of the update beyond AdamW's, as a share of the passes; None: as its products take.
    """

    cut: Cut
    method: str
    iterations: Iterations
    slowdown: IterationRatio | None
    noise: float
    count: float
    cost: float | None

    @property
    def time(self) -> float:
        """To the loss, in units of the passes of an update."""
        return self.count * self.cut.time


@dataclass(frozen=True)
class Verdict:
    """The answer; options are sorted, fastest first.

    Attributes:
        question: what was asked.
        synchronous: the best cut of every method that reaches the loss without delay.
        schedules: the best cut of every schedule, with the method of the best of them.
        asynchronous: every method under this delay; those that never got there last.
        replicas: every method, if they were asked for.
        too_large: methods whose asynchronous run does not fit into a device.
        unmeasured: methods that no run measures at this delay, with the delays at which runs do.
        has_runs_without_delay: whether there are any, which synchronous options are from.
        has_cuts: whether any synchronous schedule fits.
    """

    question: Question
    synchronous: Sequence[Option]
    schedules: Sequence[Option]
    asynchronous: Sequence[Option]
    replicas: Sequence[Option]
    too_large: Sequence[str]
    unmeasured: Mapping[str, tuple[float, ...]]
    has_runs_without_delay: bool
    has_cuts: bool

    @property
    def rival(self) -> Option | None:
        """The fastest option that is not asynchronous."""
        return min([*self.synchronous[:1], *self.replicas[:1]], key=lambda option: option.time, default=None)

    @property
    def advantage(self) -> float | None:
        """Time of the rival over that of the best asynchronous option; None if there is none of either.

        An upper bound where the asynchronous time is a lower bound.
        """
        if self.rival is None or not self.asynchronous:
            return None
        return self.rival.time / self.asynchronous[0].time

    @property
    def noise(self) -> float:
        """Half the 95 % interval of the advantage's logarithm."""
        if self.rival is None or not self.asynchronous:
            return math.inf
        best = self.asynchronous[0]
        # Of one method, both sides share the noise of the runs without delay.
        between = 0.0 if best.method == self.rival.method else self.rival.noise
        return math.hypot(best.noise, between)

    @property
    def is_upper_bound(self) -> bool:
        """Whether the best asynchronous option never reached the loss."""
        return bool(self.asynchronous) and self.asynchronous[0].iterations.is_lower_bound

    @property
    def is_tie(self) -> bool:
        """Whether the noise between seeds could turn the answer round."""
        return self.advantage is not None and not self.is_upper_bound and abs(math.log(self.advantage)) <= self.noise

    @property
    def is_memory_short(self) -> bool:
        """Whether memory leaves no synchronous schedule, or no asynchronous method: nothing is to be compared."""
        return not self.has_cuts or (bool(self.too_large) and not self.asynchronous)

    def break_even(self, option: Option) -> float | None:
        """The slowdown at which an asynchronous option is as fast as the rival; None without a slowdown."""
        if self.rival is None or option.slowdown is None:
            return None
        return self.rival.time / (option.cut.time * option.iterations.count / option.slowdown.ratio)


Grid = dict[tuple[int, int], Verdict | None]
"""Answers by P and M; None where the question cannot be asked."""


def answer(measurements: Measurements, question: Question) -> Verdict:
    """Compare the synchronous cuts of every method without delay with every method under this delay."""
    experiments = by_method(measurements)
    devices, loss = question.devices, question.loss
    costs: dict[str, float | None] = {method: question.costs.get(method) for method in experiments}
    if isinstance(devices, EqualStages):
        costs = {**update_costs(measurements.experiments), **question.costs}
    spread = seed_spread(measurements, loss)
    synchronous, asynchronous, replicas, unmeasured, too_large = [], [], [], {}, []
    has_cuts = True
    for method, own in experiments.items():
        settings, cost = own[0].settings, costs[method]
        fresh = iterations_at(measurements, own, 0.0, loss)
        # A method that never gets there is no synchronous option: its lower bound would win by never arriving.
        reference = None if fresh is None or fresh.is_lower_bound else fresh
        if reference is not None:
            count, noise = reference.count, NORMAL_QUANTILE * spread / math.sqrt(len(reference.by_seed))
            cut = first_that_fits(devices.synchronous(settings, cost), devices.memory)
            has_cuts = cut is not None
            if cut is not None:
                synchronous.append(Option(cut, method, reference, None, noise, count, cost))
            if question.local is not None:
                copies = devices.replicas(settings, cost, question.local)
                if copies is not None and first_that_fits(iter([copies]), devices.memory):
                    count *= question.local.slowdown
                    replicas.append(Option(copies, method, reference, None, noise, count, cost))
        delayed = iterations_at(measurements, own, question.delay, loss)
        if delayed is None:
            unmeasured[method] = tuple(sorted(experiment.delay for experiment in own))
            continue
        cut = first_that_fits(iter([devices.asynchronous(settings, cost)]), devices.memory)
        if cut is None:
            too_large.append(method)
        else:
            asynchronous.append(_asynchronous(cut, method, delayed, reference, spread, cost))
    synchronous.sort(key=lambda option: option.time)
    return Verdict(
        question,
        synchronous,
        _schedules(question, experiments, synchronous),
        sorted(asynchronous, key=lambda option: (option.iterations.is_lower_bound, option.time)),
        sorted(replicas, key=lambda option: option.time),
        too_large,
        unmeasured,
        any(experiment.delay == 0.0 for experiment in measurements.experiments),
        has_cuts,
    )


def _asynchronous(
    cut: Cut, method: str, delayed: Iterations, reference: Iterations | None, spread: float, cost: float | None
) -> Option:
    noise = NORMAL_QUANTILE * spread / math.sqrt(len(delayed.by_seed))
    if reference is None:
        return Option(cut, method, delayed, None, noise, delayed.count, cost)
    slowdown = iteration_ratio(delayed.by_seed, reference.by_seed)
    assert slowdown is not None
    if slowdown.high is not None:
        noise = math.log(slowdown.high / slowdown.ratio)
    elif not slowdown.is_lower_bound:
        num_pairs = len(delayed.by_seed.keys() & reference.by_seed.keys()) or 1
        noise = NORMAL_QUANTILE * spread * math.sqrt(2 / num_pairs)
    # Delay is no gain: what looks like one is noise.
    return Option(cut, method, delayed, slowdown, noise, reference.count * max(1.0, slowdown.ratio), cost)


def _schedules(
    question: Question, experiments: Mapping[str, Sequence[Experiment]], synchronous: Sequence[Option]
) -> list[Option]:
    """The best cut of every schedule that fits, with the best synchronous method."""
    if not synchronous:
        return []
    best, memory = synchronous[0], question.devices.memory
    options: dict[str, Option] = {}
    for cut in question.devices.synchronous(experiments[best.method][0].settings, best.cost):
        if cut.schedule not in options and first_that_fits(iter([cut]), memory):
            options[cut.schedule] = Option(cut, best.method, best.iterations, None, best.noise, best.count, best.cost)
    return list(options.values())


def iterations_at(
    measurements: Measurements, experiments: Sequence[Experiment], delay: float, loss: float
) -> Iterations | None:
    """The iterations of one method's experiments to a loss at a delay, linear in log(1 + delay) between measured ones.

    Between two delays, those of the seeds that both have; where they have none in common, their means.

    Returns:
        None beyond the measured delays, or between two that are further apart than `WIDEST_GAP`.
    """
    ordered = sorted(experiments, key=lambda experiment: experiment.delay)
    exact = next((measured for measured in ordered if math.isclose(measured.delay, delay, abs_tol=1e-9)), None)
    if exact is not None:
        return Iterations(measurements.reached(exact, loss), (exact.delay,), exact.num_rates)
    for low, high in pairwise(ordered):
        if low.delay < delay < high.delay and (1 + high.delay) / (1 + low.delay) <= WIDEST_GAP:
            below, above = (_shared(measurements, one, other, loss) for one, other in ((low, high), (high, low)))
            share = math.log((1 + delay) / (1 + low.delay)) / math.log((1 + high.delay) / (1 + low.delay))
            by_seed = {
                seed: Reached(
                    below[seed].iterations + share * (above[seed].iterations - below[seed].iterations),
                    below[seed].is_reached and above[seed].is_reached,
                )
                for seed in below
            }
            return Iterations(by_seed, (low.delay, high.delay), min(low.num_rates, high.num_rates))
    return None


def _shared(measurements: Measurements, one: Experiment, other: Experiment, loss: float) -> dict[int, Reached]:
    reached = measurements.reached(one, loss)
    shared = {seed: run for seed, run in reached.items() if seed in other.seeds}
    if shared:
        return shared
    mean = geometric_mean([run.iterations for run in reached.values()])
    return {-1: Reached(mean, all(run.is_reached for run in reached.values()))}


def seed_spread(measurements: Measurements, loss: float) -> float:
    """Standard deviation of the logarithm of iterations to a loss between seeds, over all experiments with several."""
    squares, freedom = 0.0, 0
    for experiment in measurements.experiments:
        runs = measurements.reached(experiment, loss).values()
        if len(runs) > 1 and all(run.is_reached for run in runs):
            logs = np.log([run.iterations for run in runs])
            squares += float(((logs - logs.mean()) ** 2).sum())
            freedom += len(logs) - 1
    return math.sqrt(squares / freedom) if freedom else ASSUMED_SPREAD


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


def losses_to_ask(measurements: Measurements, delay: float) -> list[float]:
    """The lowest loss that AdamW reaches both without delay and at this one, and the lowest that any method so reaches.

    Without such runs of AdamW, the second alone; where no run measures this delay, those of the longest that is.

    Raises:
        UserError: none reaches any loss that was measured.
    """
    longest = max(experiment.delay for experiment in measurements.experiments)
    for asked in (delay, longest):
        lowest = {method: _lowest(measurements, own, asked) for method, own in by_method(measurements).items()}
        if min(lowest.values()) < math.inf:
            return sorted({min(lowest.values()), lowest.get(COST_REFERENCE, math.inf)} - {math.inf}, reverse=True)
    raise UserError(
        f"--loss: needed, since no run falls to {measurements.losses[0]:g} nats under the longest delay, {longest:g}"
        " updates"
    )


def _lowest(measurements: Measurements, experiments: Sequence[Experiment], delay: float) -> float:
    """The lowest loss that all seeds of a method reach at a delay, and without any where that was measured."""
    lowest = math.inf
    for loss in measurements.losses:
        delayed, fresh = (iterations_at(measurements, experiments, at, loss) for at in (delay, 0.0))
        if delayed is None or delayed.is_lower_bound or (fresh is not None and fresh.is_lower_bound):
            break
        lowest = loss
    return lowest


def by_method(measurements: Measurements) -> dict[str, list[Experiment]]:
    """The experiments of each method, under its delays."""
    methods: dict[str, list[Experiment]] = {}
    for experiment in measurements.experiments:
        methods.setdefault(experiment.method, []).append(experiment)
    return methods
