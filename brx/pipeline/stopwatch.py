"""Times work on a device without waiting for the device."""

from __future__ import annotations

import time

import torch


class Stopwatch:
    """One stretch of work: `start`, `stop`, and, when nobody minds waiting for a GPU, `seconds`.

    Args:
        device: where the work is done.
    """

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._events = [torch.Event(device, enable_timing=True) for _ in range(2)] if self._is_cuda else []
        self._times = [0.0, 0.0]

    def start(self) -> None:
        """The work begins."""
        self._mark(0)

    def stop(self) -> None:
        """The work has been handed to the device (CUDA) or is over."""
        self._mark(1)

    def seconds(self) -> float:
        """How long the work took; on CUDA waits until it is over."""
        if self._is_cuda:
            self._events[1].synchronize()
            return float(self._events[0].elapsed_time(self._events[1])) / 1e3
        return self._times[1] - self._times[0]

    def _mark(self, mark: int) -> None:
        if self._is_cuda:
            self._events[mark].record()
        else:
            self._times[mark] = time.perf_counter()
