"""Which weights a stage uses when: the meaning of delay (docs/semantics.md)."""

from __future__ import annotations

import math


def stage_delay(stage: int, num_stages: int) -> int:
    """tau_k = P - 1 - k: how many updates old the weights are that stage k's gradient was computed from."""
    return num_stages - 1 - stage


def version_used(iteration: int, delay: int) -> int:
    """The number of updates behind the weights with which a stage runs the forward pass of micro-batch `iteration`.

    Before the pipeline has filled, that is the initial weights: max(0, t - 1 - tau).
    """
    return max(0, iteration - 1 - delay)


def prediction_decay(delay: int) -> float:
    """gamma = D^(1/tau) with D = exp(-2): the decay of PipeMare's average step (T2, arXiv:1910.05124); tau >= 1."""
    return math.exp(-2.0 / delay)
