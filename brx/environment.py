"""What a process inherits (environment variables, checked before use; output streams; signals), and
what it passes on to the processes that it starts."""

import contextlib
import gc
import io
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from typing import Any, TextIO

from brx.errors import RunError, UserError

# The longest path of a Unix socket, in bytes. macOS has the smallest `sun_path` of the systems that
# we run on: 104 bytes, including the final zero.
_LONGEST_SOCKET_PATH = 103
# multiprocessing adds /pymp-XXXXXXXX/listener-XXXXXXXX to the path of the temporary folder.
_SOCKET_NAME_LENGTH = len("/pymp-") + len("/listener-") + 2 * 8


def stop_signals() -> list[signal.Signals]:
    """The signals that ask a process to stop: from Ctrl-C, a scheduler or a lost terminal.

    SIGHUP is not among them if `nohup` made this process ignore it.
    """
    signals = [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signals.append(signal.SIGHUP)
    return signals


def fill_standard_descriptors() -> None:
    """Open the null device in place of each standard stream that was closed before this process
    started (`brx ... <&-`, or a daemon).

    The system gives a file the lowest free descriptor. A lock or metrics.jsonl as descriptor 0, 1
    or 2 would be hidden by the pipe to a child, or get what C libraries write to stderr.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            # This descriptor is the lowest free one.
            opened = os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(opened, True)  # a child has the same need


def signal_name(number: int) -> str:
    """The name of a signal, such as `SIGKILL`, or `signal 99` if Python knows no name for it."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def num_cores() -> int:
    """The CPU cores that this process may use. A scheduler, a container or `taskset` may leave it
    fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class OutputStream(io.TextIOWrapper):
    """A standard stream that drops its output when it can no longer be written: the reader of the
    pipe has ended (`| head`), the terminal is closed, or the disk is full. Long work continues.
    """

    def __init__(self, stream: TextIO) -> None:
        # Keep a reference: when the original stream is garbage-collected, it closes the descriptor.
        self._original = stream
        self._sink = _Sink(stream.fileno())
        # PYTHONUNBUFFERED or python -u: lines of long work are to be in a log at once.
        is_unbuffered = bool(getattr(stream, "write_through", False))
        super().__init__(
            io.BufferedWriter(self._sink),
            encoding=stream.encoding,
            # A name with a character that the encoding lacks must not end a command.
            errors="backslashreplace",
            line_buffering=stream is sys.stderr or stream.isatty() or is_unbuffered,
        )

    @property
    def lost(self) -> OSError | None:
        """The first error that made the stream drop output; None if everything was written."""
        return self._sink.lost


class _Sink(io.RawIOBase):
    """Writes to a file descriptor, and drops what cannot be written."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self.lost: OSError | None = None

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def write(self, data: Any) -> int:
        try:
            return os.write(self._descriptor, data)
        except OSError as error:
            self.lost = self.lost or error
            return len(data)  # claim success, so that the buffer above does not try again


@contextlib.contextmanager
def rare_collections() -> Iterator[None]:
    """Let Python's garbage collector run a hundred times less often.

    For work that reads a lot of data and keeps it, such as thousands of runs. Otherwise the
    collector walks over all of it again and again, which takes a tenth of the time."""
    before = gc.get_threshold()
    youngest, *older = before
    gc.set_threshold(100 * youngest, *older)
    try:
        yield
    finally:
        gc.set_threshold(*before)


def brx_command(*arguments: str) -> list[str]:
    """The command line of another `brx` process, to be started with `child_environment`.

    It finds this brx even if the working folder has a folder called `brx`.
    """
    return [sys.executable, "-P", "-m", "brx", *arguments]


def child_environment() -> dict[str, str]:
    """The environment for a Python process that is to import from the same places as this one.

    Python looks into the working folder first when it is started with `-m` or `-c`. A child looks
    there only if this process does, too.
    """
    # An empty entry (from `python -c`) means the working folder, and the child's may be another.
    places = [place or os.getcwd() for place in sys.path]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(place for place in places if os.pathsep not in place),
        "PYTHONSAFEPATH": "1",
    }


def variable(name: str) -> str | None:
    """An environment variable; None if it is not set, or empty (some schedulers set empty ones)."""
    return os.environ.get(name) or None


def whole_number(name: str, *, least: int = 0) -> int | None:
    """The whole number in an environment variable; None if it is not set, or empty.

    Raises:
        UserError: it is something else, or less than `least`.
    """
    text = variable(name)
    if text is None:
        return None
    if not (text.isascii() and text.isdecimal()) or int(text) < least:
        raise UserError(f"{name}: must be a whole number from {least}, got {text!r} (unset it?)")
    return int(text)


def environment_for_git() -> dict[str, str]:
    """This process's environment, without the variables that name a git repository.

    Inside a git hook, GIT_DIR and the like name the hook's repository, and git would look there.
    Variables that configure git stay.
    """
    kept = {}
    for name, text in os.environ.items():
        if not name.startswith("GIT_") or name.startswith("GIT_CONFIG"):
            kept[name] = text
    return kept


def temporary_folder() -> str:
    """The folder for temporary files.

    Raises:
        RunError: no folder for them can be written to.
    """
    try:
        return tempfile.gettempdir()
    except OSError as error:
        raise RunError(f"TMPDIR: {error.strerror}") from None


def has_room_for_sockets() -> bool:
    """Whether the temporary folder's path is short enough for the sockets of multiprocessing."""
    length = len(os.fsencode(temporary_folder())) + _SOCKET_NAME_LENGTH
    return length <= _LONGEST_SOCKET_PATH
