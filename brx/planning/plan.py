"""What a run will need, before it starts: memory of every rank and multiplications, from closed
forms.

The memory of a rank peaks when the loss is computed, with all activations there, or when a backward
pass has left its gradients, or when the optimizer steps. Weights, the gradients of an update,
optimizer state and rings are always there."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from inspect import signature
from typing import Any, Literal, NamedTuple, get_args

import torch

from brx.config import schema
from brx.config.schema import RunConfig
from brx.methods.table import METHODS, find_method, ring_matrix_dtype
from brx.model.sizes import (
    FP32,
    Sizes,
    block_activation_bytes,
    early_gradient_bytes,
    head_bytes,
    num_elements,
    stage_forward_flops,
    stage_sizes,
)
from brx.model.stage import partition
from brx.optim.basis_rotation import BasisRotation
from brx.optim.matrix_batch import BATCH_BYTES
from brx.optim.parameter_state import state_shapes
from brx.pipeline.delay import StageDelay, check_devices, stage_delays

Source = Literal["2nd", "1st"]
Geometry = Literal["bilateral", "unilateral"]
STRATEGIES: tuple[tuple[Source, Geometry], ...] = tuple(
    itertools.product(get_args(Source), get_args(Geometry))
)
SOAP_LONGEST_SIDE = (
    10_000  # pytorch-optimizer's `max_precondition_dim`: its SOAP keeps nothing for a longer side
)
NEWTON_SCHULZ_STEPS = 5  # of torch's Muon and pytorch-optimizer's Scion

STAGE_PARTS = ("weights", "gradients", "moments", "rotation", "rings", "activations")  # of `Memory`
RANK_PARTS = (*STAGE_PARTS, "logits", "update", "probe")  # what a rank holds


@dataclass(frozen=True, kw_only=True)
class Memory:
    """What one virtual stage adds to its rank, or what a rank holds; in bytes but for the number of
    parameters."""

    stages: Sequence[int]
    num_parameters: int
    weights: int  # the newest in fp32, as gradients and moments; with a delay also those in use
    gradients: int
    moments: int
    rotation: int  # bases and covariances
    rings: int  # the older weight versions, with what weight prediction keeps
    # of all micro-batches in flight, with autocast's copies; of a rank with the links' buffers
    activations: int
    # What a rank has once.
    logits: int = 0  # working memory of head and loss, of the rank with the last stage
    update: int = 0  # working memory of an update
    probe: int = 0  # of the measures of staleness (`logging.staleness_every`)
    peak: int = 0  # the largest sum of what is there at one time
    by_stage: Sequence[Memory] = ()


def plan_memory(
    config: RunConfig,
    device_type: str,
    ranges: Sequence[Sequence[int]] | None = None,
    *,
    in_flight: Sequence[float] | None = None,
) -> list[Memory]:
    """The memory of every rank; UserError where so many devices cannot run the configured delays.

    `ranges` are the stages of each rank, by default an even cut into `pipeline.devices` runs;
    `in_flight` the most micro-batches whose activations each rank keeps at one time, by default the
    R - r of asynchronous 1F1B."""
    if ranges is None:
        ranges = partition(config.pipeline.stages, config.pipeline.devices)
    if in_flight is None:
        check_devices(stage_delays(config.pipeline), ranges)
        in_flight = range(len(ranges), 0, -1)
    return [
        _rank(config, device_type, own, len(ranges), most)
        for own, most in zip(ranges, in_flight, strict=True)
    ]


def planned_device_type(config: RunConfig) -> str:  # CUDA where any would do
    return "cuda" if config.runtime.device == "auto" else config.runtime.device


def stages_sizes(config: RunConfig, own: Sequence[int]) -> dict[int, Sizes]:
    blocks = partition(config.model.blocks, config.pipeline.stages)
    return {
        index: stage_sizes(config.model, config.data.vocabulary_size, blocks[index])
        for index in own
    }


def forward_flops(config: RunConfig, own: Sequence[int]) -> int:
    """Operations of the forward pass of a micro-batch through some stages of a run."""
    blocks, batch = (
        partition(config.model.blocks, config.pipeline.stages),
        config.training.batch_size,
    )
    return sum(
        stage_forward_flops(config.model, config.data.vocabulary_size, blocks[index], batch)
        for index in own
    )


def update_flops(config: RunConfig, own: Sequence[int]) -> float:
    """Operations of the method's own matrix products for some stages of a run, per update on
    average."""
    return sum(method_flops(config, sizes) for sizes in stages_sizes(config, own).values())


def passes(config: RunConfig) -> int:
    """The time of a micro-batch's passes in forward passes: forward 1, backward 2, recomputation
    1."""
    return 4 if config.pipeline.recompute else 3


def rank_flops(config: RunConfig, own: Sequence[int]) -> float:
    """Operations of one rank in an iteration: forward and backward pass, recomputation, and the
    method's own."""
    return passes(config) * config.pipeline.accumulation * forward_flops(
        config, own
    ) + update_flops(config, own)


