"""Start the ranks of one machine and watch over them: if one fails, all end, and one line says which and why."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from brx.errors import NeighbourLostError, RunError, UserError

REPORT = "BRX_RANK_REPORT"
"""Environment variable: the file in which a rank leaves its error for the launcher."""

POLL_S = 0.05
# After the first failure the others get this long to report theirs, so that the cause is told from its consequences;
# and after rank 0 was stopped, to end.
GRACE_S = 3.0
TERMINATE_S = 5.0


@dataclass(frozen=True)
class _Ending:
    """How a rank ended: the exit code, and its error if it could still write one.

    Attributes:
        message: the error; None if it left none.
        peer_problem: if the error is that another rank was lost, what that one did ("closed its connection").
        lost_peer: which one, if that is known.
    """

    rank: int
    code: int
    message: str | None = None
    peer_problem: str | None = None
    lost_peer: int | None = None


def launch(
    arguments: Sequence[str], num_ranks: int, *, descriptors: Sequence[int] = (), environment: Mapping[str, str] = {}
) -> int:
    """Run `brx ARGUMENTS` in `num_ranks` processes on this machine, with the environment that torchrun would set.

    The processes are in a session of their own: Ctrl-C reaches the launcher, which passes it on to rank 0 alone.

    Args:
        arguments: of `brx`.
        num_ranks: R.
        descriptors: of files that the ranks keep open, such as a lock.
        environment: variables that they get beside torchrun's.

    Returns:
        0 when all are done, 130 when they were stopped.

    Raises:
        UserError: a rank refused the request.
        RunError: a rank failed; names it and the cause.
    """
    with tempfile.TemporaryDirectory(prefix="brx-") as folder:
        reports = [Path(folder) / f"rank-{rank}.json" for rank in range(num_ranks)]
        port = int(os.environ.get("MASTER_PORT") or free_port())
        shared = {**os.environ, **environment, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        shared |= {"WORLD_SIZE": str(num_ranks), "LOCAL_WORLD_SIZE": str(num_ranks)}
        processes: list[subprocess.Popen[bytes]] = []
        passed_on: list[int] = []

        def pass_on(number: int, frame: FrameType | None) -> None:
            if not processes or processes[0].poll() is not None:
                raise KeyboardInterrupt  # the one that would stop the others is not there
            passed_on.append(number)
            processes[0].send_signal(number)

        before = {number: signal.signal(number, pass_on) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            for rank, report in enumerate(reports):
                processes.append(_start(arguments, rank, report, shared, descriptors))
            return _watch(processes, reports, passed_on)
        finally:
            _end(processes)
            for number, handler in before.items():
                signal.signal(number, handler)


def started_as_one_of_many() -> bool:
    """Whether the environment says that this process is a rank (as torchrun's does)."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def report_error(error: UserError | RunError) -> bool:
    """In a launched rank: leave the error for the launcher to tell, once; False if there is no launcher."""
    if REPORT not in os.environ:
        return False
    content: dict[str, Any] = {"message": str(error)}
    if isinstance(error, NeighbourLostError):
        content |= {"peer_problem": error.problem, "lost_peer": error.peer}
    Path(os.environ[REPORT]).write_text(json.dumps(content), encoding="utf-8")
    return True


def end_with_launcher() -> None:
    """In a launched rank: exit as soon as the launcher is gone, however it went (it holds our standard input open)."""
    if REPORT not in os.environ:
        return

    def wait_for_end() -> None:
        os.read(0, 1)  # not sys.stdin: its lock would be held at interpreter shutdown
        os._exit(1)

    threading.Thread(target=wait_for_end, daemon=True).start()


def _start(
    arguments: Sequence[str], rank: int, report: Path, shared: Mapping[str, str], descriptors: Sequence[int]
) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "brx", *arguments],
        env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank), REPORT: str(report)},
        stdin=subprocess.PIPE,
        pass_fds=tuple(descriptors),
        start_new_session=True,
    )


