"""The command `brx` in processes that start in milliseconds.

Loading torch and brx takes about three seconds of processor time. On Linux, a fork server does that
once, as for the cells of a sweep; each process is a fork of it. Ranks are forks of their launcher,
and the server of a sweep's cells is a fork of the sweep. Everything after the start is real:
signals, locks, messages, exit codes. Tests of the start itself use `brx.environment.brx_command`,
or torchrun.
"""

import atexit
import contextlib
import multiprocessing
import os
import random
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import forkserver, util
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import IO, Any
from unittest import mock

import torch

from brx.distributed import launch
from brx.environment import child_environment, stop_signals
from brx.sweep.launchers import SHARED_IMPORTS, START

LOADED = [*SHARED_IMPORTS, "brx.cli.main", "brx.distributed.processes", "tests.processes"]


class Started:
    """A process of multiprocessing, with those methods of `subprocess.Popen` that brx and the tests
    use.

    Args:
        process: the process, which has been started.
        output, errors: the files that its standard output and error go to.
        stdin: our end of a pipe to its standard input, if there is one.
    """

    def __init__(
        self,
        process: BaseProcess,
        output: IO[str] | None = None,
        errors: IO[str] | None = None,
        stdin: IO[bytes] | None = None,
    ) -> None:
        self._process, self._files, self.stdin = process, (output, errors), stdin
        atexit.register(self._end)  # otherwise, Python would wait for the process at its exit

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self.returncode is None:
            assert timeout is not None
            raise subprocess.TimeoutExpired("brx", timeout)
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Wait for its end; returns what it wrote to its standard output and error."""
        self.wait(timeout)
        output, errors = map(_content, self._files)
        return output, errors

    def errors(self) -> str:
        """What it has written to its standard error so far."""
        return _content(self._files[1])

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _end(self) -> None:
        self.kill()
        self._process.join()


def _content(file: IO[str] | None) -> str:
    assert file is not None
    file.seek(0)
    return file.read()


def start(
    function: Callable[..., None],  # at the top of a module
    *arguments: Any,
    environment: Mapping[str, str] = {},
    output: IO[str] | None = None,
    errors: IO[str] | None = None,
) -> Started:
    """Call a function in a process and session of its own, with one thread.

    Args:
        function: at the top of a module, so that the process can import it.
        arguments: for the function.
        environment: variables in addition to those of this process.
        output, errors: files for its standard output and error; by default temporary ones, which
            `communicate` reads.
    """
    output, errors = output or _new_file(), errors or _new_file()
    context: Any = multiprocessing.get_context(START)
    if START == "forkserver":
        context.set_forkserver_preload(LOADED)
    # multiprocessing sends the descriptor of a Connection to the other process along with it.
    streams = [Connection(os.dup(stream.fileno())) for stream in (output, errors)]
    variables = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    process = context.Process(target=_call, args=(function, arguments, variables, streams))
    # The first call starts the server, which must import brx and the tests from the same places.
    with mock.patch.dict(os.environ, {**child_environment(), "OMP_NUM_THREADS": "1"}):
        process.start()
    return Started(process, output, errors)


def _new_file() -> IO[str]:
    return tempfile.TemporaryFile("a+")


def start_brx(*arguments: Any, **options: Any) -> Started:
    """Start `brx ARGUMENTS` in a process of its own; the options are those of `start`."""
    return start(_brx, list(map(str, arguments)), **options)


def start_ranks(num_ranks: int, start_one: Callable[..., Started]) -> list[Started]:
    """Start processes that find each other, as those of torchrun do.

    Args:
        num_ranks: the number of processes.
        start_one: starts a process; it is called with a rank and the keyword `environment`.
    """
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    meeting["WORLD_SIZE"] = str(num_ranks)
    return [
        start_one(rank, environment={**meeting, "RANK": str(rank)}) for rank in range(num_ranks)
    ]


def free_port() -> int:
    """A free port below those that systems hand out by themselves, so that no other program gets it
    before rank 0 binds it."""
    for port in random.SystemRandom().sample(range(20_000, 32_768), 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no free port between 20000 and 32767")


def _call(
    function: Callable[..., None],
    arguments: Sequence[Any],
    variables: Mapping[str, str],
    streams: Sequence[Connection],
) -> None:
    os.setsid()
    # A server that was started for a sweep blocks these signals, and under `nohup` SIGHUP is
    # ignored.
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, stop_signals())
    for descriptor, stream in enumerate(streams, start=1):
        os.dup2(stream.fileno(), descriptor)
        stream.close()
    _set_environment(variables)
    torch.set_num_threads(1)
    function(*arguments)


def _set_environment(variables: Mapping[str, str]) -> None:
    os.environ.clear()
    os.environ.update(variables)


def _brx(arguments: Sequence[str]) -> None:
    """Do in this process what `python -m brx ARGUMENTS` does."""
    if START == "forkserver":
        # Replace them in these modules alone: other modules start git with `subprocess`, and the
        # resource tracker with `util`.
        launch.subprocess = mock.Mock(Popen=fork_rank, PIPE=subprocess.PIPE)
        forkserver.util = mock.Mock(wraps=util, spawnv_passfds=fork_server)
    sys.argv[1:] = arguments
    runpy.run_module("brx", run_name="__main__")


def fork_server(path: str, arguments: Sequence[str], descriptors: Sequence[int]) -> int:
    """Start a fork server as a fork of this process, in place of `util.spawnv_passfds`."""
    pid = os.fork()
    if pid:
        return pid
    # As in a new program: no other files than its own, among them locks, and no signal handlers.
    kept = {0, 1, 2, *descriptors}
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in kept:
            with contextlib.suppress(OSError):  # the listing's own descriptor is closed already
                os.close(int(name))
    _reset_signals()
    try:
        exec(arguments[-1], {})  # after the interpreter's option -c
    finally:
        os._exit(0)


def _reset_signals() -> None:
    """Set the signal handlers of a new program."""
    for number in stop_signals():
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


_writers: list[IO[bytes]] = []
"""In a launcher: the pipes to its ranks' standard inputs."""


def fork_rank(command: Sequence[str], *, env: Mapping[str, str], **options: Any) -> Started:
    """Start a rank as a fork of its launcher, in place of `subprocess.Popen`."""
    assert options["start_new_session"]
    assert options["stdin"] == subprocess.PIPE
    source, target = os.pipe()
    _writers.append(os.fdopen(target, "wb"))
    arguments = command[command.index("brx") + 1 :]
    process = multiprocessing.get_context("fork").Process(
        target=_be_rank, args=(arguments, env, source)
    )
    process.start()
    os.close(source)
    return Started(process, stdin=_writers[-1])


def _be_rank(arguments: Sequence[str], environment: Mapping[str, str], source: int) -> None:
    os.setsid()
    os.dup2(source, 0)
    # A rank sees the end of its launcher when its pipe has no writer left, so close our copies.
    for writer in _writers:
        with contextlib.suppress(OSError):
            os.close(writer.fileno())
    _reset_signals()  # the handlers are the launcher's
    _set_environment(environment)
    sys.argv[1:] = arguments
    runpy.run_module("brx", run_name="__main__")
