"""Turns documents into token files: in parallel, in bounded memory, atomically, and resumably.

    DIRECTORY/<source>-<tokenizer>-<hash>/train.bin, train.json, validation.bin, validation.json

The folder appears under its name when it is complete. Until then a hidden folder holds what has
been written, with a note on how much of it is safe. An interrupted preparation continues from
there, and ends with the same bytes."""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
import time
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock, Timeout
from numpy.typing import NDArray
from pydantic import BaseModel

from brx.config.schema import DataConfig
from brx.data.sources import (
    TEXT_PIECE,
    documents,
    installed_versions,
    is_validation,
    local_files,
    notes_on_files,
    other_packages,
)
from brx.data.token_file import (
    Sidecar,
    TokenFile,
    Tokenize,
    Tokens,
    dtype_of,
    make_tokenizer,
    sha256,
)
from brx.environment import num_cores
from brx.errors import RunError, UserError, counted
from brx.files import sync, sync_folder, user_path, write_json
from brx.names import file_name, shown
from brx.progress import ProgressBar

# This number enters the hash in a folder's name. Raise it when the same settings come to mean other
# tokens.
FORMAT = 1
SPLITS = ("train", "validation")
NOTE = "note.json"
DOCUMENTS_AHEAD = 256  # documents in memory at a time
DOCUMENTS_PER_COMMIT = 1024
HOW_TO_BRING_TOKENS = "docs/how-to.md (Tokens that you have already)"
# One thread reads the documents for all; more threads than this would wait for it.
MAX_DEFAULT_WORKERS = 8


@dataclass(frozen=True)
class PreparedData:
    """The token files of a run."""

    train: TokenFile
    validation: TokenFile

    @classmethod
    def load(
        cls, folder: Path, *, always_hash: bool = False, can_be_made_again: bool = False
    ) -> PreparedData:
        """Open a folder of token files.

        Args:
            always_hash: as in `TokenFile.load`.
            can_be_made_again: the folder was made of a source that brx knows. Otherwise it may be
                the only copy of somebody's tokens, and no message must ask for its removal.

        Raises:
            UserError: a file is missing or damaged.
        """
        try:
            return cls(
                train=TokenFile.load(folder / "train.bin", always_hash=always_hash),
                validation=TokenFile.load(folder / "validation.bin", always_hash=always_hash),
            )
        except UserError as error:
            remedy = f"{HOW_TO_BRING_TOKENS} says what such a folder holds"
            if can_be_made_again:
                remedy = f"remove {folder} to prepare it again"
            raise UserError(f"{error}; {remedy}") from None

    @property
    def fingerprint(self) -> str:
        """A hash of the contents of both files. Runs whose fingerprints differ are never compared
        silently."""
        return _fingerprint([self.train.sidecar, self.validation.sidecar])


def _fingerprint(sidecars: Iterable[Sidecar]) -> str:
    both = "".join(sidecar.sha256 for sidecar in sidecars)
    return hashlib.sha256(both.encode()).hexdigest()


def prepare(
    config: DataConfig,
    *,
    workers: int | None = None,
    quiet: bool = False,
    always_hash: bool = False,
    fingerprint: str | None = None,
) -> PreparedData:
    """Make the token files if they are not there yet, and open them.

    Args:
        workers: threads that tokenize. By default one for bytes, and for GPT-2's encoding one per
            core, up to 8.
        quiet: show no progress, and print no notes.
        always_hash: read files that are there already as a whole, and compare their SHA-256 with
            their sidecars, even where size, times and inode say that nothing has changed.
        fingerprint: the fingerprint of the data on which a run was trained before. Where the source
            is gone, token files in `config.directory` with this fingerprint are used instead.

    Raises:
        RunError: the disk or the network failed; the next call continues from there.
        UserError: the source or a token file is not as `config` says.
    """
    folder = _folder_or_kept(config, fingerprint, quiet)
    is_the_source = folder == user_path(config.source)
    if not folder.is_dir():
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            with _exclusive(folder):
                if not folder.is_dir():  # another process may have made it while this one waited
                    _make(config, folder, workers, quiet)
        except OSError as error:
            remedy = "once that is mended, preparing again goes on from here"
            raise RunError(
                f"{folder}: cannot be written: {error.strerror or error}; {remedy}"
            ) from None
    data = PreparedData.load(folder, always_hash=always_hash, can_be_made_again=not is_the_source)
    _check_tokenizer(data, config)
    if config.source == "packages" and not quiet:
        _note_other_packages(config, data.fingerprint)
    return data


