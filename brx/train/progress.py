"""What the user sees while a run is under way: a live bar on a terminal, plain lines otherwise."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

PLAIN_LINE_EVERY_S = 10.0


class TrainingProgress:
    """Shows iteration, loss, tokens/s and the time left, on stderr.

    Args:
        label: the run's name.
        total: its last iteration.
        done: iterations done before this session.
        quiet: show nothing (ranks other than 0).
    """

    def __init__(self, label: str, total: int, done: int = 0, *, quiet: bool = False) -> None:
        self._console = Console(stderr=True, quiet=quiet, highlight=False)
        self._label = label
        self._total = total
        self._first = done
        self._last_line = self._start = time.monotonic()
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]:.3f}  {task.fields[rate]:,.0f} tokens/s"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task(label, total=total, completed=done, loss=float("nan"), rate=0.0)

    def update(self, iteration: int, loss: float, tokens_per_second: float) -> None:
        """Show the state after `iteration`."""
        self._bar.update(self._task, completed=iteration, loss=loss, rate=tokens_per_second)
        now = time.monotonic()
        if self._console.is_terminal or (now - self._last_line < PLAIN_LINE_EVERY_S and iteration < self._total):
            return
        self._last_line = now
        remaining = (now - self._start) / (iteration - self._first) * (self._total - iteration)
        self._console.print(
            f"{self._label}: iteration {iteration}/{self._total}  loss {loss:.3f}"
            f"  {tokens_per_second:,.0f} tokens/s  {remaining:.0f} s left",
            soft_wrap=True,
            markup=False,
        )

    def say(self, message: str) -> None:
        """Print a line above the bar."""
        self._console.print(f"{self._label}: {message}", soft_wrap=True, markup=False)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()
