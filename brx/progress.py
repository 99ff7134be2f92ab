"""Show the progress of long work on stderr: a live bar on a terminal, plain lines otherwise."""

import time
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

PLAIN_LINE_EVERY_S = 10.0


class ProgressBar:
    """Shows how much is done, a text, and the time left.

    Args:
        label: the name of the work, for example `training`.
        unit: what is counted, for example `iteration`.
        total: the number of units; None if it is not known.
        done: the number of units that were done before this session.
        quiet: show nothing.
    """

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
        """Show that `done` units are done now, with a text. Plain lines are printed at most every
        ten seconds, and at the end."""
        self._bar.update(self._task, completed=done, text=f"{self._count(done)}  {text}")
        if self._console.is_terminal:
            return
        now = time.monotonic()
        is_due = now - self._last_line >= PLAIN_LINE_EVERY_S or done == self._total
        if is_due:
            self._last_line = now
            self.say(f"{self._unit} {self._count(done)}  {text}{self._left(done, now)}")

    def _left(self, done: int, now: float) -> str:
        """The time left at the pace of this session: `  12 s left`; empty if it is not known."""
        if self._total is None or done <= self._first:
            return ""
        per_unit = (now - self._start) / (done - self._first)
        return f"  {per_unit * (self._total - done):.0f} s left"

    def say_at_times(self, message: str) -> None:
        """Print a message, unless a line was printed in the last ten seconds: long steps report
        how far they are, short ones print nothing."""
        now = time.monotonic()
        if now - self._last_line >= PLAIN_LINE_EVERY_S:
            self._last_line = now
            self.say(message)

    def say(self, message: str, label: str | None = None) -> None:
        """Print a line, above the bar if there is one; `label` replaces the bar's."""
        self._console.print(f"{label or self._label}: {message}", soft_wrap=True, markup=False)

    def _count(self, done: int) -> str:
        return f"{done:,}" if self._total is None else f"{done:,}/{self._total:,}"

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()