def _note_other_packages(config: DataConfig, fingerprint: str) -> None:
    """Say on stderr if the corpus is not the one of the published results."""
    try:
        difference = other_packages(config, fingerprint)
    except UserError:  # a package is gone: `_kept_folder` has told of the token files in its place
        return
    if difference:
        published = "not the corpus of the published results (constraints.txt pins its packages)"
        print(f"data.source: packages: {difference}: {published}", file=sys.stderr)


def is_prepared(folder: Path) -> bool:
    """Whether a folder holds complete token files. Training on them needs no documents."""
    return all((folder / f"{split}.bin").is_file() for split in SPLITS)


def _check_tokenizer(data: PreparedData, config: DataConfig) -> None:
    """UserError if the token files were made with another tokenizer. That can happen if
    `data.source` names a folder of token files."""
    for split, file in (("train", data.train), ("validation", data.validation)):
        actual = file.sidecar.tokenizer
        vocabulary = file.sidecar.vocabulary
        if actual != config.tokenizer:
            also = f" and data.vocabulary to {vocabulary}" if actual == "own" else ""
            raise UserError(
                f"data.tokenizer: {config.tokenizer}, but {split}.bin in {config.source} holds "
                f"{actual}; set data.tokenizer to {actual}{also}"
            )
        if vocabulary != config.vocabulary:
            raise UserError(
                f"data.vocabulary: {config.vocabulary}, but {split}.bin in {config.source} has "
                f"{vocabulary} different ids; set data.vocabulary to {vocabulary}"
            )


def token_folder(config: DataConfig) -> Path:
    """The folder of the token files. Its name contains a hash of everything that decides their
    content.

    If the source is itself a folder of token files, it is that folder.

    Raises:
        UserError: there is no such source.
    """
    source = user_path(config.source)
    if is_prepared(source):
        return source
    if config.tokenizer == "own":
        raise UserError(
            f"data.source: {config.source}: must be a folder of token files with data.tokenizer "
            f"own; {HOW_TO_BRING_TOKENS} says how to make it"
        )
    not_deciding = {"directory", "max_epochs", "vocabulary"}
    deciding = {"format": FORMAT, **config.model_dump(exclude=not_deciding)}
    if config.source == "packages":
        deciding["versions"] = installed_versions()
    elif (files := local_files(config.source)) is not None:
        deciding["files"] = [_identity(file) for file in files]
    digest = hashlib.sha256(json.dumps(deciding, sort_keys=True).encode()).hexdigest()
    last_part = Path(config.source).name  # empty for "/" and "."
    name = file_name(last_part) if last_part else "data"
    return user_path(config.directory) / f"{name}-{config.tokenizer}-{digest[:8]}"


def _identity(file: Path) -> tuple[str, int, int]:
    """A file's path, its size in bytes, and the time of its last change in ns. A changed file is
    another source."""
    stat = file.stat()
    return str(file.resolve()), stat.st_size, stat.st_mtime_ns


def _folder_or_kept(config: DataConfig, fingerprint: str | None, quiet: bool) -> Path:
    """`token_folder`; or if the source has changed or is gone since token files with this
    fingerprint were made of it, the folder of these."""
    try:
        folder = token_folder(config)
    except UserError:
        kept = _kept_folder(config, fingerprint)
        if kept is None:
            raise
        is_gone = True
    else:
        if fingerprint is None or _fingerprint_in(folder) == fingerprint:
            return folder
        kept = _kept_folder(config, fingerprint)
        if kept is None:
            return folder
        # A source that is not on the disk is a dataset on the hub, or a folder of texts that is
        # gone and whose name looks like a dataset's.
        is_on_disk = config.source == "packages" or is_prepared(user_path(config.source))
        is_gone = not is_on_disk and local_files(config.source) is None
    if not quiet:
        print(
            f"brx: note: data.source: {shown(config.source)}: "
            f"{'is gone' if is_gone else 'has changed'}; the run goes on with the token files "
            f"that it was trained on, {shown(str(kept))}",
            file=sys.stderr,
        )
    return kept


