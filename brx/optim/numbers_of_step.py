"""Numbers that differ from step to step, where the device reads them: so a CUDA graph, which holds
addresses, can be replayed with the next step's."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .member import Member
from .parameter_state import arithmetic

# Devices that read the numbers of a step from tensors.
ON_DEVICE = ("cuda",)

LARGEST_STEP = 1.8
"""The furthest that an update moves an entry, in steps of the largest size that AdamW could take
then.

Entries without gradient history all take full steps, which in one entry of the original space can
add up. With the usual betas the limit is 1.8 learning rates at update 2, 2.9 at 50, 13 in the
end."""


@dataclass
class StepNumbers:
    """The numbers of parameters that go through a step together.

    Attributes:
        lr: the learning rate.
        decay: (), 1 - lr weight_decay, in the dtype of the arithmetic.
        limit: the largest change of an entry of a rotated matrix, without the decay.
    """

    lr: float | Tensor
    decay: Tensor
    limit: float | Tensor

    @classmethod
    def for_cpu(cls, member: Member) -> StepNumbers:
        # A tensor, since a number would be made into one for every weight.
        decay = torch.tensor(member.decay, dtype=arithmetic(member.parameter))
        return cls(member.options["lr"], decay, limit_of(member))

    @classmethod
    def on(cls, device: torch.device, dtype: torch.dtype) -> StepNumbers:
        """Tensors on a device, to be written before each step."""
        # torch's fused kernel reads a learning rate in float32.
        lr = torch.zeros((), dtype=torch.float32, device=device)
        return cls(lr, torch.zeros((), dtype=dtype, device=device), lr.to(dtype, copy=True))

    def write(self, member: Member) -> None:
        """Put a member's numbers into the tensors, without waiting for the device."""
        assert isinstance(self.lr, Tensor)
        assert isinstance(self.limit, Tensor)
        self.lr.fill_(member.options["lr"])
        self.decay.fill_(member.decay)
        self.limit.fill_(limit_of(member))


class NumbersOfSteps:
    """The numbers of a step on each device: the same tensors in every step of the same make-up."""

    def __init__(self) -> None:
        self._kept: list[StepNumbers] = []
        self._next = 0

    def begin(self) -> None:
        self._next = 0

    def of(self, member: Member) -> StepNumbers:
        """The numbers of a member and those like it, written for this step."""
        device = member.parameter.device
        if device.type not in ON_DEVICE:
            return StepNumbers.for_cpu(member)
        dtype = arithmetic(member.parameter)
        at = self._next
        self._next += 1
        if at == len(self._kept):
            self._kept.append(StepNumbers.on(device, dtype))
        kept = self._kept[at]
        if kept.decay.device != device or kept.decay.dtype != dtype:
            kept = self._kept[at] = StepNumbers.on(device, dtype)
        kept.write(member)
        return kept


def limit_of(member: Member) -> float:
    """The largest change of an entry in the member's next update; infinite where Adam's step has no
    bound."""
    largest = largest_adam_step(member.num_updates + 1, member.options["betas"])
    return float(member.options["lr"] * LARGEST_STEP * largest) if largest < math.inf else math.inf


def largest_adam_step(update: int, betas: tuple[float, float]) -> float:
    """The largest |m^| / sqrt(v^) of any gradients up to that update, by Cauchy-Schwarz; inf where
    beta1^2 >= beta2."""
    beta1, beta2 = betas
    if beta1**2 >= beta2:
        return math.inf
    ratio = beta1**2 / beta2
    of_sums = (1 - beta2**update) / (1 - beta2) * ((1 - beta1) / (1 - beta1**update)) ** 2
    return math.sqrt(of_sums * (1 - ratio**update) / (1 - ratio))
