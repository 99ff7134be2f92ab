"""What the user sees of a preparation: a live bar on a terminal, plain lines otherwise."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from brx.data.writing import Written

PLAIN_LINE_EVERY_S = 10.0


class PreparationProgress:
    """Shows training tokens, documents and tokens/s, on stderr.

    Args:
        source: what is prepared.
        total: training tokens wanted; None for all there are.
        written: what there is, kept up to date by the writer.
        quiet: show nothing.
    """

    def __init__(self, source: str, total: int | None, written: Written, *, quiet: bool = False) -> None:
        self._console = Console(stderr=True, quiet=quiet, highlight=False)
        self._source = source
        self._written = written
        self._before = _num_tokens(written)
        self._start = self._last_line = time.monotonic()
        self._bar = Progress(
            TextColumn("preparing {task.description}"),
            BarColumn(),
            TextColumn("{task.fields[text]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
            transient=True,
        )
        self._task = self._bar.add_task(source, total=total, completed=self._train_tokens, text="")

    def update(self) -> None:
        """Show how far it is."""
        self._bar.update(self._task, completed=self._train_tokens, text=self._text())
        now = time.monotonic()
        if not self._console.is_terminal and now - self._last_line >= PLAIN_LINE_EVERY_S:
            self._last_line = now
            self._say("preparing", self._text())

    @property
    def _train_tokens(self) -> int:
        return self._written.splits["train"].num_tokens

    def _text(self) -> str:
        num_tokens = _num_tokens(self._written)
        rate = (num_tokens - self._before) / max(time.monotonic() - self._start, 1e-9)
        return f"{num_tokens:,} tokens  {self._written.documents_read:,} documents  {rate:,.0f} tokens/s"

    def _say(self, what: str, text: str) -> None:
        self._console.print(f"{what} {self._source}: {text}", soft_wrap=True, markup=False)

    def __enter__(self) -> Self:
        self._bar.start()
        if self._before:
            self._say("preparing", f"going on after {self._before:,} tokens")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()
        if error is None:
            self._say("prepared", self._text())


def _num_tokens(written: Written) -> int:
    return sum(count.num_tokens for count in written.splits.values())
