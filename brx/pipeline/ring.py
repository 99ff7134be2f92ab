"""The older weight versions of one stage, on the device or in host memory.

Slots in host memory are copied to the device ahead of time. On CUDA they are pinned, and the copies run on a stream of
their own, beside the computation. Elsewhere these are plain copies (of no use but for tests: there is one memory).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from brx.pipeline.delay import StageDelay

UNKNOWN = -(2**62)


class Ring:
    """Slots for the versions that `StageDelay` names, and buffers on the device.

    Without buffers a micro-batch computes with its slot itself. With B buffers it computes with a copy of the slot, in
    buffer (n - 1) mod B, which is its own until its update.

    Args:
        initial: version 0, on the device, in the ring's dtypes; all slots begin with it.
        num_buffers: as many as micro-batches are between forward pass and update at one time, and one more with slots
            on the host: when micro-batch n is forwarded, n + 1 is fetched.
    """

    def __init__(self, initial: Sequence[Tensor], delay: StageDelay, num_buffers: int, *, on_host: bool) -> None:
        device = initial[0].device
        self._delay = delay
        self._on_host = on_host
        self._is_cuda = on_host and device.type == "cuda"  # copies run on a stream of their own
        self.slots = [[self._to_slot(tensor) for tensor in initial] for _ in range(delay.num_slots)]
        self.buffers: list[list[Tensor]] = [[tensor.clone() for tensor in initial] for _ in range(num_buffers)]
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
        if self._is_cuda:
            torch.cuda.current_stream().wait_event(self._loaded[index])
        return self.buffers[index]

    def prefetch(self, micro_batch: int) -> None:
        """Start to fetch the weights of a micro-batch from the host, if their version is there already."""
        is_held = not self._on_host or self._held[self._buffer_of(micro_batch)] == micro_batch
        if not is_held and self._delay.version_used(micro_batch) <= self._newest_stored:
            self._load(micro_batch)

    @torch.no_grad()
    def store(self, version: int, weights: list[Tensor]) -> None:
        with self._aside():
            torch._foreach_copy_(self.slots[self._delay.slot_of(version)], weights, non_blocking=self._on_host)
            if self._stream is not None and self._stored is not None:
                for weight in weights:
                    weight.record_stream(self._stream)  # a forecast is gone before the copy from it is over
                self._stored.record()
        self._newest_stored = version

    def finish_store(self) -> None:
        """Let the device's next work wait until the last `store` has read the weights."""
        if self._stored is not None:
            torch.cuda.current_stream().wait_event(self._stored)

    def forget(self) -> None:
        """A micro-batch may come again, or the slots have new contents: buffers are no longer what they were."""
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
            torch._foreach_copy_([weight.data for weight in self.buffers[index]], slot, non_blocking=self._on_host)
            if self._is_cuda:
                self._loaded[index].record()
        self._held[index] = micro_batch

    def _aside(self) -> AbstractContextManager[object]:
        """The stream of the copies, after all that the device has been given so far."""
        if self._stream is None:
            return nullcontext()
        self._stream.wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(self._stream)

    def _to_slot(self, tensor: Tensor) -> Tensor:
        if not self._on_host:
            return tensor.clone()
        copy = tensor.to("cpu", copy=True)
        return copy.pin_memory() if self._is_cuda else copy
