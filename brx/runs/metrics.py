"""metrics.jsonl: one JSON object per line, in order of iteration, flushed as it is written."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from brx.errors import UserError
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


@dataclass(frozen=True)
class MetricsFile:
    """What a metrics file holds.

    Attributes:
        lines: all of them, each with its record; None for a line that is none, because a crash cut it short or
            something has garbled it.
    """

    lines: list[tuple[str, Record | None]]

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a metrics file; one that is not there holds nothing.

        Raises:
            UserError: it cannot be read, or its records are not in order: two processes have written it.
        """
        return cls(list(_lines(path)))

    @property
    def records(self) -> list[Record]:
        """The readable records, in the order of their lines."""
        return [record for _, record in self.lines if record is not None]

    @property
    def garbled(self) -> list[int]:
        """Numbers of the lines, from 1, that are no records but are followed by some."""
        numbers = [number for number, (_, record) in enumerate(self.lines, start=1) if record is None]
        last = max((number for number, (_, record) in enumerate(self.lines, start=1) if record is not None), default=0)
        return [number for number in numbers if number < last]

    def missing(self, iteration: int, is_validated: Callable[[int], bool]) -> list[int]:
        """The iterations up to this one that lack a record: one entry for each that lacks.

        Args:
            iteration: the last one that counts.
            is_validated: whether a validation follows an iteration.
        """
        trained = {record["iteration"] for record in self.records if "train_loss" in record}
        validated = {record["iteration"] for record in self.records if "val_loss" in record}
        lacking = [t for t in range(1, iteration + 1) if t not in trained]
        lacking += [t for t in range(1, iteration + 1) if is_validated(t) and t not in validated]
        return sorted(lacking)


def read_metrics(path: Path) -> Iterator[Record]:
    """The records of a metrics file, without lines that a crash cut short or something has garbled.

    Raises:
        UserError: see `MetricsFile.read`.
    """
    return (record for _, record in _lines(path) if record is not None)


def truncate_metrics(path: Path, iteration: int) -> None:
    """Drop what was written after `iteration`, so that a resumed run writes it again, once."""
    lines = MetricsFile.read(path).lines
    while lines and (lines[-1][1] is None or lines[-1][1]["iteration"] > iteration):
        lines.pop()
    write_text(path, "".join(line for line, _ in lines))


def _lines(path: Path) -> Iterator[tuple[str, Record | None]]:
    """Each line with its record: steps once each in order, validations likewise, after their iteration's step."""
    newest = {"train_loss": 0, "val_loss": 0}
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            for number, line in enumerate(file, start=1):
                record = _parse(line)
                if record is not None:
                    kind, iteration = "val_loss" if "val_loss" in record else "train_loss", record["iteration"]
                    if iteration <= newest[kind] or iteration < newest["train_loss"]:
                        raise UserError(
                            f"{path}: line {number}: iteration {iteration} after iteration {max(newest.values())}: two"
                            " processes have written here; train the run again in another folder"
                        )
                    newest[kind] = iteration
                yield line, record
    except FileNotFoundError:
        return
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None


def _parse(line: str) -> Record | None:
    if not line.endswith("\n"):
        return None
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or type(record.get("iteration")) is not int:
        return None
    needed = ("val_loss",) if "val_loss" in record else ("train_loss", "seconds")
    return record if all(isinstance(record.get(key), int | float) for key in needed) else None


def exact(value: float) -> float:
    """A float32 as the shortest decimal that reads back to it."""
    return float(f"{value:.9g}")
