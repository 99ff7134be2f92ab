"""What a model makes of the schedules: memory of the busiest device, as `brx plan` says, and the time of a transfer."""

from __future__ import annotations

from collections.abc import Mapping

from brx.config.schema import RunConfig
from brx.errors import UserError
from brx.model.sizes import stage_forward_flops
from brx.model.stage import partition
from brx.planning.idle import SYNCHRONOUS, synchronous_idle
from brx.planning.plan import plan_memory, planned_device_type
from brx.planning.verdict import ASYNCHRONOUS


def micro_batch_config(config: RunConfig, num_stages: int, num_micro_batches: int) -> RunConfig:
    """The configuration with a device per stage, and with its batch split up into micro-batches.

    Raises:
        UserError: the batch does not divide, or the model has fewer blocks than stages.
    """
    batch = config.training.batch_size * config.pipeline.accumulation
    if batch % num_micro_batches:
        raise UserError(
            f"--micro-batches {num_micro_batches}: training.batch_size {batch} is no multiple of it (set another one)"
        )
    if num_stages > config.model.blocks:
        raise UserError(f"--stages {num_stages}: the model has only {config.model.blocks} blocks")
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
        config: the run; `training.batch_size` is the number of examples per update.
        num_stages: P.
        num_micro_batches: M.
        bandwidth: bytes per second between neighbours.
        throughput: FLOP/s of a device.
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
