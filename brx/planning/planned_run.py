"""A run on its devices, by its real cut: what `brx plan` and `brx verdict --config` both say of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from brx.config.loading import validate
from brx.config.parsing import parse_bytes
from brx.config.schema import RunConfig
from brx.errors import UserError
from brx.model.sizes import FP32, num_elements
from brx.model.stage import partition
from brx.planning.cuts import ASYNCHRONOUS, REPLICAS, Cut, LocalSteps, divisors, preference
from brx.planning.device_peaks import parse_throughput
from brx.planning.idle import SYNCHRONOUS, Pace, asynchronous_elapsed, synchronous_pace
from brx.planning.plan import (
    boundary_bytes,
    forward_flops,
    passes,
    plan_memory,
    planned_device_type,
    stages_shapes,
    update_flops,
)


@dataclass(frozen=True)
class PlannedRun:
    """A run on its `pipeline.devices`, with what they can do.

    Attributes:
        config: with P stages on R devices, M micro-batches per update.
        memory: of a device, in bytes.
        throughput: FLOP/s of a device.
        bandwidth: bytes per second between neighbours; None: transfers take no time.
    """

    config: RunConfig
    memory: float | None = None
    throughput: float | None = None
    bandwidth: float | None = None

    def split(self, num_stages: int, num_micro_batches: int) -> PlannedRun:
        """The same examples per update on a device per stage, as a pipeline of so many micro-batches.

        Raises:
            UserError: the batch does not divide, or the model has fewer blocks than stages.
        """
        examples = self.config.training.batch_size * self.config.pipeline.accumulation
        if examples % num_micro_batches:
            raise UserError(
                f"--micro-batches {num_micro_batches}: training.batch_size {examples} is no multiple of it"
                " (set another one)"
            )
        if num_stages > self.config.model.blocks:
            raise UserError(f"--stages {num_stages}: the model has only {self.config.model.blocks} blocks")
        return replace(self, config=_resized(self.config, num_stages, num_stages, num_micro_batches, delay="pipeline"))

    @cached_property
    def num_ranks(self) -> int:
        return self.config.pipeline.devices

    @cached_property
    def unit(self) -> float:
        """Operations of a device for an update's passes, if all devices did as many."""
        config = self.config
        forward = forward_flops(config, range(config.pipeline.stages))
        return passes(config) * config.pipeline.accumulation * forward / self.num_ranks

    @cached_property
    def uneven(self) -> str | None:
        """That devices have unequal numbers of blocks, and the nearest numbers of devices that would not; or None."""
        num_stages = self.config.pipeline.stages
        blocks = partition(self.config.model.blocks, num_stages)
        counts = {
            num_ranks: sorted({sum(len(blocks[stage]) for stage in own) for own in partition(num_stages, num_ranks)})
            for num_ranks in range(1, num_stages + 1)
        }
        if len(shares := counts[self.num_ranks]) == 1:
            return None
        even = [num_ranks for num_ranks, found in counts.items() if len(found) == 1]
        below, above = ([one for one in even if one < self.num_ranks], [one for one in even if one > self.num_ranks])
        told = " or ".join(map(str, [*below[-1:], *above[:1]]))
        return f"The cut is uneven: {' or '.join(map(str, shares))} blocks per device; {told} device(s) would be even."

    @property
    def weight_bytes(self) -> int:
        """Of the whole model, in fp32."""
        return FP32 * sum(map(num_elements, stages_shapes(self.config, range(self.config.pipeline.stages)).values()))

    def seconds(self, cut: Cut) -> float | None:
        """Of an update; None where the throughput is not known."""
        return None if self.throughput is None else cut.time * self.unit / self.throughput

    def asynchronous(self, settings: Mapping[str, Any], cost: float | None) -> Cut:
        config = with_method(self.config, settings)
        own = partition(config.pipeline.stages, self.num_ranks)
        times = tuple(passes(config) * forward_flops(config, stages) / self.unit for stages in own)
        count = config.pipeline.accumulation
        if cost is None:
            updates = tuple(update_flops(config, stages) / self.unit for stages in own)
        else:
            updates = tuple(cost * count * time for time in times)
        elapsed = asynchronous_elapsed(times, updates, count, self._transfer(config))
        waiting = asynchronous_elapsed(times, (0.0,) * len(own), count, self._transfer(config))
        memory = max(rank.peak for rank in plan_memory(config, planned_device_type(config)))
        return Cut(ASYNCHRONOUS, count, elapsed, 1.0 - 1.0 / waiting, memory)

    def synchronous(self, settings: Mapping[str, Any], cost: float | None) -> Iterator[Cut]:
        config = with_method(self.config, settings)
        without_delay = config.pipeline.model_copy(update={"stash": "exact", "forecast": None, "delay": 0})
        config = config.model_copy(update={"pipeline": without_delay})
        examples = config.training.batch_size * config.pipeline.accumulation
        found = []
        for name, schedule in SYNCHRONOUS.items():
            num_chunks = schedule.num_chunks * self.num_ranks
            if num_chunks > config.model.blocks:
                continue
            for count in divisors(examples):
                sized = _resized(config, num_chunks, self.num_ranks, count, delay=0)
                pace = self._pace(sized, name)
                if pace is not None:
                    time = pace.elapsed + self._update_time(sized, name, cost)
                    found.append((Cut(name, count, time, 1.0 - 1.0 / pace.elapsed), sized, pace))
        for cut, sized, pace in sorted(found, key=lambda entry: preference(entry[0])):
            ranks = self._chunks(cut.schedule)
            planned = plan_memory(sized, planned_device_type(sized), ranks, in_flight=pace.in_flight)
            yield Cut(cut.schedule, cut.num_micro_batches, cut.time, cut.idle, max(rank.peak for rank in planned))

    def replicas(self, settings: Mapping[str, Any], cost: float | None, local: LocalSteps) -> Cut | None:
        config = with_method(self.config, settings)
        examples = config.training.batch_size * config.pipeline.accumulation
        if examples % self.num_ranks:
            return None
        config = _resized(config, 1, 1, self.num_ranks, delay=0)
        pipeline = config.pipeline.model_copy(update={"accumulation": 1, "stash": "exact", "forecast": None})
        config = config.model_copy(update={"pipeline": pipeline})
        update = update_flops(config, [0]) / self.unit if cost is None else cost * self.num_ranks
        memory = plan_memory(config, planned_device_type(config))[0].peak
        return Cut(REPLICAS, 1, 1.0 + update + local.averaging / local.steps, 0.0, memory)

    def _chunks(self, name: str) -> list[tuple[int, ...]]:
        return [SYNCHRONOUS[name].chunks(rank, self.num_ranks) for rank in range(self.num_ranks)]

    def _pace(self, config: RunConfig, name: str) -> Pace | None:
        forward = tuple(forward_flops(config, [chunk]) / self.unit for chunk in range(config.pipeline.stages))
        count, again = config.pipeline.accumulation, float(passes(config) - 3)
        return synchronous_pace(name, forward, count, self._transfer(config), again)

    def _update_time(self, config: RunConfig, name: str, cost: float | None) -> float:
        """Of the busiest rank: the next step waits for it."""
        if cost is None:
            return max(update_flops(config, own) for own in self._chunks(name)) / self.unit
        shares = (forward_flops(config, own) for own in self._chunks(name))
        return cost * config.pipeline.accumulation * passes(config) * max(shares) / self.unit

    def _transfer(self, config: RunConfig) -> float:
        if self.bandwidth is None or self.throughput is None:
            return 0.0
        return boundary_bytes(config) / self.bandwidth * self.throughput / self.unit


