"""The weight versions of one stage: the live weights and the ring of older ones that micro-batches in flight need."""

from __future__ import annotations

from typing import Literal, NotRequired, TypedDict, cast

import torch
from torch import Tensor, nn

from brx.model.stage import Stage, is_block_matrix
from brx.pipeline.delay import StageDelay
from brx.pipeline.forecast import Forecaster, ForecastRule, ParameterStates
from brx.pipeline.host_ring import HostRing

StashMode = Literal["exact", "none", "predict"]


class VersionsState(TypedDict):
    """What decides the trajectory of a stage, apart from its optimizer."""

    weights: dict[str, Tensor]
    ring: list[list[Tensor]]
    average_step: list[Tensor] | None
    forecast: NotRequired[ParameterStates]


class StageVersions:
    """A stage whose forward and backward passes see the weights that its delay dictates.

    With tau > 0 there is a ring of ceil(tau / M) + 1 slots. They hold version 0 at first; version v lies in slot
    (v - 1) mod (number of slots), as `StageDelay` says:

    - before the forward pass of micro-batch n, the slot holds version max(0, floor((n - 1 - tau) / M));
    - `exact`: the backward pass sees the same;
    - `none`, `predict`: what the forward pass computed with is overwritten between the two, as a real pipeline
      overwrites its only copy, with the newest weights or with PipeMare's prediction. The activations stay those of the
      forward pass. With M = 1 that is the slot itself, which no other micro-batch needs; with M > 1 the update's later
      micro-batches do, and each micro-batch in flight computes with a copy of its slot;
    - after update t, its slot takes version t, which a later micro-batch is going to need; with a `forecast`, where
      version t is expected to be when that micro-batch's update comes.

    So one copy of the stage's weights per iteration (two where the slot is overwritten) is all that delay costs in
    time. With tau = 0 the live weights are the only version, and nothing is copied.

    Attributes:
        stage: the module; outside of `bind` its parameters are the live weights.
        live: the newest weights by name. Optimizers update these, in place.
    """

    def __init__(
        self,
        stage: Stage,
        index: int,
        delay: StageDelay,
        stash: StashMode = "exact",
        matrix_dtype: torch.dtype = torch.float32,
        *,
        num_in_flight: int = 1,
        on_host: bool = False,
        forecast: ForecastRule | None = None,
    ) -> None:
        """
        Args:
            stage: the stage with its initial weights, on its device.
            index: k, counted from the first stage of the pipeline.
            delay: which versions it uses.
            stash: what the backward pass sees.
            matrix_dtype: the ring's dtype for matrices; bf16 where autocast would cast them to it anyway, which gives
                the same numbers from half the memory.
            num_in_flight: micro-batches between forward and backward pass on this device, at most.
            on_host: keep the ring in host memory.
            forecast: run both passes where the weights are expected to be at the update (with `exact` only).
        """
        self.stage = stage
        self.index = index
        self.delay = delay
        self.stash = stash
        self.live: dict[str, Tensor] = dict(stage.named_parameters())
        self._newest = list(self.live.values())
        self._owners = [_owner(stage, name) for name in self.live]
        self._host_ring: HostRing | None = None
        self.ring: list[list[Tensor]] = []
        if delay.tau and on_host:
            self._host_ring = HostRing(self._copy_of_live(matrix_dtype), delay, num_in_flight)
            self.ring = self._host_ring.slots
        elif delay.tau:
            self.ring = [self._copy_of_live(matrix_dtype) for _ in range(delay.num_slots)]
        # What micro-batches in flight compute with, where overwriting their slots would spoil it for others.
        self._copies: list[list[Tensor]] = []
        if self.ring and not on_host and stash != "exact" and delay.accumulation > 1:
            self._copies = [self._copy_of_live(matrix_dtype) for _ in range(num_in_flight)]
        self._copied: list[int | None] = [None] * len(self._copies)
        self._gradient_sum: list[Tensor] | None = None
        self._extrapolation: Extrapolation | None = None
        if delay.tau and stash == "predict":
            self._extrapolation = Extrapolation(self._newest, delay)
        self._forecaster: Forecaster | None = None
        if forecast is not None:
            self.forecast_by(forecast)

    def forecast_by(self, rule: ForecastRule) -> None:
        """Before the first update: run both passes where a rule expects the weights to be (with `exact` only)."""
        assert self.stash == "exact"
        if self.ring:
            self._forecaster = Forecaster(rule, self._newest, self.delay.in_updates)

    def bind(self, micro_batch: int) -> None:
        """Let the module compute with the weights of a micro-batch: version `delay.version_used(micro_batch)`."""
        self._point_to(self.forward_weights(micro_batch))
        if self._host_ring is not None:
            self._host_ring.prefetch(micro_batch + 1)

    def bind_live(self) -> None:
        """Let the module compute with the newest weights."""
        self._point_to(self._newest)

    @torch.no_grad()
    def prepare_backward(self, micro_batch: int) -> None:
        """Overwrite what the forward pass computed with by what the backward pass sees, if that is another version."""
        if not self.ring or self.stash == "exact":
            return
        # Through .data: autograd saved these very tensors and would (rightly) object to what is done here on purpose.
        torch._foreach_copy_([weight.data for weight in self.forward_weights(micro_batch)], self.used(micro_batch))

    def collect_gradients(self, micro_batch: int) -> None:
        """Move a micro-batch's gradients to the live weights, in the live weights' dtype."""
        for live, weight in zip(self.live.values(), self.forward_weights(micro_batch), strict=True):
            gradient = weight.grad
            weight.grad = None
            live.grad = gradient.to(live.dtype) if gradient is not None else None
        if self._host_ring is not None:  # the update is about to change what may still be on its way to the host
            self._host_ring.finish_store()

    def accumulate(self, micro_batch: int) -> None:
        """Add the live weights' gradients to the update's; with its last micro-batch they become the mean.

        The sum is taken in the order of the micro-batches, so that it is the same on any number of devices.
        """
        if self.delay.accumulation == 1:
            return
        gradients = [_gradient(live) for live in self._newest]
        if self._gradient_sum is None:
            self._gradient_sum = gradients
        else:
            torch._foreach_add_(self._gradient_sum, gradients)
        for live in self._newest:
            live.grad = None
        if self.delay.ends_update(micro_batch):
            torch._foreach_div_(self._gradient_sum, self.delay.accumulation)
            for live, mean in zip(self._newest, self._gradient_sum, strict=True):
                live.grad = mean
            self._gradient_sum = None

    def forward_weights(self, micro_batch: int) -> list[Tensor]:
        """What the forward pass of a micro-batch computes with, in the order of `live`; valid until `prepare_backward`.

        The ring's dtype; with a forecast, where the weights were expected to be.
        """
        if self._host_ring is not None:
            return self._host_ring.weights(micro_batch)
        if self._copies:
            return self._copy_of_slot(micro_batch)
        return self.ring[self.delay.slot_used(micro_batch)] if self.ring else self._newest

    def used(self, micro_batch: int) -> list[Tensor]:
        """The weights that the backward pass of a micro-batch sees, in the order of `live`; valid until its update.

        In mode `exact` the ring's own tensors, rounded if the ring is bf16; else what is, or was, copied into the slot,
        unrounded.
        """
        if not self.ring or self.stash == "exact":
            return self.forward_weights(micro_batch)
        return self._newest if self._extrapolation is None else self._extrapolation.from_weights(self._newest)

    @torch.no_grad()
    def record_update(self, version: int) -> None:
        """The live weights have become this version: store it for the micro-batch that needs it; drop the gradients."""
        for live in self._newest:
            live.grad = None
        if self._extrapolation is not None:
            self._extrapolation.observe(self._newest)
        stored = self._newest if self._forecaster is None else self._forecaster.after_update(self._newest)
        if self._host_ring is not None:
            self._host_ring.store(version, stored)
        elif self.ring:
            torch._foreach_copy_(self.ring[self.delay.slot_of(version)], stored)

    def state_dict(self) -> VersionsState:
        """Everything here that decides the trajectory (no copies)."""
        if self._host_ring is not None:
            self._host_ring.wait()
        state: VersionsState = {
            "weights": {name: parameter.data for name, parameter in self.live.items()},
            "ring": [[parameter.data for parameter in slot] for slot in self.ring],
            "average_step": None if self._extrapolation is None else self._extrapolation.average_step,
        }
        if self._forecaster is not None:
            state["forecast"] = self._forecaster.state
        return state

    @torch.no_grad()
    def load_state_dict(self, state: VersionsState) -> None:
        """Restore what `state_dict` gave, in place.

        Raises:
            ValueError: the state belongs to another stage, delay or stash mode.
        """
        if list(state["weights"]) != list(self.live) or len(state["ring"]) != len(self.ring):
            raise ValueError(f"stage {self.index}: the state is of another stage or delay")
        if (state["average_step"] is None) != (self._extrapolation is None):
            raise ValueError(f"stage {self.index}: the state is of another stash mode")
        if ("forecast" in state) != (self._forecaster is not None):
            raise ValueError(f"stage {self.index}: the state is of a run with another forecast")
        torch._foreach_copy_(self._newest, list(state["weights"].values()))
        for slot, saved in zip(self.ring, state["ring"], strict=True):
            torch._foreach_copy_(slot, saved)
        self._copied = [None] * len(self._copies)
        if self._host_ring is not None:
            self._host_ring.forget()
        if self._extrapolation is not None and state["average_step"] is not None:
            self._extrapolation.restore(self._newest, state["average_step"])
        if self._forecaster is not None:
            self._forecaster.restore(self._newest, state["forecast"])

    @property
    def device(self) -> torch.device:
        """Where the live weights are."""
        return self._newest[0].device

    @property
    def ring_bytes(self) -> int:
        """Memory of the ring in bytes, with the copies of micro-batches in flight: nothing at tau = 0."""
        return sum(parameter.nbytes for slot in (*self.ring, *self._copies) for parameter in slot)

    @torch.no_grad()
    def _copy_of_slot(self, micro_batch: int) -> list[Tensor]:
        index = micro_batch % len(self._copies)
        if self._copied[index] != micro_batch:
            slot = self.ring[self.delay.slot_used(micro_batch)]
            torch._foreach_copy_([weight.data for weight in self._copies[index]], slot)
            self._copied[index] = micro_batch
        return self._copies[index]

    def _point_to(self, parameters: list[Tensor]) -> None:
        # What torch.func.functional_call does, without its cost of a hundred microseconds per stage.
        for (module, attribute), parameter in zip(self._owners, parameters, strict=True):
            module._parameters[attribute] = cast(nn.Parameter, parameter)

    def _copy_of_live(self, matrix_dtype: torch.dtype) -> list[Tensor]:
        return [
            nn.Parameter(live.detach().to(matrix_dtype if is_block_matrix(name) else live.dtype, copy=True))
            for name, live in self.live.items()
        ]


