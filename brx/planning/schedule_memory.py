"""What a model makes of the schedules: memory of the busiest device, as `brx plan` says, and the time of a transfer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from brx.config.schema import RunConfig
from brx.errors import UserError
from brx.model.sizes import stage_forward_flops
from brx.model.stage import partition
from brx.planning.idle import SYNCHRONOUS, synchronous_idle
from brx.planning.plan import plan_memory, planned_device_type
from brx.planning.verdict import ASYNCHRONOUS, Question


@dataclass(frozen=True)
class Fitting:
    """A model and its devices, which say at every P and M how long transfers take and what fits.

    Attributes:
        config: the run; its micro-batches of an update together are the examples per update.
        device_memory: bytes of a device; None: everything fits.
        bandwidth: bytes per second between neighbours; None: transfers take no time.
        throughput: FLOP/s of a device, with `bandwidth`.
    """

    config: RunConfig
    device_memory: float | None = None
    bandwidth: float | None = None
    throughput: float | None = None

    def memory(self, question: Question) -> dict[str, float]:
        """Bytes of the busiest device by schedule, at the question's P and M.

        Raises:
            UserError: the model cannot be split up so.
        """
        return memory_by_schedule(self.config, question.num_stages, question.num_micro_batches)

    def fitted(self, question: Question) -> Question:
        """The question with the transfer time of its P and M, and without the schedules that do not fit there.

        Raises:
            UserError: the model cannot be split up so.
        """
        shape = (question.num_stages, question.num_micro_batches)
        transfer = 0.0
        if self.bandwidth is not None and self.throughput is not None:
            transfer = transfer_time(self.config, *shape, bandwidth=self.bandwidth, throughput=self.throughput)
        excluded = too_large(self.memory(question), self.device_memory)
        return replace(question, transfer_time=transfer, excluded=excluded)

    def fitted_if_possible(self, question: Question) -> Question | None:
        """`fitted`; None if the model cannot be split up so."""
        is_possible = cannot_split(self.config, question.num_stages, question.num_micro_batches) is None
        return self.fitted(question) if is_possible else None


def cannot_split(config: RunConfig, num_stages: int, num_micro_batches: int) -> str | None:
    """Why a model has no P stages, or an update of it no M micro-batches, if it cannot."""
    batch = config.training.batch_size * config.pipeline.accumulation
    if batch % num_micro_batches:
        return (
            f"--micro-batches {num_micro_batches}: training.batch_size {batch} is no multiple of it (set another one)"
        )
    if num_stages > config.model.blocks:
        return f"--stages {num_stages}: the model has only {config.model.blocks} blocks"
    return None


def micro_batch_config(config: RunConfig, num_stages: int, num_micro_batches: int) -> RunConfig:
    """The configuration with a device per stage, and with its batch split up into micro-batches.

    Raises:
        UserError: the batch does not divide, or the model has fewer blocks than stages.
    """
    problem = cannot_split(config, num_stages, num_micro_batches)
    if problem is not None:
        raise UserError(problem)
    batch = config.training.batch_size * config.pipeline.accumulation
    changes = {"stages": num_stages, "devices": num_stages, "delay": "pipeline", "accumulation": num_micro_batches}
    pipeline = config.pipeline.model_copy(update=changes)
    training = config.training.model_copy(update={"batch_size": batch // num_micro_batches})
    return config.model_copy(update={"pipeline": pipeline, "training": training})


def memory_by_schedule(config: RunConfig, num_stages: int, num_micro_batches: int) -> dict[str, float]:
    """Bytes of the busiest device, by schedule.

    A synchronous pipeline keeps no older weights and predicts none, whatever the run's stash and forecast are; it keeps
    the activations of as many micro-batches as its schedule has in flight, and logits of one.

    Args:
        config: the run; its micro-batches of an update together are the examples per update.
        num_stages: P, a device each.
        num_micro_batches: M.

    Raises:
        UserError: the batch does not divide, or the model has fewer blocks than stages.
    """
    config = micro_batch_config(config, num_stages, num_micro_batches)
    device_type = planned_device_type(config)
    peaks: dict[str, float] = {ASYNCHRONOUS: max(rank.peak for rank in plan_memory(config, device_type))}
    without_delay = config.pipeline.model_copy(update={"delay": 0, "stash": "exact", "forecast": None})
    synchronous = config.model_copy(update={"pipeline": without_delay})
    for name in SYNCHRONOUS:
        idle = synchronous_idle(name, num_stages, num_micro_batches)
        if idle is not None:
            ranks = plan_memory(synchronous, device_type, in_flight=idle.in_flight)
            peaks[name] = max(rank.peak for rank in ranks)
    return peaks


def transfer_time(
    config: RunConfig, num_stages: int, num_micro_batches: int, *, bandwidth: float, throughput: float
) -> float:
    """Time of a micro-batch's activations from one device to the next, in units of its forward pass on one device.

    Args:
        config: the run; its micro-batches of an update together are the examples per update.
        num_stages: P.
        num_micro_batches: M.
        bandwidth: bytes per second between neighbours.
        throughput: FLOP/s of a device.

    Raises:
        UserError: the batch does not divide, or the model has fewer blocks than stages.
    """
    config = micro_batch_config(config, num_stages, num_micro_batches)
    model, batch = config.model, config.training.batch_size
    element = 2 if config.runtime.precision == "bf16" else 4
    size = element * batch * model.sequence_length * model.width
    middle = partition(model.blocks, num_stages)[num_stages // 2]
    forward = stage_forward_flops(model, config.data.vocabulary_size, middle, batch)
    return (size / bandwidth) / (forward / throughput)


def too_large(memory: Mapping[str, float], device_memory: float | None) -> tuple[str, ...]:
    """The schedules whose busiest device needs more than there is."""
    if device_memory is None:
        return ()
    return tuple(schedule for schedule, needed in memory.items() if needed > device_memory)
