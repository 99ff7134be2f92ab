"""What a process inherits from whoever started it: its environment variables, taken checked, and
what the processes that it starts itself shall inherit."""

import os
import sys
import tempfile

from brx.errors import RunError, UserError

# The longest path of a socket, by the smallest `sun_path` among the systems that we run on (macOS),
# without its final zero byte.
_LONGEST_SOCKET_PATH = 103
# What multiprocessing puts below the temporary folder: /pymp-XXXXXXXX/listener-XXXXXXXX
_SOCKET_NAME_LENGTH = len("/pymp-") + len("/listener-") + 2 * 8


def brx_command(*arguments: str) -> list[str]:
    """The command line of another `brx` process, whatever folder called `brx` lies in the working
    folder; start it with `child_environment`."""
    return [sys.executable, "-P", "-m", "brx", *arguments]


def child_environment() -> dict[str, str]:
    """Our environment, for Python processes that import from the same places as this one.

    Python looks into the working folder first when it is started with `-m` or `-c`; a child looks
    there only if this process does, too."""
    # An empty entry is the working folder (of `python -c`), and might become another one.
    places = [place or os.getcwd() for place in sys.path]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(place for place in places if os.pathsep not in place),
        "PYTHONSAFEPATH": "1",
    }


def variable(name: str) -> str | None:
    """An environment variable; None where it is not set, or empty, as schedulers leave some."""
    return os.environ.get(name) or None


def whole_number(name: str, *, least: int = 0) -> int | None:
    """An environment variable's number; None where it is not set, or empty.

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
    """Our environment without the variables that point git to a repository: within a hook, GIT_DIR
    and its like name the hook's own, wherever git is asked to look. What configures git stays."""
    return {
        name: text
        for name, text in os.environ.items()
        if not name.startswith("GIT_") or name.startswith("GIT_CONFIG")
    }


def temporary_folder() -> str:
    """Where temporary files go.

    Raises:
        RunError: no folder for them can be written to.
    """
    try:
        return tempfile.gettempdir()
    except OSError as error:
        raise RunError(f"TMPDIR: {error.strerror}") from None


def has_room_for_sockets() -> bool:
    """Whether the path of a socket of multiprocessing fits below the temporary folder."""
    length = len(os.fsencode(temporary_folder())) + _SOCKET_NAME_LENGTH
    return length <= _LONGEST_SOCKET_PATH
