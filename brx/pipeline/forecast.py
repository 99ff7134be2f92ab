"""Weight prediction at the forward pass: both passes run where the weights are expected to be at the update.

The built-in rules are those of `pipeline.forecast`; a method may bring its own (`Method.forecast`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

Forecast = Literal["last-update", "momentum"]

ParameterStates = list[dict[str, Any]]
"""What a rule keeps: for each weight of a stage, tensors and numbers by name. It is part of checkpoints."""

ForecastRule = Callable[[list[Tensor], list[Tensor], float, ParameterStates], list[Tensor]]
"""From the newest weights of a stage, the update that they have just had, tau in updates, and the rule's own state:
the weights with which a later micro-batch computes. Called after every update, without gradients."""

MOMENTUM_DECAY = 0.9
"""Of the average of the updates along which `momentum` looks ahead."""


def along_last_update(newest: list[Tensor], update: list[Tensor], tau: float, state: ParameterStates) -> list[Tensor]:
    """w + tau (w(t) - w(t-1))."""
    return list(torch._foreach_add(newest, update, alpha=tau))


def along_momentum(newest: list[Tensor], update: list[Tensor], tau: float, state: ParameterStates) -> list[Tensor]:
    """w + tau d, d <- gamma d + (1 - gamma) (w(t) - w(t-1)) from zero (SpecTrain, arXiv:1809.02839, whose step is -lr
    times the momentum)."""
    average = [
        kept.setdefault("average_update", torch.zeros_like(last)) for kept, last in zip(state, update, strict=True)
    ]
    torch._foreach_mul_(average, MOMENTUM_DECAY)
    torch._foreach_add_(average, update, alpha=1.0 - MOMENTUM_DECAY)
    return list(torch._foreach_add(newest, average, alpha=tau))


FORECAST_RULES: dict[Forecast, ForecastRule] = {"last-update": along_last_update, "momentum": along_momentum}


class Forecaster:
    """A forecast rule at work on one stage.

    Attributes:
        state: of the rule, a dict per weight.
    """

    def __init__(self, rule: ForecastRule, weights: Sequence[Tensor], tau: float) -> None:
        """
        Args:
            rule: says where the weights are going to be.
            weights: of the stage, at version 0.
            tau: in updates, above 0.
        """
        self.state: ParameterStates = [{} for _ in weights]
        self._rule = rule
        self._tau = tau
        self._previous = [weight.detach().clone() for weight in weights]

    @torch.no_grad()
    def after_update(self, newest: list[Tensor]) -> list[Tensor]:
        """The forecast from the newest weights, once after each update."""
        update = list(torch._foreach_sub(newest, self._previous))
        torch._foreach_copy_(self._previous, newest)
        return self._rule(newest, update, self._tau, self.state)

    @torch.no_grad()
    def restore(self, newest: list[Tensor], state: ParameterStates) -> None:
        """Continue from a saved state, with the weights saved at the same time."""
        torch._foreach_copy_(self._previous, newest)
        self.state = [on_device(kept, newest[0].device) for kept in state]


def on_device(kept: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """What a rule keeps for a parameter, as it was saved, with its tensors where they are needed."""
    return {key: value.to(device) if isinstance(value, Tensor) else value for key, value in kept.items()}
