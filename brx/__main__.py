"""The entry point of `brx` and `python -m brx`. Ctrl-C ends the process cleanly, even while modules
are still being imported."""

import os
import signal
import sys
from types import FrameType

from brx.environment import OutputStream, fill_standard_descriptors


def start() -> None:
    """Run the command line of this process, and exit."""
    fill_standard_descriptors()
    # If the parent process made this one ignore Ctrl-C, keep ignoring it.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)
    # Python sets a stream to None if it was closed before the process started.
    if sys.stdout is not None:
        sys.stdout = OutputStream(sys.stdout)
    if sys.stderr is not None:
        sys.stderr = OutputStream(sys.stderr)
    # brx draws into files. Notebooks name a backend of their own for the commands that they start,
    # and where it is not installed, matplotlib could not be imported.
    os.environ.pop("MPLBACKEND", None)
    from brx.cli.main import main

    sys.exit(main())


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt, or exit at once while a module is being imported: some libraries
    swallow the exception there."""
    while frame is not None:
        if "importlib._bootstrap" in frame.f_code.co_filename:
            os.write(2, b"brx: interrupted\n")
            os._exit(130)
        frame = frame.f_back
    raise KeyboardInterrupt


if __name__ == "__main__":
    start()
