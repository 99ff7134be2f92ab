"""Documents into token files: in parallel, in bounded memory, atomic, and resumable.

    DIRECTORY/<source>-<tokenizer>-<hash>/train.bin, train.json, validation.bin, validation.json

The folder appears under its name when it is complete. Until then a hidden one holds what has been
written, and a note of how far it is good; an interrupted preparation goes on from there, to the
same bytes."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import time
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from filelock import FileLock, Timeout
from pydantic import BaseModel

from brx.config.schema import DataConfig
from brx.data.sources import (
    documents,
    installed_versions,
    is_validation,
    local_files,
    notes_on_files,
    other_packages,
)
from brx.data.token_file import DTYPE, Sidecar, TokenFile, Tokenize, Tokens, make_tokenizer, sha256
from brx.errors import RunError, UserError
from brx.files import sync, sync_folder, user_path, write_json
from brx.names import file_name, shown
from brx.progress import ProgressBar

# Part of every folder's name; to be raised when the same settings come to mean other tokens.
FORMAT = 1
SPLITS = ("train", "validation")
NOTE = "note.json"
DOCUMENTS_AHEAD, DOCUMENTS_PER_COMMIT = 256, 1024
# One thread reads the documents for all; more than this many wait for it.
MAX_DEFAULT_WORKERS = 8


@dataclass(frozen=True)
class PreparedData:
    """The token files of a run."""

    train: TokenFile
    validation: TokenFile

    @classmethod
    def load(cls, folder: Path, *, always_hash: bool = False) -> PreparedData:
        """Open a folder of token files; UserError where one is missing or damaged: see
        `TokenFile.load`."""
        return cls(
            *(TokenFile.load(folder / f"{split}.bin", always_hash=always_hash) for split in SPLITS)
        )

    @property
    def fingerprint(self) -> str:
        """A hash of both files' contents; runs with different ones are never compared silently."""
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
        fingerprint: of the data that a run was trained on before. Where the source is gone, token
            files in `config.directory` that have it are used instead.

    Raises:
        RunError: the disk or the network failed; the next call goes on from there.
        UserError: the source or a token file is not as `config` says.
    """
    folder = _folder_or_kept(config, fingerprint, quiet)
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
    data = PreparedData.load(folder, always_hash=always_hash)
    _check_tokenizer(data, config)
    if (
        not quiet
        and config.source == "packages"
        and (difference := other_packages(config, data.fingerprint))
    ):
        published = "not the corpus of the published results (constraints.txt pins its packages)"
        print(f"data.source: packages: {difference}: {published}", file=sys.stderr)
    return data


def is_prepared(folder: Path) -> bool:
    """Whether a folder holds token files, which a machine without the documents can train on."""
    return all((folder / f"{split}.bin").is_file() for split in SPLITS)


def _check_tokenizer(data: PreparedData, config: DataConfig) -> None:
    """UserError where token files that `data.source` names hold another tokenizer's tokens."""
    found = data.train.sidecar.tokenizer
    if found != config.tokenizer:
        raise UserError(
            f"data.tokenizer: {config.tokenizer}, but the token files in {config.source} hold "
            f"{found}; set data.tokenizer to {found}"
        )


