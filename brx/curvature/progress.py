"""What the user sees of an estimate under way: a live bar on a terminal, plain lines otherwise."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

PLAIN_LINE_EVERY_S = 10.0


class EstimateProgress:
    """Shows how many vectors are done and the estimate so far, on stderr.

    Args:
        label: what is estimated.
        total: vectors wanted.
        done: vectors of earlier sessions.
    """

    def __init__(self, label: str, total: int, done: int) -> None:
        self._console = Console(stderr=True, highlight=False)
        self._label = label
        self._total = total
        self._last_line = time.monotonic()
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("so far {task.fields[estimate]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task(label, total=total, completed=done, estimate="-")

    def update(self, done: int, estimate: str) -> None:
        """Show the estimate after `done` vectors."""
        self._bar.update(self._task, completed=done, estimate=estimate)
        now = time.monotonic()
        if not self._console.is_terminal and (now - self._last_line >= PLAIN_LINE_EVERY_S or done == self._total):
            self._last_line = now
            self._console.print(f"{self._label}: {done}/{self._total} vectors, so far {estimate}")

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()
