"""Measures the time of a run's stages on a device, for `pipeline.balance: time`."""

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from brx.config.schema import RunConfig
from brx.model.head import loss_of
from brx.model.sizes import distinct_blocks
from brx.model.stage import Stage, make_stage, partition

REPEATS = 7


def measure_stage_costs(config: RunConfig, device: torch.device) -> list[float]:
    """The seconds of each stage's passes on a device. Embedding, blocks and head are measured
    separately, because with GPT-2's vocabulary the head takes as long as several blocks."""
    model = config.model
    vocabulary_size = config.data.vocabulary_size
    shape = (config.training.batch_size, model.sequence_length)
    tokens = torch.zeros(shape, dtype=torch.int64, device=device)  # (B, S)
    stream = torch.randn(*shape, model.width, device=device, requires_grad=True)  # (B, S, D)

    def part(block: int) -> Stage:
        """A stage of one block; the first one has the embedding, too, and the last one the head."""
        return make_stage(model, vocabulary_size, range(block, block + 1), seed=0).to(device)

    recompute = config.pipeline.recompute
    like = distinct_blocks(model)
    seconds = {}
    for block in set(like.values()):
        (module,) = part(block).blocks.values()
        run = partial(checkpoint, module, use_reentrant=False) if recompute else module
        seconds[block] = _seconds(partial(_output, run, stream), device)
    blocks = partition(model.blocks, config.pipeline.stages)
    costs = [sum(seconds[like[block]] for block in of_stage) for of_stage in blocks]
    embedding = part(0).embedding
    head = part(model.blocks - 1).head
    assert embedding is not None
    assert head is not None
    costs[0] += _seconds(lambda: embedding(tokens).sum(), device)
    costs[-1] += _seconds(lambda: loss_of(head, stream, tokens, vocabulary_size), device)
    return costs


def _output(
    block: Callable[[Tensor], Any],
    stream: Tensor,  # (B, S, D)
) -> Tensor:
    """The sum of a block's output."""
    output = block(stream)
    total: Tensor = output[0].sum() if isinstance(output, tuple) else output.sum()
    return total


def _seconds(forward: Callable[[], Tensor], device: torch.device) -> float:
    """The median time of a forward and backward pass."""
    seconds = []
    for _ in range(1 + REPEATS):
        started = time.perf_counter()
        torch.autograd.backward(forward())
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[1:])  # the first one warms up
