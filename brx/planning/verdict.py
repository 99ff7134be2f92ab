"""Synchronous or asynchronous? Time to a loss on P devices with M micro-batches per update.

Time is iterations x the time of an update (`brx.planning.schedules`). Assumed are equal examples
per update, which the synchronous side splits up as is fastest, a device per stage, updates that are
not overlapped with passes, and iterations as measured at the same delay in updates, tau_k / M <= (P
- 1) / M. Delay never helps: a method that was measured to need fewer iterations with delay than
without is taken to need as many."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pandas as pd

from brx.config.parsing import parse_bytes
from brx.errors import UserError, did_you_mean
from brx.planning.schedules import Cut, EqualStages, LocalSteps, first_that_fits
from brx.readers import read_json
from brx.runs.frames import comparable, load
from brx.runs.slowdown import IterationRatio, Reached, geometric_mean, iteration_ratio
from brx.runs.time_to_loss import Experiment, Measurements, measure_largest_set

if TYPE_CHECKING:
    from brx.planning.planned_run import PlannedRun

COMMITTED = Path(
    "results/tables/similar/time-to-loss.json"
)  # what the committed runs say (make reproduce-figures)
COST_REFERENCE = "pipedream"  # AdamW, whose update counts as part of an iteration
WIDEST_GAP = (
    4.0  # largest factor of 1 + delay between two measured delays for iterations to be interpolated
)
# of the logarithm of iterations between seeds, where no experiment has two seeds to tell it
ASSUMED_SPREAD = 0.05
LEAST_NOISE = 0.005  # two decimals: passages of one seed may fall on the same iteration
NORMAL_QUANTILE = 1.96  # of 95 % intervals


@dataclass(frozen=True)
class Question:
    loss: float  # training loss to reach, in nats
    num_stages: int
    num_micro_batches: int  # per update, of the asynchronous pipeline
    devices: EqualStages | PlannedRun
    # Of methods' updates, as shares of an update's passes, in place of what the runs or the model
    # say.
    costs: Mapping[str, float] = field(default_factory=dict)
    local: LocalSteps | None = (
        None  # the third rival, data-parallel replicas with local steps; None: not asked for
    )

    @property
    def delay(self) -> float:  # the largest of a stage, in updates
        return (self.num_stages - 1) / self.num_micro_batches


class Iterations(NamedTuple):  # that a method needs under a delay
    by_seed: Mapping[int, Reached]  # a run that never got there counts all of its iterations
    delays: tuple[
        float, ...
    ]  # the measured delays that they are from: one, or two for an interpolation
    num_rates: int  # learning rates tried, the fewest of those experiments

    @property
    def is_lower_bound(self) -> bool:  # a run never got there
        return not _mean(self.by_seed.values()).is_reached

    @property
    def mean(self) -> float:
        return _mean(self.by_seed.values()).iterations


class Option(NamedTuple):  # one way to train
    cut: Cut  # how the devices run it
    method: str  # with what tells its variants apart
    iterations: Iterations
    slowdown: IterationRatio | None
    """In iterations, over the method's own without delay, seed by seed; None where those do not
    reach the loss."""
    noise: float  # half the 95 % interval of the logarithm of `num_iterations`
    num_iterations: (
        float  # that it is taken to need: without delay times the slowdown, if that is above 1
    )
    cost: (
        float | None
    )  # of the update beyond AdamW's, as a share of the passes; None: as its products take
    paired_noise: float = (
        0.0  # as `noise`, of the slowdown alone: what both sides of one method share cancels
    )

    @property
    def time(self) -> float:  # to the loss, in units of the passes of an update
        return self.num_iterations * self.cut.time


@dataclass(frozen=True)
class Verdict:
    """The answer; options are sorted, fastest first."""

    question: Question
    synchronous: Sequence[
        Option
    ]  # the best cut of every method that reaches the loss without delay
    schedules: Sequence[
        Option
    ]  # the best cut of every schedule, with the method of the best of them
    asynchronous: Sequence[Option]  # every method under this delay; those that never got there last
    replicas: Sequence[Option]  # every method, if they were asked for
    too_large: Sequence[str]  # methods whose asynchronous run does not fit into a device
    unmeasured: Mapping[str, tuple[float, ...]]
    """Methods that no run measures at this delay, with the delays at which runs do."""
    has_runs_without_delay: bool  # which synchronous options are from
    has_cuts: bool  # unless no synchronous schedule of any method fits

    @property
    def rival(self) -> Option | None:  # the fastest option that is not asynchronous
        return min(
            [*self.synchronous[:1], *self.replicas[:1]],
            key=lambda option: option.time,
            default=None,
        )

    @property
    def advantage(self) -> float | None:
        """Time of the rival over that of the best asynchronous option; an upper bound if that is a
        lower one."""
        return (
            self.rival.time / self.asynchronous[0].time
            if self.rival and self.asynchronous
            else None
        )

    @property
    def noise(self) -> float:
        """Half the 95 % interval of the advantage's logarithm, where there is one."""
        best = self.asynchronous[0]
        assert self.rival is not None
        return (
            best.paired_noise
            if best.method == self.rival.method
            else math.hypot(best.noise, self.rival.noise)
        )

    @property
    def is_upper_bound(self) -> bool:  # the best asynchronous option never reached the loss
        return bool(self.asynchronous) and self.asynchronous[0].iterations.is_lower_bound

    @property
    def is_open(self) -> bool:  # had it trained on, it could have won
        return self.is_upper_bound and self.advantage is not None and self.advantage > 1.0

    @property
    def is_tie(self) -> bool:  # the noise between seeds could turn the answer round
        if self.advantage is None or self.is_upper_bound:
            return False
        return abs(math.log(self.advantage)) <= max(self.noise, LEAST_NOISE)

    def break_even(self, option: Option) -> float | None:
        """The slowdown at which an option is as fast as the rival; below 1 it cannot win, as delay
        is no gain."""
        if self.rival is None or option.slowdown is None:
            return None
        without_delay = option.num_iterations / max(1.0, option.slowdown.ratio)
        return self.rival.time / (option.cut.time * without_delay)


