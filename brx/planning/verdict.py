"""Decides whether synchronous or asynchronous training is faster: the time to a loss on P devices
with M micro-batches per update.

Time is the number of iterations (`brx.planning.iterations`) times the time of an update
(`brx.planning.schedules`). It is assumed that both sides have equal examples per update, which the
synchronous side splits in the fastest way; that there is one device per stage; and that updates do
not overlap with passes. Delay is assumed never to help: if a method was measured to need fewer
iterations with delay than without, it counts as needing equally many."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from brx.planning.iterations import Iterations, by_method, iterations_at, seed_spread
from brx.planning.schedules import Cut, EqualStages, first_that_fits
from brx.planning.update_costs import update_costs
from brx.runs.slowdown import IterationRatio, iteration_ratio
from brx.runs.time_to_loss import Experiment, Measurements

if TYPE_CHECKING:
    from brx.planning.planned_run import PlannedRun

LEAST_NOISE = 0.005
"""The least noise of log(advantage), about half a unit of the second decimal. With one seed, two
runs may pass a loss at the same iteration, which shows no noise."""
NORMAL_QUANTILE = 1.96
"""For 95 % intervals."""


@dataclass(frozen=True)
class Question:
    """Which side reaches this loss sooner, on these devices?"""

    loss: float
    """The training loss to reach, in nats."""
    num_stages: int
    num_micro_batches: int
    """Per update, of the asynchronous pipeline."""
    devices: EqualStages | PlannedRun
    costs: Mapping[str, float] = field(default_factory=dict)
    """By method, the cost of its update as a share of an update's passes, in place of the cost that
    follows from the runs or the model."""

    @property
    def delay(self) -> float:
        """The largest delay of a stage, in updates."""
        return (self.num_stages - 1) / self.num_micro_batches


class Option(NamedTuple):
    """One way to train: a method on one side."""

    cut: Cut
    """How the devices run it."""
    method: str
    """The variant's name."""
    iterations: Iterations
    slowdown: IterationRatio | None
    """In iterations, relative to the method's own runs without delay, seed by seed. None without
    delay, and where those runs do not reach the loss."""
    noise: float
    """Half the 95 % interval of log(`num_iterations`)."""
    num_iterations: float
    """The number of iterations that counts: the one without delay, times the slowdown if that is
    above 1."""
    cost: float | None
    """Cost of the update beyond AdamW's, as a share of the passes; None if its products are
    counted."""
    paired_noise: float = 0.0
    """Half the 95 % interval of log(slowdown). It replaces `noise` if both sides have the same
    method, because the noise that both share cancels."""

    @property
    def time(self) -> float:
        """The time to the loss, in the unit of `Cut.time`."""
        return self.num_iterations * self.cut.time


@dataclass(frozen=True)
class Comparison:
    """An asynchronous option against a synchronous one."""

    asynchronous: Option
    synchronous: Option

    @property
    def advantage(self) -> float:
        """The synchronous time divided by the asynchronous one; an upper bound if
        `is_upper_bound`."""
        return self.synchronous.time / self.asynchronous.time

    @property
    def is_one_method(self) -> bool:
        return self.asynchronous.method == self.synchronous.method

    @property
    def noise(self) -> float:
        """Half the 95 % interval of log(`advantage`)."""
        if self.is_one_method:
            return self.asynchronous.paired_noise
        return math.hypot(self.asynchronous.noise, self.synchronous.noise)

    @property
    def is_upper_bound(self) -> bool:
        """Whether the asynchronous option never reached the loss."""
        return self.asynchronous.iterations.is_lower_bound

    @property
    def is_open(self) -> bool:
        """Whether the asynchronous option never reached the loss, and could have won had it trained
        on."""
        return self.is_upper_bound and self.advantage > 1.0

    @property
    def is_tie(self) -> bool:
        """Whether the noise between seeds could reverse the answer."""
        if self.is_upper_bound:
            return False
        return abs(math.log(self.advantage)) <= max(self.noise, LEAST_NOISE)


@dataclass(frozen=True)
class Verdict:
    """The answer; options are sorted, fastest first."""

    question: Question
    synchronous: Sequence[Option]
    """Every method that reaches the loss without delay, each with its best cut."""
    schedules: Sequence[Option]
    """Every schedule with its best cut, for the fastest synchronous method."""
    asynchronous: Sequence[Option]
    """Every method measured under this delay; those that never reached the loss come last."""
    too_large: Sequence[str]
    """Methods whose asynchronous run does not fit into a device."""
    unmeasured: Mapping[str, tuple[float, ...]]
    """Methods that no run measures at this delay, with the delays at which runs do."""
    has_runs_without_delay: bool
    """Whether there are any runs without delay. Synchronous options come from them."""
    has_cuts: bool
    """Whether a synchronous schedule fits, for any method."""

    @property
    def rival(self) -> Option | None:
        """The fastest synchronous option."""
        return self.synchronous[0] if self.synchronous else None

    @property
    def best_of_each(self) -> Comparison | None:
        """The fastest option of each side, whatever the methods."""
        if self.rival is None or not self.asynchronous:
            return None
        return Comparison(self.asynchronous[0], self.rival)

    @property
    def same_method(self) -> Comparison | None:
        """One method on both sides: the fastest asynchronous one that has a synchronous option."""
        synchronous = {option.method: option for option in self.synchronous}
        for option in self.asynchronous:
            if option.method in synchronous:
                return Comparison(option, synchronous[option.method])
        return None

    def break_even(self, option: Option, rival: Option | None = None) -> float | None:
        """The slowdown at which an asynchronous option is as fast as a synchronous one (by default
        the fastest). If it is below 1, the asynchronous option cannot win, because delay never
        helps. None if there is no rival, or no slowdown."""
        rival = rival or self.rival
        if rival is None or option.slowdown is None:
            return None
        without_delay = option.num_iterations / max(1.0, option.slowdown.ratio)
        return rival.time / (option.cut.time * without_delay)


