"""Plans a run on its devices, with its real cut into stages: the numbers that `brx plan` and
`brx verdict --config` print."""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

from brx.accelerators import PEAKS, peak_flops
from brx.config.loading import validate
from brx.config.parsing import dump_yaml, parse_bytes, parse_flops
from brx.config.schema import RECORDED, RunConfig
from brx.errors import UserError, counted, counted_choices, did_you_mean
from brx.model.sizes import training_flops
from brx.model.stage import partition
from brx.planning.cuts import assign, planned_ranges
from brx.planning.flops import (
    forward_flops,
    pass_flops,
    rank_flops,
    recomputed_flops,
    update_flops,
)
from brx.planning.placement import size_text, what_would_fit
from brx.planning.plan import boundary_bytes, plan_memory, planned_device_type
from brx.planning.schedules import (
    ASYNCHRONOUS,
    SYNCHRONOUS,
    Cut,
    Schedule,
    asynchronous_elapsed,
    divisors,
    first_that_fits,
    preference,
    synchronous_pace,
)

# The settings of a pipeline that verdicts change.
PIPELINE_KEYS = (
    "stages",
    "devices",
    "accumulation",
    "delay",
    "stash",
    "recompute",
    "forecast",
    "error_feedback",
)
WITHOUT_DELAY = {"delay": 0, "stash": "exact", "forecast": None, "error_feedback": 0.0}
UTILIZATION = 0.4
"""The share of a data sheet's peak that devices are assumed to reach."""
MEASURED_UTILIZATION = 0.02
"""What `paper-95m` reached with AdamW on an H100: results/gpu/paper-95m."""


class Throughput(NamedTuple):
    """How fast a device computes."""

    flops: float
    """FLOP/s."""
    is_assumed: bool
    """Whether it is `UTILIZATION` times a data sheet's peak."""


ASSUMED_LINE = (
    f"This assumes {UTILIZATION:.0%} of the data sheet's peak, which small models do not reach: "
    f"paper-95m reached {MEASURED_UTILIZATION:.0%} on an H100. Better: train a few iterations with "
    "AdamW on one such device, and give --throughput the model_flops_per_second of summary.json."
)


def parse_throughput(text: str, precision: str) -> Throughput:
    """FLOP/s from a number, or from a device's name.

    Raises:
        UserError: it is neither.
    """
    peak = peak_flops(text, "bf16" if precision == "bf16" else "fp32")
    if peak is not None:
        return Throughput(UTILIZATION * peak, is_assumed=True)
    if text[:1].isdigit():
        return Throughput(parse_flops(text, "--throughput"), is_assumed=False)
    known = f"FLOP/s as a number, for example 120T, or one of: {', '.join(PEAKS)}"
    raise UserError(
        f"--throughput {text}: no such device{did_you_mean(text, PEAKS)} (write {known})"
    )


