"""Write files so that a crash leaves the old content or the new content, never half of either."""

import contextlib
import errno
import functools
import json
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from brx.errors import RunError, UserError
from brx.names import file_name

_NO_SYNC = {errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP}
"""Errors of file systems that cannot sync folders (FUSE, SMB, some of WSL)."""


def user_path(text: str | os.PathLike[str]) -> Path:
    """A path as a user writes it, in settings or on the command line: `~` is the home folder.

    Raises:
        UserError: `~NAME` names a user that does not exist.
    """
    try:
        return Path(text).expanduser()
    except RuntimeError:
        raise UserError(f"{text}: unknown user; write the whole path") from None


def temporary_for(path: Path) -> Path:
    """A hidden name next to `path`, for a file or folder that will be renamed to `path`.

    The name holds the process id, so that processes do not collide. It is short enough for the file
    system even if the name of `path` has the largest length.
    """
    return path.with_name(f".{file_name(path.name)}.{os.getpid()}.tmp")


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Open a binary file that replaces `path` when the block ends without an error (temporary name,
    fsync, rename).

    Raises:
        RunError: the folder cannot be written to, the disk is full, or `path` is a folder or a
            device, or has too long a name.
    """
    with write_errors_in_one_line(path):
        _check_replaceable(path)
    temporary = temporary_for(path)
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            sync(file.fileno(), path)
        temporary.replace(path)
        sync_folder(path.parent)
    except OSError as error:
        raise cannot_write(path, error) from None
    except RuntimeError as error:
        # torch.save names this C++ file in its error when a write was cut short.
        if "inline_container" not in str(error):
            raise
        raise cannot_write(path, OSError(0, "no space, or a short write")) from None
    finally:
        with contextlib.suppress(OSError):  # a read-only folder refuses this as well
            temporary.unlink(missing_ok=True)


def _check_replaceable(path: Path) -> None:
    """OSError if no ordinary file can take the place of `path`: a rename would put one in the place
    of /dev/null."""
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "not an ordinary file")


def write_text(path: Path, text: str) -> None:
    """Replace a text file's content in one step, as UTF-8.

    Raises:
        RunError: the folder cannot be written to, or the disk is full.
    """
    with replacing(path) as file:
        file.write(text.encode("utf-8"))


def write_json(path: Path, content: Any) -> None:
    """Replace a JSON file's content in one step, as `write_text` does."""
    write_text(path, json.dumps(content, indent=2) + "\n")


def replace_folder(new: Path, path: Path) -> None:
    """Rename a folder to `path`, and remove the folder that was there, if any.

    Both must be on one disk. If the rename fails, the old folder is put back.
    """
    old = new.with_name(new.name + ".old")
    if path.exists():
        path.rename(old)
    try:
        new.rename(path)
    except BaseException:
        if old.exists():
            old.rename(path)
        raise
    shutil.rmtree(old, ignore_errors=True)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make a rename inside `folder` survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        sync(descriptor, folder)
    finally:
        os.close(descriptor)


def sync(descriptor: int, path: Path) -> None:
    """Make what was written to a file or folder survive a power cut.

    If the file system cannot do that, a note on stderr says so once.

    Args:
        descriptor: the open file or folder.
        path: its path, for the note.
    """
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_SYNC:
            raise
        _tell_no_sync(path.parent)


@functools.cache
def _tell_no_sync(folder: Path) -> None:
    print(
        f"brx: note: {folder}: this file system cannot make files survive a power cut (fsync); "
        f"after one, continue from an older checkpoint",
        file=sys.stderr,
        flush=True,
    )


@contextlib.contextmanager
def write_errors_in_one_line(path: Path) -> Iterator[None]:
    """A context in which the error of a disk that is full, read-only or gone becomes a RunError of
    one line that names `path`."""
    try:
        yield
    except OSError as error:
        raise cannot_write(path, error) from None


def make_folder(folder: Path) -> None:
    """Make a folder, and those around it, unless it is there.

    Raises:
        RunError: it cannot be made.
    """
    with write_errors_in_one_line(folder):
        folder.mkdir(parents=True, exist_ok=True)


def cannot_write(path: Path, error: OSError) -> RunError:
    """The error for a full disk, a read-only folder and the like."""
    return RunError(
        f"{path}: cannot be written: {reason(error, path)}; what was there before is unchanged"
    )


def reason(error: OSError, path: Path) -> str:
    """What is wrong with a path. Where a file stands in the place of a folder, this names it, which
    the system's words ("File exists") do not."""
    if error.errno in (errno.EEXIST, errno.ENOTDIR):
        for place in (path, *path.parents):
            if place.is_file():
                return f"{place} is a file, not a folder"
    return error.strerror or str(error)
