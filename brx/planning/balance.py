"""Which device carries which stages: by count, or so that the slowest device is as fast as possible."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from brx.config.schema import RunConfig
from brx.model.stage import partition
from brx.model.transformer import Block, Embedding, Head

REPEATS = 7


def assign(costs: Sequence[float], num_ranks: int) -> list[range]:
    """Cut stages into contiguous runs, one per rank, such that the largest sum of costs is as small as possible.

    R is at most the number of stages; no rank goes empty. Of several best cuts, it is the one whose first ranks carry
    least.
    """
    num_stages = len(costs)
    sums = [0.0]
    for cost in costs:
        sums.append(sums[-1] + cost)
    # best[r][k]: the smallest possible largest sum for stages k.. on r ranks; cut[r][k]: where the first of them ends.
    best = [[float("inf")] * (num_stages + 1) for _ in range(num_ranks + 1)]
    cut = [[0] * (num_stages + 1) for _ in range(num_ranks + 1)]
    best[0][num_stages] = 0.0
    for ranks in range(1, num_ranks + 1):
        for first in range(num_stages):
            for stop in range(first + 1, num_stages + 1):
                largest = max(sums[stop] - sums[first], best[ranks - 1][stop])
                if largest < best[ranks][first]:
                    best[ranks][first], cut[ranks][first] = largest, stop
    ranges, first = [], 0
    for ranks in range(num_ranks, 0, -1):
        stop = cut[ranks][first]
        ranges.append(range(first, stop))
        first = stop
    return ranges


def measure_stage_costs(config: RunConfig, device: torch.device) -> list[float]:
    """Seconds of each stage's forward and backward pass, from the times of a block, the embedding and the head.

    At GPT-2's vocabulary the head weighs several blocks, which an even cut by number does not see.
    """
    model, batch = config.model, config.training.batch_size
    vocabulary_size = config.data.vocabulary_size
    tokens = torch.zeros(batch, model.sequence_length, dtype=torch.int64, device=device)
    stream = torch.randn(batch, model.sequence_length, model.width, device=device, requires_grad=True)
    head = Head(model, vocabulary_size).to(device)
    embedding = Embedding(model, vocabulary_size).to(device)
    # All blocks but the mixtures are alike; with mixtures, their mean counts for each.
    blocks = [Block(model, index).to(device) for index in range(config.model.moe.every if config.model.moe else 1)]
    block_seconds = statistics.mean(_seconds(partial(_output_sum, block, stream), device) for block in blocks)
    costs = [block_seconds * len(blocks) for blocks in partition(model.blocks, config.pipeline.stages)]
    costs[0] += _seconds(lambda: embedding(tokens).sum(), device)
    costs[-1] += _seconds(lambda: head.loss(stream, tokens), device)
    return costs


def _output_sum(block: Block, stream: Tensor) -> Tensor:
    output: Tensor = block(stream)[0]
    return output.sum()


def _seconds(forward: Callable[[], Tensor], device: torch.device) -> float:
    """Median time of a forward and backward pass."""
    seconds = []
    for repeat in range(REPEATS + 1):
        _finish(device)
        started = time.perf_counter()
        torch.autograd.backward(forward())
        _finish(device)
        if repeat:  # the first one warms up
            seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
