"""A run on its devices, by its real cut: what `brx plan` and `brx verdict --config` both say of
it."""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from brx.config.loading import validate
from brx.config.parsing import dump_yaml, parse_bytes, parse_flops
from brx.config.schema import RECORDED, RunConfig
from brx.errors import UserError, did_you_mean
from brx.model.sizes import FP32, num_elements, training_flops
from brx.model.stage import partition
from brx.planning.placement import what_would_fit
from brx.planning.plan import (
    boundary_bytes,
    forward_flops,
    passes,
    plan_memory,
    planned_device_type,
    rank_flops,
    stages_sizes,
    update_flops,
)
from brx.planning.schedules import (
    ASYNCHRONOUS,
    REPLICAS,
    SYNCHRONOUS,
    Cut,
    LocalSteps,
    asynchronous_elapsed,
    divisors,
    first_that_fits,
    preference,
    synchronous_pace,
)

# From their makers' data sheets, dense, in TFLOP/s: bf16 matrix products with fp32 accumulation,
# fp32 without TF32. Longer names first where one holds another.
PEAKS = {
    "B200": (2250, 75),
    "H200": (989, 67),
    "H100 PCIe": (756, 51),
    "H100 NVL": (835, 60),
    "H100": (989, 67),
    "A100": (312, 19.5),
    "A6000": (154.8, 38.7),
    "A40": (149.7, 37.4),
    "A10": (125, 31.2),
    "L40S": (362, 91.6),
    "L4": (121, 30.3),
    "RTX 4090": (165.2, 82.6),
    "RTX 3090": (71, 35.6),
    "RTX 3080": (59.5, 29.8),
    "MI300X": (1307, 163.4),
}
PIPELINE_KEYS = (
    "stages",
    "devices",
    "accumulation",
    "delay",
    "stash",
    "recompute",
    "forecast",
)  # verdicts change them
WITHOUT_DELAY = {"delay": 0, "stash": "exact", "forecast": None}
UTILIZATION = 0.4  # assumed share of a data sheet's peak


def peak_flops(name: str, precision: str) -> float | None:
    """Peak FLOP/s of the device that calls itself `name` (for example "NVIDIA A100-SXM4-80GB");
    None if unknown."""
    words = name.lower().replace("-", " ")
    for known, (bf16, fp32) in PEAKS.items():
        # As a whole word: an L40 is no L4, an A1000 no A100.
        if f" {known.lower()} " in f" {words} ":
            return 1e12 * (bf16 if precision == "bf16" else fp32)
    return None


def parse_throughput(text: str, precision: str) -> float:
    """FLOP/s from a number, or from a device's name; UserError if it is neither."""
    peak = peak_flops(text, precision)
    if peak is not None:
        return UTILIZATION * peak
    if text[:1].isdigit():
        return parse_flops(text, "--throughput")
    known = f"FLOP/s as a number, for example 120T, or one of: {', '.join(PEAKS)}"
    raise UserError(
        f"--throughput {text}: no such device{did_you_mean(text, PEAKS)} (write {known})"
    )


