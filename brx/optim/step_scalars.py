"""The learning rate, the decay and the limit of a step. They differ from step to step, so on a GPU
they are tensors: a CUDA graph that reads them can be replayed with the next step's values.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .parameter_state import arithmetic
from .step_member import StepMember

# Devices that read a step's scalars from tensors.
ON_DEVICE = ("cuda",)

LARGEST_STEP = 1.8
"""The largest change of an entry in an update, in units of the largest step that AdamW could take
at that update.

Rotated entries without gradient history all take full steps, which can add up in one weight. With
the usual betas the limit is 1.8 learning rates at update 2, 2.9 at 50, and 13 in the end."""


@dataclass
class StepScalars:
    """The scalars of a step, for parameters that are updated together.

    Attributes:
        lr: the learning rate; a tensor () on a GPU.
        decay: 1 - lr weight_decay, a tensor () in the dtype of the arithmetic.
        limit: the largest change of an entry of a rotated matrix, without the decay; a tensor ()
            on a GPU.
    """

    lr: float | Tensor
    decay: Tensor
    limit: float | Tensor

    @classmethod
    def for_cpu(cls, member: StepMember) -> StepScalars:
        """A member's scalars, for a step on the CPU."""
        # A tensor, since torch would make one of a number for every weight. Its device is stated:
        # the program may have set another one as the default.
        decay = torch.tensor(member.decay, dtype=arithmetic(member.parameter), device="cpu")
        return cls(member.options["lr"], decay, limit_of(member))

    @classmethod
    def on(cls, device: torch.device, dtype: torch.dtype) -> StepScalars:
        """Tensors on a device, to be written before each step."""
        # torch's fused kernel reads a learning rate in float32.
        lr = torch.zeros((), dtype=torch.float32, device=device)
        return cls(lr, torch.zeros((), dtype=dtype, device=device), lr.to(dtype, copy=True))

    def write(self, member: StepMember) -> None:
        """Write a member's scalars into the tensors, without waiting for the device."""
        assert isinstance(self.lr, Tensor)
        assert isinstance(self.limit, Tensor)
        self.lr.fill_(member.options["lr"])
        self.decay.fill_(member.decay)
        self.limit.fill_(limit_of(member))


class StepScalarsPool:
    """Gives each step its scalars. Steps with the same signature get the same tensors."""

    def __init__(self) -> None:
        self._kept: list[StepScalars] = []
        self._next = 0

    def begin(self) -> None:
        """Start a new step."""
        self._next = 0

    def of(self, member: StepMember) -> StepScalars:
        """The scalars of this step for a member, and for others like it."""
        device = member.parameter.device
        if device.type not in ON_DEVICE:
            return StepScalars.for_cpu(member)
        dtype = arithmetic(member.parameter)
        index = self._next
        self._next += 1
        if index == len(self._kept):
            self._kept.append(StepScalars.on(device, dtype))
        kept = self._kept[index]
        if kept.decay.device != device or kept.decay.dtype != dtype:
            kept = self._kept[index] = StepScalars.on(device, dtype)
        kept.write(member)
        return kept


def limit_of(member: StepMember) -> float:
    """The largest change of an entry in the member's next update; infinite where Adam's step has no
    bound."""
    largest = largest_adam_step(member.num_updates + 1, member.options["betas"])
    if largest == math.inf:
        return math.inf
    return float(member.options["lr"] * LARGEST_STEP * largest)


def largest_adam_step(update: int, betas: tuple[float, float]) -> float:
    """The largest |m^| / sqrt(v^) at an update, over all sequences of gradients; infinite if
    beta1^2 >= beta2.

    By Cauchy-Schwarz: m^ = sum a_k g_k and v^ = sum b_k g_k^2 give m^2 / v <= sum a_k^2 / b_k.
    """
    beta1, beta2 = betas
    if beta1**2 >= beta2:
        return math.inf
    # a_k = (1 - beta1) beta1^(t - k) / (1 - beta1^t), and b_k likewise with beta2. So the sum is a
    # geometric series in beta1^2 / beta2, times the constant `scale`.
    ratio = beta1**2 / beta2
    scale = (1 - beta2**update) / (1 - beta2) * ((1 - beta1) / (1 - beta1**update)) ** 2
    return math.sqrt(scale * (1 - ratio**update) / (1 - ratio))
