"""Delays that vary from one micro-batch to the next, as in training over the internet.

    brx train quick --set pipeline.stages=8 pipeline.delay=examples/delays/internet.py:straggler
    brx schedule --stages 8 --devices 1 --delay examples/delays/internet.py:churn

Each function takes (stage, stages, micro-batch from 1, seed) and returns tau in micro-batches for
the forward pass of this stage. Its attribute `most` is the largest tau; the ring of versions has
room for this many. brx makes sure that versions never run backwards."""

import random

JITTER = 4
"""The most micro-batches that a link adds."""
LATE, LATE_FOR, EVERY = 12, 10, 50
"""A straggler's delay, its duration and its period, all in micro-batches."""
GONE_FOR = 20
"""How many micro-batches a stage is away."""


def in_pipeline(stage: int, num_stages: int) -> int:
    """The delay of an asynchronous pipeline."""
    return num_stages - 1 - stage


def jitter(stage: int, num_stages: int, micro_batch: int, seed: int) -> int:
    """The pipeline's delay plus 0 to 4, drawn for each stage and micro-batch."""
    drawn = random.Random(f"{seed} {stage} {micro_batch}").randint(0, JITTER)
    return in_pipeline(stage, num_stages) + drawn


jitter.most = lambda stage, num_stages: in_pipeline(stage, num_stages) + JITTER


def straggler(stage: int, num_stages: int, micro_batch: int, seed: int) -> int:
    """The middle stage is 12 micro-batches late for 10 of every 50; when, is drawn for each 50."""
    period, now = divmod(micro_batch, EVERY)
    begins = random.Random(f"{seed} {period}").randrange(EVERY - LATE_FOR)
    is_late = stage == num_stages // 2 and begins <= now < begins + LATE_FOR
    return in_pipeline(stage, num_stages) + LATE * is_late


straggler.most = lambda stage, num_stages: (
    in_pipeline(stage, num_stages) + LATE * (stage == num_stages // 2)
)


def churn(stage: int, num_stages: int, micro_batch: int, seed: int) -> int:
    """In every 50 micro-batches, one stage is gone for 20. It returns with the weights that it left
    with."""
    period, now = divmod(micro_batch, EVERY)
    draw = random.Random(f"{seed} {period}")
    gone, begins = draw.randrange(num_stages), draw.randrange(EVERY - GONE_FOR)
    away = now - begins if stage == gone and begins <= now < begins + GONE_FOR else 0
    return in_pipeline(stage, num_stages) + away


churn.most = lambda stage, num_stages: in_pipeline(stage, num_stages) + GONE_FOR - 1