def boundary_bytes(config: RunConfig) -> int:  # from one block to the next, of one micro-batch
    element = 2 if config.runtime.precision == "bf16" else FP32
    return element * config.training.batch_size * config.model.sequence_length * config.model.width


def _rank(
    config: RunConfig, device_type: str, own: Sequence[int], num_ranks: int, in_flight: float
) -> Memory:
    model, batch, bf16 = (
        config.model,
        config.training.batch_size,
        config.runtime.precision == "bf16",
    )
    vocabulary, num_stages = config.data.vocabulary_size, config.pipeline.stages
    delays, blocks = stage_delays(config.pipeline), partition(model.blocks, num_stages)
    sizes = stages_sizes(config, own)
    has_first, has_last = 0 in own, num_stages - 1 in own
    boundary = boundary_bytes(config)

    by_stage = [
        _stage(config, device_type, k, delays[k], blocks[k], sizes[k], in_flight) for k in own
    ]
    total = {
        part: sum(getattr(stage, part) for stage in by_stage)
        for part in ("num_parameters", *STAGE_PARTS)
    }
    # In flight across an update, once the backward pass has used up its own: without delay there
    #     are none.
    delayed = sum(
        stage.activations for index, stage in zip(own, by_stage, strict=True) if delays[index].tau
    )
    others = int(delayed / in_flight * (in_flight - 1))
    buffers = 0
    if num_ranks > 1:  # received activations and gradients, and what is being sent
        buffers = ((math.ceil(in_flight) + 1) * (not has_first) + 2 * (not has_last) + 2) * boundary

    logits = head_bytes(model, vocabulary, batch, bf16=bf16) if has_last else 0
    update = _update_bytes(config, sizes, device_type)
    early_gradients = early_gradient_bytes(model, vocabulary, batch) if has_last else 0
    backward = 6 * boundary  # gradients of activations within a block
    if config.pipeline.recompute:
        backward += max(
            _block_bytes(config, device_type, block) for index in own for block in blocks[index]
        )
    both_passes = total["activations"] + max(logits, backward) + early_gradients
    # What autograd leaves at the weights in use, until it has been added to the update's gradients.
    arrived = sum(_in_use_bytes(config, delays[index], sizes[index]) for index in own)
    if config.pipeline.accumulation > 1 and ring_matrix_dtype(config) == torch.bfloat16:
        # Of later micro-batches, those in bf16 are cast before they are added.
        delayed_sizes = [sizes[index] for index in own if delays[index].tau]
        arrived += FP32 * sum(map(_num_cast_elements, delayed_sizes))
    moments = [both_passes, others + arrived, others + update]
    probe = 0
    if config.logging.staleness_every is not None:
        # From its second micro-batch on, there is the sum of the fresh gradients so far.
        fresh_sum = total["gradients"] if config.pipeline.accumulation > 1 else 0
        older, probe, measured = _probe_bytes(
            config, sizes, total["gradients"], both_passes + fresh_sum, update
        )
        moments = [both_passes + older, *moments[1:], measured]
    parts = ("weights", "gradients", "moments", "rotation", "rings")
    always = sum(total[part] for part in parts) + buffers
    total["activations"] += buffers
    peak = always + max(moments)
    return Memory(
        stages=own, by_stage=by_stage, **total, logits=logits, update=update, probe=probe, peak=peak
    )


