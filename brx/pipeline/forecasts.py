"""Extrapolated weights: PipeMare's prediction for the backward pass, and forecasts for both passes.

Both follow from what the updates have added to the newest weights. `Extrapolation` keeps that.
Needs torch alone.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal, assert_never

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from brx.pipeline.delay import StageDelay
from brx.pipeline.slots import FlatLayout, FlatTensors, Tensors, as_list, copy_tensors

StashMode = Literal["exact", "none", "predict"]
Forecast = Literal["last-update", "average-update"]

ParameterStates = list[dict[str, Any]]
"""The state of a forecast or a gradient rule, also in checkpoints: for each weight, tensors and
numbers by name."""

ForecastRule = Callable[[list[Tensor], list[Tensor], float, ParameterStates], list[Tensor]]
"""Takes the newest weights of a stage, the update that they have just had, w(t) - w(t-1), tau in
updates, and the rule's own state, which it may change. Returns the weights with which a later
micro-batch will compute. Each list has one tensor per weight. It is called after every update,
under `no_grad`."""

AVERAGE_DECAY = 0.9  # gamma of the average of the updates along which `average-update` looks ahead


def along_last_update(
    newest: list[Tensor], update: list[Tensor], tau_updates: float, state: ParameterStates
) -> list[Tensor]:
    """w + tau (w(t) - w(t-1)); with momentum SGD that is SpecTrain's w - s lr v
    (arXiv:1809.02839)."""
    return list(torch._foreach_add(newest, update, alpha=tau_updates))


def along_average_update(
    newest: list[Tensor], update: list[Tensor], tau_updates: float, state: ParameterStates
) -> list[Tensor]:
    """w + tau d^, d^ = d / (1 - gamma^t) with d <- gamma d + (1 - gamma) (w(t) - w(t-1)) from zero.

    SpecTrain's idea with one average more: the updates of Adam or of momentum SGD are averages
    already."""
    average = moving_average(update, AVERAGE_DECAY, state)
    for kept in state:
        kept["updates"] = kept.get("updates", 0) + 1
    bias_correction = 1.0 - AVERAGE_DECAY ** state[0]["updates"]
    return list(torch._foreach_add(newest, average, alpha=tau_updates / bias_correction))


FORECAST_RULES: dict[Forecast, ForecastRule] = {
    "last-update": along_last_update,
    "average-update": along_average_update,
}


def moving_average(update: list[Tensor], decay: float, state: ParameterStates) -> list[Tensor]:
    """d <- decay d + (1 - decay) update, from zero and without bias correction; kept as
    `average_update`."""
    average = [
        kept.setdefault("average_update", torch.zeros_like(last))
        for kept, last in zip(state, update, strict=True)
    ]
    torch._foreach_mul_(average, decay)
    torch._foreach_add_(average, update, alpha=1.0 - decay)
    return average


def copied_to(device: torch.device | str, kept: Any) -> Any:
    """A state with copies of all its tensors on a device.

    Args:
        device: where the copies are made.
        kept: tensors and anything else, in nested dictionaries, lists and tuples.
    """
    return tree_map_only(Tensor, lambda tensor: tensor.detach().to(device, copy=True), kept)


class Extrapolation:
    """Extrapolates the weights of one stage from their updates so far.

    With `stash: predict`, the backward pass computes with w - tau delta, where delta is an average
    of the updates (PipeMare's T2, arXiv:1910.05124). With a forecast, both passes compute with the
    weights that its rule gives. Otherwise, and without delay, this keeps nothing.

    Args:
        layout: the layout of the weights.
        newest: version 0 of the weights.
        delay: the stage's delay.
        stash: the stash mode.
        rule: the rule of the forecast, if there is one (with `exact` only).
    """

    def __init__(
        self,
        layout: FlatLayout,
        newest: Tensors,
        delay: StageDelay,
        stash: StashMode,
        rule: ForecastRule | None = None,
    ) -> None:
        assert rule is None or stash == "exact"
        self._layout = layout
        self._delay = delay
        self._stash = stash
        self.rule = rule
        self.state: ParameterStates = [{} for _ in layout.places]  # the averages, by weight
        self._before: FlatTensors | None = None  # the weights before the next update, where needed
        if self.is_needed:
            self.remember(newest)

    @property
    def is_needed(self) -> bool:
        """Whether this has to look at every update."""
        return self._delay.tau > 0 and (self._stash == "predict" or self.rule is not None)

    @property
    def newest(self) -> FlatTensors | None:
        """A copy of the newest weights, if `is_needed`; else None."""
        return self._before if self.is_needed else None

    def remember(self, newest: Tensors) -> None:
        """Before an update whose `last_update` is wanted: keep a copy of the weights."""
        if self._before is None:
            self._before = self._layout.like_weights()
            copy_tensors(self._before, newest)

    @torch.no_grad()
    def last_update(self, newest: Tensors) -> list[Tensor]:
        """After an update that was remembered, and before `record`: w(t) - w(t-1)."""
        assert self._before is not None
        return list(torch._foreach_sub(list(as_list(newest)), self._before.views))

    @torch.no_grad()
    def record(self, newest: Tensors, parameters: Sequence[Tensor]) -> Tensors:
        """After an update: the weights with which the passes of a later micro-batch compute.

        Args:
            newest: the weights after the update.
            parameters: the same, as the objects that are keys of the optimizer's state. A rule gets
                these.
        """
        if not self.is_needed:
            self._before = None  # if it was remembered, then for this update alone
            return newest
        update = self.last_update(newest)
        stored = newest
        if self.rule is not None:
            stored = self.rule(list(parameters), update, self._delay.tau_updates, self.state)
        elif self._stash == "predict":
            # delta <- gamma delta + (1 - gamma) (w(t) - w(t-1))
            moving_average(update, self._delay.prediction_decay, self.state)
        assert self._before is not None
        copy_tensors(self._before, newest)
        return stored

    @torch.no_grad()
    def seen_by_backward(self, newest: Tensors) -> Tensors:
        """The weights of a backward pass with any mode but `exact`: they are not those of its
        forward pass."""
        match self._stash:
            case "none":
                return newest
            case "predict":
                return self._predicted(newest)
            case "exact":
                raise AssertionError("with `exact`, both passes compute with the same weights")
            case unknown:
                assert_never(unknown)

    def _predicted(self, newest: Tensors) -> Tensors:
        """w - tau delta, tau in updates."""
        average = [kept["average_update"] for kept in self.state if "average_update" in kept]
        if not average:  # before the first update
            return newest
        tau = self._delay.tau_updates
        return list(torch._foreach_add(list(as_list(newest)), average, alpha=-tau))

    def load_state(self, state: ParameterStates, newest: Tensors) -> None:
        """Continue with a saved `state`, after the weights that belong to it have been loaded.

        Raises:
            ValueError: the state is of another stash mode or forecast.
        """
        if len(state) != len(self.state) or (any(state) and not self.is_needed):
            raise ValueError("the state is of another stash mode or forecast")
        devices = [self._layout.groups[place.group].device for place in self._layout.places]
        self.state = [copied_to(device, kept) for device, kept in zip(devices, state, strict=True)]
        if self._before is not None:
            copy_tensors(self._before, newest)