def answer(measurements: Measurements, question: Question) -> Verdict:
    """Compare every method without delay, by its best synchronous cut, with every method under this
    delay.

    Raises:
        UserError: the loss is above those that were measured.
    """
    experiments_of = by_method(measurements)
    costs = _costs(measurements, question)
    devices = question.devices
    spread = seed_spread(measurements, question.loss)

    references: dict[str, Iterations] = {}  # without delay, of the methods that reach the loss
    for method, experiments in experiments_of.items():
        reference = _reached_without_delay(measurements, experiments, question.loss)
        if reference is not None:
            references[method] = reference

    synchronous: list[Option] = []
    for method, reference in references.items():
        cost = costs[method]
        cuts = devices.synchronous(experiments_of[method][0].settings, cost)
        if cut := first_that_fits(cuts, devices.memory):
            synchronous.append(_synchronous(cut, method, reference, spread, cost))
    synchronous.sort(key=lambda option: option.time)

    asynchronous: list[Option] = []
    unmeasured: dict[str, tuple[float, ...]] = {}
    too_large: list[str] = []
    for method, experiments in experiments_of.items():
        cost = costs[method]
        delayed = iterations_at(measurements, experiments, question.delay, question.loss)
        if delayed is None:
            unmeasured[method] = tuple(sorted(experiment.delay for experiment in experiments))
            continue
        cut = first_that_fits([devices.asynchronous(experiments[0].settings, cost)], devices.memory)
        if cut is None:
            too_large.append(method)
            continue
        option = _asynchronous(cut, method, delayed, references.get(method), spread, cost)
        asynchronous.append(option)
    asynchronous.sort(key=lambda option: (option.iterations.is_lower_bound, option.time))
    return Verdict(
        question,
        synchronous,
        _by_schedule(synchronous, experiments_of, devices),
        asynchronous,
        too_large,
        unmeasured,
        has_runs_without_delay=any(one.delay == 0.0 for one in measurements.experiments),
        has_cuts=bool(synchronous) or not references,
    )


def _costs(measurements: Measurements, question: Question) -> dict[str, float | None]:
    """The cost of each method's update: the given one, else the cost by the pace of the runs. With
    a known model it is None unless given, because the model counts the products."""
    costs: dict[str, float | None] = dict.fromkeys(by_method(measurements))
    if isinstance(question.devices, EqualStages):
        costs |= update_costs(measurements.experiments)
    return costs | dict(question.costs)


def _reached_without_delay(
    measurements: Measurements, experiments: Sequence[Experiment], loss: float
) -> Iterations | None:
    """A method's iterations without delay; None if a run never reaches the loss, because its lower
    bound could win without ever arriving."""
    fresh = iterations_at(measurements, experiments, 0.0, loss)
    return None if fresh is None or fresh.is_lower_bound else fresh


def _by_schedule(
    synchronous: Sequence[Option],
    experiments_of: Mapping[str, Sequence[Experiment]],  # by method
    devices: EqualStages | PlannedRun,
) -> list[Option]:
    """Each schedule with its best cut, for the fastest synchronous method."""
    if not synchronous:
        return []
    fastest = synchronous[0]
    settings = experiments_of[fastest.method][0].settings
    best: dict[str, Option] = {}
    for cut in devices.synchronous(settings, fastest.cost):
        if cut.schedule not in best and first_that_fits([cut], devices.memory):
            best[cut.schedule] = fastest._replace(cut=cut)
    return list(best.values())


def _noise(iterations: Iterations, spread: float) -> float:
    return NORMAL_QUANTILE * spread / math.sqrt(len(iterations.by_seed))


def _synchronous(
    cut: Cut, method: str, reached: Iterations, spread: float, cost: float | None
) -> Option:
    return Option(cut, method, reached, None, _noise(reached, spread), reached.mean, cost)


def _asynchronous(
    cut: Cut,
    method: str,
    delayed: Iterations,
    reference: Iterations | None,
    spread: float,
    cost: float | None,
) -> Option:
    noise = _noise(delayed, spread)
    if reference is None:
        return Option(cut, method, delayed, None, noise, delayed.mean, cost)
    slowdown = iteration_ratio(delayed.by_seed, reference.by_seed)
    assert slowdown is not None
    if slowdown.high is not None:
        paired_noise = math.log(slowdown.high / slowdown.ratio)
    else:
        # The logarithm of a ratio is a difference of two, and has twice their variance.
        num_pairs = len(delayed.by_seed.keys() & reference.by_seed.keys()) or 1
        paired_noise = NORMAL_QUANTILE * spread * math.sqrt(2 / num_pairs)
    # Delay never helps: a slowdown below 1 is noise.
    num_iterations = reference.mean * max(1.0, slowdown.ratio)
    return Option(cut, method, delayed, slowdown, noise, num_iterations, cost, paired_noise)
