"""metrics.jsonl: one JSON object per line, in order of iteration, flushed as it is written."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
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
    """Appends records to metrics.jsonl; RunError where the disk is full, read-only or gone."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with self._told():
            self._file = path.open("a", encoding="utf-8")

    def write(self, records: Iterable[Record]) -> None:
        """Append the records and flush them."""
        with self._told():
            self._file.writelines(json.dumps(record) + "\n" for record in records)
            self._file.flush()

    def sync(self) -> None:
        """Let what was written survive a power cut; before a checkpoint that continues from it is complete."""
        with self._told():
            os.fsync(self._file.fileno())
            sync_folder(self.path.parent)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        # On a full disk the buffer cannot be flushed: told, where nothing else is.
        with self._told() if kind is None else contextlib.suppress(OSError):
            self._file.close()

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise cannot_write(self.path, error) from None


@dataclass(frozen=True)
class MetricsFile:
    """What a metrics file holds: all lines, each with its record; None for one that a crash or something garbled."""

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
        numbers = {True: [0], False: []}
        for number, (_, record) in enumerate(self.lines, start=1):
            numbers[record is not None].append(number)
        return [number for number in numbers[False] if number < numbers[True][-1]]

    def missing(self, iteration: int, is_validated: Callable[[int], bool]) -> list[int]:
        """The iterations up to this one that lack a record (of their step, or of their validation): an entry each."""
        trained = {record["iteration"] for record in self.records if "train_loss" in record}
        validated = {record["iteration"] for record in self.records if "val_loss" in record}
        lacking = [t for t in range(1, iteration + 1) if t not in trained]
        lacking += [t for t in range(1, iteration + 1) if is_validated(t) and t not in validated]
        return sorted(lacking)


def read_metrics(path: Path) -> Iterator[Record]:
    """The records of a metrics file, without lines that are none; see `MetricsFile.read`."""
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