@dataclass(frozen=True)
class PlannedRun:
    """A run of P stages on its `pipeline.devices`, with what the devices can do. See `EqualStages`
    for the questions that it answers."""

    config: RunConfig
    memory: float | None = None
    """Of a device, in bytes."""
    throughput: float | None = None
    """FLOP/s of a device."""
    is_assumed: bool = False
    """Whether `throughput` is assumed from a data sheet."""
    bandwidth: float | None = None
    """Bytes per second between neighbours; None: transfers take no time."""

    def split(self, num_stages: int, num_micro_batches: int) -> PlannedRun:
        """The same examples per update, in another number of micro-batches, on one device per
        stage.

        With `balance: time`, each device holds a run of blocks, which have the delay of its rank.

        Raises:
            UserError: the examples or the blocks cannot be divided so.
        """
        if self.examples % num_micro_batches:
            raise UserError(
                f"--micro-batches {num_micro_batches}: {counted(self.examples, 'example')} per "
                f"update cannot be divided by it"
            )
        num_blocks = self.config.model.blocks
        if num_stages > num_blocks:
            blocks = counted(num_blocks, "block")
            raise UserError(f"--stages {num_stages}: the model has only {blocks}")
        if self.config.pipeline.balance == "count":
            config = _resized(
                self.config, num_stages, num_stages, num_micro_batches, delay="pipeline"
            )
            return replace(self, config=config)
        config = _resized(self.config, num_blocks, num_stages, num_micro_batches, delay=0)
        delays = []
        for rank, stages in enumerate(planned_ranges(config)):
            delays += [num_stages - 1 - rank] * len(stages)
        pipeline = config.pipeline.model_copy(update={"delay": delays})
        return replace(self, config=config.model_copy(update={"pipeline": pipeline}))

    @property
    def num_ranks(self) -> int:
        return self.config.pipeline.devices

    @property
    def examples(self) -> int:
        """The examples in one update."""
        return self.config.training.batch_size * self.config.pipeline.accumulation

    @cached_property
    def unit(self) -> float:
        """The unit of time of a `Cut`: the operations of one device for an update's passes, if all
        devices did equally many."""
        flops = pass_flops(self.config, range(self.config.pipeline.stages))
        return self.config.pipeline.accumulation * flops / self.num_ranks

    @property
    def cut_lines(self) -> list[str]:
        """Lines about how blocks are divided among devices; none if all have equally many."""
        counts = self._block_counts(planned_ranges(self.config))
        if len(set(counts)) == 1:
            return []
        if self.config.pipeline.balance == "time":
            return [
                f"Blocks per device, by the operations of their passes: "
                f"{', '.join(map(str, counts))}. The run itself measures its stages "
                f"(pipeline.balance: time)."
            ]
        shares = " or ".join(map(str, sorted(set(counts))))
        nearest = counted_choices(self._nearest_even_cuts(), "device")
        return [f"The cut is uneven: {shares} blocks per device; {nearest} would be even."]

    def _nearest_even_cuts(self) -> list[int]:
        """The next smaller and the next larger number of devices with equally many blocks each, as
        far as there are such numbers."""
        num_stages = self.config.pipeline.stages
        even = []
        for num_ranks in range(1, num_stages + 1):
            counts = self._block_counts(partition(num_stages, num_ranks))
            if len(set(counts)) == 1:
                even.append(num_ranks)
        index = bisect(even, self.num_ranks)
        return even[max(0, index - 1) : index + 1]

    def _block_counts(self, ranges: Sequence[range]) -> list[int]:
        """The blocks of each rank."""
        blocks = partition(self.config.model.blocks, self.config.pipeline.stages)
        return [sum(len(blocks[stage]) for stage in stages) for stages in ranges]

    def seconds(self, cut: Cut) -> float | None:
        """The time of an update in seconds; None if the throughput is not known."""
        return None if self.throughput is None else cut.time * self.unit / self.throughput

    def overrides(self, asked: RunConfig, settings: Mapping[str, Any]) -> list[str]:
        """The changes, for `--set`, that make this run with a method of the configuration
        `asked`."""
        config = with_method(self.config, settings)
        words = []
        if config.optimizer != asked.optimizer:
            section = dump_yaml(settings["optimizer"], default_flow_style=True, width=math.inf)
            words.append(f"optimizer={section.strip()}")
        for section, keys in (("pipeline", PIPELINE_KEYS), ("training", ("batch_size",))):
            ours, theirs = getattr(config, section), getattr(asked, section)
            for key in keys:
                value = getattr(ours, key)
                if value != getattr(theirs, key):
                    words.append(f"{section}.{key}={'null' if value is None else value}")
        return words

    def remedy(self, settings: Mapping[str, Any]) -> str | None:
        """Settings, or more stages, with which the asynchronous run would fit into `memory`; None
        if none is known."""
        assert self.memory is not None
        config = with_method(self.config, settings)
        for remedy in what_would_fit(config, planned_device_type(config), self.memory):
            # Smaller batches would change the examples per update, and other numbers of devices the
            # number of stages. Those would be other questions.
            if "batch_size" not in remedy and "devices" not in remedy:
                return f"--set {remedy}"
        num_stages = 2 * self.num_ranks
        while num_stages <= config.model.blocks:
            cut = self.split(num_stages, config.pipeline.accumulation).asynchronous(settings, 0.0)
            if first_that_fits([cut], self.memory):
                return f"--stages {num_stages}"
            num_stages *= 2
        return None

    def asynchronous(self, settings: Mapping[str, Any], cost: float | None) -> Cut:
        """Asynchronous 1F1B with a method."""
        config = with_method(self.config, settings)
        ranges = planned_ranges(config)
        count = config.pipeline.accumulation
        transfer = self._transfer(config)
        times = tuple(pass_flops(config, stages) / self.unit for stages in ranges)
        updates = tuple(self._update(config, stages, cost) for stages in ranges)
        no_updates = (0.0,) * len(ranges)
        elapsed = asynchronous_elapsed(times, updates, count, transfer)
        passes_alone = asynchronous_elapsed(times, no_updates, count, transfer)
        ranks = plan_memory(config, planned_device_type(config), ranges)
        memory = max(rank.peak for rank in ranks)
        return Cut(ASYNCHRONOUS, count, elapsed, 1.0 - 1.0 / passes_alone, memory)

    def synchronous(self, settings: Mapping[str, Any], cost: float | None) -> Iterator[Cut]:
        """Every schedule with every number of micro-batches for which it exists, fastest first."""
        config = with_method(self.config, settings)
        planned_cuts = []
        for name, schedule in SYNCHRONOUS.items():
            if schedule.num_chunks * self.num_ranks > config.model.blocks:
                continue
            for count in divisors(self.examples):
                planned = self._planned_cut(config, name, schedule, count, cost)
                if planned is not None:
                    planned_cuts.append(planned)
        # Memory is planned one by one, since callers often need the first cut only.
        for planned in sorted(planned_cuts, key=lambda planned: preference(planned.cut)):
            ranks = plan_memory(
                planned.config,
                planned_device_type(planned.config),
                planned.ranks,
                in_flight=planned.in_flight,
            )
            yield planned.cut._replace(memory=max(rank.peak for rank in ranks))

    def _planned_cut(
        self, config: RunConfig, name: str, schedule: Schedule, count: int, cost: float | None
    ) -> _PlannedCut | None:
        """A synchronous schedule with `count` micro-batches; None if it does not exist for them."""
        num_chunks = schedule.num_chunks * self.num_ranks
        if config.pipeline.balance == "count":
            sized = _resized(config, num_chunks, self.num_ranks, count, **WITHOUT_DELAY)
            chunks = [range(chunk, chunk + 1) for chunk in range(num_chunks)]
        else:
            # A stage per block, so that chunks may have any number of blocks.
            num_blocks = config.model.blocks
            sized = _resized(config, num_blocks, self.num_ranks, count, **WITHOUT_DELAY)
            blocks = [pass_flops(sized, [block]) for block in range(num_blocks)]
            chunks = assign(blocks, num_chunks)
        forward = tuple(forward_flops(sized, chunk) / self.unit for chunk in chunks)
        recompute = tuple(recomputed_flops(sized, chunk) / self.unit for chunk in chunks)
        pace = synchronous_pace(name, forward, count, self._transfer(sized), recompute)
        if pace is None:
            return None
        ranks = []
        for rank in range(self.num_ranks):
            stages: list[int] = []
            for chunk in schedule.chunks(rank, self.num_ranks):
                stages += chunks[chunk]
            ranks.append(stages)
        # The next step waits for the update of the busiest rank.
        update = max(self._update(sized, stages, cost) for stages in ranks)
        cut = Cut(name, count, pace.elapsed + update, 1.0 - 1.0 / pace.elapsed)
        return _PlannedCut(cut, sized, ranks, pace.in_flight)

    def _update(self, config: RunConfig, stages: Sequence[int], cost: float | None) -> float:
        if cost is None:
            return update_flops(config, stages) / self.unit
        return cost * config.pipeline.accumulation * pass_flops(config, stages) / self.unit

    def _transfer(self, config: RunConfig) -> float:
        """The time that the stream takes from one device to the next, in units of a `Cut`; 0 if the
        bandwidth or throughput is not known."""
        if self.bandwidth is None or self.throughput is None:
            return 0.0
        return boundary_bytes(config) / self.bandwidth * self.throughput / self.unit


