"""Show the progress of long work on stderr: a live bar on a terminal, plain lines otherwise."""

import sys
import time
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

PLAIN_LINE_EVERY_S = 10.0


def tell(line: str) -> None:
    """Print a line on stderr at once: what follows may take long."""
    print(line, file=sys.stderr, flush=True)


def error_console(*, quiet: bool = False) -> Console:
    """A console on stderr that prints names as they are. By default, rich would take `[lr=0.1]` in
    a run's name for markup, and `:b:` for an emoji."""
    return Console(stderr=True, quiet=quiet, highlight=False, markup=False, emoji=False)


def is_live(console: Console) -> bool:
    """Whether a console can draw a bar or a table again in its place.

    Some terminals cannot (TERM=dumb, as in Emacs). FORCE_COLOR makes rich take any file for a
    terminal, but in a log every new drawing would be one more line.
    """
    return console.is_terminal and not console.is_dumb_terminal and console.file.isatty()


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
        self._console = error_console(quiet=quiet)
        self._is_live = is_live(self._console)
        self._label = label
        self._unit = unit
        self._total = total
        self._first = done
        self._start = self._last_line = time.monotonic()
        self._bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TextColumn("{task.fields[text]}", markup=False),
            TimeElapsedColumn(),
            TextColumn("elapsed,"),
            TimeRemainingColumn(),
            TextColumn("left"),
            console=self._console,
            disable=not self._is_live,
        )
        self._task = self._bar.add_task(label, total=total, completed=done, text=self._count(done))

    def update(self, done: int, text: str) -> None:
        """Show that `done` units are done now, with a text. Plain lines are printed at most every
        ten seconds, and at the end."""
        self._bar.update(self._task, completed=done, text=f"{self._count(done)}  {text}")
        if self._is_live:
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
        self._console.print(f"{label or self._label}: {message}", soft_wrap=True)

    def _count(self, done: int) -> str:
        return f"{done:,}" if self._total is None else f"{done:,}/{self._total:,}"

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()


def duration(seconds: float) -> str:
    """A time as people write it: `40 s`, `12 min`, `3.5 h` or `2.1 days`."""
    for unit, size in (("days", 86400.0), ("h", 3600.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds / 60:.0f} min" if seconds >= 120 else f"{seconds:.0f} s"
