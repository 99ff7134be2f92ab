"""`brx` and `python -m brx`: start the command. Ctrl-C ends the process cleanly from its first
moment on."""

import os
import signal
import sys
from types import FrameType

from brx.environment import OutputStream


def start() -> None:
    """Run the command line of this process, and exit."""
    # The parent process may have made us ignore Ctrl-C, which then stays so.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)
    # A stream is None if it was closed before we began.
    if sys.stdout is not None:
        sys.stdout = OutputStream(sys.stdout)
    if sys.stderr is not None:
        sys.stderr = OutputStream(sys.stderr)
    from brx.cli.main import main

    sys.exit(main())


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt; but exit at once while a module is imported, as some libraries
    swallow the exception there."""
    while frame is not None:
        if "importlib._bootstrap" in frame.f_code.co_filename:
            os.write(2, b"brx: interrupted\n")
            os._exit(130)
        frame = frame.f_back
    raise KeyboardInterrupt


if __name__ == "__main__":
    start()