def _watch(processes: list[subprocess.Popen[bytes]], reports: list[Path], passed_on: list[int]) -> int:
    """Wait for the end of all, or of one that fails.

    Args:
        processes: the ranks.
        reports: where they leave their errors.
        passed_on: the signals that rank 0 was sent, so far.
    """
    stopped_at = None
    while True:
        codes = [process.poll() for process in processes]
        if passed_on and codes[0] not in (None, 0) and not reports[0].exists():  # stopped while it was still starting
            codes[0] = 130
        if any(code not in (None, 0, 130) for code in codes):
            break
        if all(code is not None for code in codes):
            return 130 if 130 in codes else 0
        if codes[0] == 130:
            # It parts from the others last; stopped before it has met them, it leaves them waiting for it.
            stopped_at = stopped_at or time.monotonic()
            if time.monotonic() > stopped_at + GRACE_S:
                return 130
        time.sleep(POLL_S)
    deadline = time.monotonic() + GRACE_S
    while time.monotonic() < deadline and not _cause(processes, reports, final=False):
        time.sleep(POLL_S)
    if processes[0].poll() == 130 and _cause(processes, reports, final=False) is None:
        return 130  # a second Ctrl-C cut rank 0 off in the middle, and the others have merely lost it
    raise _cause(processes, reports, final=True) or RunError("a rank failed and left no reason")


def _cause(
    processes: list[subprocess.Popen[bytes]], reports: list[Path], *, final: bool
) -> UserError | RunError | None:
    """The error to tell: a rank's own before those of ranks that merely lost a neighbour.

    Args:
        processes: the ranks.
        reports: where they leave their errors.
        final: blame a rank that is still running but that others say stopped answering.
    """
    endings = [_ending(rank, process, reports[rank]) for rank, process in enumerate(processes)]
    failed = [ending for ending in endings if ending is not None and ending.code not in (0, 130)]
    for ending in failed:
        if ending.code < 0:
            name = signal.Signals(-ending.code).name
            return RunError(f"rank {ending.rank} was killed by {name}; the last checkpoint is kept")
    for ending in failed:
        if ending.message is None:
            return RunError(f"rank {ending.rank} ended with exit code {ending.code} (its traceback is above)")
        if ending.peer_problem is None:
            refused = ending.code == 2
            return UserError(ending.message) if refused else RunError(f"rank {ending.rank}: {ending.message}")
    if not final or not failed:
        return None
    running = [rank for rank, ending in enumerate(endings) if ending is None]
    told = next((ending for ending in failed if ending.lost_peer in running), failed[0])
    # A rank that waited for all does not know for whom: it is one that has not said anything.
    blamed = running[0] if told.lost_peer is None and running else told.lost_peer
    who = "a rank" if blamed is None else f"rank {blamed}"
    return RunError(f"{who} {told.peer_problem}; the last checkpoint is kept")


def _ending(rank: int, process: subprocess.Popen[bytes], report: Path) -> _Ending | None:
    """How a rank ended; None while it runs."""
    code = process.poll()
    if code is None:
        return None
    try:
        return _Ending(rank, code, **json.loads(report.read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return _Ending(rank, code)


def _end(processes: list[subprocess.Popen[bytes]]) -> None:
    """Leave no process behind: first politely, then (also if it is stopped) for good."""
    running = [process for process in processes if process.poll() is None]
    for process in running:
        process.terminate()
    deadline = time.monotonic() + TERMINATE_S
    while time.monotonic() < deadline and any(process.poll() is None for process in running):
        time.sleep(POLL_S)
    for process in processes:
        if process.poll() is None:
            process.kill()
        process.wait()
        assert process.stdin is not None
        process.stdin.close()


def free_port() -> int:
    """A port below those that systems hand out by themselves: nobody is given it before rank 0 binds it."""
    for port in random.SystemRandom().sample(range(20_000, 32_768), 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise RunError("no free port between 20000 and 32767; name one in MASTER_PORT")
