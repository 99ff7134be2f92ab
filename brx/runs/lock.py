"""A run's folder belongs to one process at a time: the one that holds the lock on its `.lock` file.

The lock is the operating system's (flock): it ends with the last process that holds it, however that process ends, so
nothing has to be cleaned up after a crash. A sweep that starts a run, and a launcher that starts ranks, hand the lock
down: the child goes on holding it when its parent is killed. (filelock's own objects would unlock it for the child,
too; its function for a descriptor leaves that to the system.)
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from filelock import lock_descriptor

from brx.errors import UserError
from brx.files import cannot_write

LOCK = ".lock"
HANDED_DOWN = "BRX_RUN_LOCK"
"""Environment variable: the descriptor of a lock that the parent process holds and this one goes on holding."""

PATIENCE_S, POLL_S = 0.5, 0.02
"""Whoever asks whether a folder is locked holds its lock for an instant: no reason to refuse a run."""

_NO_LOCKS = {errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOLCK}


@contextlib.contextmanager
def hold(folder: Path) -> Iterator[int]:
    """Hold a run's folder while it is trained in; gives the lock's descriptor.

    The folder is made if there is none. One that holds nothing but the lock at the end, because the run was refused,
    is removed again.

    Raises:
        UserError: another process holds it; says which.
        RunError: the folder cannot be written to.
    """
    handed_down = _handed_down(folder)
    if handed_down is not None:
        _sign(handed_down)
        yield handed_down
        return
    with lock(folder, patience_s=PATIENCE_S) as descriptor:
        if descriptor is None:
            holder = "another process"
            with contextlib.suppress(OSError, UnicodeDecodeError):
                holder = (folder / LOCK).read_text(encoding="utf-8") or holder
            raise UserError(
                f"{folder}: {holder} trains in this folder; wait until it has ended, or choose another --out"
            )
        try:
            yield descriptor
        finally:
            with contextlib.suppress(OSError):
                if [path.name for path in folder.iterdir()] == [LOCK]:
                    (folder / LOCK).unlink()
                    folder.rmdir()


@contextlib.contextmanager
def lock(folder: Path, *, patience_s: float = 0.0) -> Iterator[int | None]:
    """Take the lock of a run's folder, which is made if there is none, trying for some time.

    Gives its descriptor, or None when another process holds it. RunError where the folder cannot be written to.
    """
    deadline = time.monotonic() + patience_s
    while (descriptor := _take(folder)) is None and time.monotonic() < deadline:
        time.sleep(POLL_S)
    try:
        yield descriptor
    finally:
        if descriptor is not None:
            os.close(descriptor)


def is_locked(folder: Path) -> bool:
    """Whether a process trains in the folder, or a sweep is about to."""
    try:
        descriptor = os.open(folder / LOCK, os.O_RDWR)
    except OSError:
        return False
    try:
        return not _try(descriptor, folder)
    finally:
        os.close(descriptor)


def hand_down(descriptor: int) -> dict[str, str]:
    """The environment that tells a child process, which inherits `descriptor`, that it holds the lock."""
    return {HANDED_DOWN: str(descriptor)}


def _handed_down(folder: Path) -> int | None:
    """The descriptor of this folder's lock, if the parent process has handed it down."""
    text = os.environ.get(HANDED_DOWN, "")
    with contextlib.suppress(OSError):
        if text.isdecimal() and os.path.samestat(os.fstat(int(text)), (folder / LOCK).stat()):
            return int(text)
    return None


def _take(folder: Path) -> int | None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise cannot_write(folder / LOCK, error) from None
    # A file without a name is one that `hold` has removed between the two calls.
    if _try(descriptor, folder) and os.fstat(descriptor).st_nlink > 0:
        _sign(descriptor)
        return descriptor
    os.close(descriptor)
    return None


def _try(descriptor: int, folder: Path) -> bool:
    try:
        return lock_descriptor(descriptor, blocking=False)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        _tell_no_locks(folder.parent)
        return True


@functools.cache
def _tell_no_locks(folder: Path) -> None:
    note = f"brx: note: {folder}: this file system has no locks; let no two processes train in one folder"
    print(note, file=sys.stderr, flush=True)


def _sign(descriptor: int) -> None:
    """Leave a note of who holds the lock, for messages."""
    with contextlib.suppress(OSError):  # a full disk
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
