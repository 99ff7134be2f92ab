"""Documents into token files: in parallel, in bounded memory, atomic, and resumable.

    DIRECTORY/<source>-<tokenizer>-<hash>/train.bin, train.json, validation.bin, validation.json

The folder appears under its name only when it is complete. Until then a hidden folder holds what has been written; an
interrupted preparation goes on from there, to the same bytes.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import re
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from brx.config.schema import VOCABULARY_SIZES, DataConfig
from brx.data.packages import PUBLISHED_FINGERPRINT, PUBLISHED_VERSIONS, installed_versions
from brx.data.parallel import tokenized
from brx.data.sources import documents, local_files
from brx.data.token_file import DTYPE, TokenFile
from brx.data.writing import SPLITS, TokenWriter, Written
from brx.errors import RunError, UserError
from brx.progress import ProgressBar

# Part of every folder's name; to be raised when the same settings come to mean other tokens.
FORMAT = 1
CHUNKS_PER_COMMIT = 16


@dataclass(frozen=True)
class PreparedData:
    """The token files of a run.

    Attributes:
        train: what it trains on.
        validation: what it validates on.
    """

    train: TokenFile
    validation: TokenFile

    @classmethod
    def load(cls, folder: Path, *, always_hash: bool = False) -> PreparedData:
        """Open a folder of token files.

        Raises:
            UserError: a file is missing or damaged; see `TokenFile.load`.
        """
        return cls(*(TokenFile.load(folder / f"{split}.bin", always_hash=always_hash) for split in SPLITS))

    @property
    def vocabulary_size(self) -> int:
        """Number of token ids of the tokenizer."""
        return VOCABULARY_SIZES[self.train.sidecar.tokenizer]

    @property
    def fingerprint(self) -> str:
        """A hash of both files' contents; runs with different ones are never compared silently."""
        return hashlib.sha256((self.train.sidecar.sha256 + self.validation.sidecar.sha256).encode()).hexdigest()


def prepare(config: DataConfig, *, workers: int | None = None, quiet: bool = False) -> PreparedData:
    """Make the token files if they are not there yet, and open them.

    Args:
        config: source, tokenizer, budget and folder.
        workers: processes that tokenize; by default one per core for GPT-2's encoding, none for bytes.
        quiet: show no progress.

    Raises:
        UserError: the source cannot be read or is too small, the disk is too small, or the files were damaged.
        RunError: the disk is full or the connection broke; another call goes on from there.
    """
    folder = token_folder(config)
    if not folder.is_dir():
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            with _exclusive(folder):
                if not folder.is_dir():  # another process may have made it while this one waited
                    _make(config, folder, workers, quiet)
        except OSError as error:
            raise RunError(
                f"{folder}: cannot be written: {error.strerror or error};"
                " once that is mended, preparing again goes on from here"
            ) from None
    data = PreparedData.load(folder)
    if not quiet and config.source == "packages" and (difference := _other_packages(config, data.fingerprint)):
        print(
            f"data.source: packages: {difference}: not the corpus of the published results (constraints.txt pins its"
            " packages)",
            file=sys.stderr,
        )
    return data


