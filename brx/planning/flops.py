"""Counts the floating-point operations of a run; a multiply-add is two."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from brx.config.schema import OptimizerConfig, RunConfig
from brx.methods.product_costs import Products
from brx.methods.table import find_method
from brx.methods.trial import is_own, trial_of
from brx.model.sizes import Sizes, blocks_forward_flops, stage_forward_flops, stage_sizes
from brx.model.stage import partition


def stages_sizes(config: RunConfig, stages: Sequence[int]) -> dict[int, Sizes]:
    """The parameters of some stages of a run, by stage."""
    blocks = partition(config.model.blocks, config.pipeline.stages)
    return {
        index: stage_sizes(config.model, config.data.vocabulary_size, blocks[index])
        for index in stages
    }


def forward_flops(config: RunConfig, stages: Sequence[int]) -> int:
    """The operations of a micro-batch's forward pass through some stages of a run."""
    blocks = partition(config.model.blocks, config.pipeline.stages)
    vocabulary_size = config.data.vocabulary_size
    batch = config.training.batch_size
    return sum(
        stage_forward_flops(config.model, vocabulary_size, blocks[index], batch) for index in stages
    )


def recomputed_flops(config: RunConfig, stages: Sequence[int]) -> int:
    """The operations that a micro-batch's backward pass through some stages repeats: with
    `pipeline.recompute`, the forward passes of their blocks. The head is never recomputed."""
    if not config.pipeline.recompute:
        return 0
    blocks = partition(config.model.blocks, config.pipeline.stages)
    batch = config.training.batch_size
    return sum(blocks_forward_flops(config.model, blocks[index], batch) for index in stages)


def pass_flops(config: RunConfig, stages: Sequence[int]) -> int:
    """The operations of a micro-batch's passes through some stages: the forward pass, twice as much
    for the backward pass, and recomputation."""
    return 3 * forward_flops(config, stages) + recomputed_flops(config, stages)


def update_products(config: RunConfig, stages: Sequence[int]) -> Products:
    """The method's own matrix products for some stages of a run, per update on average."""
    if is_own(config):
        counted = trial_of(config).product_flops
        return Products(others=sum(counted.get(index, 0.0) for index in stages))
    total = Products()
    for sizes in stages_sizes(config, stages).values():
        total = total.plus(products_of(config, sizes))
    return total


def products_of(config: RunConfig, sizes: Sizes) -> Products:
    """The matrix products of a built-in method for these parameters, per update on average."""
    total = Products()
    for size in sizes.values():
        if size.is_matrix:
            total = total.plus(_products(config.optimizer, size.shape))
    return total


@lru_cache(maxsize=1024)
def _products(optimizer: OptimizerConfig, shape: tuple[int, ...]) -> Products:
    return find_method(RunConfig(optimizer=optimizer)).products(shape)


def update_flops(config: RunConfig, stages: Sequence[int]) -> float:
    """The operations of `update_products`."""
    return update_products(config, stages).total


def rank_flops(config: RunConfig, stages: Sequence[int]) -> float:
    """The operations of one rank in an iteration: forward and backward passes, recomputation, and
    the method's own products."""
    return config.pipeline.accumulation * pass_flops(config, stages) + update_flops(config, stages)