def _stage(
    config: RunConfig,
    device_type: str,
    index: int,
    delay: StageDelay,
    blocks: range,
    sizes: Sizes,
    in_flight: float,
) -> Memory:
    casts = 0
    if config.runtime.precision == "bf16" and not (
        ring_matrix_dtype(config) == torch.bfloat16 and delay.tau
    ):
        # Autocast's copies of fp32 matrices; those of a bf16 ring are used as they are.
        casts = 2 * _num_cast_elements(sizes)
    if config.pipeline.recompute:
        kept = len(blocks) * boundary_bytes(config)
    else:
        kept = sum(_block_bytes(config, device_type, block) for block in blocks)
    num_parameters = num_elements(sizes)
    moments, rotation = optimizer_bytes(config, sizes)
    return Memory(
        stages=[index],
        num_parameters=num_parameters,
        weights=FP32 * num_parameters + (_in_use_bytes(config, delay, sizes) if delay.tau else 0),
        gradients=FP32 * num_parameters,
        moments=moments,
        rotation=rotation,
        rings=_ring_bytes(config, delay, sizes, device_type, math.ceil(in_flight)),
        # Without delay, all micro-batches in flight see the same weights, and one copy of them.
        activations=int(in_flight * kept + (in_flight if delay.tau else 1) * casts),
    )


def _block_bytes(
    config: RunConfig, device_type: str, block: int
) -> int:  # activations of one micro-batch
    bf16 = config.runtime.precision == "bf16"
    return block_activation_bytes(
        config.model, block, config.training.batch_size, bf16=bf16, device_type=device_type
    )


def _ring_bytes(
    config: RunConfig, delay: StageDelay, sizes: Sizes, device_type: str, in_flight: int
) -> int:
    if delay.tau == 0:
        return 0
    pipeline = config.pipeline
    num_slots = delay.num_slots
    if pipeline.rings == "host":
        # On the device is the one that is fetched next, and those between their two passes.
        num_buffers = 1 if in_flight == 1 else in_flight + 1
        num_slots = num_buffers + (num_slots if device_type == "cpu" else 0)
    # Weight prediction keeps the weights before the last update, and for an average their average
    # step. What a user's own forecast keeps besides is not known.
    is_average = pipeline.stash == "predict" or pipeline.forecast == "average-update"
    num_copies = 2 if is_average else int(_forecasts(config))
    slot = _in_use_bytes(config, delay, sizes)
    return num_slots * slot + num_copies * FP32 * num_elements(sizes)


def _in_use_bytes(config: RunConfig, delay: StageDelay, sizes: Sizes) -> int:
    """The weights with which a stage computes: with a delay in the dtypes of its slots."""
    num_all, num_in_matrices = num_elements(sizes), _num_cast_elements(sizes)
    matrix_element = ring_matrix_dtype(config).itemsize if delay.tau else FP32
    return matrix_element * num_in_matrices + FP32 * (num_all - num_in_matrices)


def _forecasts(config: RunConfig) -> bool:  # both passes compute with predicted weights
    return config.pipeline.forecast is not None or find_method(config).forecasts


def _update_bytes(config: RunConfig, by_stage: dict[int, Sizes], device_type: str) -> int:
    """Temporary tensors of an update: of the largest batch of equal matrices, or of the largest
    stage."""
    sizes = {index: FP32 * num_elements(stage) for index, stage in by_stage.items()}
    # For the norms of the updates, the weights before.
    before = sum(sizes.values()) if config.logging.update_norms else 0
    if isinstance(config.optimizer, schema.BasisRotationConfig):
        together = {name: size for stage in by_stage.values() for name, size in stage.items()}
        return before + rotation_update_bytes(config, together, device_type)
    if isinstance(config.optimizer, schema.NesterovConfig):
        return before + 2 * max(sizes.values())
    delays = stage_delays(config.pipeline)
    largest_delayed = max((size for index, size in sizes.items() if delays[index].tau), default=0)
    predicted = (
        2 if _forecasts(config) else int(config.pipeline.stash == "predict")
    )  # the update, and the forecast
    correction = (
        isinstance(config.optimizer, schema.DelayCompensationConfig)
        and config.pipeline.stash != "none"
    )
    return max(before, (predicted + correction) * largest_delayed)


