"""The weight versions of one stage: the newest weights, and the ring of older ones that
micro-batches in flight need.

What is swapped: a submodule looks its weights up by attribute, so `bind` replaces the entries in
the submodules' `_parameters` by the values of a slot of the ring. Optimizers, checkpoints and
everybody else keep the parameters that the module began with, the *newest* weights. The gradient of
an old version is applied to them, and gets there so:

- the engine binds the slot's tensors as leaves (`bind`); autograd leaves each gradient in the
  slot's `.grad`, and `collect_gradients` moves it to the newest weights, before the method looks at
  it;
- in anybody's loop (`brx.pipeline.anywhere`) nobody would call that, and DDP or hooks wait for the
  gradient at the parameters themselves: `bind_through` binds the slot's values, whose gradients
  autograd passes on to them. That costs some 50 us per stage and micro-batch, a twentieth of a
  small model's iteration.

Needs torch alone.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
from torch import Tensor, nn

from brx.pipeline.delay import StageDelay
from brx.pipeline.forecasts import (
    ForecastRule,
    ParameterStates,
    StashMode,
    copied_to,
    moving_average,
)

UNKNOWN = -(2**62)


class Ring:
    """Slots for the versions that `StageDelay` names, on the device or in host memory, and buffers
    on the device.

    Without buffers a micro-batch computes with its slot itself. With B buffers it computes with a
    copy of the slot, in buffer (n - 1) mod B, which is its own until its update: as many as
    micro-batches are between forward pass and update at one time, and one more with slots on the
    host: when micro-batch n is forwarded, n + 1 is fetched. On CUDA these slots are pinned, and
    copies run on a stream of their own; elsewhere they are plain copies (for tests).

    `initial` is version 0, on the device, in the ring's dtypes; all slots begin with it.
    """

    def __init__(
        self, initial: Sequence[Tensor], delay: StageDelay, num_buffers: int, *, on_host: bool
    ) -> None:
        device = initial[0].device
        self._delay = delay
        self._on_host = on_host
        self._is_cuda = on_host and device.type == "cuda"  # copies run on a stream of their own
        self.slots = [
            [self._to_slot(tensor) for tensor in initial]
            for _ in range(delay.num_slots if delay.tau else 0)
        ]
        self.buffers: list[list[Tensor]] = [
            [_leaf(tensor) for tensor in initial] for _ in range(num_buffers)
        ]
        self._held: list[int | None] = [None] * num_buffers  # the micro-batch of each buffer
        self._newest_stored = 0
        self._stream = torch.cuda.Stream(device) if self._is_cuda else None  # type: ignore[no-untyped-call]
        self._loaded = [torch.cuda.Event() for _ in self.buffers] if self._is_cuda else []  # type: ignore[no-untyped-call]
        self._stored = torch.cuda.Event() if self._is_cuda else None  # type: ignore[no-untyped-call]

    def weights(self, micro_batch: int) -> list[Tensor]:
        """What the forward pass of a micro-batch computes with, on the device."""
        if not self.buffers:
            return self.slots[self._delay.slot_used(micro_batch)]
        index = self._buffer_of(micro_batch)
        if self._held[index] != micro_batch:  # nobody has fetched it ahead
            self._load(micro_batch)
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_event(self._loaded[index])
        return self.buffers[index]

    def prefetch(self, micro_batch: int) -> None:
        """Start to fetch the weights of a micro-batch from the host, if their version is there
        already."""
        is_held = not self._on_host or self._held[self._buffer_of(micro_batch)] == micro_batch
        if not is_held and self._delay.version_used(micro_batch) <= self._newest_stored:
            self._load(micro_batch)

    @torch.no_grad()
    def store(self, version: int, weights: list[Tensor]) -> None:
        with self._aside():
            torch._foreach_copy_(
                self.slots[self._delay.slot_of(version)], weights, non_blocking=self._on_host
            )
            if self._stream is not None and self._stored is not None:
                for weight in weights:
                    weight.record_stream(
                        self._stream
                    )  # a forecast is gone before the copy from it is over
                self._stored.record()
        self._newest_stored = version

    def finish_store(self) -> None:
        """Let the device's next work, an update, wait until the last `store` has read the
        weights."""
        if self._stream is not None and self._stored is not None:
            torch.cuda.current_stream(self._stream.device).wait_event(self._stored)

    def forget(self) -> None:
        """A micro-batch may come again, or the slots have new contents: buffers are no longer what
        they were."""
        self._held = [None] * len(self.buffers)
        self._newest_stored = UNKNOWN

    def wait(self) -> None:
        """Until the slots may be read or written on the host."""
        if self._stream is not None:
            self._stream.synchronize()

    def _buffer_of(self, micro_batch: int) -> int:
        return (micro_batch - 1) % len(self.buffers)

    @torch.no_grad()
    def _load(self, micro_batch: int) -> None:
        index, slot = self._buffer_of(micro_batch), self.slots[self._delay.slot_used(micro_batch)]
        with self._aside():
            # Through .data: a graph that is no longer needed may still hold the buffer's tensors.
            torch._foreach_copy_(
                [weight.data for weight in self.buffers[index]], slot, non_blocking=self._on_host
            )
            if self._is_cuda:
                self._loaded[index].record()
        self._held[index] = micro_batch

    def _aside(self) -> AbstractContextManager[object]:
        """The stream of the copies, after all that the device has been given so far."""
        if self._stream is None:
            return nullcontext()
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        return torch.cuda.stream(self._stream)

    def _to_slot(self, tensor: Tensor) -> Tensor:
        if not self._on_host:
            return _leaf(tensor)
        copy = tensor.to("cpu", copy=True)
        return copy.pin_memory() if self._is_cuda else copy


def _leaf(tensor: Tensor) -> Tensor:
    """A copy that the module can compute with, in whose `.grad` autograd leaves the gradient."""
    return nn.Parameter(tensor.clone())


class ReboundStage:
    """A stage whose forward and backward passes see the weights that its delay dictates.

    With tau > 0 there is a ring of ceil(tau / M) + 1 slots (see `StageDelay`). The forward pass of
    micro-batch n computes with version max(0, floor((n - 1 - tau) / M)), and so does the backward
    pass with `exact`. After update t, its slot takes version t; with a `forecast`, where version t
    is expected to be when the update of the micro-batch comes that needs it. So one copy of the
    stage's weights per iteration (two with `none` and `predict`) is all that delay costs in time.
    With tau = 0 the newest weights are the only version, and nothing is copied.

    `module` computes the stage; its parameters are the newest weights except while another version
    is bound. `newest` are these by name; optimizers update them in place.

    Args: ring_dtype: the ring's dtype for a weight; bf16 for those that autocast would cast to it
        anyway, which gives
            the same numbers from half the memory.
        num_in_flight: micro-batches between forward and backward pass on this device, at most.
        names: of the module's parameters that are this stage's; all by default.
        always_copy: a micro-batch may come again (after a skipped update), so its slot must never
            be overwritten.
    """

    def __init__(
        self,
        module: nn.Module,
        index: int,
        delay: StageDelay,
        stash: StashMode = "exact",
        ring_dtype: Callable[[str, Tensor], torch.dtype] = lambda name, weight: weight.dtype,
        *,
        num_in_flight: int = 1,
        on_host: bool = False,
        forecast: ForecastRule | None = None,
        names: Collection[str] | None = None,
        always_copy: bool = False,
    ) -> None:
        self.module, self.index, self.delay, self.stash = module, index, delay, stash
        self.newest = {
            name: p for name, p in module.named_parameters() if names is None or name in names
        }
        self._newest_list: list[Tensor] = list(
            self.newest.values()
        )  # as torch._foreach functions take them
        self._places = _places(module, self._newest_list)
        self._rnns = [rnn for rnn in module.modules() if isinstance(rnn, nn.RNNBase)]
        # A micro-batch in flight computes with a copy of its slot where that is on the host, or
        # where replacing its weights for the backward pass would spoil them for others; with M = 1
        # no other needs the slot.
        copies = on_host or (stash != "exact" and (delay.micro_batches_share_slots or always_copy))
        num_buffers = num_in_flight + int(on_host) if delay.tau and copies else 0
        initial = [
            weight.detach().to(ring_dtype(name, weight)) for name, weight in self.newest.items()
        ]
        self.ring = Ring(initial, delay, num_buffers, on_host=on_host and delay.tau > 0)
        self._gradient_sum: list[Tensor] | None = None
        self._before_update: list[Tensor] | None = (
            None  # where somebody asks what an update added to the weights
        )
        self._extrapolation: ParameterStates = [
            {} for _ in self.newest
        ]  # the moving averages of predict and forecast
        self._forecast = forecast
        if self._extrapolates:
            self.remember()

    def forecast_by(self, rule: ForecastRule) -> None:
        """Before the first update: run both passes where a rule expects the weights to be (with
        `exact` only)."""
        assert self.stash == "exact"
        self._forecast = rule
        if self._extrapolates:
            self.remember()

    def bind(self, micro_batch: int) -> None:
        """Let the module compute with version `delay.version_used(micro_batch)`."""
        self._point_to(self.forward_weights(micro_batch))
        self.ring.prefetch(micro_batch + 1)

    def bind_through(self, micro_batch: int) -> None:
        """As `bind`, but gradients arrive at the newest weights by themselves."""
        if self.delay.tau:
            with torch.enable_grad():  # where activations are recomputed, autograd is off
                old = self.forward_weights(micro_batch)
                at_version = _AtVersion.apply(old, *self._newest_list)  # type: ignore[no-untyped-call]
                self._point_to(at_version)
            self.ring.prefetch(micro_batch + 1)

    def bind_newest(self) -> None:
        self._point_to(self._newest_list)

    @torch.no_grad()
    def prepare_backward(self, micro_batch: int) -> None:
        """For `none` and `predict`, replace the forward weights, as a real pipeline overwrites its
        only copy."""
        if not self.delay.tau or self.stash == "exact":
            return
        # The activations stay those of the forward pass. Through .data: autograd saved these very
        # tensors and would (rightly) object to what is done here on purpose.
        targets = [weight.data for weight in self.forward_weights(micro_batch)]
        torch._foreach_copy_(targets, self.backward_weights(micro_batch))

    def collect_gradients(self, micro_batch: int) -> None:
        """Move a micro-batch's gradients to the newest weights, in these weights' dtype."""
        for newest, weight in zip(
            self._newest_list, self.forward_weights(micro_batch), strict=True
        ):
            gradient = weight.grad
            weight.grad = None
            newest.grad = gradient.to(newest.dtype) if gradient is not None else None
        self.ring.finish_store()

    def accumulate(self, micro_batch: int) -> None:
        """Add the newest weights' gradients to the update's; with its last micro-batch they become
        the mean."""
        if self.delay.accumulation == 1:
            return
        gradients = [weight.grad for weight in self._newest_list if weight.grad is not None]
        assert len(gradients) == len(self._newest_list), "a parameter took no part in the loss"
        if self._gradient_sum is None:
            self._gradient_sum = gradients
        else:  # in the order of the micro-batches: the same sum on any number of devices
            torch._foreach_add_(self._gradient_sum, gradients)
        self.drop_gradients()
        if self.delay.ends_update(micro_batch):
            torch._foreach_div_(self._gradient_sum, self.delay.accumulation)
            for weight, mean in zip(self._newest_list, self._gradient_sum, strict=True):
                weight.grad = mean
            self._gradient_sum = None

    def drop_gradients(self) -> None:
        for weight in self._newest_list:
            weight.grad = None

    def forward_weights(self, micro_batch: int) -> list[Tensor]:
        """What its forward pass computes with, in the order of `newest` and the ring's dtype."""
        return self.ring.weights(micro_batch) if self.delay.tau else self._newest_list

    def backward_weights(self, micro_batch: int) -> list[Tensor]:
        """What its backward pass sees, in the order of `newest`; valid until its update."""
        if (
            not self.delay.tau or self.stash == "exact"
        ):  # the ring's own tensors, rounded if the ring is bf16
            return self.forward_weights(micro_batch)
        average = [kept.get("average_update") for kept in self._extrapolation]
        if (
            self.stash == "none" or average[0] is None
        ):  # before the first update, predict knows of none either
            return self._newest_list
        # PipeMare's T2 (arXiv:1910.05124): w - tau delta, tau in updates.
        return list(
            torch._foreach_add(
                self._newest_list, cast(list[Tensor], average), alpha=-self.delay.tau_updates
            )
        )

    @torch.no_grad()
    def remember(self) -> None:
        """Before an update whose `last_update` is wanted: keep a copy of the weights."""
        if self._before_update is None:
            self._before_update = [weight.detach().clone() for weight in self._newest_list]

    @torch.no_grad()
    def last_update(self) -> list[Tensor]:
        """After an update that was remembered, and before it is recorded: what it added to the
        weights."""
        assert self._before_update is not None
        return list(
            torch._foreach_sub(
                [weight.detach() for weight in self._newest_list], self._before_update
            )
        )

    @torch.no_grad()
    def record_update(self, version: int) -> None:
        """The newest weights have become this version: store it for the micro-batch that needs
        it."""
        stored = self._newest_list
        if self._extrapolates:
            update = self.last_update()  # w(t) - w(t-1)
            if self._forecast is not None:
                stored = self._forecast(
                    self._newest_list, update, self.delay.tau_updates, self._extrapolation
                )
            else:  # predict: delta <- gamma delta + (1 - gamma) (w(t) - w(t-1))
                moving_average(update, self.delay.prediction_decay, self._extrapolation)
            assert self._before_update is not None
            torch._foreach_copy_(self._before_update, self._newest_list)
        else:
            self._before_update = None  # if it was remembered, then for this update alone
        if self.delay.tau:
            self.ring.store(version, stored)

    def state_dict(self) -> dict[str, Any]:
        """Everything here that decides the trajectory, for a checkpoint (no copies)."""
        self.ring.wait()
        return {
            "weights": {name: parameter.data for name, parameter in self.newest.items()},
            "ring": [[parameter.data for parameter in slot] for slot in self.ring.slots],
            "extrapolation": self._extrapolation,
        }

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` gave, in place; ValueError where it is another stage's or
        mode's."""
        if list(state["weights"]) != list(self.newest) or len(state["ring"]) != len(
            self.ring.slots
        ):
            raise ValueError(f"stage {self.index}: the state is of another stage or delay")
        if len(state["extrapolation"]) != len(self.newest) or (
            any(state["extrapolation"]) and not self._extrapolates
        ):
            raise ValueError(f"stage {self.index}: the state is of another stash mode or forecast")
        self.ring.wait()  # for a copy under way, which would land on what is loaded
        torch._foreach_copy_(self._newest_list, list(state["weights"].values()))
        for slot, saved in zip(self.ring.slots, state["ring"], strict=True):
            torch._foreach_copy_(slot, saved)
        self.ring.forget()
        self._extrapolation = copied_to(self.device, state["extrapolation"])
        if self._before_update is not None:
            torch._foreach_copy_(self._before_update, self._newest_list)

    @property
    def device(self) -> torch.device:
        return self._newest_list[0].device

    @property
    def ring_bytes(self) -> int:
        return sum(
            weight.nbytes
            for weights in (*self.ring.slots, *self.ring.buffers)
            for weight in weights
        )

    @property
    def _extrapolates(self) -> bool:
        return self.delay.tau > 0 and (self.stash == "predict" or self._forecast is not None)

    def _point_to(self, parameters: list[Tensor] | tuple[Tensor, ...]) -> None:
        # What torch.func.functional_call does, without its cost of a hundred microseconds per
        # stage.
        for module, attribute, index in self._places:
            module._parameters[attribute] = cast(nn.Parameter, parameters[index])
        for rnn in self._rnns:  # which keep a list of their weights beside
            rnn._flat_weights = [getattr(rnn, name) for name in rnn._flat_weights_names]


class _AtVersion(torch.autograd.Function):
    """The values of an old version, whose gradients are those of the newest weights (gradients
    arrive one by one)."""

    @staticmethod
    def forward(ctx: Any, values: list[Tensor], *newest: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(
            False
        )  # a weight that takes no part gets no gradient, as without a delay
        return tuple(value.detach() for value in values)  # the ring's memory, not a copy

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        return None, *gradients


def _places(module: nn.Module, weights: list[Tensor]) -> list[tuple[nn.Module, str, int]]:
    """Each submodule and attribute that hold one of the weights, a tied one several times, and its
    index."""
    indices = {id(weight): index for index, weight in enumerate(weights)}
    held = [
        (submodule, name, id(p))
        for submodule in module.modules()
        for name, p in submodule._parameters.items()
    ]
    return [
        (submodule, name, indices[identity])
        for submodule, name, identity in held
        if identity in indices
    ]