def answer(measurements: Measurements, question: Question) -> Verdict:
    """Compare the synchronous cuts of every method without delay with every method under this
    delay."""
    experiments = by_method(measurements)
    devices, memory, loss = question.devices, question.devices.memory, question.loss
    costs: dict[str, float | None] = {method: question.costs.get(method) for method in experiments}
    if isinstance(devices, EqualStages):
        costs = {**update_costs(measurements.experiments), **question.costs}
    spread = seed_spread(measurements, loss)
    synchronous, asynchronous, replicas, unmeasured, too_large = [], [], [], {}, []
    is_any_measured = False
    for method, own in experiments.items():
        settings, cost = own[0].settings, costs[method]
        fresh = iterations_at(measurements, own, 0.0, loss)
        # A method that never gets there is no synchronous option: its lower bound would win by
        #     never arriving.
        reference = None if fresh is None or fresh.is_lower_bound else fresh
        if reference is not None:
            is_any_measured = True
            noise = NORMAL_QUANTILE * spread / math.sqrt(len(reference.by_seed))
            if cut := first_that_fits(devices.synchronous(settings, cost), memory):
                synchronous.append(
                    Option(cut, method, reference, None, noise, reference.mean, cost)
                )
            copies = question.local and devices.replicas(settings, cost, question.local)
            if question.local and copies and first_that_fits([copies], memory):
                num_iterations = reference.mean * question.local.slowdown
                replicas.append(
                    Option(copies, method, reference, None, noise, num_iterations, cost)
                )
        delayed = iterations_at(measurements, own, question.delay, loss)
        if delayed is None:
            unmeasured[method] = tuple(sorted(experiment.delay for experiment in own))
        elif cut := first_that_fits([devices.asynchronous(settings, cost)], memory):
            asynchronous.append(_asynchronous(cut, method, delayed, reference, spread, cost))
        else:
            too_large.append(method)
    synchronous.sort(key=lambda option: option.time)
    schedules: dict[str, Option] = {}  # with the best synchronous method
    for best in synchronous[:1]:
        for cut in devices.synchronous(experiments[best.method][0].settings, best.cost):
            if cut.schedule not in schedules and first_that_fits([cut], memory):
                schedules[cut.schedule] = best._replace(cut=cut)
    return Verdict(
        question,
        synchronous,
        list(schedules.values()),
        sorted(asynchronous, key=lambda option: (option.iterations.is_lower_bound, option.time)),
        sorted(replicas, key=lambda option: option.time),
        too_large,
        unmeasured,
        has_runs_without_delay=any(
            experiment.delay == 0.0 for experiment in measurements.experiments
        ),
        has_cuts=bool(synchronous) or not is_any_measured,
    )