class _PlannedCut(NamedTuple):
    """A synchronous cut before its memory is known."""

    cut: Cut
    config: RunConfig
    ranks: Sequence[Sequence[int]]
    """The stages of each rank."""
    in_flight: tuple[float, ...]


def parse_devices(
    config: RunConfig, device_memory: str | None, throughput: str | None, bandwidth: str | None
) -> PlannedRun:
    """A run on devices that options of the command line describe.

    Raises:
        UserError: one of them has no such form, or lacks another.
    """
    if bandwidth is not None and throughput is None:
        raise UserError(
            "--bandwidth: needs --throughput, too, since transfers are compared with passes"
        )
    memory = None if device_memory is None else parse_bytes(device_memory, "--device-memory")
    bytes_per_second = None if bandwidth is None else parse_bytes(bandwidth, "--bandwidth")
    run = PlannedRun(config, memory, bandwidth=bytes_per_second)
    if throughput is None:
        return run
    flops, is_assumed = parse_throughput(throughput, config.runtime.precision)
    return replace(run, throughput=flops, is_assumed=is_assumed)


def with_method(config: RunConfig, settings: Mapping[str, Any]) -> RunConfig:
    """The configuration with another method: its section `optimizer`, its stash mode and its
    forecast.

    Raises:
        UserError: the settings are of a loop that is not brx's.
    """
    if not settings:
        return config
    content = config.model_dump(mode="json")
    content["optimizer"] = settings["optimizer"]
    method = str(content["optimizer"]["method"])
    if method.startswith(RECORDED):
        raise UserError(
            f"--config: {method} was recorded from a loop of your own, whose memory brx does not"
            " know; leave it out"
        )
    pipeline = content["pipeline"] | settings.get("pipeline", {})
    # Other modes keep no activations that they could recompute.
    pipeline["recompute"] = pipeline["recompute"] and pipeline["stash"] == "exact"
    content["pipeline"] = pipeline
    return validate(content, RunConfig, "measured settings")