def _probe_bytes(
    config: RunConfig, by_stage: dict[int, Sizes], gradients: int, second_pass: int, update: int
) -> tuple[int, int, int]:
    """Of the measures of staleness: older updates kept; these with what an update adds; the largest
    sum at a time."""
    every, delays = config.logging.staleness_every, stage_delays(config.pipeline)
    assert every is not None
    older = before = bases = 0
    for index, sizes in by_stage.items():
        size = FP32 * num_elements(sizes)
        # Just before a measured update t: t - 1, t - lag, and those a lag before later measured
        #     ones.
        older += len({1, *range(delays[index].most_tau_updates, 0, -every)}) * size
        before += size
        if isinstance(config.optimizer, schema.BasisRotationConfig):
            bases += FP32 * sum(kept.bases for _, kept in rotations(config, sizes))
    # Of the largest parameter, in float64, when the cosine of two gradients is taken.
    products = 3 * 8 * max(_largest(sizes) for sizes in by_stage.values())
    largest = max(second_pass, gradients + products, bases + max(update, before))
    return older, older + before + bases, older + before + largest


def _num_cast_elements(sizes: Sizes) -> int:
    """Of weights that autocast casts wherever they are used; rings may keep them in bf16."""
    return sum(size.numel for size in sizes.values() if size.is_cast)


# What optimizers keep and compute beyond the passes; of BasisRotation by its own `state_shapes` on
# the meta device.


class Rotation(NamedTuple):
    """What a method keeps for one parameter (*lead, m, n) beyond moments; no sides where it does
    not rotate it."""

    sides: tuple[int, ...]  # the lengths of those that are rotated
    bases: int  # elements of U and V, of all matrices of the stack
    covariances: int  # elements of L and R


@lru_cache(maxsize=1024)
def rotation(
    optimizer: schema.BasisRotationConfig | schema.SoapConfig, shape: tuple[int, ...]
) -> Rotation:
    if isinstance(optimizer, schema.SoapConfig):
        sides = tuple(side for side in shape[-2:] if side <= SOAP_LONGEST_SIDE)
        elements = math.prod(shape[:-2]) * sum(side**2 for side in sides)
        return Rotation(sides, elements, elements)
    method = METHODS["basis-rotation"].bound_to(RunConfig(optimizer=optimizer))
    parameter = torch.nn.Parameter(torch.empty(shape, device="meta"))
    return _kept(
        shape,
        method.matrices(
            [{"params": [("weight", parameter)], "stage": 0, "delay": 0.0}]
        ).param_groups[0],
    )


def overhead_elements(shape: tuple[int, ...], source: Source, geometry: Geometry) -> int:
    """Elements beyond Adam's two moments, however long the sides (appendix "Memory Overhead
    Analysis")."""
    defaults = {
        name: option.default for name, option in signature(BasisRotation).parameters.items()
    }
    kept = _kept(shape, {**defaults, "source": source, "geometry": geometry, "max_dim": None})
    return kept.bases + kept.covariances


def _kept(shape: tuple[int, ...], group: dict[str, Any]) -> Rotation:
    sizes = state_shapes(torch.empty(shape, device="meta"), group)
    bases = [shape for name, shape in sizes.items() if name.endswith("_basis")]
    covariances = [shape for name, shape in sizes.items() if name.endswith("_covariance")]
    return Rotation(
        tuple(shape[-1] for shape in bases),
        sum(map(math.prod, bases)),
        sum(map(math.prod, covariances)),
    )


