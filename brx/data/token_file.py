"""A token file: little-endian uint16 ids, with a JSON sidecar that says what they are."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

import numpy as np

from brx.data.tokenizers import Tokens
from brx.errors import UserError

DTYPE = np.dtype("<u2")


@dataclass(frozen=True)
class Sidecar:
    """What a token file holds.

    Attributes:
        source: where the documents came from.
        tokenizer: how they were tokenized.
        num_tokens: how many ids the file holds.
        num_documents: from how many documents.
        sha256: of the file.
    """

    source: str
    tokenizer: str
    num_tokens: int
    num_documents: int
    sha256: str

    def write(self, path: Path) -> None:
        """Write it as JSON beside the token file at `path`."""
        with path.with_suffix(".json").open("w", encoding="utf-8") as file:
            json.dump(asdict(self), file, indent=2)
            file.flush()
            os.fsync(file.fileno())


class TokenFile:
    """A memory-mapped token file that was checked against its sidecar.

    Attributes:
        tokens: the ids, read-only, uint16.
        sidecar: what they are.
    """

    def __init__(self, tokens: Tokens, sidecar: Sidecar) -> None:
        self.tokens = tokens
        self.sidecar = sidecar

    @property
    def num_tokens(self) -> int:
        """How many ids the file holds."""
        return self.sidecar.num_tokens

    @classmethod
    def load(cls, path: Path) -> Self:
        """Map a token file into memory.

        Its SHA-256 is compared with the sidecar's whenever its size or modification time is not that of the last
        comparison, so that opening a large file again costs nothing.

        Raises:
            UserError: the file or its sidecar is missing, damaged, or not what the sidecar says.
        """
        sidecar_path = path.with_suffix(".json")
        try:
            sidecar = Sidecar(**json.loads(sidecar_path.read_text(encoding="utf-8")))
            stat = path.stat()
        except (OSError, ValueError, TypeError) as error:
            raise UserError(
                f"{sidecar_path}: not a readable token file and sidecar ({error}); {_remedy(path)}"
            ) from None
        if stat.st_size != sidecar.num_tokens * DTYPE.itemsize:
            expected = sidecar.num_tokens * DTYPE.itemsize
            raise UserError(f"{path}: holds {stat.st_size} bytes, its sidecar says {expected}; {_remedy(path)}")
        note = path.with_suffix(".verified")
        seen = f"{stat.st_size} {stat.st_mtime_ns} {sidecar.sha256}"
        if not note.is_file() or note.read_text(encoding="utf-8") != seen:
            if sha256(path) != sidecar.sha256:
                raise UserError(f"{path}: its SHA-256 is not the sidecar's; {_remedy(path)}")
            _write_note(note, seen)
        return cls(np.memmap(path, DTYPE, "r") if stat.st_size else np.empty(0, DTYPE), sidecar)


def sha256(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _write_note(note: Path, seen: str) -> None:
    try:
        note.write_text(seen, encoding="utf-8")
    except OSError:
        return  # a read-only folder: the comparison is made again next time


def _remedy(path: Path) -> str:
    return f"remove {path.parent} to prepare it again"
