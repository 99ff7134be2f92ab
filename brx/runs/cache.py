"""The content of a run's files, parsed once and kept next to them.

Parsing YAML and JSON takes most of the time of a command that reads many runs. The parsed content
of a run is therefore kept in its folder, in the file `CACHE`, with a key: the state of each file
that was parsed, and a digest of the code that parsed it. If anything is wrong (another key, a
damaged cache, a folder that cannot be written to), the run's own files are parsed: that costs time
and nothing else.

The cache is a line of JSON (`_Header`), the settings and the summary as JSON, and the curves as
float64. Most runs are small, and a table format (Parquet, an archive of arrays) costs more to open
than such a run costs to read.

Curves that an export has stored compactly are not kept: they are read about as fast, and float64
would take ten times their space.

Settings are kept unchecked, and nothing that is computed from the files is kept: checks and
computations are done again each time.
"""

import contextlib
import functools
import hashlib
import json
import os
import stat
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from brx import readers
from brx.config import loading, parsing
from brx.config.loading import read_settings
from brx.errors import UserError
from brx.readers import MOST_ARRAY_BYTES, read_text
from brx.runs import folder, metrics
from brx.runs.folder import CACHE, parse_summary
from brx.runs.metrics import COMPACT, Curves, is_compact, num_lacking, read_curves

FILES = ("config.yaml", "summary.json", "metrics.jsonl", COMPACT)
"""The files of a run that are parsed."""

SETTLED_S = 2.0
"""A file younger than this may still change without a change of its times and size, because the
clocks of file systems tick in steps of up to two seconds. Such a file is not cached."""

_PARSERS = (loading, parsing, readers, folder, metrics)  # and this module
_FLOAT64 = np.dtype("<f8")

FileState = tuple[int, ...]
"""Identifies the content of a file: its size, the times at which its content and its status last
changed (ns), and its inode. Empty if the file does not exist. A program can set the first of the
times, but not the second."""


@dataclass(frozen=True)
class Parsed:
    """The content of a run's files."""

    settings: dict[str, Any]  # content of config.yaml, unchecked
    summary: dict[str, Any]  # empty while the run is under way
    curves: Curves


@dataclass(frozen=True)
class _Header:
    """The first line of the file."""

    key: str
    sha256: str  # covers all that follows the line
    text_bytes: list[int]  # lengths of settings and summary
    curve_lengths: list[int] | None  # numbers in each of `Curves`; None: they are not kept


def file_states(run: Path) -> tuple[FileState, ...]:
    """The states of `FILES` in a run's folder; they differ after any of the files has changed."""
    folder = os.fspath(run)
    return tuple(_state_of(f"{folder}/{name}") for name in FILES)


def _state_of(file: str) -> FileState:
    try:
        status = os.stat(file)  # a quarter of the time of Path.stat
    except OSError:
        return ()
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino


def read_parsed(run: Path, states: tuple[FileState, ...] | None = None) -> Parsed:
    """The content of the files in a run's folder, as they are now.

    Args:
        run: the folder.
        states: the states of its files (`file_states`), if they have just been taken.

    Raises:
        UserError: a file is damaged, or there is no training loss yet.
    """
    if states is None:
        states = file_states(run)
    kept = _read(run, states)
    if kept is not None:
        return kept
    parsed = _parse(run)
    # If a file changed while it was parsed, the new content must not be kept under the old state.
    if _is_settled(states) and file_states(run) == states:
        _write(run, states, parsed)
    return parsed


def _parse(run: Path) -> Parsed:
    summary_path = run / "summary.json"
    summary: dict[str, Any] = {}
    try:
        if summary_path.is_file():
            summary = parse_summary(read_text(summary_path))
    except ValueError as error:
        raise UserError(
            f"{summary_path}: not readable: {error}; restore it, or train the run again"
        ) from None
    return Parsed(read_settings(run / "config.yaml"), summary, read_curves(run))


def _is_settled(states: tuple[FileState, ...]) -> bool:
    """Whether all files are older than `SETTLED_S`."""
    newest_ns = max(max(state[1:3]) for state in states if state)  # state[1:3]: the times
    return time.time() - newest_ns / 1e9 > SETTLED_S