@dataclass(frozen=True)
class PlannedRun:
    """A run of P stages on its `pipeline.devices`, with what they can do; see `EqualStages` for its
    questions."""

    config: RunConfig
    memory: float | None = None  # of a device, in bytes
    throughput: float | None = None  # FLOP/s of a device
    bandwidth: float | None = (
        None  # bytes per second between neighbours; None: transfers take no time
    )

    def split(self, num_stages: int, num_micro_batches: int) -> PlannedRun:
        """The same examples per update in so many micro-batches on a device per stage; UserError if
        they cannot be."""
        if self.examples % num_micro_batches:
            raise UserError(
                f"--micro-batches {num_micro_batches}: {self.examples} examples per update are no "
                f"multiple"
            )
        if num_stages > self.config.model.blocks:
            raise UserError(
                f"--stages {num_stages}: the model has only {self.config.model.blocks} blocks"
            )
        return replace(
            self,
            config=_resized(
                self.config, num_stages, num_stages, num_micro_batches, delay="pipeline"
            ),
        )

    @property
    def num_ranks(self) -> int:
        return self.config.pipeline.devices

    @property
    def examples(self) -> int:  # of an update
        return self.config.training.batch_size * self.config.pipeline.accumulation

    @cached_property
    def unit(self) -> float:
        """Operations of a device for an update's passes, if all devices did as many."""
        forward = forward_flops(self.config, range(self.config.pipeline.stages))
        return passes(self.config) * self.config.pipeline.accumulation * forward / self.num_ranks

    @cached_property
    def uneven(self) -> str | None:
        """A line that devices have unequal numbers of blocks, with the nearest even numbers of
        devices; or None."""
        num_stages = self.config.pipeline.stages
        blocks = partition(self.config.model.blocks, num_stages)
        counts = {
            num_ranks: sorted(
                {
                    sum(len(blocks[stage]) for stage in own)
                    for own in partition(num_stages, num_ranks)
                }
            )
            for num_ranks in range(1, num_stages + 1)
        }
        if len(shares := counts[self.num_ranks]) == 1:
            return None
        even = [num_ranks for num_ranks, found in counts.items() if len(found) == 1]
        place = bisect(even, self.num_ranks)
        told = " or ".join(map(str, even[max(0, place - 1) : place + 1]))
        return (
            f"The cut is uneven: {' or '.join(map(str, shares))} blocks per device; {told} "
            f"device(s) would be even."
        )

    @property
    def weight_bytes(self) -> int:  # of the whole model, in fp32
        return FP32 * sum(
            map(
                num_elements,
                stages_sizes(self.config, range(self.config.pipeline.stages)).values(),
            )
        )

    def seconds(
        self, cut: Cut
    ) -> float | None:  # of an update; None where the throughput is not known
        return None if self.throughput is None else cut.time * self.unit / self.throughput

    def overrides(self, asked: RunConfig, settings: Mapping[str, Any]) -> list[str]:
        """What makes this run, with a method, of the configuration `asked`: for `--set`."""
        config, words = with_method(self.config, settings), []
        if config.optimizer != asked.optimizer:
            words = [
                "optimizer="
                + dump_yaml(settings["optimizer"], default_flow_style=True, width=math.inf).strip()
            ]
        for section, keys in (("pipeline", PIPELINE_KEYS), ("training", ("batch_size",))):
            ours, theirs = getattr(config, section), getattr(asked, section)
            changed = {
                key: getattr(ours, key)
                for key in keys
                if getattr(ours, key) != getattr(theirs, key)
            }
            words += [
                f"{section}.{key}={'null' if value is None else value}"
                for key, value in changed.items()
            ]
        return words

    def remedy(self, settings: Mapping[str, Any]) -> str | None:
        """Settings, or more stages, with which the asynchronous run would fit into `memory`; None
        if none is known."""
        assert self.memory is not None
        config = with_method(self.config, settings)
        remedies = what_would_fit(config, planned_device_type(config), self.memory)
        # Smaller batches would be fewer examples per update, fewer devices fewer stages: other
        #     questions.
        if found := [one for one in remedies if "batch_size" not in one and "devices" not in one]:
            return f"--set {found[0]}"
        num_stages = 2 * config.pipeline.stages
        while num_stages <= config.model.blocks:
            cut = self.split(num_stages, config.pipeline.accumulation).asynchronous(settings, 0.0)
            if first_that_fits([cut], self.memory):
                return f"--stages {num_stages}"
            num_stages *= 2
        return None

    def asynchronous(self, settings: Mapping[str, Any], cost: float | None) -> Cut:
        config = with_method(self.config, settings)
        own = partition(config.pipeline.stages, self.num_ranks)
        times = tuple(passes(config) * forward_flops(config, stages) / self.unit for stages in own)
        count = config.pipeline.accumulation
        updates = tuple(self._update(config, stages, cost) for stages in own)
        elapsed = asynchronous_elapsed(times, updates, count, self._transfer(config))
        waiting = asynchronous_elapsed(times, (0.0,) * len(own), count, self._transfer(config))
        memory = max(rank.peak for rank in plan_memory(config, planned_device_type(config)))
        return Cut(ASYNCHRONOUS, count, elapsed, 1.0 - 1.0 / waiting, memory)

    def synchronous(self, settings: Mapping[str, Any], cost: float | None) -> Iterator[Cut]:
        config, found = with_method(self.config, settings), []
        for name, schedule in SYNCHRONOUS.items():
            num_chunks = schedule.num_chunks * self.num_ranks
            if num_chunks > config.model.blocks:
                continue
            ranks = [schedule.chunks(rank, self.num_ranks) for rank in range(self.num_ranks)]
            for count in divisors(self.examples):
                sized = _resized(config, num_chunks, self.num_ranks, count, **WITHOUT_DELAY)
                forward = tuple(
                    forward_flops(sized, [chunk]) / self.unit for chunk in range(num_chunks)
                )
                pace = synchronous_pace(
                    name, forward, count, self._transfer(sized), float(passes(sized) - 3)
                )
                if pace is None:
                    continue
                # The next step waits for the update of the busiest rank.
                update = max(self._update(sized, own, cost) for own in ranks)
                cut = Cut(name, count, pace.elapsed + update, 1.0 - 1.0 / pace.elapsed)
                found.append((cut, sized, ranks, pace.in_flight))
        for cut, sized, ranks, in_flight in sorted(found, key=lambda entry: preference(entry[0])):
            planned = plan_memory(sized, planned_device_type(sized), ranks, in_flight=in_flight)
            yield cut._replace(memory=max(rank.peak for rank in planned))

    def replicas(
        self, settings: Mapping[str, Any], cost: float | None, local: LocalSteps
    ) -> Cut | None:
        if self.examples % self.num_ranks:
            return None
        # Each with its share of the examples, in one micro-batch.
        own = _resized(with_method(self.config, settings), 1, 1, self.num_ranks, **WITHOUT_DELAY)
        config = own.model_copy(
            update={"pipeline": own.pipeline.model_copy(update={"accumulation": 1})}
        )
        update = update_flops(config, [0]) / self.unit if cost is None else cost * self.num_ranks
        memory = plan_memory(config, planned_device_type(config))[0].peak
        return Cut(REPLICAS, 1, 1.0 + update + local.averaging / local.steps, 0.0, memory)

    def _update(self, config: RunConfig, own: Sequence[int], cost: float | None) -> float:
        if cost is None:
            return update_flops(config, own) / self.unit
        return (
            cost
            * config.pipeline.accumulation
            * passes(config)
            * forward_flops(config, own)
            / self.unit
        )

    def _transfer(self, config: RunConfig) -> float:
        if self.bandwidth is None or self.throughput is None:
            return 0.0
        return boundary_bytes(config) / self.bandwidth * self.throughput / self.unit