def _asynchronous(
    cut: Cut,
    method: str,
    delayed: Iterations,
    reference: Iterations | None,
    spread: float,
    cost: float | None,
) -> Option:
    noise = NORMAL_QUANTILE * spread / math.sqrt(len(delayed.by_seed))
    if reference is None:
        return Option(cut, method, delayed, None, noise, delayed.mean, cost)
    slowdown = iteration_ratio(delayed.by_seed, reference.by_seed)
    assert slowdown is not None
    if slowdown.high is not None:
        paired = math.log(slowdown.high / slowdown.ratio)
    else:
        num_pairs = len(delayed.by_seed.keys() & reference.by_seed.keys()) or 1
        paired = NORMAL_QUANTILE * spread * math.sqrt(2 / num_pairs)
    # Delay is no gain: what looks like one is noise.
    return Option(
        cut,
        method,
        delayed,
        slowdown,
        noise,
        reference.mean * max(1.0, slowdown.ratio),
        cost,
        paired,
    )


def iterations_at(
    measurements: Measurements, experiments: Sequence[Experiment], delay: float, loss: float
) -> Iterations | None:
    """The iterations of one method's experiments to a loss at a delay, linear in log(1 + delay)
    between measured ones.

    Interpolated seed by seed, or between means without a common seed; None beyond the measured
    delays and in wide gaps."""
    ordered = sorted(experiments, key=lambda experiment: experiment.delay)
    for one in ordered:
        if math.isclose(one.delay, delay, abs_tol=1e-9):
            return Iterations(measurements.reached(one, loss), (one.delay,), one.num_rates)
    for low, high in pairwise(ordered):
        if low.delay < delay < high.delay and (1 + high.delay) / (1 + low.delay) <= WIDEST_GAP:
            below, above = (measurements.reached(one, loss) for one in (low, high))
            if not below.keys() & above.keys():
                below, above = ({-1: _mean(seeds.values())} for seeds in (below, above))
            share = math.log((1 + delay) / (1 + low.delay)) / math.log(
                (1 + high.delay) / (1 + low.delay)
            )
            by_seed = {}
            for seed, (first, first_there) in below.items():
                if seed in above:
                    last, last_there = above[seed]
                    by_seed[seed] = Reached(
                        first + share * (last - first), first_there and last_there
                    )
            return Iterations(by_seed, (low.delay, high.delay), min(low.num_rates, high.num_rates))
    return None


def _mean(runs: Collection[Reached]) -> Reached:
    return Reached(
        geometric_mean([run.iterations for run in runs]), all(run.is_reached for run in runs)
    )