def _kept_folder(config: DataConfig, fingerprint: str | None) -> Path | None:
    """The folder in `config.directory` whose token files have this fingerprint. If several have it,
    one that was made of a source of this name comes first. None if there is none."""
    if fingerprint is None:
        return None
    folders = token_folders(user_path(config.directory))
    kept = [folder for folder in folders if _fingerprint_in(folder) == fingerprint]
    for folder in kept:
        if Sidecar.read(folder / "train.bin").source == config.source:
            return folder
    return kept[0] if kept else None


def _fingerprint_in(folder: Path) -> str | None:
    """The fingerprint of a folder's token files by their sidecars; None if it holds no complete
    token files."""
    if not is_prepared(folder):
        return None
    try:
        return _fingerprint(Sidecar.read(folder / f"{split}.bin") for split in SPLITS)
    except UserError:  # damaged
        return None


def token_folders(directory: Path) -> list[Path]:
    """All folders of token files in a directory, sorted, including the hidden ones of incomplete
    preparations."""
    complete = directory.glob("*/train.json")
    partial = directory.glob(f"*/{NOTE}")
    return sorted(path.parent for path in (*complete, *partial))


def remove(folder: Path) -> None:
    """Remove a folder of token files, complete or not.

    Raises:
        UserError: it is no such folder, holds other files too, or is a link.
    """
    if folder.is_symlink():
        raise UserError(f"{folder}: is a link to {folder.resolve()}; name that folder instead")
    known = {NOTE}
    for split in SPLITS:
        known |= {f"{split}.bin", f"{split}.json", f"{split}.verified"}
    strangers = {path.name for path in folder.glob("*") if path.suffix != ".tmp"} - known
    if strangers or folder not in token_folders(folder.parent):
        raise UserError(f"{folder}: is not a folder of token files; brx data list shows them")
    complete = folder.with_name(folder.name.removeprefix(".").removesuffix(".partial"))
    with _exclusive(complete):
        shutil.rmtree(folder)
    _lock_file(complete).unlink(missing_ok=True)


class SplitCount(BaseModel, extra="forbid", strict=True):
    """What has been written of one split."""

    num_tokens: int = 0
    num_documents: int = 0


class Written(BaseModel):
    """How much of a preparation has been written: the content of its note."""

    documents_read: int
    splits: dict[str, SplitCount]

    @property
    def num_tokens(self) -> int:
        """Tokens of both splits."""
        return sum(count.num_tokens for count in self.splits.values())


class TokenWriter:
    """Appends documents to token files that are not yet complete.

    A writer that is opened on the folder of an interrupted one cuts the files back to the last
    commit. Its `written` says where to continue. `close` it in any case.

    Args:
        folder: the unfinished one.
        vocabulary: the number of different ids, for the tokenizer `own`.
    """

    def __init__(self, folder: Path, vocabulary: int | None = None) -> None:
        self._folder = folder
        self._vocabulary = vocabulary
        self._dtype = dtype_of(vocabulary)
        folder.mkdir(exist_ok=True)
        self.written = _read_note(folder, self._dtype.itemsize)
        self._files = {split: (folder / f"{split}.bin").open("ab") for split in SPLITS}
        for split, file in self._files.items():
            file.truncate(self.written.splits[split].num_tokens * self._dtype.itemsize)

    def append(self, split: str, tokens: NDArray[np.integer[Any]] | Sequence[int]) -> None:
        """Append a document's tokens (n,), an array or a list of whole numbers, to `split`, "train"
        or "validation".

        Raises:
            UserError: these are no such numbers, or one of them is not in the vocabulary.
        """
        ids = np.asarray(tokens)
        self._check_ids(ids)
        count = self.written.splits[split]
        self._files[split].write(ids.astype(self._dtype).tobytes())
        count.num_tokens += len(ids)
        count.num_documents += 1
        self.written.documents_read += 1

    def _check_ids(self, ids: NDArray[Any]) -> None:
        """UserError for ids that the file's type would turn into others."""
        if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
            raise UserError(
                f"{self._folder}: tokens must be a list of whole numbers, got an array of shape "
                f"{ids.shape} and type {ids.dtype}"
            )
        if ids.dtype == self._dtype and self._vocabulary is None:
            return  # from brx's own tokenizers
        least, most = int(ids.min(initial=0)), int(ids.max(initial=0))
        size = self._vocabulary or 2**16
        if least < 0 or most >= size:
            wrong = least if least < 0 else most
            raise UserError(
                f"{self._folder}: the token {wrong:,} is not among the {size:,} ids of the "
                f"vocabulary; TokenWriter's argument `vocabulary` is the number of different ids"
            )

    def commit(self) -> None:
        """Write everything to the disk, and note how much it is."""
        # The files come first: the note must never promise more than the disk holds.
        for file in self._files.values():
            file.flush()
            sync(file.fileno(), self._folder)
        write_json(self._folder / NOTE, self.written.model_dump())

    def finish(self, source: str, tokenizer: str, folder: Path) -> None:
        """Write the sidecars, and give the folder its final name, which marks it as complete."""
        self.commit()
        for split, count in self.written.splits.items():
            path = self._folder / f"{split}.bin"
            sidecar = Sidecar(
                source=source,
                tokenizer=tokenizer,
                vocabulary=self._vocabulary,
                sha256=sha256(path),
                **count.model_dump(),
            )
            sidecar.write(path)
        (self._folder / NOTE).unlink()
        self._folder.rename(folder)
        sync_folder(folder)
        sync_folder(folder.parent)

    def close(self) -> None:
        """Close both files, even if one cannot write the rest of its buffer.

        A file left open would write its rest whenever it is collected as garbage, perhaps into the
        files of a later preparation. A folder without a commit is removed: a later preparation
        could not go on from there, and `token_folders` does not find it.

        Raises:
            OSError: the rest of a buffer could not be written.
        """
        with ExitStack() as stack:
            if not (self._folder / NOTE).exists():
                stack.callback(shutil.rmtree, self._folder, ignore_errors=True)
            for file in self._files.values():
                stack.callback(file.close)


