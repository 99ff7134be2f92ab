"""AdamW with gradients that are damped where the weights have already moved in their direction.

A gradient at old weights asks for a move that later updates may have made already. So each
coordinate that has moved against its gradient since then is damped, in proportion to its move over
the largest such move.

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
