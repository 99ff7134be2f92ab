"""A token file: little-endian uint16 ids, with a JSON sidecar that says what they are."""

from __future__ import annotations

import hashlib
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
from pydantic import BaseModel, Field, ValidationError

from brx.data.tokenizers import Tokens
from brx.errors import UserError
from brx.files import write_text

DTYPE = np.dtype("<u2")


class Sidecar(BaseModel, extra="forbid", strict=True, frozen=True):
    """What a token file holds."""

    source: str
    tokenizer: str
    num_tokens: int = Field(ge=0)
    num_documents: int = Field(ge=0)
    sha256: str
    """Of the file, in hexadecimal."""

    def write(self, path: Path) -> None:
        """Write it as JSON beside the token file at `path`."""
        write_text(path.with_suffix(".json"), self.model_dump_json(indent=2) + "\n")

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read the sidecar of the token file at `path`; UserError where there is none."""
        sidecar = path.with_suffix(".json")
        try:
            return cls.model_validate_json(sidecar.read_bytes())
        except OSError as error:
            raise UserError(f"{sidecar}: cannot be read: {error.strerror}; {_remedy(path)}") from None
        except ValidationError as error:
            first = error.errors()[0]
            problem = ": ".join([*map(str, first["loc"]), first["msg"]])
            raise UserError(f"{sidecar}: not the sidecar of a token file: {problem}; {_remedy(path)}") from None


@dataclass(frozen=True)
class TokenFile:
    """A memory-mapped token file, read-only, that was checked against its sidecar."""

    tokens: Tokens
    sidecar: Sidecar

    @property
    def num_tokens(self) -> int:
        return self.sidecar.num_tokens

    @classmethod
    def load(cls, path: Path, *, always_hash: bool = False) -> Self:
        """Map a token file into memory; UserError where it or its sidecar is missing or damaged.

        Its size is always compared with the sidecar. Its SHA-256 is compared only when size or modification time are
        not those of the last comparison (noted in a `.verified` file beside it), so that opening a large file again
        costs nothing; damage that leaves both unchanged is found with `always_hash`.
        """
        sidecar = Sidecar.read(path)
        try:
            stat = path.stat()
        except OSError as error:
            raise UserError(f"{path}: cannot be read: {error.strerror}; {_remedy(path)}") from None
        expected = sidecar.num_tokens * DTYPE.itemsize
        if stat.st_size != expected:
            raise UserError(f"{path}: holds {stat.st_size} bytes, its sidecar says {expected}; {_remedy(path)}")
        note = path.with_suffix(".verified")
        seen = f"{stat.st_size} {stat.st_mtime_ns} {sidecar.sha256}"
        if always_hash or not note.is_file() or note.read_bytes() != seen.encode():
            if sha256(path) != sidecar.sha256:
                raise UserError(f"{path}: its SHA-256 is not the sidecar's; {_remedy(path)}")
            with suppress(OSError):  # a read-only folder: the comparison is made again next time
                note.write_text(seen, encoding="utf-8")
        # A plain array over the map: numpy's memmap class costs microseconds at every indexing.
        tokens = np.asarray(np.memmap(path, DTYPE, "r")) if expected else np.empty(0, DTYPE)
        return cls(tokens, sidecar)


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _remedy(path: Path) -> str:
    return f"remove {path.parent} to prepare it again"
