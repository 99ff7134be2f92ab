r"""AdamW with gradients that are damped where the weights have already moved in their direction.

A gradient at old weights asks for a move that later updates may already have made. So each
coordinate of the gradient is damped if the weight has moved against it since then, in proportion to
that move.

    brx train quick --set pipeline.stages=8 \
        optimizer.method=examples/methods/drift_corrector.py:DriftCorrector
"""

import torch
from torch import Tensor

from brx.methods.method import Method


class DriftCorrector(Method):
    """g <- g (1 - strength d / max d), where d is how far each weight has moved against g since the
    weights of the backward pass."""

    summary = "AdamW on gradients damped where the weights have followed them meanwhile"

    def __init__(self, strength: float = 0.5) -> None:
        self.strength = strength

    def correct_gradients(
        self, gradients: list[Tensor], newest: list[Tensor], used: list[Tensor], state: list[dict]
    ) -> None:
        for gradient, now, then in zip(gradients, newest, used, strict=True):
            followed = torch.relu((then - now) * gradient.sign())  # d
            largest = followed.amax().clamp_min(1e-12)
            gradient.mul_(1 - self.strength * followed / largest)
