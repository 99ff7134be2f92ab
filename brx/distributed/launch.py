"""Starts the ranks of one machine and watches over them: if one fails, all end, and one line says
which and why.

torch's own launcher is not used, for three reasons. It ends all ranks at the first failure, before
the others can say whom they lost. It sends Ctrl-C to all of them. And when it is killed itself, it
leaves them running.
"""

import json
import math
import os
import secrets
import signal
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

from brx.environment import (
    brx_command,
    child_environment,
    signal_name,
    stop_signals,
    temporary_folder,
    variable,
    whole_number,
)
from brx.errors import DivergedError, NeighbourLostError, RunError, UserError

# The environment variable of ranks that `launch` has started. It names the file in which they meet.
LAUNCHED = "BRX_LAUNCHED"
# torchrun's environment variable for the file in which a rank leaves its error.
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"

LOOPBACK = "lo" if sys.platform == "linux" else "lo0"  # the network interface

POLL_S = 0.05
# After the first failure, the other ranks get this long to report their own errors, so that the
# cause can be told from its consequences. After rank 0 was stopped, they get this long to end.
GRACE_S = 3.0
# How long ranks get to react to SIGTERM. One that waits for a lost neighbour does not react to it.
TERMINATE_S = 2.0


@dataclass(frozen=True)
class _Rank:
    """A process that `launch` has started."""

    number: int
    process: subprocess.Popen[bytes]
    report: Path  # where it leaves its error (`report_error`)

    @property
    def code(self) -> int | None:
        """The exit code; None while it runs."""
        return self.process.poll()

    @property
    def has_failed(self) -> bool:
        return self.code not in (None, 0, 130)

    @property
    def was_aborted(self) -> bool:
        """Whether it ended as NCCL's watchdog ends a process.

        If a message does not arrive within `pipeline.timeout_s`, the watchdog's own thread raises.
        No code of ours can catch that, and the process aborts.
        """
        return self.code == -signal.SIGABRT

    def error(self) -> dict[str, Any]:
        """The error that the rank left behind; empty if there is none.

        `text` is the message. If the rank has lost another one, `problem` and `peer` say how and
        which. `has_diverged` is true if the run has diverged.
        """
        try:
            report = json.loads(self.report.read_text(encoding="utf-8"))
            error: dict[str, Any] = report["brx"]
        except (OSError, ValueError, KeyError):
            return {}
        return error


def launch(
    arguments: Sequence[str],
    num_ranks: int,
    *,
    descriptors: Sequence[int] = (),
    environment: Mapping[str, str] = {},
) -> int:
    """Run `brx ARGUMENTS` in several processes on this machine.

    They meet in a file that this user alone can read, and talk to each other over the loopback
    interface.

    Args:
        arguments: the arguments of the command line, without `brx`.
        num_ranks: how many processes to start.
        descriptors: open files, such as a lock, that the processes keep open.
        environment: environment variables for them, in addition to ours.

    Returns:
        0 when all are done, 130 when they were stopped.

    Raises:
        UserError: a rank refused the request.
        RunError: a rank failed.
    """
    with tempfile.TemporaryDirectory(prefix="brx-", dir=temporary_folder()) as folder:
        shared = _shared_environment(Path(folder), num_ranks, environment)
        ranks: list[_Rank] = []
        passed_on: list[int] = []  # the signals that were passed on to rank 0

        def pass_on(number: int, frame: FrameType | None) -> None:
            if not ranks or ranks[0].code is not None:
                raise KeyboardInterrupt  # rank 0, which would stop the others, is not there
            passed_on.append(number)
            ranks[0].process.send_signal(number)  # it tells the others

        before = {number: signal.signal(number, pass_on) for number in stop_signals()}
        try:
            for rank in range(num_ranks):
                report = Path(folder) / f"rank-{rank}.json"
                own = {"RANK": str(rank), "LOCAL_RANK": str(rank), ERROR_FILE: str(report)}
                process = _start(arguments, descriptors, {**shared, **own})
                ranks.append(_Rank(rank, process, report))
            return _watch(ranks, passed_on)
        finally:
            _end([rank.process for rank in ranks])
            for number, handler in before.items():
                signal.signal(number, handler)


def _shared_environment(
    folder: Path,  # only this user can look into it
    num_ranks: int,
    further: Mapping[str, str],
) -> dict[str, str]:
    """The environment that all ranks have."""
    shared = {**child_environment(), **further}
    # Activations and gradients stay on this machine, as does the meeting of the ranks.
    shared.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK)
    return shared | {
        LAUNCHED: str(folder / f"meeting-{secrets.token_hex(16)}"),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
    }


def _start(
    arguments: Sequence[str], descriptors: Sequence[int], environment: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        brx_command(*arguments),
        env=environment,
        stdin=subprocess.PIPE,  # see `end_with_launcher`
        pass_fds=tuple(descriptors),
        start_new_session=True,  # Ctrl-C reaches the launcher, which passes it on to rank 0 alone
    )


def rank_and_world_size() -> tuple[int, int] | None:
    """This process's rank and the number of ranks, by the environment variables of a launcher.

    Returns:
        None if this process is the only one.

    Raises:
        UserError: RANK and WORLD_SIZE do not fit together, or RANK is set alone.
    """
    rank = whole_number("RANK")
    num_ranks = whole_number("WORLD_SIZE", least=1)
    if rank is not None and num_ranks is None:
        raise UserError(f"RANK: is {rank}, but WORLD_SIZE is not set; set both, or unset RANK")
    if rank is None or num_ranks is None:
        return None
    if rank >= num_ranks:
        raise UserError(f"RANK: must be less than WORLD_SIZE ({num_ranks}), got {rank}")
    return rank, num_ranks