def _read_note(folder: Path, bytes_per_token: int) -> Written:
    """What has been written to a partial folder, by its note. If the note is missing or damaged, or
    the files hold less than it says, nothing counts as written."""
    try:
        written = Written.model_validate_json((folder / NOTE).read_bytes())
        for split in SPLITS:
            promised = written.splits[split].num_tokens * bytes_per_token
            if (folder / f"{split}.bin").stat().st_size < promised:
                raise ValueError("less than promised")
    except (OSError, ValueError, KeyError):
        return Written(documents_read=0, splits={split: SplitCount() for split in SPLITS})
    return written


def tokenized(
    tokenize: Tokenize, texts: Iterable[str], workers: int
) -> Generator[tuple[str, Tokens], None, None]:
    """Documents with their tokens, in order.

    `DOCUMENTS_AHEAD` of them are tokenized at a time, in `workers` threads. Threads help, because
    the encodings release the GIL."""
    texts = iter(texts)
    with ThreadPoolExecutor(workers) as threads:
        while ahead := list(islice(texts, DOCUMENTS_AHEAD)):
            yield from zip(ahead, threads.map(tokenize, ahead), strict=True)


def _make(config: DataConfig, folder: Path, workers: int | None, quiet: bool) -> None:
    """Make the token files of a folder that does not exist yet, or continue an interrupted
    preparation."""
    partial = folder.with_name(f".{folder.name}.partial")
    _check_disk(config, partial)
    if config.source != "packages" and not quiet:
        for note in notes_on_files(config.source):
            print(f"brx: note: data.source: {config.source}: {note}", file=sys.stderr)
    tokenize = make_tokenizer(config.tokenizer)
    if workers is None:
        workers = _default_workers(config.tokenizer)
    with closing(TokenWriter(partial)) as writer:
        _write_documents(config, writer, tokenize, max(1, workers), quiet)
        problem = _too_small(config, writer.written)
        if problem is not None:
            shutil.rmtree(partial)
            raise UserError(problem)
        writer.finish(config.source, config.tokenizer, folder)


def _default_workers(tokenizer: str) -> int:
    """The number of threads that tokenize. Bytes need no work that threads could share."""
    if tokenizer == "gpt2":
        return min(num_cores(), MAX_DEFAULT_WORKERS)
    return 1