def token_folder(config: DataConfig) -> Path:
    """The folder of the token files: named by the source and by a hash of all that decides their
    content.

    A source that is such a folder is used as it is."""
    if is_prepared(user_path(config.source)):
        return user_path(config.source)
    decides = {"format": FORMAT, **config.model_dump(exclude={"directory", "max_epochs"})}
    if config.source == "packages":
        decides["versions"] = installed_versions()
    elif (files := local_files(config.source)) is not None:  # a changed file is another source
        decides["files"] = [
            (str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in files
        ]
    digest = hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()
    name = file_name(Path(config.source).name) if Path(config.source).name else "data"
    return user_path(config.directory) / f"{name}-{config.tokenizer}-{digest[:8]}"


def _folder_or_kept(config: DataConfig, fingerprint: str | None, quiet: bool) -> Path:
    """`token_folder`; where the source is gone, the folder that has the fingerprint."""
    try:
        folder = token_folder(config)
    except UserError:
        kept = _kept_folder(config, fingerprint, quiet)
        if kept is None:
            raise
        return kept
    if is_prepared(folder) or config.source == "packages" or local_files(config.source) is not None:
        return folder
    # A dataset on the hub, or a folder of texts that is gone.
    return _kept_folder(config, fingerprint, quiet) or folder


def _kept_folder(config: DataConfig, fingerprint: str | None, quiet: bool) -> Path | None:
    """The folder of token files with this fingerprint, whatever they were made of; None where there
    is none."""
    if fingerprint is None:
        return None
    for folder in filter(is_prepared, token_folders(user_path(config.directory))):
        try:
            sidecars = [Sidecar.read(folder / f"{split}.bin") for split in SPLITS]
        except UserError:  # another run's, and damaged
            continue
        if _fingerprint(sidecars) == fingerprint:
            if not quiet:
                print(
                    f"brx: note: data.source: {shown(config.source)}: is gone; the run goes on "
                    f"with the token files that were made of it, {shown(str(folder))}",
                    file=sys.stderr,
                )
            return folder
    return None


def token_folders(directory: Path) -> list[Path]:
    """All folders of token files in a directory, and the hidden ones of preparations that are not
    complete."""
    return sorted(
        path.parent for name in ("train.json", NOTE) for path in directory.glob(f"*/{name}")
    )


def remove(folder: Path) -> None:
    """Remove a folder of token files, complete or not; UserError where it is none."""
    if folder.is_symlink():
        raise UserError(f"{folder}: is a link to {folder.resolve()}; name that folder instead")
    known = {NOTE, *(f"{split}.{kind}" for split in SPLITS for kind in ("bin", "json", "verified"))}
    strangers = {path.name for path in folder.glob("*") if path.suffix != ".tmp"} - known
    if strangers or folder not in token_folders(folder.parent):
        raise UserError(f"{folder}: is not a folder of token files; brx data list shows them")
    complete = folder.with_name(folder.name.removeprefix(".").removesuffix(".partial"))
    with _exclusive(complete):
        shutil.rmtree(folder)
    _lock_file(complete).unlink(missing_ok=True)


class SplitCount(BaseModel, extra="forbid", strict=True):
    num_tokens: int = 0
    num_documents: int = 0


class Written(BaseModel):
    """How far a preparation is: the content of its note."""

    documents_read: int
    splits: dict[str, SplitCount]

    @property
    def num_tokens(self) -> int:
        return sum(count.num_tokens for count in self.splits.values())


class TokenWriter:
    """Appends documents to token files that are not complete; opened again, it cuts them back to
    the last commit."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(exist_ok=True)
        self.written = _read_note(folder)
        self._files = {split: (folder / f"{split}.bin").open("ab") for split in SPLITS}
        for split, file in self._files.items():
            file.truncate(self.written.splits[split].num_tokens * DTYPE.itemsize)

    def append(self, split: str, tokens: Tokens) -> None:
        count = self.written.splits[split]
        self._files[split].write(tokens.astype(DTYPE).tobytes())
        count.num_tokens += len(tokens)
        count.num_documents += 1
        self.written.documents_read += 1

    def commit(self) -> None:
        """Make what has been written survive anything."""
        for (
            file
        ) in self._files.values():  # first: the note must never promise more than the disk holds
            file.flush()
            sync(file.fileno(), self._folder)
        write_json(self._folder / NOTE, self.written.model_dump())

    def finish(self, source: str, tokenizer: str, folder: Path) -> None:
        """Write the sidecars and give the folder its final name: from then on it is complete."""
        self.commit()
        for split, count in self.written.splits.items():
            path = self._folder / f"{split}.bin"
            Sidecar(
                source=source, tokenizer=tokenizer, sha256=sha256(path), **count.model_dump()
            ).write(path)
        (self._folder / NOTE).unlink()
        self._folder.rename(folder)
        sync_folder(folder)
        sync_folder(folder.parent)

    def close(self) -> None:
        for file in self._files.values():
            file.close()


def _read_note(folder: Path) -> Written:
    """What the note promises, and nothing where there is no good note or the files fall short of
    it."""
    try:
        written = Written.model_validate_json((folder / NOTE).read_bytes())
        for split in SPLITS:
            promised = written.splits[split].num_tokens * DTYPE.itemsize
            if (folder / f"{split}.bin").stat().st_size < promised:
                raise ValueError("less than promised")
    except (OSError, ValueError, KeyError):
        return Written(documents_read=0, splits={split: SplitCount() for split in SPLITS})
    return written


def tokenized(
    tokenize: Tokenize, texts: Iterable[str], workers: int
) -> Generator[tuple[str, Tokens], None, None]:
    """Documents with their tokens, in order; `DOCUMENTS_AHEAD` at a time, in threads: encodings
    release the GIL."""
    texts = iter(texts)
    with ThreadPoolExecutor(workers) as threads:
        while ahead := list(islice(texts, DOCUMENTS_AHEAD)):
            yield from zip(ahead, threads.map(tokenize, ahead), strict=True)


def _make(config: DataConfig, folder: Path, workers: int | None, quiet: bool) -> None:
    partial = folder.with_name(f".{folder.name}.partial")
    _check_disk(config, partial)
    if not quiet and config.source != "packages":
        for note in notes_on_files(config.source):
            print(f"brx: note: data.source: {config.source}: {note}", file=sys.stderr)
    tokenize = make_tokenizer(config.tokenizer)
    if workers is None:
        workers = min(os.cpu_count() or 1, MAX_DEFAULT_WORKERS) if config.tokenizer == "gpt2" else 1
    with closing(TokenWriter(partial)) as writer:
        written, before, start = writer.written, writer.written.num_tokens, time.monotonic()
        done = written.splits["train"].num_tokens
        with ProgressBar(
            f"preparing {config.source}", "training tokens", config.tokens, done, quiet=quiet
        ) as progress:
            if done:
                progress.say(f"going on after {done:,} training tokens")
            texts = documents(config, skip=written.documents_read)
            with closing(tokenized(tokenize, texts, max(1, workers))) as pairs:
                _write_all(config, writer, progress, pairs)
            rate = (written.num_tokens - before) / max(time.monotonic() - start, 1e-9)
            text = (
                f"{written.num_tokens:,} tokens  {written.documents_read:,} documents  "
                f"{rate:,.0f} tokens/s"
            )
            progress.say(text, label=f"prepared {config.source}")
        if (problem := _too_small(config, written)) is not None:
            shutil.rmtree(partial)
            raise UserError(problem)
        writer.finish(config.source, config.tokenizer, folder)


def _write_all(
    config: DataConfig,
    writer: TokenWriter,
    progress: ProgressBar,
    pairs: Iterable[tuple[str, Tokens]],
) -> None:
    """Append documents until they or the budget of training tokens run out."""
    written, train = writer.written, writer.written.splits["train"]
    for text, tokens in pairs:
        if train.num_tokens == config.tokens:  # perhaps before this process began
            return
        is_held_out = is_validation(text, config.validation_fraction, config.split_seed)
        left = None if is_held_out or config.tokens is None else config.tokens - train.num_tokens
        writer.append("validation" if is_held_out else "train", tokens[:left])
        if written.documents_read % DOCUMENTS_AHEAD == 0:
            progress.update(train.num_tokens, f"{written.documents_read:,} documents")
        if written.documents_read % DOCUMENTS_PER_COMMIT == 0:
            writer.commit()


def _too_small(config: DataConfig, written: Written) -> str | None:
    """What is wrong with a source that has been read to its end or to the budget; None if it will
    do."""
    train, validation = written.splits["train"], written.splits["validation"]
    if train.num_documents == 0 or validation.num_documents == 0:
        gave = f"{train.num_documents} for training and {validation.num_documents} for validation"
        settings = (
            f"data.validation_fraction {config.validation_fraction}, data.tokens {config.tokens}"
        )
        return (
            f"data.source: {config.source}: too small: {written.documents_read} documents gave "
            f"{gave} ({settings})"
        )
    if config.tokens is not None and train.num_tokens < config.tokens:
        holds = f"{train.num_tokens:,} (and {validation.num_tokens:,} for validation)"
        return (
            f"data.tokens: {config.tokens:,} training tokens were asked for, {config.source} "
            f"holds {holds}"
        )
    return None


def _check_disk(config: DataConfig, partial: Path) -> None:
    if config.tokens is None:
        return
    needed = int(config.tokens * DTYPE.itemsize / (1.0 - config.validation_fraction))
    there = shutil.disk_usage(partial.parent).free + sum(
        file.stat().st_size for file in partial.glob("*.bin")
    )
    if needed > there:
        asked = (
            f"{config.tokens:,} training tokens and their validation tokens need "
            f"{needed / 1e9:.2f} GB"
        )
        raise UserError(
            f"data.directory: {config.directory}: {asked}, {there / 1e9:.2f} GB are free"
        )


@contextmanager
def _exclusive(folder: Path) -> Iterator[None]:
    """One process at a time prepares a folder; the others wait here and then find it done."""
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
