"""Documents into token files: in parallel, in bounded memory, atomic, and resumable.

    DIRECTORY/<source>-<hash>/train.bin, train.json, validation.bin, validation.json

The folder appears under its name only when it is complete. Until then a hidden folder holds what has been written,
with a note of how far it is good; an interrupted preparation goes on from there, to the same bytes.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import lru_cache
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from typing import BinaryIO

from brx.config.schema import DataConfig
from brx.data.progress import PreparationProgress
from brx.data.sources import documents, local_files
from brx.data.token_file import DTYPE, Sidecar, TokenFile, sha256
from brx.data.tokenizers import Tokenize, make_tokenizer
from brx.errors import RunError, UserError

SPLITS = ("train", "validation")
CHUNK_CHARACTERS = 1_000_000
CHUNKS_PER_NOTE = 16


@dataclass(frozen=True)
class PreparedData:
    """The token files of a run.

    Attributes:
        train: what it trains on.
        validation: what it validates on.
        fingerprint: a hash of both files' contents; runs with different ones are never compared silently.
    """

    train: TokenFile
    validation: TokenFile

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the two files' SHA-256."""
        return hashlib.sha256((self.train.sidecar.sha256 + self.validation.sidecar.sha256).encode()).hexdigest()


@dataclass
class _Split:
    """How much of one split has been written."""

    num_tokens: int = 0
    num_documents: int = 0


@dataclass
class _State:
    """How far a preparation is good."""

    documents_read: int
    splits: dict[str, _Split]


def prepare(config: DataConfig, *, workers: int | None = None) -> PreparedData:
    """Make the token files if they are not there yet, and open them.

    Args:
        config: source, tokenizer, budget and folder.
        workers: processes that tokenize; by default one a core for GPT-2's encoding, none for bytes.

    Raises:
        UserError: the source cannot be read, is too small, or the files were damaged.
        RunError: the disk is full.
    """
    folder = token_folder(config)
    if not folder.is_dir():
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            with _exclusive(folder):
                if not folder.is_dir():  # another process may have made it while this one waited
                    _make(config, folder, workers)
        except OSError as error:
            raise RunError(f"{folder}: cannot be written: {error.strerror}; preparation resumes from here") from None
    return PreparedData(*(TokenFile.load(folder / f"{split}.bin") for split in SPLITS))


def token_folder(config: DataConfig) -> Path:
    """The folder of the token files: named by the source and by a hash of all that decides their content."""
    decides = config.model_dump(exclude={"directory", "max_epochs"})
    files = local_files(config.source) if config.source != "stdlib" else None
    if files is not None:  # a changed file is another source
        decides["files"] = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    digest = hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()
    name = re.sub(r"[^\w.-]+", "-", Path(config.source).name or config.source).strip("-")
    return Path(config.directory) / f"{name}-{config.tokenizer}-{digest[:8]}"


def is_validation(document: str, fraction: float, seed: int) -> bool:
    """Whether a document is held out: decided by a seeded hash of its text, so by nothing else."""
    digest = hashlib.sha256(f"{seed}/{document}".encode("utf-8", "replace")).digest()
    return int.from_bytes(digest[:8], "little") < fraction * 2**64


def _make(config: DataConfig, folder: Path, workers: int | None) -> None:
    partial = folder.with_name(f".{folder.name}.partial")
    partial.mkdir(exist_ok=True)
    _check_disk(config, partial)
    state = _read_note(partial)
    files = {split: _open_at(partial / f"{split}.bin", state.splits[split].num_tokens) for split in SPLITS}
    try:
        with PreparationProgress(config.source, config.tokens, state.splits["train"].num_tokens) as progress:
            _write_all(config, partial, state, files, progress, workers)
    finally:
        for file in files.values():
            file.close()
    _check_size(config, state)
    for split in SPLITS:
        path, written = partial / f"{split}.bin", state.splits[split]
        Sidecar(config.source, config.tokenizer, written.num_tokens, written.num_documents, sha256(path)).write(path)
    (partial / "note.json").unlink(missing_ok=True)
    partial.rename(folder)


def _write_all(
    config: DataConfig,
    partial: Path,
    state: _State,
    files: dict[str, BinaryIO],
    progress: PreparationProgress,
    workers: int | None,
) -> None:
    """Append tokenized chunks until the documents or the budget of training tokens run out."""
    remaining = islice(documents(config), state.documents_read, None)
    for number, chunk in enumerate(_tokenized(config, remaining, workers), start=1):
        for split, tokens in chunk:
            written = state.splits[split]
            if split == "train" and config.tokens is not None:
                tokens = tokens[: (config.tokens - written.num_tokens) * DTYPE.itemsize]
            files[split].write(tokens)
            written.num_tokens += len(tokens) // DTYPE.itemsize
            written.num_documents += 1
            state.documents_read += 1
            if state.splits["train"].num_tokens == config.tokens:
                return
        progress.update(state.splits["train"].num_tokens, state.documents_read)
        if number % CHUNKS_PER_NOTE == 0:
            _write_note(partial, state, files.values())
    for file in files.values():
        file.flush()
        os.fsync(file.fileno())


