"""The weights of one stage in the engine: the newest ones, the ones in use, and older versions in
slots.

The *newest* weights are the parameters that the module began with. Optimizers, checkpoints and
everybody else hold these. The weights *in use* are the module's own parameters, with which both
passes compute. Without delay, they are the newest ones. Contents move, tensors do not: `bind`
copies a version from its slot into the weights in use, and after an update the newest weights are
copied into the slot of their version. All of them lie in one buffer per data type, so each copy is
one operation per data type, and nothing changes its address from iteration to iteration.

Gradients arrive at the weights in use; `brx.pipeline.gradients` hands them to the newest weights.

Needs torch alone.
"""

from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from brx.pipeline.delay import StageDelay
from brx.pipeline.error_feedback import ErrorFeedback
from brx.pipeline.forecasts import Extrapolation, ForecastRule, StashMode
from brx.pipeline.slots import FlatLayout, Slots, as_list, copy_tensors

_Bound = int | Literal["newest"] | None
"""What the weights in use hold: the version of a slot (its index), the newest weights, or something
else (None)."""


class StageVersions:
    """A stage whose forward and backward passes see the weights that its delay dictates.

    With tau > 0 there are ceil(tau / M) + 1 slots (see `StageDelay`). The forward pass of
    micro-batch n computes with version max(0, floor((n - 1 - tau) / M)), and so does the backward
    pass with stash mode `exact`. After update t, a slot takes version t. With a forecast, the slot
    instead takes the weights expected when the gradient of the micro-batch that reads it will be
    applied. So delay costs one copy of the weights per micro-batch, and one per update. With
    tau = 0, the newest weights are the only version, and nothing is copied.

    `newest` are the newest weights by name, which optimizers update in place. `in_use` are the
    module's own parameters, in the same order, in the slots' data types.

    Args:
        module: computes the stage. Its parameters get new memory. With tau > 0, the module gets
            other parameters in their places.
        index: the stage's number, from 0.
        delay: the stage's delay.
        stash: the stash mode, which says what the backward pass computes with.
        slot_dtype: the slots' data type for a weight, given its name. bf16 for weights that
            autocast would cast to it anyway: the numbers are the same, in half the memory.
        num_in_flight: the most micro-batches that are between their forward and backward pass on
            this device at one time.
        on_host: keep the slots in host memory.
        forecast: the rule of a forecast (with `exact` only).
        error_feedback: the coefficient of error feedback; without delay it does nothing.
    """

    def __init__(
        self,
        module: nn.Module,
        index: int,
        delay: StageDelay,
        stash: StashMode = "exact",
        slot_dtype: Callable[[str, Tensor], torch.dtype] = lambda name, weight: weight.dtype,
        *,
        num_in_flight: int = 1,
        on_host: bool = False,
        forecast: ForecastRule | None = None,
        error_feedback: float = 0.0,
    ) -> None:
        self.module = module
        self.index = index
        self.delay = delay
        self.stash = stash
        self.newest = dict(module.named_parameters())
        weights = list(self.newest.values())
        slot_dtypes = [slot_dtype(name, weight) for name, weight in self.newest.items()]
        self.layout = FlatLayout(weights, slot_dtypes)
        # The newest weights move into one buffer per data type.
        self._newest = self.layout.like_weights()
        copy_tensors(self._newest, weights)
        for weight, view in zip(weights, self._newest.views, strict=True):
            weight.data = view
        self.in_use: list[nn.Parameter] = weights
        if delay.tau:
            self._in_use = self.layout.like_slot()
            copy_tensors(self._in_use, self._newest)
            self.in_use = self._in_use.parameters()
            for weight, used in zip(weights, self.in_use, strict=True):
                _share_hooks(weight, used)
            _replace_parameters(module, weights, self.in_use)
        self._bound: _Bound = "newest"
        self.slots = Slots(
            self.layout, delay, self._newest, on_host=on_host, num_in_flight=num_in_flight
        )
        self._extrapolation = Extrapolation(self.layout, self._newest, delay, stash, forecast)
        self._error_feedback: ErrorFeedback | None = None
        if error_feedback and delay.tau:
            self._error_feedback = ErrorFeedback(self.layout, self._newest, error_feedback)

    def forecast_by(self, rule: ForecastRule) -> None:
        """Before the first update: let both passes compute with the weights that a rule expects at
        the update (with `exact` only)."""
        self._extrapolation = Extrapolation(self.layout, self._newest, self.delay, self.stash, rule)

    def bind(self, micro_batch: int) -> None:
        """Let the module compute with the version of the micro-batch's forward pass."""
        if self.delay.tau == 0:
            return
        slot = self.delay.slot_used(micro_batch)
        if self._bound != slot:
            self.slots.load(micro_batch, self._in_use)
            self._bound = slot
        self.slots.prefetch(micro_batch + 1)

    def bind_backward(self, micro_batch: int) -> None:
        """Let the module hold the weights of the micro-batch's backward pass. With `none` and
        `predict`, they replace the weights of the forward pass, as a real pipeline overwrites its
        only copy. The activations are still the ones that the forward pass saved."""
        if self.stash == "exact":
            self.bind(micro_batch)
        elif self.delay.tau:
            copy_tensors(self._in_use, self._extrapolation.seen_by_backward(self._newest))
            self._bound = None

    def bind_newest(self) -> None:
        """Let the module compute with the newest weights."""
        if self.delay.tau and self._bound != "newest":
            copy_tensors(self._in_use, self._newest)
            self._bound = "newest"

    def seen_by_backward(self) -> list[Tensor]:
        """The weights of the backward pass that has just run, in the order of `newest`."""
        if self.stash == "exact":
            return list(self.in_use)  # rounded, if the slots are bf16
        return list(as_list(self._extrapolation.seen_by_backward(self._newest)))

    @torch.no_grad()
    def take_back(self) -> None:
        """After a step: weights to which it has given other memory (`weight.data = ...`) return to
        their places in the buffers, with the new contents.

        Raises:
            ValueError: a weight has another shape, data type or device.
        """
        for (name, weight), place in zip(self.newest.items(), self._newest.views, strict=True):
            if weight.is_set_to(place):
                continue
            for kind in ("shape", "dtype", "device"):
                before, after = getattr(place, kind), getattr(weight, kind)
                if before != after:
                    raise ValueError(f"it changed the {kind} of {name} from {before} to {after}")
            place.copy_(weight.clone())  # the new memory may overlap the old one
            weight.data = place

    def newest_were_written(self) -> None:
        """The newest weights have other contents, which are no new version: the weights in use do
        not hold them."""
        if self._bound == "newest":
            self._bound = None

    def correct_update(self) -> None:
        """After an update: correct it by error feedback, if the stage has that."""
        if self._error_feedback is not None:
            self._error_feedback.correct(self._newest)

    def remember(self) -> None:
        """Before an update whose `last_update` is wanted: keep a copy of the weights."""
        self._extrapolation.remember(self._newest)

    def last_update(self) -> list[Tensor]:
        """w(t) - w(t - 1) per weight, after an update for which `remember` was called and before
        `record_update`."""
        return self._extrapolation.last_update(self._newest)

    def record_update(self, version: int) -> None:
        """The newest weights have become this version: store it for the micro-batches that will
        use it."""
        stored = self._extrapolation.record(self._newest, list(self.newest.values()))
        if self.delay.tau == 0:
            return
        self.slots.store(version, stored)
        if self._bound in ("newest", self.delay.slot_of(version)):
            self._bound = None  # the contents of that slot, or the newest weights, have changed

    def state_dict(self) -> dict[str, Any]:
        """Everything here that decides the trajectory, for a checkpoint (no copies).

        `ring` has a weight's older versions in all slots as one tensor, (num_slots, *shape); it is
        empty without delay. `last_update` is there with error feedback.
        """
        self.slots.wait()
        state = {
            "weights": {name: parameter.data for name, parameter in self.newest.items()},
            "ring": self._ring(),
            "extrapolation": self._extrapolation.state,
        }
        if self._error_feedback is not None:
            state["last_update"] = self._error_feedback.state()
        return state

    def _ring(self) -> dict[str, Tensor]:
        """The slots' contents by weight, (num_slots, *shape); empty without slots."""
        if not self.slots.slots:
            return {}
        return dict(zip(self.newest, self.slots.stacked(), strict=True))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state of `state_dict`, in place.

        Raises:
            ValueError: the state is of another stage, delay, stash mode or forecast, or has no
                error feedback where this stage has it.
        """
        if ("last_update" in state) != (self._error_feedback is not None):
            raise ValueError(f"stage {self.index}: the state is of another error feedback")
        ring = _by_weight(state["ring"], list(self.newest))
        here = self._ring()
        if list(state["weights"]) != list(self.newest) or _shapes(ring) != _shapes(here):
            raise ValueError(f"stage {self.index}: the state is of another stage or delay")
        # A copy that is under way would overwrite what is loaded.
        self.slots.wait()
        copy_tensors(self._newest, list(state["weights"].values()))
        copy_tensors(list(here.values()), list(ring.values()))
        self.slots.forget()
        self._bound = None
        try:
            self._extrapolation.load_state(state["extrapolation"], self._newest)
        except ValueError as error:
            raise ValueError(f"stage {self.index}: {error}") from None
        if self._error_feedback is not None:
            self._error_feedback.load(state["last_update"], self._newest)

    @property
    def device(self) -> torch.device:
        """Where the stage computes."""
        return self.in_use[0].device


def _by_weight(
    ring: Mapping[str, Tensor] | list[list[Tensor]], names: list[str]
) -> Mapping[str, Tensor]:
    """A saved ring in the form that `state_dict` gives it. Earlier versions of brx saved one list
    of tensors per slot."""
    if not isinstance(ring, list):
        return ring
    stacked = [torch.stack(slots) for slots in zip(*ring, strict=True)]
    # Not strict: `load_state_dict` compares the shapes, and names the stage if they are wrong.
    return dict(zip(names, stacked, strict=False))


def _shapes(tensors: Mapping[str, Tensor]) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in tensors.items()}


def _share_hooks(weight: nn.Parameter, used: nn.Parameter) -> None:
    """Let the hooks of a weight (`register_hook`) see the gradients of the one that is used in its
    place. Both have the same dictionary, so a hook that is removed is removed from both."""
    for kind in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        hooks = getattr(weight, kind)
        if hooks:
            setattr(used, kind, hooks)


def _replace_parameters(
    module: nn.Module, old: list[nn.Parameter], new: list[nn.Parameter]
) -> None:
    """Replace the parameters of a module and of its submodules. A tied parameter is replaced in
    each of its places."""
    replacements = {id(before): after for before, after in zip(old, new, strict=True)}
    for submodule in module.modules():
        for name, parameter in list(submodule._parameters.items()):
            if id(parameter) in replacements:
                setattr(submodule, name, replacements[id(parameter)])