def _write_documents(
    config: DataConfig, writer: TokenWriter, tokenize: Tokenize, workers: int, quiet: bool
) -> None:
    """Tokenize and write the documents that the writer does not have yet, with a progress bar."""
    written = writer.written
    tokens_before = written.num_tokens
    train_tokens_before = written.splits["train"].num_tokens
    start = time.monotonic()
    with ProgressBar(
        f"preparing {config.source}",
        "training tokens",
        config.tokens,
        train_tokens_before,
        quiet=quiet,
    ) as progress:
        if train_tokens_before:
            progress.say(f"going on after {train_tokens_before:,} training tokens")
        texts = documents(config, skip=written.documents_read)
        with closing(tokenized(tokenize, texts, workers)) as pairs:
            _write_all(config, writer, progress, pairs)
        seconds = max(time.monotonic() - start, 1e-9)
        rate = (written.num_tokens - tokens_before) / seconds
        num_documents = counted(written.documents_read, "document", ",")
        text = f"{written.num_tokens:,} tokens  {num_documents}  {rate:,.0f} tokens/s"
        progress.say(text, label=f"prepared {config.source}")


def _write_all(
    config: DataConfig,
    writer: TokenWriter,
    progress: ProgressBar,
    pairs: Iterable[tuple[str, Tokens]],
) -> None:
    """Append documents to the splits, until there are no more or the budget of training tokens is
    met. The last training document is cut to meet it exactly."""
    written = writer.written
    train = written.splits["train"]
    for text, tokens in pairs:
        if train.num_tokens == config.tokens:  # an interrupted preparation may have met it already
            return
        if is_validation(text, config.validation_fraction, config.split_seed):
            writer.append("validation", tokens)
        elif config.tokens is None:
            writer.append("train", tokens)
        else:
            tokens_left = config.tokens - train.num_tokens
            writer.append("train", tokens[:tokens_left])
        if written.documents_read % DOCUMENTS_AHEAD == 0:
            progress.update(train.num_tokens, f"{written.documents_read:,} documents")
        if written.documents_read % DOCUMENTS_PER_COMMIT == 0:
            writer.commit()


def _too_small(config: DataConfig, written: Written) -> str | None:
    """The problem, in words, of a source that gave too little text, once it has been read to its
    end or to the budget; None if it gave enough."""
    train = written.splits["train"]
    validation = written.splits["validation"]
    if train.num_documents == 0 or validation.num_documents == 0:
        gave = f"{train.num_documents} for training and {validation.num_documents} for validation"
        settings = (
            f"data.validation_fraction {config.validation_fraction}, data.tokens {config.tokens}"
        )
        remedy = "another data.split_seed draws other documents"
        files = None if config.source == "packages" else local_files(config.source)
        if files is not None and any(file.suffix == ".txt" for file in files):
            remedy = (
                f"a .txt file counts as documents of about {TEXT_PIECE:,} characters, and {remedy}"
            )
        return (
            f"data.source: {config.source}: too small: "
            f"{counted(written.documents_read, 'document')} gave {gave} ({settings}); {remedy}"
        )
    if config.tokens is not None and train.num_tokens < config.tokens:
        holds = f"{train.num_tokens:,} (and {validation.num_tokens:,} for validation)"
        return (
            f"data.tokens: {config.tokens:,} training tokens were asked for, {config.source} "
            f"holds {holds}"
        )
    return None


def _check_disk(config: DataConfig, partial: Path) -> None:
    """UserError if the disk has too little room for token files whose size is known."""
    if config.tokens is None:
        return
    bytes_per_token = dtype_of(config.vocabulary).itemsize
    needed = int(config.tokens * bytes_per_token / (1.0 - config.validation_fraction))
    already_written = sum(file.stat().st_size for file in partial.glob("*.bin"))
    available = shutil.disk_usage(partial.parent).free + already_written
    if needed > available:
        asked = (
            f"{config.tokens:,} training tokens and their validation tokens need "
            f"{needed / 1e9:.2f} GB"
        )
        raise UserError(
            f"data.directory: {config.directory}: {asked}, {available / 1e9:.2f} GB are free"
        )


@contextmanager
def _exclusive(folder: Path) -> Iterator[None]:
    """A context that one process at a time may enter, to prepare a folder. The others wait, and
    then find the folder done."""
    lock = FileLock(_lock_file(folder))
    try:
        held = lock.acquire(blocking=False)
    except Timeout:
        print(f"waiting for another process that prepares {folder}", file=sys.stderr)
        held = lock.acquire()
    with held:
        yield


def _lock_file(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.lock")
