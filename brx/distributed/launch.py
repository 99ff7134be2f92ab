"""Start the ranks of one machine and watch over them: if one fails, all end, and one line says
which and why.

torch's own launcher is not used: it ends all ranks at the first failure, before the others can say
whom they lost, sends Ctrl-C to all of them, and leaves them running when it is killed itself."""

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
from brx.errors import NeighbourLostError, RunError, UserError

# Environment variables: in the ranks that `launch` has started, the file by which they meet; and,
# torchrun's own, where a rank leaves its error.
LAUNCHED, ERROR_FILE = "BRX_LAUNCHED", "TORCHELASTIC_ERROR_FILE"

LOOPBACK = "lo" if sys.platform == "linux" else "lo0"  # the network interface

POLL_S = 0.05
# After the first failure the others get this long to report theirs, so that the cause is told from
# its consequences; and after rank 0 was stopped, to end.
GRACE_S = 3.0
TERMINATE_S = 2.0  # those that wait for a lost neighbour do not hear it


@dataclass(frozen=True)
class _Rank:
    number: int
    process: subprocess.Popen[bytes]
    report: Path

    @property
    def code(self) -> int | None:
        return self.process.poll()  # None while it runs

    @property
    def has_failed(self) -> bool:
        return self.code not in (None, 0, 130)

    @property
    def was_aborted(self) -> bool:
        """Whether it ended as NCCL's watchdog ends a process: a message that did not arrive within
        `pipeline.timeout_s` raises in the watchdog's own thread, which no code of ours can catch,
        and the process aborts."""
        return self.code == -signal.SIGABRT

    def error(self) -> dict[str, Any]:
        """What it left behind: `text` and, where another rank was lost, `problem` and `peer`; empty
        if nothing."""
        try:
            return json.loads(self.report.read_text(encoding="utf-8"))["brx"]  # type: ignore[no-any-return]
        except (OSError, ValueError, KeyError):
            return {}


def launch(
    arguments: Sequence[str],
    num_ranks: int,
    *,
    descriptors: Sequence[int] = (),
    environment: Mapping[str, str] = {},
) -> int:
    """Run `brx ARGUMENTS` in `num_ranks` processes on this machine, which meet by a file that this
    user alone can read, and talk to each other over the loopback interface.

    They keep files open (`descriptors`, such as a lock), and get further variables (`environment`).
    Gives 0 when all are done, 130 when they were stopped; UserError where a rank refused the
    request, RunError where one failed."""
    with tempfile.TemporaryDirectory(prefix="brx-", dir=temporary_folder()) as folder:
        # Nobody but this user can look into the folder, and nobody else knows the name in it.
        meeting = Path(folder) / f"meeting-{secrets.token_hex(16)}"
        shared = {
            **child_environment(),
            **environment,
            LAUNCHED: str(meeting),
        }
        # Activations and gradients stay on this machine as well.
        shared.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK)
        shared |= {"WORLD_SIZE": str(num_ranks), "LOCAL_WORLD_SIZE": str(num_ranks)}
        ranks: list[_Rank] = []
        passed_on: list[int] = []

        def pass_on(number: int, frame: FrameType | None) -> None:
            if not ranks or ranks[0].code is not None:
                raise KeyboardInterrupt  # rank 0, which would stop the others, is not there
            passed_on.append(number)
            ranks[0].process.send_signal(number)  # it tells the others

        before = {number: signal.signal(number, pass_on) for number in stop_signals()}
        try:
            for rank in range(num_ranks):
                report = Path(folder) / f"rank-{rank}.json"
                process = subprocess.Popen(
                    brx_command(*arguments),
                    env={
                        **shared,
                        "RANK": str(rank),
                        "LOCAL_RANK": str(rank),
                        ERROR_FILE: str(report),
                    },
                    stdin=subprocess.PIPE,  # see `end_with_launcher`
                    pass_fds=tuple(descriptors),
                    # Ctrl-C reaches the launcher, which passes it on to rank 0 alone
                    start_new_session=True,
                )
                ranks.append(_Rank(rank, process, report))
            return _watch(ranks, passed_on)
        finally:
            _end([rank.process for rank in ranks])
            for number, handler in before.items():
                signal.signal(number, handler)


def place_among_many() -> tuple[int, int] | None:
    """This process's rank and how many there are, where a launcher has started several; else None.

    Raises:
        UserError: the environment variables RANK and WORLD_SIZE do not fit together.
    """
    rank, num_ranks = whole_number("RANK"), whole_number("WORLD_SIZE", least=1)
    if rank is None or num_ranks is None:
        return None
    if rank >= num_ranks:
        raise UserError(f"RANK: must be less than WORLD_SIZE ({num_ranks}), got {rank}")
    return rank, num_ranks


