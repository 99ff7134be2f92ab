"""Weight prediction at the forward pass: both passes run where the weights are expected to be at the update.

The built-in rules are those of `pipeline.forecast`; a method may bring its own (`Method.forecast`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

Forecast = Literal["last-update", "average-update"]

ParameterStates = list[dict[str, Any]]
"""What a rule keeps: for each weight of a stage, tensors and numbers by name. It is part of checkpoints."""

ForecastRule = Callable[[list[Tensor], list[Tensor], float, ParameterStates], list[Tensor]]
"""From the newest weights of a stage, the update that they have just had, tau in updates, and the rule's own state:
the weights with which a later micro-batch computes. Called after every update, without gradients."""

AVERAGE_DECAY = 0.9
"""gamma of the average of the updates along which `average-update` looks ahead."""


def along_last_update(
    newest: list[Tensor], update: list[Tensor], tau_updates: float, state: ParameterStates
) -> list[Tensor]:
    """w + tau (w(t) - w(t-1)).

    With momentum SGD the last update is -lr v, so this is SpecTrain's w - s lr v (arXiv:1809.02839).
    """
    return list(torch._foreach_add(newest, update, alpha=tau_updates))


def along_average_update(
    newest: list[Tensor], update: list[Tensor], tau_updates: float, state: ParameterStates
) -> list[Tensor]:
    """w + tau d^, d^ = d / (1 - gamma^t) with d <- gamma d + (1 - gamma) (w(t) - w(t-1)) from zero.

    SpecTrain's idea with one average more: the updates of Adam or of momentum SGD are averages already.
    """
    average = moving_average(update, AVERAGE_DECAY, state)
    for kept in state:
        kept["updates"] = kept.get("updates", 0) + 1
    return list(torch._foreach_add(newest, average, alpha=tau_updates / (1.0 - AVERAGE_DECAY ** state[0]["updates"])))


def moving_average(update: list[Tensor], decay: float, state: ParameterStates) -> list[Tensor]:
    """d <- decay d + (1 - decay) update, from zero and without bias correction; kept as `average_update`."""
    average = [
        kept.setdefault("average_update", torch.zeros_like(last)) for kept, last in zip(state, update, strict=True)
    ]
    torch._foreach_mul_(average, decay)
    torch._foreach_add_(average, update, alpha=1.0 - decay)
    return average


FORECAST_RULES: dict[Forecast, ForecastRule] = {
    "last-update": along_last_update,
    "average-update": along_average_update,
}


def on_device(kept: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """What a rule keeps for a parameter, as it was saved, with its tensors where they are needed."""
    return {key: value.to(device, copy=True) if isinstance(value, Tensor) else value for key, value in kept.items()}