def _read(run: Path, states: tuple[FileState, ...]) -> Parsed | None:
    """The content of a run's cache; None if there is no cache for these states of its files."""
    content = _content_of(run / CACHE)
    if content is None:
        return None
    line, _, body = content.partition(b"\n")
    try:
        header = _Header(**json.loads(line))
        # A cache that is not ours, or is of other states, is not parsed any further.
        if header.key != _key(states) or header.sha256 != _digest(header, body):
            return None
        settings_text, summary_text, *series = _parts(header, body)
        settings, summary = json.loads(settings_text), json.loads(summary_text)
        if header.curve_lengths is not None:
            arrays = (np.frombuffer(each, _FLOAT64).astype(np.float64) for each in series)
            return Parsed(settings, summary, Curves(*arrays))
    except (ValueError, TypeError, RecursionError):  # a damaged file
        return None
    return Parsed(settings, summary, read_curves(run))


def _parts(header: _Header, body: bytes) -> Iterator[bytes]:
    """The bytes of the settings, the summary, and each of the curves that are kept."""
    curve_bytes = [_FLOAT64.itemsize * length for length in header.curve_lengths or []]
    start = 0
    for num_bytes in [*header.text_bytes, *curve_bytes]:
        yield body[start : start + num_bytes]
        start += num_bytes


def _content_of(path: Path) -> bytes | None:
    """The bytes of a regular file; None if it is missing, a link, too large, or cannot be read."""
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with open(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            if stat.S_ISREG(status.st_mode) and status.st_size <= MOST_ARRAY_BYTES:
                return file.read()
    return None


def _write(run: Path, states: tuple[FileState, ...], parsed: Parsed) -> None:
    """Write the cache. Do nothing if JSON cannot hold the content exactly, or if the folder cannot
    be written to."""
    # A run that lacks iterations is parsed each time, so that it is named on stderr each time.
    if num_lacking(parsed.curves, parsed.summary) != 0:
        return
    settings = _as_text(parsed.settings)
    summary = _as_text(parsed.summary)
    if settings is None or summary is None:
        return
    texts = [settings.encode(), summary.encode()]
    curves: list[bytes] = []
    lengths: list[int] | None = None
    if not is_compact(run):
        curves = [values.astype(_FLOAT64).tobytes() for values in parsed.curves]
        lengths = [len(values) for values in parsed.curves]
    body = b"".join([*texts, *curves])
    header = _Header(_key(states), "", [len(text) for text in texts], lengths)
    header = replace(header, sha256=_digest(header, body))
    line = json.dumps(asdict(header)).encode()
    with contextlib.suppress(OSError):
        _replace(run / CACHE, line + b"\n" + body)


def _as_text(content: dict[str, Any]) -> str | None:
    """The content as JSON; None if the JSON would not read back as the same content (keys that are
    numbers, dates, NaN)."""
    try:
        text = json.dumps(content)
    except (TypeError, ValueError):
        return None
    return text if json.loads(text) == content else None


def _replace(path: Path, content: bytes) -> None:
    """Write a file in the place of `path`.

    There is no fsync: if a power cut damages the file, its digest no longer fits.

    Raises:
        OSError: `path` is a link, or the file cannot be written.
    """
    if path.is_symlink():
        raise OSError(f"{path}: is a link")
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("xb") as file:
            file.write(content)
        temporary.replace(path)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def _key(states: tuple[FileState, ...]) -> str:
    """A text that is equal only for the same files, parsed by the same code."""
    return f"{_parser_digest()} {states}"


@functools.cache
def _parser_digest() -> str:
    """A fingerprint of all code that decides how a file is parsed."""
    digest = hashlib.sha256()
    for file in [__file__, *(module.__file__ for module in _PARSERS)]:
        assert file is not None
        digest.update(Path(file).read_bytes())
    return digest.hexdigest()


def _digest(header: _Header, body: bytes) -> str:
    """A fingerprint of the body and of its division into parts."""
    digest = hashlib.sha256(f"{header.text_bytes} {header.curve_lengths} ".encode())
    digest.update(body)
    return digest.hexdigest()