def _resized(
    config: RunConfig, num_stages: int, num_ranks: int, num_micro_batches: int, **others: Any
) -> RunConfig:
    """The same examples per update with other numbers of stages, devices and micro-batches."""
    examples = config.training.batch_size * config.pipeline.accumulation
    sizes = {"stages": num_stages, "devices": num_ranks, "accumulation": num_micro_batches}
    pipeline = config.pipeline.model_copy(update=sizes | others)
    training = config.training.model_copy(update={"batch_size": examples // num_micro_batches})
    return config.model_copy(update={"pipeline": pipeline, "training": training})


def time_lines(run: PlannedRun) -> list[str]:
    """Operations, and the times of one and of all iterations, also for the best synchronous cut."""
    lines = [*run.cut_lines, _flops_line(run)]
    asynchronous = run.asynchronous({}, None)
    lines.append(_time_line(run, asynchronous))
    if run.is_assumed:
        lines.append(ASSUMED_LINE)
    if run.num_ranks > 1:
        lines.append(_synchronous_line(run, asynchronous))
    return lines


def _flops_line(run: PlannedRun) -> str:
    config = run.config
    by_rank = [rank_flops(config, stages) for stages in planned_ranges(config)]
    model = training_flops(config.model, config.data.vocabulary_size, run.examples)
    extra = sum(by_rank) - model
    share = max(by_rank) / sum(by_rank)
    return (
        f"FLOPs per iteration: {model / 1e12:.3g} T for the model, {extra / 1e12:.3g} T for "
        f"recomputation and the method's matrix products; the busiest rank does {share:.0%}."
    )


def _time_line(run: PlannedRun, asynchronous: Cut) -> str:
    seconds = run.seconds(asynchronous)
    if seconds is None or run.throughput is None:
        return (
            "For the time, give --throughput (FLOP/s per device as measured, or a device's name)."
        )
    iterations = counted(run.config.training.last_iteration, "iteration", ",")
    devices = counted(run.num_ranks, "device")
    return (
        f"At {run.throughput / 1e12:.4g} TFLOP/s per device: {seconds:.3g} s per iteration, "
        f"{iterations} in {_hours(run, seconds):.3g} h on {devices}."
    )


def _hours(run: PlannedRun, seconds: float) -> float:
    """The hours that all iterations take."""
    return seconds * run.config.training.last_iteration / 3600


def _synchronous_line(run: PlannedRun, asynchronous: Cut) -> str:
    best = first_that_fits(run.synchronous({}, None), run.memory)
    if best is None:
        return "No synchronous cut of the same examples fits."
    assert best.memory is not None
    ratio = best.time / asynchronous.time
    seconds = run.seconds(asynchronous)
    took = "" if seconds is None else f": {_hours(run, seconds) * ratio:.3g} h"
    return (
        f"The best synchronous cut of the same {counted(run.examples, 'example')}, "
        f"{best.schedule} with {counted(best.num_micro_batches, 'micro-batch')}, takes "
        f"{ratio:.2f} times as long per iteration{took}, and {size_text(best.memory)}. Its devices "
        f"wait for {best.idle:.0%} of the passes' time (asynchronously {asynchronous.idle:.0%}: "
        f"for the busiest)."
    )
