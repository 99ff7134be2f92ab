"""Delays that vary from one micro-batch to the next, as in training over the internet.

    brx train quick --set pipeline.stages=8 pipeline.delay=examples/delays/internet.py:straggler
    brx schedule --stages 8 --devices 1 --delay examples/delays/internet.py:churn

Each function returns tau, the delay in micro-batches, for one stage's forward pass on one
micro-batch (micro-batches count from 1, stages from 0). Its attribute `most` is a function that
returns the stage's largest tau, which decides how many weight versions brx keeps. brx makes sure
that a stage never goes back to an older version than it has used."""

import random

JITTER = 4
"""The most micro-batches that a slow link adds to a delay."""
EVERY = 50
"""The length of a period in micro-batches. In each period, one stage is late or gone once."""
LATE = 12
"""How many micro-batches a straggler adds to its delay."""
LATE_FOR = 10
"""How many micro-batches of a period the straggler is late for."""
GONE_FOR = 20
"""How many micro-batches of a period a stage is gone for."""


def in_pipeline(stage: int, num_stages: int) -> int:
    """The delay of an asynchronous pipeline."""
    return num_stages - 1 - stage


def jitter(stage: int, num_stages: int, micro_batch: int, seed: int) -> int:
    """The pipeline's delay plus 0 to 4, drawn at random for each stage and micro-batch."""
    drawn = random.Random(f"{seed} {stage} {micro_batch}").randint(0, JITTER)
    return in_pipeline(stage, num_stages) + drawn


jitter.most = lambda stage, num_stages: in_pipeline(stage, num_stages) + JITTER


def straggler(stage: int, num_stages: int, micro_batch: int, seed: int) -> int:
    """In every 50 micro-batches, the middle stage is 12 micro-batches late for 10 consecutive ones,
    which begin at random."""
    period, now = divmod(micro_batch, EVERY)
    begins = random.Random(f"{seed} {period}").randrange(EVERY - LATE_FOR)
    delay = in_pipeline(stage, num_stages)
    if stage == num_stages // 2 and begins <= now < begins + LATE_FOR:
        delay += LATE
    return delay


def most_of_straggler(stage: int, num_stages: int) -> int:
    delay = in_pipeline(stage, num_stages)
    return delay + LATE if stage == num_stages // 2 else delay


straggler.most = most_of_straggler


def churn(stage: int, num_stages: int, micro_batch: int, seed: int) -> int:
    """In every 50 micro-batches, one stage is gone for 20. It returns with the weights that it left
    with."""
    period, now = divmod(micro_batch, EVERY)
    draw = random.Random(f"{seed} {period}")
    gone = draw.randrange(num_stages)
    begins = draw.randrange(EVERY - GONE_FOR)
    delay = in_pipeline(stage, num_stages)
    if stage == gone and begins <= now < begins + GONE_FOR:
        delay += now - begins  # grows by one per micro-batch, so that the version stays the same
    return delay


churn.most = lambda stage, num_stages: in_pipeline(stage, num_stages) + GONE_FOR - 1
