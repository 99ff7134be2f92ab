"""Ctrl-C and SIGTERM as a request to stop at the next iteration."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType
from typing import Any, Self


class StopSignal:
    """While active, the first SIGINT or SIGTERM sets `requested`; a second one interrupts at once.

    Args:
        listen: whether this process decides; elsewhere Ctrl-C is ignored (rank 0 says when to stop) and SIGTERM kills.
    """

    def __init__(self, listen: bool = True) -> None:
        self.requested = False
        self._listen = listen
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if self._listen:
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._handle)
        else:
            self._before[signal.SIGINT] = signal.signal(signal.SIGINT, signal.SIG_IGN)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
