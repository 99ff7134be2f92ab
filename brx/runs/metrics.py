"""metrics.jsonl: one JSON object a line, in order of iteration, flushed as it is written."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from brx.files import cannot_write, sync_folder, write_text

Record = dict[str, Any]
"""`iteration`, then either a training step (`train_loss` in nats, `lr`, `grad_norm`, `tokens`, `seconds`) or a
validation (`val_loss` in nats). A step at a log point has more: `stage_grad_norms`, `stage_update_norms`, those of
`MEASURED`, and `failed_refreshes`, the number so far of bases that stayed as they were, once there has been one."""

MEASURED = frozenset({"seconds", "tokens_per_second", "mfu", "update_seconds", "refresh_seconds", "peak_memory_bytes"})
"""Keys whose values are times, rates and memory: the only ones that differ between two runs of one configuration."""


class MetricsWriter:
    """Appends records to metrics.jsonl."""

    def __init__(self, path: Path) -> None:
        """
        Raises:
            RunError: the file cannot be opened for writing.
        """
        self.path = path
        try:
            self._file = path.open("a", encoding="utf-8")
        except OSError as error:
            raise cannot_write(path, error) from None

    def write(self, records: Iterable[Record]) -> None:
        """Append the records and flush them.

        Raises:
            RunError: the disk is full.
        """
        try:
            self._file.writelines(json.dumps(record) + "\n" for record in records)
            self._file.flush()
        except OSError as error:
            raise cannot_write(self.path, error) from None

    def sync(self) -> None:
        """Let what was written survive a power cut; before a checkpoint that continues from it is complete.

        Raises:
            RunError: the disk is full or gone.
        """
        try:
            os.fsync(self._file.fileno())
            sync_folder(self.path.parent)
        except OSError as error:
            raise cannot_write(self.path, error) from None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._file.close()
        except OSError as close_error:  # a full disk: the buffer cannot be flushed
            if kind is None:
                raise cannot_write(self.path, close_error) from None


def read_metrics(path: Path) -> Iterator[Record]:
    """The records of a metrics file; a line that a crash cut short ends the file."""
    if not path.exists():
        return
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                record = json.loads(line)
            except json.JSONDecodeError:
                return
            if not line.endswith("\n"):
                return
            yield record


def complete_until(path: Path, is_validated: Callable[[int], bool]) -> int:
    """The last iteration up to which a metrics file lacks no record.

    Args:
        path: the file.
        is_validated: whether a validation follows an iteration.
    """
    trained: set[int] = set()
    validated: set[int] = set()
    for record in read_metrics(path):
        (validated if "val_loss" in record else trained).add(record["iteration"])
    following = 1
    while following in trained and (following in validated or not is_validated(following)):
        following += 1
    return following - 1


def truncate_metrics(path: Path, iteration: int) -> None:
    """Drop what was written after `iteration`, so that a resumed run writes it again, once."""
    kept = [json.dumps(record) + "\n" for record in read_metrics(path) if record["iteration"] <= iteration]
    write_text(path, "".join(kept))


def exact(value: float) -> float:
    """A float32 as the shortest decimal that reads back to it."""
    return float(f"{value:.9g}")
