"""A ring of weight versions in host memory; the few that are in use are copied to the device, ahead of time.

On CUDA the host memory is pinned and the copies run on a stream of their own, beside the computation. Elsewhere they
are plain copies (of no use but for tests: there is only one memory).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from brx.pipeline.delay import StageDelay

UNKNOWN = -(2**62)


class HostRing:
    """Device buffers over a host ring of weight versions.

    The buffer of micro-batch t is (t - 1) mod n, with n = (micro-batches in flight) + 1: when micro-batch t is
    forwarded, t + 1 is fetched into a buffer whose micro-batch has had its update.

    Args:
        initial: version 0, on the device; all slots begin with it.
        num_in_flight: micro-batches between forward pass and update on this device, at most.

    Attributes:
        slots: on the host, in the order and dtypes of a slot on the device.
    """

    def __init__(self, initial: Sequence[Tensor], delay: StageDelay, num_in_flight: int) -> None:
        device = initial[0].device
        self._is_cuda = device.type == "cuda"
        self._delay = delay
        self.slots = [[self._to_host(tensor) for tensor in initial] for _ in range(delay.num_slots)]
        self._buffers = [[nn.Parameter(tensor.clone()) for tensor in initial] for _ in range(num_in_flight + 1)]
        self._held: list[int | None] = [None] * len(self._buffers)
        self._newest_stored = 0
        self._stream = torch.cuda.Stream(device) if self._is_cuda else None  # type: ignore[no-untyped-call]
        self._loaded = [torch.cuda.Event() for _ in self._buffers] if self._is_cuda else []  # type: ignore[no-untyped-call]
        self._stored = torch.cuda.Event() if self._is_cuda else None  # type: ignore[no-untyped-call]

    def weights(self, micro_batch: int) -> list[Tensor]:
        """What the passes of a micro-batch compute with, on the device."""
        buffer = self._buffer_of(micro_batch)
        if self._held[buffer] != micro_batch:
            self._load(micro_batch)
        if self._is_cuda:
            torch.cuda.current_stream().wait_event(self._loaded[buffer])
        return list(self._buffers[buffer])

    def prefetch(self, micro_batch: int) -> None:
        """Start to fetch the weights of a micro-batch, if the update that made them is behind us."""
        is_held = self._held[self._buffer_of(micro_batch)] == micro_batch
        if not is_held and self._delay.version_used(micro_batch) <= self._newest_stored:
            self._load(micro_batch)

    def store(self, version: int, newest: Sequence[Tensor]) -> None:
        """Keep the newest weights, which are this version."""
        with self._aside():
            for slot, weight in zip(self.slots[self._delay.slot_of(version)], newest, strict=True):
                slot.copy_(weight, non_blocking=True)
                if self._stream is not None:
                    weight.record_stream(self._stream)  # a forecast is gone before the copy from it is over
            if self._stored is not None:
                self._stored.record()
        self._newest_stored = version

    def finish_store(self) -> None:
        """Let the device's next work wait until the last `store` has read the weights."""
        if self._stored is not None:
            torch.cuda.current_stream().wait_event(self._stored)

    def forget_buffers(self) -> None:
        """A micro-batch may come again: what its buffer was overwritten with is not its version."""
        self._held = [None] * len(self._buffers)

    def forget(self) -> None:
        """The slots have been given another content."""
        self._held = [None] * len(self._buffers)
        self._newest_stored = UNKNOWN

    def wait(self) -> None:
        """Until the slots may be read or written on the host."""
        if self._stream is not None:
            self._stream.synchronize()

    def _buffer_of(self, micro_batch: int) -> int:
        return (micro_batch - 1) % len(self._buffers)

    def _load(self, micro_batch: int) -> None:
        index = self._buffer_of(micro_batch)
        with self._aside(), torch.no_grad():
            for weight, kept in zip(self._buffers[index], self.slots[self._delay.slot_used(micro_batch)], strict=True):
                weight.data.copy_(kept, non_blocking=True)
            if self._is_cuda:
                self._loaded[index].record()
        self._held[index] = micro_batch

    def _aside(self) -> AbstractContextManager[object]:
        """The stream of the copies, after all that the device has been given so far."""
        if self._stream is None:
            return nullcontext()
        self._stream.wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(self._stream)

    def _to_host(self, tensor: Tensor) -> Tensor:
        copy = tensor.detach().to("cpu", copy=True)
        return copy.pin_memory() if self._is_cuda else copy
