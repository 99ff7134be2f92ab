"""`brx` and `python -m brx`: the command, in a process that ends cleanly on Ctrl-C from its first
moment on."""

import os
import signal
import sys
from types import FrameType

from brx.environment import OutputStream


def start() -> None:
    # The parent process may have chosen to ignore Ctrl-C.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)
    # None where it was closed before we began
    if sys.stdout is not None:
        sys.stdout = OutputStream(sys.stdout)
    if sys.stderr is not None:
        sys.stderr = OutputStream(sys.stderr)
    from brx.cli.main import main

    sys.exit(main())


def _interrupt(number: int, frame: FrameType | None) -> None:
    """KeyboardInterrupt; while a module is imported, the end: some libraries swallow the exception
    then."""
    while frame is not None:
        if "importlib._bootstrap" in frame.f_code.co_filename:
            os.write(2, b"brx: interrupted\n")
            os._exit(130)
        frame = frame.f_back
    raise KeyboardInterrupt


if __name__ == "__main__":
    start()