def seed_spread(measurements: Measurements, loss: float) -> float:
    """Standard deviation of the logarithm of iterations to a loss between seeds, over all
    experiments with several."""
    by_experiment = [
        measurements.reached(experiment, loss).values() for experiment in measurements.experiments
    ]
    logs = [
        np.log([run.iterations for run in runs]) for runs in by_experiment if _mean(runs).is_reached
    ]
    freedom = sum(len(seeds) - 1 for seeds in logs)
    return (
        math.sqrt(sum(len(seeds) * seeds.var() for seeds in logs) / freedom)
        if freedom
        else ASSUMED_SPREAD
    )


def update_costs(experiments: Iterable[Experiment]) -> dict[str, float]:
    """What each method's update takes beyond AdamW's, as a share of AdamW's iteration, from the
    fastest run of each.

    Runs of equal M compare: of several, that at which AdamW is fastest; where AdamW lacks, the
    fastest method is it."""
    measured = pd.DataFrame([(one.method, one.micro_batches, one.seconds) for one in experiments])
    seconds = measured.groupby([0, 1])[2].min().unstack()  # a row per method, a column per M
    reference = seconds.reindex([COST_REFERENCE]).iloc[0]
    shares = (seconds / reference.fillna(seconds.min()) - 1.0).clip(lower=0.0)
    by_preference = shares[reference.sort_values().index]
    return dict(by_preference.bfill(axis=1).iloc[:, 0])


def losses_to_ask(measurements: Measurements, delay: float) -> list[float]:
    """The lowest losses that AdamW (if it has such runs) and any method reach both without delay
    and at this one.

    Where no run measures this delay, those of the longest that is measured; UserError where those
    reach none."""
    longest = max(experiment.delay for experiment in measurements.experiments)
    for asked in (delay, longest):
        lowest = {
            method: _lowest(measurements, own, asked)
            for method, own in by_method(measurements).items()
        }
        if min(lowest.values()) < math.inf:
            return sorted(
                {min(lowest.values()), lowest.get(COST_REFERENCE, math.inf)} - {math.inf},
                reverse=True,
            )
    highest = f"{measurements.losses[0]:g} nats"
    raise UserError(
        f"--loss: needed, since no run falls to {highest} under the longest delay, {longest:g} "
        f"updates"
    )


def _lowest(measurements: Measurements, experiments: Sequence[Experiment], delay: float) -> float:
    """The lowest loss that all seeds of a method reach at a delay, and without any where that was
    measured."""
    lowest = math.inf
    for loss in measurements.losses:
        delayed, fresh = (iterations_at(measurements, experiments, at, loss) for at in (delay, 0.0))
        if (
            delayed is None
            or delayed.is_lower_bound
            or (fresh is not None and fresh.is_lower_bound)
        ):
            break
        lowest = loss
    return lowest


def by_method(measurements: Measurements) -> dict[str, list[Experiment]]:
    names = dict.fromkeys(one.method for one in measurements.experiments)
    return {name: [one for one in measurements.experiments if one.method == name] for name in names}


def read_measurements(runs: Sequence[Path]) -> tuple[Measurements, list[str]]:
    """From a file (the committed one by default), or from runs: the largest set that compares, and
    notes."""
    if not runs and not COMMITTED.is_file():
        raise UserError(
            f"RUNS: needed, since {COMMITTED} is not there (it is in a checkout of brx)"
        )
    paths = list(runs) or [COMMITTED]
    if len(paths) == 1 and not paths[0].is_dir():
        return Measurements.read(paths[0]), []
    return measure_largest_set(load(paths), ", ".join(map(str, paths)))


def parse_costs(texts: Sequence[str], measurements: Measurements) -> dict[str, float]:
    """`METHOD=SHARE` as numbers; UserError where a method is not among those measured, or its share
    is none."""
    methods, costs = sorted(by_method(measurements)), {}
    for text in texts:
        method, _, share = text.rpartition("=")
        if method not in methods:
            hint = did_you_mean(method, methods)
            raise UserError(
                f"--cost {text}: write METHOD=SHARE{hint} (METHOD one of: {'; '.join(methods)})"
            )
        costs[method] = _number(share)
        if not costs[method] < math.inf:
            raise UserError(
                f"--cost {text}: the share of an iteration must be a number from 0, as 0.05 for 5 %"
            )
    return costs