def token_folder(config: DataConfig) -> Path:
    """The folder of the token files: named by the source and by a hash of all that decides their content."""
    decides = {"format": FORMAT, **config.model_dump(exclude={"directory", "max_epochs"})}
    if config.source == "packages":
        decides["versions"] = installed_versions()
    elif (files := local_files(config.source)) is not None:  # a changed file is another source
        decides["files"] = [(str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    digest = hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()
    name = re.sub(r"[^\w.-]+", "-", Path(config.source).name).strip(".-") or "data"
    return Path(config.directory) / f"{name}-{config.tokenizer}-{digest[:8]}"


def _other_packages(config: DataConfig, fingerprint: str) -> str | None:
    """What is not as it was for the published results; None if nothing."""
    versions = installed_versions()
    if others := [
        f"{name} {versions[name]} instead of {published}"
        for name, published in PUBLISHED_VERSIONS.items()
        if versions[name] != published
    ]:
        return ", ".join(others)
    decides = {"tokenizer", "tokens", "validation_fraction", "split_seed"}
    default = DataConfig(source="packages").model_dump(include=decides)
    if config.model_dump(include=decides) == default and fingerprint != PUBLISHED_FINGERPRINT:
        return "files of the installed packages were changed"
    return None


def _make(config: DataConfig, folder: Path, workers: int | None, quiet: bool) -> None:
    partial = folder.with_name(f".{folder.name}.partial")
    _check_disk(config, partial)
    with TokenWriter(partial) as writer:
        done, before, start = writer.written.splits["train"].num_tokens, _num_tokens(writer.written), time.monotonic()
        label = f"preparing {config.source}"
        with ProgressBar(label, "training tokens", config.tokens, done, quiet=quiet) as progress:
            if done:
                progress.say(f"going on after {done:,} training tokens")
            _write_all(config, writer, progress, workers)
            num_tokens = _num_tokens(writer.written)
            rate = (num_tokens - before) / max(time.monotonic() - start, 1e-9)
            text = f"{num_tokens:,} tokens  {writer.written.documents_read:,} documents  {rate:,.0f} tokens/s"
            progress.say(text, label=f"prepared {config.source}")
        problem = _too_small(config, writer.written)
        if problem is not None:
            shutil.rmtree(partial)
            raise UserError(problem)
        writer.finish(config.source, config.tokenizer, folder)


def _write_all(config: DataConfig, writer: TokenWriter, progress: ProgressBar, workers: int | None) -> None:
    """Append tokenized documents until they or the budget of training tokens run out."""
    train = writer.written.splits["train"]
    texts = documents(config, skip=writer.written.documents_read)
    with closing(tokenized(config, texts, workers)) as chunks:  # closing it ends the worker processes
        for number, chunk in enumerate(chunks, start=1):
            for document in chunk:
                tokens = document.tokens
                if document.split == "train" and config.tokens is not None:
                    tokens = tokens[: (config.tokens - train.num_tokens) * DTYPE.itemsize]
                writer.append(document.split, tokens)
                if train.num_tokens == config.tokens:
                    return
            progress.update(train.num_tokens, f"{writer.written.documents_read:,} documents")
            if number % CHUNKS_PER_COMMIT == 0:
                writer.commit()


def _num_tokens(written: Written) -> int:
    return sum(count.num_tokens for count in written.splits.values())


def _too_small(config: DataConfig, written: Written) -> str | None:
    """What is wrong with a source that has been read to its end or to the budget; None if it will do."""
    train, validation = written.splits["train"], written.splits["validation"]
    if written.documents_read == 0:
        return f"data.source: {config.source}: holds no text"
    if train.num_documents == 0 or validation.num_documents == 0:
        return (
            f"data.source: {config.source}: too small: {written.documents_read} documents gave {train.num_documents}"
            f" for training and {validation.num_documents} for validation"
            f" (data.validation_fraction {config.validation_fraction}, data.tokens {config.tokens})"
        )
    if config.tokens is not None and train.num_tokens < config.tokens:
        return (
            f"data.tokens: {config.tokens:,} training tokens were asked for, {config.source} holds"
            f" {train.num_tokens:,} (and {validation.num_tokens:,} for validation)"
        )
    return None


def _check_disk(config: DataConfig, partial: Path) -> None:
    if config.tokens is None:
        return
    needed = int(config.tokens * DTYPE.itemsize / (1.0 - config.validation_fraction))
    there = shutil.disk_usage(partial.parent).free + sum(file.stat().st_size for file in partial.glob("*.bin"))
    if needed > there:
        raise UserError(
            f"data.directory: {config.directory}: {config.tokens:,} training tokens and their validation tokens need"
            f" {needed / 1e9:.2f} GB, {there / 1e9:.2f} GB are free"
        )


@contextmanager
def _exclusive(folder: Path) -> Iterator[None]:
    """One process at a time prepares a folder; the others wait here and then find it done."""
    with folder.with_name(f".{folder.name}.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"waiting for another process that prepares {folder}", file=sys.stderr)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
