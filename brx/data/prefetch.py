"""Micro-batches on their device, made while the device is busy with the ones before."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

Batch = tuple[Tensor, Tensor]

AHEAD = 4


class Prefetcher:
    """Fetches micro-batches for a device, and measures how long the training loop waited for them.

    On CUDA a thread assembles the next `AHEAD` ones in pinned memory, so that the copy to the device is asynchronous.
    Elsewhere there is nothing to overlap with (a thread would compete with the computation), so a micro-batch is made
    when asked for. What is made does not depend on that: a micro-batch is a function of its iteration.

    Args:
        make: iteration to inputs and targets on the CPU, for example `Batches.batch`.
        device: where they are wanted.

    Attributes:
        seconds_waited: how long `batch` has taken, all calls together.
    """

    def __init__(self, make: Callable[[int], Batch], device: torch.device) -> None:
        self._make = make
        self._device = device
        self._thread = ThreadPoolExecutor(1, "brx-batches") if device.type == "cuda" else None
        self._ahead: dict[int, Future[Batch]] = {}
        self.seconds_waited = 0.0

    def batch(self, iteration: int) -> Batch:
        """Inputs and targets of micro-batch `iteration` on the device; any order works, ascending ones are ready."""
        started = time.perf_counter()
        inputs, targets = self._make(iteration) if self._thread is None else self._next(iteration, self._thread)
        # The caching allocator of pinned memory keeps a buffer until the copy from it is over.
        on_device = inputs.to(self._device, non_blocking=True), targets.to(self._device, non_blocking=True)
        self.seconds_waited += time.perf_counter() - started
        return on_device

    def _next(self, iteration: int, thread: ThreadPoolExecutor) -> Batch:
        wanted = range(iteration, iteration + 1 + AHEAD)
        self._ahead = {number: self._ahead.get(number) or thread.submit(self._make_pinned, number) for number in wanted}
        return self._ahead[iteration].result()

    def _make_pinned(self, iteration: int) -> Batch:
        inputs, targets = self._make(iteration)
        return inputs.pin_memory(), targets.pin_memory()

    def close(self) -> None:
        """End the thread; what it was making is dropped."""
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