def parse_devices(
    config: RunConfig, device_memory: str | None, throughput: str | None, bandwidth: str | None
) -> PlannedRun:
    """A run with devices as the command line has them.

    Raises:
        UserError: a size is none, or there is a bandwidth without a throughput to compare it with.
    """
    if bandwidth is not None and throughput is None:
        raise UserError("--bandwidth: needs --throughput, too, since transfers are compared with passes")
    return PlannedRun(
        config,
        memory=None if device_memory is None else parse_bytes(device_memory, "--device-memory"),
        throughput=None if throughput is None else parse_throughput(throughput, config.runtime.precision),
        bandwidth=None if bandwidth is None else parse_bytes(bandwidth, "--bandwidth"),
    )


def with_method(config: RunConfig, settings: Mapping[str, Any]) -> RunConfig:
    """The configuration with another method: its section `optimizer`, its stash mode and its forecast."""
    if not settings:
        return config
    content = config.model_dump(mode="json")
    content["optimizer"] = settings["optimizer"]
    content["pipeline"] |= settings.get("pipeline", {})
    return validate(content, RunConfig, "measured settings")


def _resized(config: RunConfig, num_stages: int, num_ranks: int, num_micro_batches: int, delay: Any) -> RunConfig:
    """The same examples per update on other stages and devices, in so many micro-batches."""
    examples = config.training.batch_size * config.pipeline.accumulation
    changes = {"stages": num_stages, "devices": num_ranks, "accumulation": num_micro_batches, "delay": delay}
    training = config.training.model_copy(update={"batch_size": examples // num_micro_batches})
    pipeline = config.pipeline.model_copy(update=changes)
    return config.model_copy(update={"pipeline": pipeline, "training": training})
