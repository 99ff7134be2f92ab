"""Memory of the busiest device under each schedule, from the plan of the asynchronous pipeline."""

from __future__ import annotations

import math

from brx.config.schema import RunConfig
from brx.errors import UserError
from brx.pipeline.delay import pipeline_delays
from brx.planning.idle import SYNCHRONOUS, synchronous_idle
from brx.planning.plan import RankMemory, plan_memory, planned_device_type
from brx.planning.verdict import ASYNCHRONOUS


def micro_batch_config(config: RunConfig, num_stages: int, num_micro_batches: int) -> RunConfig:
    """The configuration with a device per stage, and with its batch split up into micro-batches.

    Raises:
        UserError: the batch does not divide, or the model has fewer blocks than stages.
    """
    batch = config.training.batch_size
    if batch % num_micro_batches:
        raise UserError(
            f"--micro-batches {num_micro_batches}: training.batch_size {batch} is no multiple of it (set another one)"
        )
    if num_stages > config.model.blocks:
        raise UserError(f"--stages {num_stages}: the model has only {config.model.blocks} blocks")
    pipeline = config.pipeline.model_copy(update={"stages": num_stages, "devices": num_stages})
    training = config.training.model_copy(update={"batch_size": batch // num_micro_batches})
    return config.model_copy(update={"pipeline": pipeline, "training": training})


def memory_by_schedule(config: RunConfig, num_stages: int, num_micro_batches: int) -> dict[str, float]:
    """Bytes of the busiest device, by schedule.

    A synchronous pipeline keeps no older weights, and the activations of as many micro-batches as its schedule has in
    flight. An asynchronous one keeps ceil(tau_k / M) + 1 versions of the weights.

    Args:
        config: the run; `training.batch_size` is the number of examples per update.
        num_stages: P, a device each.
        num_micro_batches: M.
    """
    config = micro_batch_config(config, num_stages, num_micro_batches)
    ranks = plan_memory(config, planned_device_type(config))
    peaks = {ASYNCHRONOUS: max(_asynchronous(rank, num_stages, num_micro_batches) for rank in ranks)}
    for name in SYNCHRONOUS:
        idle = synchronous_idle(name, num_stages, num_micro_batches)
        if idle is not None:
            peaks[name] = max(_synchronous(rank, num_stages, idle.in_flight[rank.rank]) for rank in ranks)
    return peaks


def _asynchronous(rank: RankMemory, num_stages: int, num_micro_batches: int) -> float:
    delay = pipeline_delays(num_stages)[rank.rank].tau
    return rank.peak - rank.rings * (1.0 - (math.ceil(delay / num_micro_batches) + 1) / (delay + 1))


def _synchronous(rank: RankMemory, num_stages: int, in_flight: float) -> float:
    (stage,) = rank.by_stage
    planned = num_stages - rank.rank
    return rank.peak - rank.rings + (in_flight - planned) * stage.activations / planned