def _number(text: str) -> float:  # from 0; infinite if the text is none
    try:
        number = float(text)
    except ValueError:
        return math.inf
    return number if number >= 0 else math.inf


def parse_local_steps(
    steps: int | None,
    averaging: str | None,
    slowdown: float,
    num_replicas: int,
    run: PlannedRun | None,
) -> LocalSteps | None:
    """The third rival, P replicas, or None if it is not asked for; UserError where a part is
    missing or wrong.

    An averaging takes units of an update's passes (`3`); with a run and its throughput, seconds
    (`0.5s`), or is a ring over links of a bandwidth (`1GB`), where each replica sends 2 (P - 1) / P
    times the fp32 weights."""
    if steps is None and averaging is None:
        return None
    if steps is None or averaging is None:
        raise UserError(
            "--local-steps and --averaging: give both; how long an averaging takes is yours to say"
        )
    if not 1.0 <= slowdown < math.inf:
        raise UserError(f"--local-slowdown {slowdown:g}: must be a ratio of iterations from 1")
    units = _number(averaging)
    if units < math.inf:
        return LocalSteps(steps, units, slowdown)
    if run is None or run.throughput is None:
        others = "seconds (0.5s) and bandwidths (1GB) need --config and --throughput"
        raise UserError(
            f"--averaging {averaging}: write units of an update's passes, for example 3; {others}"
        )
    seconds = _number(averaging.removesuffix("s"))
    if seconds == math.inf:
        seconds = (
            2
            * (num_replicas - 1)
            / num_replicas
            * run.weight_bytes
            / parse_bytes(averaging, "--averaging")
        )
    return LocalSteps(steps, seconds * run.throughput / run.unit, slowdown)


def read_costs(paths: Sequence[Path]) -> dict[str, float]:
    """`update_costs` from folders of other runs, of one model and batch, or from the file of
    `benchmarks.lab`."""
    if not paths:
        return {}
    where = f"--cost-from {' '.join(map(str, paths))}"
    is_table = len(paths) == 1 and paths[0].suffix == ".json"
    seconds = _seconds_of_table(paths[0]) if is_table else _seconds_of_runs(paths, where)
    if COST_REFERENCE not in seconds:
        raise UserError(f"{where}: has no {COST_REFERENCE} (AdamW), which costs are relative to")
    return dict((seconds / seconds[COST_REFERENCE] - 1.0).clip(lower=0.0))


def _seconds_of_runs(
    folders: Sequence[Path], where: str
) -> pd.Series:  # per iteration of a method's fastest run
    runs = load(folders).dropna(subset="seconds_per_iteration")
    different = runs[
        ["architecture", "training.batch_size", "pipeline.accumulation"]
    ].drop_duplicates()
    if len(different) > 1:
        models = " and ".join(
            f"{name}, batch {batch} x {count}" for name, batch, count in different.to_numpy()
        )
        raise UserError(f"{where}: runs of one model and batch are needed, these are of {models}")
    variants = (
        item for alike in comparable(runs) for item in alike["variant"].items()
    )  # less what all of them share
    methods = {run: variant.partition(", delay ")[0] for run, variant in variants}
    return runs["seconds_per_iteration"].groupby(methods).min()


def _seconds_of_table(path: Path) -> pd.Series:
    try:
        content = read_json(path)
        table = pd.DataFrame(content["rows"], columns=content["columns"]).set_index("method")
        seconds = 1e-3 * table.filter(regex="^ms / iteration").iloc[:, 0].astype(float)
        if seconds.between(0, math.inf, inclusive="neither").all():
            return seconds
    except (ValueError, KeyError, TypeError, IndexError):
        pass
    raise UserError(f"--cost-from {path}: no table of milliseconds per iteration by method")