Chunk = list[tuple[str, bytes]]
"""For each document: its split, and its token ids as little-endian uint16."""


def _tokenized(config: DataConfig, texts: Iterator[str], workers: int | None) -> Iterator[Chunk]:
    """Tokenize chunks of documents in worker processes, in order, with few chunks in flight."""
    if workers is None:
        workers = (os.cpu_count() or 1) if config.tokenizer == "gpt2" else 0
    arguments = (config.tokenizer, config.validation_fraction, config.split_seed)
    if workers == 0:
        for texts_of_chunk in _chunks(texts):
            yield tokenize_chunk(texts_of_chunk, *arguments)
        return
    make_tokenizer(config.tokenizer)  # a missing vocabulary is told here, not by a worker
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        in_flight: deque[Future[Chunk]] = deque()
        try:
            for texts_of_chunk in _chunks(texts):
                in_flight.append(pool.submit(tokenize_chunk, texts_of_chunk, *arguments))
                if len(in_flight) > 2 * workers:
                    yield in_flight.popleft().result()
            while in_flight:
                yield in_flight.popleft().result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def tokenize_chunk(texts: list[str], tokenizer: str, validation_fraction: float, split_seed: int) -> Chunk:
    """What a worker process does."""
    tokenize = _cached_tokenizer(tokenizer)
    return [
        (SPLITS[is_validation(text, validation_fraction, split_seed)], tokenize(text).astype(DTYPE).tobytes())
        for text in texts
    ]


@lru_cache(maxsize=1)
def _cached_tokenizer(name: str) -> Tokenize:
    return make_tokenizer(name)


def _chunks(texts: Iterator[str]) -> Iterator[list[str]]:
    chunk: list[str] = []
    size = 0
    for text in texts:
        chunk.append(text)
        size += len(text)
        if size >= CHUNK_CHARACTERS:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def _read_note(partial: Path) -> _State:
    try:
        note = json.loads((partial / "note.json").read_text(encoding="utf-8"))
        return _State(note["documents_read"], {split: _Split(**note["splits"][split]) for split in SPLITS})
    except (OSError, ValueError, KeyError, TypeError):
        return _State(0, {split: _Split() for split in SPLITS})


def _write_note(partial: Path, state: _State, files: Iterable[BinaryIO]) -> None:
    for file in files:  # the note must never promise more than the disk holds
        file.flush()
        os.fsync(file.fileno())
    temporary = partial / "note.json.tmp"
    temporary.write_text(json.dumps(asdict(state)), encoding="utf-8")
    temporary.replace(partial / "note.json")


def _open_at(path: Path, num_tokens: int) -> BinaryIO:
    file = path.open("r+b" if path.exists() else "w+b")
    file.truncate(num_tokens * DTYPE.itemsize)
    file.seek(0, os.SEEK_END)
    return file


def _check_size(config: DataConfig, state: _State) -> None:
    train, validation = state.splits["train"], state.splits["validation"]
    if train.num_documents == 0 or validation.num_documents == 0:
        raise UserError(
            f"data.source: {config.source}: too small: {state.documents_read} documents gave {train.num_documents} for"
            f" training and {validation.num_documents} for validation (data.validation_fraction"
            f" {config.validation_fraction})"
        )
    if config.tokens is not None and train.num_tokens < config.tokens:
        raise UserError(
            f"data.tokens: {config.source} holds {train.num_tokens:,} training tokens, {config.tokens:,} were asked for"
        )


def _check_disk(config: DataConfig, partial: Path) -> None:
    if config.tokens is None:
        return
    needed = int(config.tokens * DTYPE.itemsize / (1.0 - config.validation_fraction))
    there = shutil.disk_usage(partial).free + sum(file.stat().st_size for file in partial.iterdir())
    if needed > there:
        raise UserError(
            f"data.directory: {config.directory}: {config.tokens:,} tokens need {needed / 1e9:.1f} GB,"
            f" {there / 1e9:.1f} GB are free"
        )


@contextmanager
def _exclusive(folder: Path) -> Iterator[None]:
    """One process at a time prepares a folder; the others wait here and then find it done."""
    with folder.with_name(f".{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