def parse_devices(
    config: RunConfig, device_memory: str | None, throughput: str | None, bandwidth: str | None
) -> PlannedRun:
    if bandwidth is not None and throughput is None:
        raise UserError(
            "--bandwidth: needs --throughput, too, since transfers are compared with passes"
        )
    memory = None if device_memory is None else parse_bytes(device_memory, "--device-memory")
    bytes_per_second = None if bandwidth is None else parse_bytes(bandwidth, "--bandwidth")
    flops = None if throughput is None else parse_throughput(throughput, config.runtime.precision)
    return PlannedRun(config, memory, flops, bytes_per_second)


def with_method(config: RunConfig, settings: Mapping[str, Any]) -> RunConfig:
    """The configuration with another method: its section `optimizer`, its stash mode and its
    forecast."""
    if not settings:
        return config
    content = config.model_dump(mode="json")
    content["optimizer"] = settings["optimizer"]
    if (method := str(content["optimizer"]["method"])).startswith(RECORDED):
        raise UserError(
            f"--config: {method} was recorded from a loop of your own, whose memory brx does not"
            " know; leave it out"
        )
    content["pipeline"] |= settings.get("pipeline", {})
    content["pipeline"]["recompute"] &= (
        content["pipeline"]["stash"] == "exact"
    )  # others have nothing to keep
    return validate(content, RunConfig, "measured settings")


def _resized(
    config: RunConfig, num_stages: int, num_ranks: int, num_micro_batches: int, **others: Any
) -> RunConfig:
    """The same examples per update on other stages and devices, in so many micro-batches."""
    examples = config.training.batch_size * config.pipeline.accumulation
    sizes = {"stages": num_stages, "devices": num_ranks, "accumulation": num_micro_batches}
    pipeline = config.pipeline.model_copy(update=sizes | others)
    training = config.training.model_copy(update={"batch_size": examples // num_micro_batches})
    return config.model_copy(update={"pipeline": pipeline, "training": training})


def time_lines(run: PlannedRun) -> list[str]:
    """Multiplications, the time of an iteration and of all, and those of the best synchronous
    cut."""
    config, num_ranks = run.config, run.num_ranks
    by_rank = [rank_flops(config, own) for own in partition(config.pipeline.stages, num_ranks)]
    model = training_flops(config.model, config.data.vocabulary_size, run.examples)
    lines = [run.uneven] if run.uneven else []
    lines.append(
        f"FLOPs per iteration: {model / 1e12:.3g} T for the model, "
        f"{(sum(by_rank) - model) / 1e12:.3g} T for"
        f" recomputation and the method's matrix products; the busiest rank does "
        f"{max(by_rank) / sum(by_rank):.0%}."
    )
    ours, iterations = run.asynchronous({}, None), config.training.last_iteration
    seconds = run.seconds(ours)
    if seconds is None or run.throughput is None:
        lines.append(
            "For the time, give --throughput (FLOP/s per device as measured, or a device's name)."
        )
    else:
        hours = seconds * iterations / 3600
        lines.append(
            f"At {run.throughput / 1e12:.4g} TFLOP/s per device: {seconds:.3g} s per iteration,"
            f" {iterations:,} iterations in {hours:.3g} h on {num_ranks} device(s)."
        )
    if num_ranks == 1:
        return lines
    best = first_that_fits(run.synchronous({}, None), run.memory)
    if best is None:
        return [*lines, "No synchronous cut of the same examples fits."]
    took = "" if seconds is None else f": {hours * best.time / ours.time:.3g} h"
    assert best.memory is not None
    lines.append(
        f"The best synchronous cut of the same {run.examples} examples, {best.schedule} with "
        f"{best.num_micro_batches}"
        f" micro-batches, takes {best.time / ours.time:.2f} times as long per iteration{took}, and"
        f" {best.memory / 1e9:.1f} GB. Its devices wait for {best.idle:.0%} of the passes' time "
        f"(asynchronously"
        f" {ours.idle:.0%}: for the busiest)."
    )
    return lines
