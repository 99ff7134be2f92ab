"""What the measures of staleness (`logging.staleness_every`) take beside the training that they watch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from brx.config.schema import BasisRotationConfig, RunConfig
from brx.model.sizes import FP32, Shapes, num_elements
from brx.model.stage import is_block_matrix
from brx.pipeline.delay import StageDelay, stage_delays
from brx.planning.optimizer_memory import basis_elements

FP64 = 8


@dataclass(frozen=True)
class ProbeMemory:
    """In bytes, at a measured iteration of a run on one device.

    Attributes:
        updates: the older updates that are kept to compare the newest with.
        before: the weights before the update.
        bases: the bases before the update.
        products: of the largest parameter, when the cosine of two gradients is taken.
    """

    updates: int
    before: int
    bases: int
    products: int

    @property
    def kept(self) -> int:
        """All that is there across the update."""
        return self.updates + self.before + self.bases

    def peak(self, *, gradients: int, second_pass: int, update: int) -> int:
        """The largest sum of what is there at one time, beside weights, moments, rotation and rings.

        Args:
            gradients: of all stages.
            second_pass: the activations of the fresh gradients' forward and backward pass, and its working memory.
            update: the working memory of the update.
        """
        beside_gradients = [
            second_pass,
            gradients + self.products,  # the fresh ones
            self.bases + max(update, self.before),  # then the newest update, as large as the weights
        ]
        return self.updates + self.before + gradients + max(beside_gradients)


def probe_memory(config: RunConfig, by_stage: Mapping[int, Shapes]) -> ProbeMemory | None:
    """What the probe of a run keeps; None if it has none.

    Args:
        config: the run.
        by_stage: the shapes of all stages.
    """
    every = config.logging.staleness_every
    if every is None:
        return None
    delays, optimizer = stage_delays(config.pipeline), config.optimizer
    sizes = {index: FP32 * num_elements(shapes) for index, shapes in by_stage.items()}
    all_shapes = [(name, shape) for shapes in by_stage.values() for name, shape in shapes.items()]
    bases = 0
    if isinstance(optimizer, BasisRotationConfig):
        bases = sum(basis_elements(shape, optimizer.geometry) for name, shape in all_shapes if is_block_matrix(name))
    return ProbeMemory(
        updates=sum(_num_older_updates(delays[index], every) * size for index, size in sizes.items()),
        before=sum(sizes.values()),
        bases=FP32 * bases,
        products=3 * FP64 * max(math.prod(shape) for _, shape in all_shapes),
    )


def _num_older_updates(delay: StageDelay, every: int) -> int:
    """Of one stage, just before a measured update t: t - 1, t - lag, and those a lag before later measured ones."""
    return len({1, *range(delay.most_tau_updates, 0, -every)})
