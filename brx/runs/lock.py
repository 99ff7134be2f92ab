"""The lock of a run's folder, which the process that trains in it holds.

The lock on `.lock` is the operating system's (flock): it ends with the last process that holds it,
so nothing has to be cleaned up after a crash. A sweep that starts a run, and a launcher that starts
ranks, hand the lock down: the child goes on holding it when its parent is killed. (filelock's own
objects would unlock it for the child, too.)
"""

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
from brx.files import write_errors_in_one_line

LOCK = ".lock"
# The environment variable with the descriptor of a lock that the parent process has handed down.
HANDED_DOWN = "BRX_RUN_LOCK"
# How long a run tries to take the lock. A process that only checks whether the folder is locked
# holds the lock for an instant.
PATIENCE_S = 0.5
POLL_S = 0.02
# Errors of file systems that have no locks.
_NO_LOCKS = {errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOLCK}


@contextlib.contextmanager
def hold(folder: Path) -> Iterator[int]:
    """A context that holds the lock of a run's folder while a run trains in it. It yields the
    lock's descriptor.

    The folder is made if there is none. If it holds only the lock at the end, it is removed again.

    Raises:
        UserError: another process holds the lock.
    """
    handed_down = _handed_down(folder)
    if handed_down is not None:
        _sign(handed_down)
        yield handed_down
        return
    with lock(folder, patience_s=PATIENCE_S) as descriptor:
        if descriptor is None:
            note = (folder / LOCK).read_text(encoding="utf-8", errors="replace")  # see `_sign`
            holder = note or "another process"
            raise UserError(
                f"{folder}: {holder} trains in this folder; wait until it has ended, or choose "
                f"another folder"
            )
        try:
            yield descriptor
        finally:
            with contextlib.suppress(OSError):
                if [path.name for path in folder.iterdir()] == [LOCK]:
                    (folder / LOCK).unlink()
                    folder.rmdir()


@contextlib.contextmanager
def lock(folder: Path, *, patience_s: float = 0.0, name: str = LOCK) -> Iterator[int | None]:
    """A context that takes the lock of a run's folder, which is made if there is none.

    Args:
        folder: the run's folder.
        patience_s: how long to try, in seconds.
        name: the name of the lock's file. With another name, something else than the run is locked.

    Yields:
        The lock's descriptor; None if another process has the lock.
    """
    deadline = time.monotonic() + patience_s
    while (descriptor := _take(folder / name)) is None and time.monotonic() < deadline:
        time.sleep(POLL_S)
    try:
        yield descriptor
    finally:
        if descriptor is not None:
            os.close(descriptor)


def is_locked(folder: Path) -> bool:
    """Whether a process trains in the folder, or a sweep is about to start one."""
    try:
        descriptor = os.open(folder / LOCK, os.O_RDWR)
    except OSError:
        return False
    try:
        return not _try(descriptor, folder)
    finally:
        os.close(descriptor)


def hand_down(descriptor: int) -> dict[str, str]:
    """Environment variables that tell a child process, which inherits `descriptor`, that it holds
    the lock."""
    return {HANDED_DOWN: str(descriptor)}


def _handed_down(folder: Path) -> int | None:
    """The descriptor of this folder's lock, if the parent process has handed it down."""
    text = os.environ.get(HANDED_DOWN, "")
    with contextlib.suppress(OSError):
        if text.isdecimal() and os.path.samestat(os.fstat(int(text)), (folder / LOCK).stat()):
            return int(text)
    return None


def _take(file: Path) -> int | None:
    """Try once to take the lock: its descriptor, or None if another process has it."""
    with write_errors_in_one_line(file):
        file.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o644)
    # `hold` of another process may have removed the file before we locked it.
    if _try(descriptor, file.parent) and os.fstat(descriptor).st_nlink > 0:
        _sign(descriptor)
        return descriptor
    os.close(descriptor)
    return None


def _try(descriptor: int, folder: Path) -> bool:
    """Try once to lock the file. Returns whether that succeeded; True, with a note on stderr, on a
    file system without locks."""
    try:
        return lock_descriptor(descriptor, blocking=False)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        _tell_no_locks(folder.parent)
        return True


@functools.cache
def _tell_no_locks(folder: Path) -> None:
    note = (
        f"brx: note: {folder}: this file system has no locks; let no two processes train in one "
        f"folder"
    )
    print(note, file=sys.stderr, flush=True)


def _sign(descriptor: int) -> None:
    """Write into the lock's file who holds it, for messages."""
    with contextlib.suppress(OSError):  # a full disk
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
