"""AdamW on gradients that are damped where they and the weights' drift since they were taken agree
in sign.

A gradient from older weights asks for a move that the later updates may have made already: the part
of each coordinate that has moved down its gradient since then, relative to the largest such move,
is taken off.

    brx train quick --set pipeline.stages=8
    optimizer.method=examples/methods/drift_corrector.py:DriftCorrector
"""

import torch
from torch import Tensor

from brx.methods.method import Method


class DriftCorrector(Method):
    """g <- g (1 - strength d / max d), d the distance moved against g since the backward pass's
    weights."""

    summary = "AdamW on gradients without what the weights have followed meanwhile"

    def __init__(self, strength: float = 0.5) -> None:
        self.strength = strength

    def correct_gradients(
        self, gradients: list[Tensor], newest: list[Tensor], used: list[Tensor], state: list[dict]
    ) -> None:
        for gradient, now, then in zip(gradients, newest, used, strict=True):
            followed = torch.relu((then - now) * gradient.sign())
            largest = followed.amax().clamp_min(1e-12)
            gradient.mul_(1 - self.strength * followed / largest)
