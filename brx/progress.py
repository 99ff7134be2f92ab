"""What the user sees of long work, on stderr: a live bar on a terminal, plain lines otherwise."""

import time
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

PLAIN_LINE_EVERY_S = 10.0


class ProgressBar:
    """Shows how much is done, what the work says of itself, and the time left.

    `done` of the `total` (None: nobody knows) units were there before this session. `quiet` shows
    nothing."""

    def __init__(
        self, label: str, unit: str, total: int | None, done: int = 0, *, quiet: bool = False
    ) -> None:
        self._console = Console(stderr=True, quiet=quiet, highlight=False)
        self._label = label
        self._unit = unit
        self._total = total
        self._first = done
        self._start = self._last_line = time.monotonic()
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[text]}"),
            TimeElapsedColumn(),
            TextColumn("elapsed,"),
            TimeRemainingColumn(),
            TextColumn("left"),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task(label, total=total, completed=done, text=self._count(done))

    def update(self, done: int, text: str) -> None:
        self._bar.update(self._task, completed=done, text=f"{self._count(done)}  {text}")
        now = time.monotonic()
        if self._console.is_terminal or (
            now - self._last_line < PLAIN_LINE_EVERY_S and done != self._total
        ):
            return
        self._last_line = now
        left = ""
        if self._total is not None and done > self._first:
            left = (
                f"  {(now - self._start) / (done - self._first) * (self._total - done):.0f} s left"
            )
        self.say(f"{self._unit} {self._count(done)}  {text}{left}")

    def say_at_times(self, message: str) -> None:
        """Say what a long step is at, every ten seconds at most and nothing of short ones."""
        now = time.monotonic()
        if now - self._last_line >= PLAIN_LINE_EVERY_S:
            self._last_line = now
            self.say(message)

    def say(self, message: str, label: str | None = None) -> None:
        self._console.print(f"{label or self._label}: {message}", soft_wrap=True, markup=False)

    def _count(self, done: int) -> str:
        return f"{done:,}" if self._total is None else f"{done:,}/{self._total:,}"

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()
