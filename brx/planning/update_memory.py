"""Plans the temporary tensors of an update: those of the optimizer's step, and copies of weights
around it."""

import math
from collections import Counter
from collections.abc import Mapping
from functools import lru_cache

from brx.config import schema
from brx.config.schema import OptimizerConfig, RunConfig
from brx.methods.muon import LARGEST_BATCH
from brx.methods.table import find_method
from brx.model.sizes import FP32, Sizes, num_elements
from brx.optim.matrix_batch import BATCH_BYTES
from brx.pipeline.delay import stage_delays


def update_bytes(config: RunConfig, by_stage: Mapping[int, Sizes], device_type: str) -> int:
    """Bytes of the temporary tensors of an update: for the largest batch of equal matrices, or the
    largest stage."""
    sizes = {index: FP32 * num_elements(stage) for index, stage in by_stage.items()}
    # A copy of the weights before the update, for the norm of the update.
    before = sum(sizes.values()) if config.logging.update_norms else 0
    together = {name: size for stage in by_stage.values() for name, size in stage.items()}
    if isinstance(config.optimizer, schema.BasisRotationConfig):
        return before + rotation_update_bytes(config, together, device_type)
    in_the_step = 0
    if isinstance(config.optimizer, schema.MuonConfig) and device_type == "cpu":
        in_the_step = muon_update_bytes(together)
    method = find_method(config)
    if method.update_copies:
        return before + method.update_copies * max(sizes.values())
    delays = stage_delays(config.pipeline)
    largest_delayed = max((size for index, size in sizes.items() if delays[index].tau), default=0)
    num_copies = 0
    if computes_with_forecasts(config):
        num_copies = 2  # the update, and the forecast
    elif config.pipeline.stash == "predict":
        num_copies = 1
    if config.pipeline.error_feedback:
        num_copies = max(num_copies, 1)
    if method.corrects_gradients and config.pipeline.stash != "none":
        num_copies += 1
    return max(before + in_the_step, num_copies * largest_delayed)


def muon_update_bytes(sizes: Sizes) -> int:
    """Temporary bytes of Muon on a CPU: the directions of all matrices, and its largest batch of
    equal matrices.

    An entry of a square matrix takes 22 bytes in the batch: five tensors in bf16 (its direction
    before and after it joins the batch and is divided by its norm, the Gram matrix and the
    polynomial) and three in fp32, while two matrices are multiplied (`brx.methods.bf16_products`).

    Args:
        sizes: all parameters of the device.
    """
    entries: Counter[tuple[int, ...]] = Counter()  # by the shape of a matrix
    for shape in matrices(sizes):
        entries[shape[-2:]] += math.prod(shape)
    in_a_batch = 0
    for (m, n), num_entries in entries.items():
        in_a_batch = max(in_a_batch, m * n, min(num_entries, LARGEST_BATCH))
    return FP32 * entries.total() + 22 * in_a_batch


def rotation_update_bytes(config: RunConfig, sizes: Sizes, device_type: str) -> int:
    """Temporary bytes of BasisRotation at a refresh of its largest batch of equal matrices.

    Args:
        config: the run's configuration.
        sizes: all parameters of the device.
        device_type: the type of the device.
    """
    largest = 0
    all_matrices = matrices(sizes)
    batch_bytes = BATCH_BYTES.get(device_type, BATCH_BYTES["cuda"])
    for shape in set(all_matrices):
        sides = rotated_sides(config, shape)
        size = math.prod(shape)
        capacity = max(1, batch_bytes // (FP32 * size))
        members = min(all_matrices.count(shape), capacity)
        side = math.prod(shape[:-2]) * max(sides, default=0) ** 2
        # Matrices for the side that is being refreshed: the product with its basis, and those of
        # the orthonormalisation. On the CPU, these are the columns by size, their reflections, the
        # triangle, what is kept of it, and the factor. Elsewhere, they are the columns by size and
        # the reduced ones; and in a pass the columns, the Gram matrix, its factor, the solution and
        # a copy of it.
        orthonormalisation = 5 if device_type == "cpu" else 7
        # The gradients, the momentum, the new moments, and the intermediate products with the
        # bases.
        per_member = (3 + 2 * len(sides)) * size + (1 + orthonormalisation) * side
        largest = max(largest, FP32 * members * per_member)
    return largest


def computes_with_forecasts(config: RunConfig) -> bool:
    """Whether both passes compute with predicted weights."""
    return config.pipeline.forecast is not None or find_method(config).forecasts


def matrices(sizes: Sizes) -> list[tuple[int, ...]]:
    """The shapes of the weight matrices in blocks, one by one."""
    return [size.shape for size in sizes.values() if size.is_matrix]


def rotated_sides(config: RunConfig, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The lengths of the sides of a matrix that the run's method rotates."""
    return _rotated_sides(config.optimizer, shape)


@lru_cache(maxsize=1024)
def _rotated_sides(optimizer: OptimizerConfig, shape: tuple[int, ...]) -> tuple[int, ...]:
    return find_method(RunConfig(optimizer=optimizer)).rotated_sides(shape)