def rotations(config: RunConfig, sizes: Sizes) -> Iterator[tuple[tuple[int, ...], Rotation]]:
    """The matrices that the run's method rotates, one by one, each with what is kept for it."""
    optimizer = config.optimizer
    if isinstance(optimizer, schema.BasisRotationConfig | schema.SoapConfig):
        for shape in matrices(sizes):
            yield shape, rotation(optimizer, shape)


def matrices(sizes: Sizes) -> Iterator[tuple[int, ...]]:
    return (size.shape for size in sizes.values() if size.is_matrix)


def _largest(sizes: Sizes) -> int:
    """The elements of the largest parameter."""
    return max(size.numel for size in sizes.values())


def optimizer_bytes(config: RunConfig, sizes: Sizes) -> tuple[int, int]:
    """Bytes of the method's moments, and of its rotation matrices, for these parameters."""
    moments = 2 * FP32 * num_elements(sizes)
    if isinstance(config.optimizer, schema.MuonConfig):  # one moment for a matrix
        moments -= FP32 * sum(map(math.prod, matrices(sizes)))
    if isinstance(config.optimizer, schema.ScionConfig):
        moments //= 2
    return moments, FP32 * sum(
        kept.bases + kept.covariances for _, kept in rotations(config, sizes)
    )


def method_flops(config: RunConfig, sizes: Sizes) -> float:
    """Operations of the method's own matrix products, an iteration on average.

    A rotation U^T G V takes 2 m n (m + n): one for the gradient and one for the update; at a
    refresh two more for the momentum, and for each side a product and a QR decomposition, about 7
    m^3. The covariances take 2 m n (m + n) whenever a gradient enters them, and so do the
    momentum's at a refresh of source `1st`. A side that is not rotated takes no part. Muon and
    Scion orthogonalise by five Newton-Schulz steps, each 4 m^2 n + 2 m^3 with m <= n."""
    optimizer, total = config.optimizer, 0.0
    if isinstance(optimizer, schema.MuonConfig | schema.ScionConfig):
        for *lead, rows, columns in matrices(sizes):
            m, n = sorted((rows, columns))
            total += math.prod(lead) * NEWTON_SCHULZ_STEPS * (4 * m**2 * n + 2 * m**3)
        return total
    for shape, kept in rotations(config, sizes):
        assert isinstance(optimizer, schema.BasisRotationConfig | schema.SoapConfig)
        at_every_step = isinstance(optimizer, schema.SoapConfig) or (
            optimizer.source == "2nd" and optimizer.covariance == "step"
        )
        product = 2 * shape[-2] * shape[-1] * sum(kept.sides)
        covariances = product / (1 if at_every_step else optimizer.frequency)
        refresh = 2 * product + 7 * sum(side**3 for side in kept.sides)
        total += math.prod(shape[:-2]) * (2 * product + covariances + refresh / optimizer.frequency)
    return total


def rotation_update_bytes(config: RunConfig, sizes: Sizes, device_type: str) -> int:
    """Temporary bytes of BasisRotation's largest batch of equal matrices at a refresh; `sizes`:
    all of the device."""
    largest, all_matrices = 0, list(matrices(sizes))
    for shape, kept in dict(rotations(config, sizes)).items():
        size = math.prod(shape)
        capacity = max(1, BATCH_BYTES.get(device_type, BATCH_BYTES["cuda"]) // (FP32 * size))
        members = min(all_matrices.count(shape), capacity)
        side = math.prod(shape[:-2]) * max(kept.sides, default=0) ** 2
        # Gradients, momentum, both moments anew, their way through the products with the bases. For
        # the side under way: the product with its basis, and what its columns are orthonormalised
        # in, on the CPU a padded copy, elsewhere the columns, their products, the triangular factor
        # and the solution, in float64.
        orthonormalisation = 1 if device_type == "cpu" else 7
        per_member = (3 + 2 * len(kept.sides)) * size + (1 + orthonormalisation) * side
        largest = max(largest, FP32 * members * per_member)
    return largest