def report_error(error: Exception) -> bool:
    """In a rank: leave the error for the launcher to tell; whether that is enough, and it need not
    be printed."""
    path = variable(ERROR_FILE)
    if path is None:
        return False
    content: dict[str, Any] = {"text": str(error)}
    if isinstance(error, NeighbourLostError):
        content |= {"problem": error.problem, "peer": error.peer}
    # torchrun shows the message where it has no traceback, and takes the earliest for the cause.
    message = {"message": f"brx: {error}", "extraInfo": {"timestamp": str(int(time.time()))}}
    report = json.dumps({"message": message, "brx": content})
    try:
        Path(path).write_text(report, encoding="utf-8")
    except OSError:  # the folder of a launcher that is gone
        return False
    return LAUNCHED in os.environ


def end_with_launcher() -> None:
    """In a launched rank: exit as soon as the launcher is gone, however it went (it holds our
    standard input open)."""

    def wait_for_end() -> None:
        os.read(0, 1)  # not sys.stdin: its lock would be held at interpreter shutdown
        os._exit(1)

    if LAUNCHED in os.environ:
        threading.Thread(target=wait_for_end, daemon=True).start()


def _watch(ranks: list[_Rank], passed_on: list[int]) -> int:
    """Wait for the end of all, or of those that end in time after a failure or a stop of rank 0.

    `passed_on` are the signals that rank 0 was sent, so far.
    """
    deadline = math.inf
    while True:
        codes = [rank.code for rank in ranks]
        # Stopped while still starting, rank 0 says nothing; the others wait for it in vain or have
        # lost it.
        was_stopped = codes[0] == 130 or (
            passed_on and codes[0] not in (None, 0) and not ranks[0].report.exists()
        )
        has_failed = any(rank.has_failed for rank in ranks)
        if was_stopped or has_failed:
            deadline = min(deadline, time.monotonic() + GRACE_S)
        # After a signal the others may end before rank 0 does: theirs is not the cause.
        is_told = has_failed and not passed_on and not was_stopped and _cause(ranks)
        if is_told or time.monotonic() > deadline or None not in codes:
            break
        time.sleep(POLL_S)
    if was_stopped:
        return 130
    if has_failed:
        raise _cause(ranks) or _blame(ranks)
    return 130 if 130 in codes else 0


def _cause(ranks: list[_Rank]) -> UserError | RunError | None:
    """A rank's own error; None where those that failed have merely lost a neighbour."""
    failed = [rank for rank in ranks if rank.has_failed and not rank.was_aborted]
    # Those that a signal has killed first: the others may have failed because of them.
    for rank in sorted(failed, key=lambda rank: rank.process.returncode >= 0):
        error, code = rank.error(), rank.process.returncode
        if code < 0:
            name = signal_name(-code)
            return RunError(f"rank {rank.number} was killed by {name}; the last checkpoint is kept")
        if not error:
            return RunError(
                f"rank {rank.number} ended with exit code {code} (its traceback is above)"
            )
        if "problem" not in error:
            return (
                UserError(error["text"])
                if code == 2
                else RunError(f"rank {rank.number}: {error['text']}")
            )
    return None


def _blame(ranks: list[_Rank]) -> RunError:
    """The rank that those which failed have lost: one that still runs, and has stopped answering,
    if there is any."""
    running = [rank.number for rank in ranks if rank.code is None]
    aborted = [rank.number for rank in ranks if rank.was_aborted]
    errors = [error for rank in ranks if rank.has_failed and "problem" in (error := rank.error())]
    if aborted:
        what = f"rank {aborted[0]} was killed by SIGABRT (its message is above)"
        if running and not errors:
            what += f", as NCCL ends a rank that waits in vain; rank {running[0]} still ran"
        return RunError(f"{what}; the last checkpoint is kept")
    told = next((error for error in errors if error["peer"] in running), errors[0])
    # A rank that waited for all does not know for whom: it is one that has not said anything.
    blamed = running[0] if told["peer"] is None and running else told["peer"]
    who = "a rank" if blamed is None else f"rank {blamed}"
    return RunError(f"{who} {told['problem']}; the last checkpoint is kept")


def _end(processes: list[subprocess.Popen[bytes]]) -> None:
    """Leave no process behind: first politely, then (also if it is stopped) for good."""
    for process in processes:
        process.terminate()  # nothing where it has ended
    deadline = time.monotonic() + TERMINATE_S
    while time.monotonic() < deadline and any(process.poll() is None for process in processes):
        time.sleep(POLL_S)
    for process in processes:
        process.kill()
        process.wait()
        assert process.stdin is not None
        process.stdin.close()
