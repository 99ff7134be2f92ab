"""Documents to tokens in worker processes: in order, and with few documents in memory."""

from __future__ import annotations

import os
import signal
import threading
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import lru_cache
from multiprocessing import get_context, parent_process

from brx.config.schema import DataConfig
from brx.data.chance import is_validation
from brx.data.token_file import DTYPE
from brx.data.tokenizers import Tokenize, make_tokenizer
from brx.errors import RunError

CHUNK_CHARACTERS = 1_000_000
# One process reads the documents for all; more than this many wait for it.
MAX_DEFAULT_WORKERS = 8


@dataclass(frozen=True)
class Document:
    """A tokenized document.

    Attributes:
        split: `train` or `validation`.
        tokens: little-endian uint16.
    """

    split: str
    tokens: bytes


def tokenized(config: DataConfig, texts: Iterable[str], workers: int | None) -> Generator[list[Document], None, None]:
    """Tokenize documents, chunk by chunk, in their order.

    Args:
        config: tokenizer and split.
        texts: the documents.
        workers: processes; 0 works in this one. By default one per core for GPT-2's encoding, and none for bytes, which
            cost less than their way to another process.

    Raises:
        UserError: GPT-2's vocabulary is not to be had.
        RunError: a worker was killed.
    """
    make_tokenizer(config.tokenizer)  # a missing vocabulary is told here, not by a worker
    if workers is None:
        workers = min(os.cpu_count() or 1, MAX_DEFAULT_WORKERS) if config.tokenizer == "gpt2" else 0
    arguments = (config.tokenizer, config.validation_fraction, config.split_seed)
    if workers == 0:
        return (tokenize_chunk(chunk, *arguments) for chunk in _chunks(texts))
    return _in_processes(_chunks(texts), arguments, workers)


def _in_processes(
    chunks: Iterator[list[str]], arguments: tuple[str, float, int], workers: int
) -> Generator[list[Document], None, None]:
    # Spawned, not forked: the parent may have threads (torch, the progress bar).
    with ProcessPoolExecutor(workers, get_context("spawn"), _follow_parent) as pool:
        in_flight: deque[Future[list[Document]]] = deque()
        try:
            for chunk in chunks:
                in_flight.append(pool.submit(tokenize_chunk, chunk, *arguments))
                if len(in_flight) > 2 * workers:
                    yield in_flight.popleft().result()
            while in_flight:
                yield in_flight.popleft().result()
        except BrokenProcessPool:
            raise RunError(
                "a tokenizing process was killed (out of memory?);"
                " prepare again with fewer --workers: it goes on from here"
            ) from None
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _follow_parent() -> None:
    """Leave Ctrl-C to the parent, and end when it ends: killed, it could not say so."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = parent_process()
    assert parent is not None

    def end_with_parent() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()


def tokenize_chunk(texts: list[str], tokenizer: str, validation_fraction: float, split_seed: int) -> list[Document]:
    """What a worker process does."""
    tokenize = _cached_tokenizer(tokenizer)
    return [
        Document(
            "validation" if is_validation(text, validation_fraction, split_seed) else "train",
            tokenize(text).astype(DTYPE).tobytes(),
        )
        for text in texts
    ]


@lru_cache(maxsize=1)
def _cached_tokenizer(name: str) -> Tokenize:
    return make_tokenizer(name)


def _chunks(texts: Iterable[str]) -> Iterator[list[str]]:
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