class Extrapolation:
    """Where weights were at the forward pass, by their recent steps: w - tau delta.

    PipeMare's discrepancy correction (T2, arXiv:1910.05124): delta <- gamma delta + (1 - gamma) (w(t) - w(t-1)) after
    each update, from zero, with gamma = exp(-2 / tau) and tau in updates.
    """

    def __init__(self, weights: list[Tensor], delay: StageDelay) -> None:
        self.average_step = [torch.zeros_like(weight) for weight in weights]
        self._delay = delay
        self._previous = [weight.detach().clone() for weight in weights]

    @torch.no_grad()
    def from_weights(self, weights: list[Tensor]) -> list[Tensor]:
        """The predicted weights, W - tau delta."""
        return list(torch._foreach_add(weights, self.average_step, alpha=-self._delay.in_updates))

    @torch.no_grad()
    def observe(self, weights: list[Tensor]) -> None:
        """Take in the step that the weights have just made."""
        step = torch._foreach_sub(weights, self._previous)
        decay = self._delay.prediction_decay
        torch._foreach_mul_(self.average_step, decay)
        torch._foreach_add_(self.average_step, step, alpha=1.0 - decay)
        torch._foreach_copy_(self._previous, weights)

    def restore(self, weights: list[Tensor], average_step: list[Tensor]) -> None:
        """Continue from a saved average, with the weights saved at the same time."""
        torch._foreach_copy_(self.average_step, average_step)
        torch._foreach_copy_(self._previous, [weight.detach() for weight in weights])


def _gradient(weight: Tensor) -> Tensor:
    assert weight.grad is not None, "a parameter took no part in the loss"
    return weight.grad


def _owner(stage: nn.Module, name: str) -> tuple[nn.Module, str]:
    """The submodule that holds a parameter, and the attribute under which it does."""
    path, _, attribute = name.rpartition(".")
    return stage.get_submodule(path), attribute
