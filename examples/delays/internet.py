"""Delays as in training over the internet: they differ from one micro-batch to the next.

    brx train quick --set pipeline.stages=8 pipeline.delay=examples/delays/internet.py:straggler
    brx schedule --stages 8 --devices 1 --delay examples/delays/internet.py:churn

A function of (stage, stages, micro-batch from 1, seed) says tau in micro-batches, as the stage's
own forward pass finds it. `most` says the largest, for which the ring of versions has room. brx
keeps versions from running backwards."""

import random

JITTER = 4
"""Micro-batches that a link may add."""
LATE, LATE_FOR, EVERY = 12, 10, 50
"""A straggler is so many micro-batches late, for so long, once in so many micro-batches."""
GONE_FOR = 20
"""Micro-batches for which a stage is away."""


def in_pipeline(stage: int, num_stages: int) -> int:
    """tau of an asynchronous pipeline."""
    return num_stages - 1 - stage


def jitter(stage: int, num_stages: int, micro_batch: int, seed: int) -> int:
    """The pipeline's delays, and from 0 to 4 more, drawn for each stage and micro-batch."""
    drawn = random.Random(f"{seed} {stage} {micro_batch}").randint(0, JITTER)
    return in_pipeline(stage, num_stages) + drawn


jitter.most = lambda stage, num_stages: in_pipeline(stage, num_stages) + JITTER


def straggler(stage: int, num_stages: int, micro_batch: int, seed: int) -> int:
    """The middle stage is 12 micro-batches late for 10 of each 50, at a time drawn anew."""
    period, now = divmod(micro_batch, EVERY)
    begins = random.Random(f"{seed} {period}").randrange(EVERY - LATE_FOR)
    is_late = stage == num_stages // 2 and begins <= now < begins + LATE_FOR
    return in_pipeline(stage, num_stages) + LATE * is_late


straggler.most = lambda stage, num_stages: (
    in_pipeline(stage, num_stages) + LATE * (stage == num_stages // 2)
)


def churn(stage: int, num_stages: int, micro_batch: int, seed: int) -> int:
    """In each 50 micro-batches another stage is gone for 20: it computes with the weights that it
    left with."""
    period, now = divmod(micro_batch, EVERY)
    draw = random.Random(f"{seed} {period}")
    gone, begins = draw.randrange(num_stages), draw.randrange(EVERY - GONE_FOR)
    away = now - begins if stage == gone and begins <= now < begins + GONE_FOR else 0
    return in_pipeline(stage, num_stages) + away


churn.most = lambda stage, num_stages: in_pipeline(stage, num_stages) + GONE_FOR - 1
