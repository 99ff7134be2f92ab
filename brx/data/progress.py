"""What the user sees of a preparation: a live bar on a terminal, plain lines otherwise."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

PLAIN_LINE_EVERY_S = 10.0


class PreparationProgress:
    """Shows training tokens, documents and tokens/s, on stderr.

    Args:
        source: what is prepared.
        total: training tokens wanted; None for all there are.
        done: training tokens written before this session.
    """

    def __init__(self, source: str, total: int | None, done: int) -> None:
        self._console = Console(stderr=True, highlight=False)
        self._source = source
        self._first = done
        self._start = self._last_line = time.monotonic()
        self._bar = Progress(
            TextColumn("preparing {task.description}"),
            BarColumn(),
            TextColumn("{task.completed:,.0f} tokens  {task.fields[documents]:,} documents  {task.fields[rate]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task(source, total=total, completed=done, documents=0, rate="")

    def update(self, tokens: int, documents: int) -> None:
        """Show how far it is."""
        now = time.monotonic()
        rate = f"{(tokens - self._first) / max(now - self._start, 1e-9):,.0f} tokens/s"
        self._bar.update(self._task, completed=tokens, documents=documents, rate=rate)
        if not self._console.is_terminal and now - self._last_line >= PLAIN_LINE_EVERY_S:
            self._last_line = now
            self._console.print(f"preparing {self._source}: {tokens:,} tokens  {documents:,} documents  {rate}")

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()
