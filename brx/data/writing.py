"""Appending documents to two token files in such a way that an interruption costs a moment's work, not the whole.

The files grow in a folder of their own, with a note of how far they are good. A writer that opens the folder again cuts
the files back to the note and says how many documents need not be read again.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from brx.data.token_file import DTYPE, Sidecar, sha256
from brx.files import sync_folder, write_json

SPLITS = ("train", "validation")
NOTE = "note.json"


@dataclass
class SplitCount:
    """How much of one split has been written."""

    num_tokens: int = 0
    num_documents: int = 0


@dataclass
class Written:
    """How far a preparation is."""

    documents_read: int = 0
    splits: dict[str, SplitCount] = field(default_factory=lambda: {split: SplitCount() for split in SPLITS})


class TokenWriter:
    """Writes the training and validation tokens of a folder that is not complete yet.

    Attributes:
        written: how far it is.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(exist_ok=True)
        self.written = _read_note(folder)
        self._files = {split: _path(folder, split).open("ab") for split in SPLITS}
        for split, file in self._files.items():
            file.truncate(self.written.splits[split].num_tokens * DTYPE.itemsize)

    def append(self, split: str, tokens: bytes) -> None:
        """Add a document's tokens (little-endian uint16) to a split."""
        self._files[split].write(tokens)
        count = self.written.splits[split]
        count.num_tokens += len(tokens) // DTYPE.itemsize
        count.num_documents += 1
        self.written.documents_read += 1

    def commit(self) -> None:
        """Make what has been written survive anything."""
        for file in self._files.values():  # first: the note must never promise more than the disk holds
            file.flush()
            os.fsync(file.fileno())
        write_json(self._folder / NOTE, asdict(self.written))

    def finish(self, source: str, tokenizer: str, folder: Path) -> None:
        """Write the sidecars and give the folder its final name: from then on it is complete."""
        self.commit()
        for split, count in self.written.splits.items():
            path = _path(self._folder, split)
            Sidecar(
                source=source,
                tokenizer=tokenizer,
                num_tokens=count.num_tokens,
                num_documents=count.num_documents,
                sha256=sha256(path),
            ).write(path)
        (self._folder / NOTE).unlink()
        self._folder.rename(folder)
        sync_folder(folder)
        sync_folder(folder.parent)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for file in self._files.values():
            file.close()


def _path(folder: Path, split: str) -> Path:
    return folder / f"{split}.bin"


def _read_note(folder: Path) -> Written:
    """What the note promises, and nothing where there is no good note or the files fall short of it."""
    try:
        note = json.loads((folder / NOTE).read_text(encoding="utf-8"))
        written = Written(note["documents_read"], {split: SplitCount(**note["splits"][split]) for split in SPLITS})
        sizes = {split: _path(folder, split).stat().st_size for split in SPLITS}
    except (OSError, ValueError, KeyError, TypeError):
        return Written()
    enough = all(sizes[split] >= written.splits[split].num_tokens * DTYPE.itemsize for split in SPLITS)
    return written if enough else Written()