def report_error(error: Exception) -> bool:
    """In a rank: leave the error for the launcher.

    Returns:
        Whether the launcher will print it, so that the rank need not.
    """
    path = variable(ERROR_FILE)
    if path is None:
        return False
    content: dict[str, Any] = {"text": str(error)}
    if isinstance(error, NeighbourLostError):
        content |= {"problem": error.problem, "peer": error.peer}
    if isinstance(error, DivergedError):
        content["has_diverged"] = True
    # In torchrun's own form. torchrun shows the message instead of a traceback, and takes the
    # earliest error for the cause.
    message = {"message": f"brx: {error}", "extraInfo": {"timestamp": str(int(time.time()))}}
    report = json.dumps({"message": message, "brx": content})
    try:
        Path(path).write_text(report, encoding="utf-8")
    except OSError:  # the folder of a launcher that is gone
        return False
    return LAUNCHED in os.environ


def end_with_launcher() -> None:
    """In a rank that `launch` has started: exit as soon as the launcher is gone, however it ended.

    The launcher holds the other end of our standard input, and never writes to it.
    """

    def wait_for_end() -> None:
        os.read(0, 1)  # not sys.stdin: its lock would be held at interpreter shutdown
        os._exit(1)

    if LAUNCHED in os.environ:
        threading.Thread(target=wait_for_end, daemon=True).start()


def _watch(ranks: list[_Rank], passed_on: list[int]) -> int:
    """Wait until all ranks have ended; after a failure or a stop of rank 0, no longer than
    `GRACE_S`.

    Args:
        ranks: all of them.
        passed_on: the signals that were passed on to rank 0 so far.

    Returns:
        0, or 130 if the ranks were stopped.

    Raises:
        UserError: a rank refused the request.
        RunError: a rank failed.
    """
    deadline = math.inf
    while True:
        codes = [rank.code for rank in ranks]
        # A rank 0 that is stopped while it is still starting leaves no error. The others wait for
        # it in vain, or have lost it.
        ended_at_start = codes[0] not in (None, 0) and not ranks[0].report.exists()
        was_stopped = codes[0] == 130 or (bool(passed_on) and ended_at_start)
        has_failed = any(rank.has_failed for rank in ranks)
        if was_stopped or has_failed:
            deadline = min(deadline, time.monotonic() + GRACE_S)
        # After a signal, the others may end before rank 0 does; their errors are not the cause.
        was_signalled = bool(passed_on) or was_stopped
        is_cause_known = has_failed and not was_signalled and _cause(ranks) is not None
        if is_cause_known or time.monotonic() > deadline or None not in codes:
            break
        time.sleep(POLL_S)
    if was_stopped:
        return 130
    if has_failed:
        raise _cause(ranks) or _blame(ranks)
    return 130 if 130 in codes else 0


def _cause(ranks: list[_Rank]) -> UserError | RunError | None:
    """The error of a rank that failed by itself; None if all failed ranks have merely lost a
    neighbour."""
    failed = [rank for rank in ranks if rank.has_failed and not rank.was_aborted]
    # Ranks that a signal has killed come first: the others may have failed because of them.
    for rank in sorted(failed, key=lambda rank: rank.process.returncode >= 0):
        error = rank.error()
        code = rank.process.returncode
        if code < 0:
            name = signal_name(-code)
            return RunError(f"rank {rank.number} was killed by {name}; the checkpoints are kept")
        if not error:
            return RunError(
                f"rank {rank.number} ended with exit code {code} (its traceback is above)"
            )
        has_lost_a_neighbour = "problem" in error
        if has_lost_a_neighbour:
            continue
        if code == 2:
            return UserError(error["text"])
        if error.get("has_diverged"):
            return RunError(error["text"])  # it names the stage, which another rank may have
        return RunError(f"rank {rank.number}: {error['text']}")
    return None


def _blame(ranks: list[_Rank]) -> RunError:
    """An error that names the lost rank, according to the reports of the ranks that lost it. If a
    rank that still runs has stopped answering, it is that one."""
    running = [rank.number for rank in ranks if rank.code is None]
    aborted = [rank.number for rank in ranks if rank.was_aborted]
    reports = [rank.error() for rank in ranks if rank.has_failed]
    lost = [report for report in reports if "problem" in report]
    if aborted:
        what = f"rank {aborted[0]} was killed by SIGABRT (its message is above)"
        if running and not lost:
            what += f", as NCCL ends a rank that waits in vain; rank {running[0]} still ran"
        return RunError(f"{what}; the checkpoints are kept")
    chosen = next((report for report in lost if report["peer"] in running), lost[0])
    blamed = chosen["peer"]
    # A rank that waited for all others does not know which one it lost: one that still runs.
    if blamed is None and running:
        blamed = running[0]
    who = "a rank" if blamed is None else f"rank {blamed}"
    return RunError(f"{who} {chosen['problem']}; the checkpoints are kept")


def _end(processes: list[subprocess.Popen[bytes]]) -> None:
    """End all processes: with SIGTERM, then with SIGKILL, which also ends a suspended process."""
    for process in processes:
        process.terminate()  # does nothing to one that has ended
    deadline = time.monotonic() + TERMINATE_S
    while time.monotonic() < deadline and any(process.poll() is None for process in processes):
        time.sleep(POLL_S)
    for process in processes:
        process.kill()
        process.wait()
        assert process.stdin is not None
        process.stdin.close()
