"""Where a stage's weights are going: forecasts, and PipeMare's estimate of where they were. Needs
torch alone."""

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from brx.pipeline.delay import StageDelay
from brx.pipeline.versions import (
    ForecastRule,
    ParameterStates,
    StashMode,
    copied_to,
    moving_average,
)


class Extrapolation:
    """The moving averages of one stage, and what follows from them.

    Args: num_weights: tensors of the stage. forecast: the rule that says with which weights the
        passes compute; None for the version itself.
    """

    def __init__(
        self, delay: StageDelay, stash: StashMode, forecast: ForecastRule | None, num_weights: int
    ) -> None:
        self._delay = delay
        self._stash = stash
        self._forecast = forecast
        self.state: ParameterStates = [{} for _ in range(num_weights)]

    @property
    def is_active(self) -> bool:
        """Whether updates have to be shown to it."""
        return self._delay.tau > 0 and (self._stash == "predict" or self._forecast is not None)

    @torch.no_grad()
    def see_update(self, newest: list[Tensor], before: Sequence[Tensor]) -> list[Tensor]:
        """After an update, which made `newest` of `before`: what the slot of the new version takes,
        which is the version itself or its forecast."""
        update = list(torch._foreach_sub(newest, list(before)))  # w(t) - w(t-1)
        if self._forecast is not None:
            return self._forecast(newest, update, self._delay.tau_updates, self.state)
        # predict: delta <- gamma delta + (1 - gamma) (w(t) - w(t-1))
        moving_average(update, self._delay.prediction_decay, self.state)
        return newest

    @torch.no_grad()
    def backward_weights(self, newest: list[Tensor]) -> list[Tensor]:
        """What the backward pass sees under `none` and `predict`."""
        average = [kept.get("average_update") for kept in self.state]
        if self._stash == "none" or average[0] is None:  # before the first update there is none
            return newest
        # PipeMare's T2 (arXiv:1910.05124): w - tau delta, tau in updates.
        deltas = cast(list[Tensor], average)
        return list(torch._foreach_add(newest, deltas, alpha=-self._delay.tau_updates))

    def load(self, saved: ParameterStates, device: torch.device) -> None:
        """Take over a `state`; ValueError where it is another stash mode's."""
        if len(saved) != len(self.state) or (any(saved) and not self.is_active):
            raise ValueError("the state is of another stash mode or forecast")
        self.state = copied_to(device, saved)

    def state_dict(self) -> list[dict[str, Any]]:
        return self.state
