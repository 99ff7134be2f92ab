"""Runs cells: as processes that share this machine's threads and GPUs, or on a Ray cluster.

On this machine, a server process imports torch once, which takes seconds, and every cell is a fork
of it. All nodes of a cluster must share the cells' folder, the working folder and the prepared
data, at the same path, on a file system with locks that hold across nodes (NFS 4, Lustre mounted
with `flock`).
"""

import contextlib
import logging
import math
import multiprocessing
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

import torch

from brx.environment import brx_command, child_environment, has_room_for_sockets, num_cores
from brx.errors import UserError
from brx.files import make_folder, write_text
from brx.runs.folder import RunFolder
from brx.runs.lock import hand_down, is_locked, lock
from brx.sweep.cell import Cell
from brx.sweep.state import FAILURE, LOG, State, outcome_of, prepare_folder, state_of

# On macOS, libraries have started threads by the time of the fork, and threads do not survive it.
# There, every cell imports torch itself.
START = "forkserver" if sys.platform == "linux" else "spawn"
SHARED_IMPORTS = ["brx.sweep.launchers", "brx.cli.train", "brx.train.loop", "torch._dynamo"]
STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)

MOST_RESTARTS = 3  # how often Ray continues a cell elsewhere after its node was lost
POLL_S = 0.2
CONNECT_S = 10.0


@dataclass
class Job:
    """A cell that runs on this machine."""

    cell: Cell
    process: BaseProcess
    resources: ExitStack  # the lock and the pipes, which are closed at the job's end
    share: int  # 0 to num_jobs - 1: its part of the machine; no other running cell has this one


class LocalLauncher:
    """Runs cells as processes of this machine.

    By default, as many cells run at a time as there are GPUs, or groups of GPUs for cells with
    several devices. Without GPUs, there is one cell per core.

    Args:
        num_jobs: how many cells run at a time instead.
        devices_per_cell: the most devices that a cell has.
        on_gpus: give cells GPUs, if there are any.

    Raises:
        UserError: a cell has more devices than there are GPUs.
    """

    def __init__(
        self, num_jobs: int | None, devices_per_cell: int, *, on_gpus: bool = True
    ) -> None:
        self._num_gpus = torch.cuda.device_count() if on_gpus else 0
        if 0 < self._num_gpus < devices_per_cell:
            raise UserError(
                f"pipeline.devices: cells need {devices_per_cell} GPUs each, there are "
                f"{self._num_gpus}"
            )
        self._gpus_per_cell = devices_per_cell if self._num_gpus else 0
        cores = num_cores()
        self.num_jobs = num_jobs or max(1, (self._num_gpus or cores) // devices_per_cell)
        # Each cell divides its threads among its devices.
        self._threads = max(1, cores // self.num_jobs)
        self.jobs: list[Job] = []

    def start(self, cell: Cell) -> bool:
        """Start or resume a cell, for which there must be room.

        Returns:
            False if another sweep runs the cell, or has finished it meanwhile.
        """
        with ExitStack() as stack:
            descriptor = stack.enter_context(lock(cell.folder))
            if descriptor is None or state_of(cell) is State.DONE:
                return False
            prepare_folder(cell)
            share = min(set(range(self.num_jobs)) - {job.share for job in self.jobs})
            # The first start waits seconds for its server. A Ctrl-C meanwhile must come when the
            # process is among the jobs, or `interrupt` would not know of it.
            resource_tracker.ensure_running()  # it would unblock them when it starts
            with _stops_blocked():
                process = start_process(cell.folder, descriptor, self._environment(share))
                stack.callback(process.close)
                self.jobs.append(Job(cell, process, stack.pop_all(), share))
        return True

    def collect(self) -> list[tuple[Cell, State, str]]:
        """The cells that have ended since the last call: each with its state and, if it failed,
        why."""
        outcomes = []
        for job in list(self.jobs):
            code = job.process.exitcode
            if code is None:
                continue
            self.jobs.remove(job)
            state, reason = outcome_of(job.cell, code)
            outcomes.append((job.cell, state, reason))
            job.resources.close()
        return outcomes

    def interrupt(self) -> None:
        """Ask all cells to save and end, and wait until they have."""
        with _stops_blocked():  # a second Ctrl-C must not spare the last ones
            for job in self.jobs:
                if job.process.pid is not None and job.process.is_alive():
                    os.kill(job.process.pid, signal.SIGINT)
        for job in self.jobs:
            job.process.join()

    def close(self) -> None:
        """Do nothing. (`RayLauncher` leaves its cluster here.)"""

    def _environment(self, share: int) -> dict[str, str]:
        """The environment of a cell: its threads, and its GPUs."""
        environment = {**child_environment(), "OMP_NUM_THREADS": str(self._threads)}
        # RANK is set for the sweep's own process, not for its cells.
        environment.pop("RANK", None)
        if self._gpus_per_cell:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(self._gpus_of(share))
        return environment

    def _gpus_of(self, share: int) -> list[str]:
        """The names of a share's GPUs; with more cells than groups of GPUs, cells share a group."""
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        names = visible.split(",") if visible else list(map(str, range(self._num_gpus)))
        num_groups = self._num_gpus // self._gpus_per_cell
        first = (share % num_groups) * self._gpus_per_cell
        return names[first : first + self._gpus_per_cell]


@contextlib.contextmanager
def _stops_blocked() -> Iterator[None]:
    """A context in which the signals that ask this process to stop wait until its end.

    Processes that are started in it inherit the blocked signals. But a signal also comes to a
    thread that does not block it, and Python then calls the handler in the main thread all the
    same. So the handlers wait, too.
    """
    with _handlers_waiting():
        before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def _handlers_waiting() -> Iterator[None]:
    """A context at whose end the handlers of the signals in `STOPS` are called that would have been
    called within it. Outside of the main thread, no handler is called anyway."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received: list[int] = []
    handlers = {stop: signal.getsignal(stop) for stop in STOPS}
    of_python = {stop: handler for stop, handler in handlers.items() if callable(handler)}
    try:
        for stop in of_python:
            signal.signal(stop, lambda number, frame: received.append(number))
        yield
    finally:
        # SIGINT last: its handler may raise KeyboardInterrupt from then on.
        for stop, handler in reversed(of_python.items()):
            signal.signal(stop, handler)
        for number in dict.fromkeys(received):
            signal.raise_signal(number)


def start_process(
    folder: Path, lock_descriptor: int, environment: Mapping[str, str]
) -> BaseProcess:
    """Start `brx train FOLDER --resume`, which writes to the folder's log.

    The signals in `STOPS` must be blocked. Ctrl-C goes to the whole process group. The sweep itself
    tells its cells to stop, and waits for them through the server. So the server must survive a
    Ctrl-C, and so must a cell until it is in a session of its own. Both inherit the blocked
    signals.

    Args:
        folder: a cell's.
        lock_descriptor: the open file of the folder's lock, which the process goes on holding.
        environment: all environment variables of the process.
    """
    method = START if has_room_for_sockets() else "spawn"  # a fork server needs a socket
    context: Any = multiprocessing.get_context(method)
    if method == "forkserver":
        context.set_forkserver_preload(SHARED_IMPORTS)
    # A descriptor that is sent as a Connection is valid in the other process, too, and keeps its
    # lock.
    arguments = (
        folder.absolute(),
        Path.cwd(),
        Connection(os.dup(lock_descriptor)),
        list(sys.path),
        dict(environment),
    )
    process: BaseProcess = context.Process(target=_train, args=arguments)
    # The first start also starts the server, which imports brx in this environment.
    with _inherited(child_environment()):
        process.start()
    return process


@contextlib.contextmanager
def _inherited(environment: Mapping[str, str]) -> Iterator[None]:
    """A context in which new processes get these environment variables."""
    before = dict(os.environ)
    os.environ.update(environment)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _train(
    folder: Path,
    working_folder: Path,
    locked: Connection,
    import_places: list[str],
    environment: dict[str, str],
) -> None:
    """What the process of a cell does."""
    os.setsid()  # Ctrl-C reaches it only once, through `LocalLauncher.interrupt`
    with (folder / LOG).open("ab") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    os.chdir(working_folder)
    # The ranks of this cell read the environment. Here it comes too late for torch, which was
    # imported by the server, so its threads are set below.
    os.environ.clear()
    os.environ.update(environment | hand_down(locked.fileno()))
    torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))
    sys.path[:] = import_places
    sys.argv[1:] = ["train", str(folder), "--resume"]
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)
    runpy.run_module("brx", run_name="__main__")


class RayLauncher:
    """Runs cells as tasks of a Ray cluster.

    Each device of a cell asks for a GPU, if the cluster has any, and for `runtime.threads` CPU
    cores (or one).

    Args:
        num_jobs: how many cells are handed to Ray at a time. Ray queues those without room. By
            default, as many as the cluster has room for.
        cells: the cells that will be started. The largest one decides how many have room.
        address: the address of the cluster; None: one is started on this machine.

    Raises:
        UserError: Ray is missing, no cluster is at the address, or no node is large enough.
    """

    def __init__(self, num_jobs: int | None, cells: Sequence[Cell], address: str | None) -> None:
        num_needed = None
        if num_jobs is not None:
            num_needed = num_jobs * max(_needs(cell, has_gpus=False).cores for cell in cells)
        self._ray = _connect(address, num_needed)
        self._jobs: dict[Any, Cell] = {}  # by the reference of what `run_cell` returns
        nodes = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
        self._has_gpus = any(node.get("GPU", 0) for node in nodes)
        largest = max(cells, key=lambda cell: _needs(cell, has_gpus=self._has_gpus))
        needs = _needs(largest, has_gpus=self._has_gpus)
        self.num_jobs = num_jobs or sum(_num_places(node, needs) for node in nodes)
        if self.num_jobs == 0:
            self.close()
            raise UserError(
                f"pipeline.devices: cell {largest.name} needs {needs.cores} CPU cores and "
                f"{needs.gpus} GPUs on one node, which no node of the cluster has; --jobs N queues "
                f"cells all the same"
            )

    def start(self, cell: Cell) -> bool:
        """Hand a cell to Ray; False if another sweep runs it, or has finished it meanwhile."""
        if state_of(cell) in (State.RUNNING, State.DONE):
            return False
        needs = _needs(cell, has_gpus=self._has_gpus)
        task = self._ray.remote(run_cell).options(
            num_cpus=needs.cores, num_gpus=needs.gpus, max_retries=MOST_RESTARTS
        )
        on_any_node = replace(cell, folder=cell.folder.absolute())
        reference = task.remote(on_any_node, Path.cwd())
        self._jobs[reference] = cell
        return True

    def collect(self) -> list[tuple[Cell, State, str]]:
        """The cells that have ended since the last call: each with its state and, if it failed,
        why."""
        outcomes = []
        for reference in self._wait(timeout=0):
            cell = self._jobs[reference]
            state, reason = self._outcome(reference)
            # A network file system may show the summary only some seconds after Ray has reported
            # the end of the cell. It is taken then.
            status = RunFolder(cell.folder).read_summary().get("status")
            if state is State.DONE and status != "finished":
                continue
            del self._jobs[reference]
            outcomes.append((cell, state, reason))
        return outcomes

    def _outcome(self, reference: Any) -> tuple[State, str]:
        """The result of `run_cell`, or why Ray has none."""
        try:
            state, reason = self._ray.get(reference)
        except self._ray.exceptions.RayError as error:
            # The node was lost too often, or the task itself failed, which Ray wraps together with
            # its traceback.
            cause = getattr(error, "cause", None) or error
            state = State.FAILED
            reason = f"Ray: {str(cause).strip().splitlines()[0]}"
            folder = self._jobs[reference].folder
            make_folder(folder)
            write_text(folder / FAILURE, reason + "\n")
        return state, reason

    def interrupt(self) -> None:
        """Ask all cells to save and end, and wait until they have."""
        for reference in self._jobs:
            self._ray.cancel(reference)
        self._wait(timeout=None)
        while any(is_locked(cell.folder) for cell in self._jobs.values()):
            time.sleep(POLL_S)

    def _wait(self, timeout: float | None) -> list[Any]:
        """The references of the cells that have ended, after at most `timeout` seconds; None waits
        for all."""
        references = list(self._jobs)
        if not references:
            return []
        ended, _ = self._ray.wait(references, num_returns=len(references), timeout=timeout)
        return list(ended)

    def close(self) -> None:
        """Leave the cluster; end it, if it was started here."""
        self._ray.shutdown()


Launcher = LocalLauncher | RayLauncher


def run_cell(cell: Cell, working_folder: Path) -> tuple[State, str]:
    """A task of Ray: start or resume a cell on this node and wait for its end. `ray.cancel` makes
    it save.

    Args:
        cell: the cell; its folder is an absolute path.
        working_folder: the sweep's working folder.

    Returns:
        See `outcome_of`.

    Raises:
        UserError: a folder is missing on this node.
    """
    for folder in (cell.folder.parent, working_folder):
        if not folder.is_dir():
            raise UserError(
                f"{folder}: not there on node {socket.gethostname()}: all nodes must share it"
            )
    # A process that outlived the loss of its task, or of another sweep, may still hold the cell.
    with lock(cell.folder, patience_s=math.inf) as descriptor:
        assert descriptor is not None
        if state_of(cell) is State.DONE:
            return State.DONE, ""
        prepare_folder(cell)
        with (cell.folder / LOG).open("ab") as log:
            process = subprocess.Popen(
                brx_command("train", str(cell.folder), "--resume"),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=working_folder,
                env=child_environment() | hand_down(descriptor),
                pass_fds=(descriptor,),
                start_new_session=True,
            )
        try:
            # It polls because Ray's KeyboardInterrupt comes between two Python instructions, and
            # does not interrupt a wait.
            while process.poll() is None:
                time.sleep(POLL_S)
        except KeyboardInterrupt:
            # Not SIGINT: Ray blocks it in its processes and, with them, in their children.
            process.terminate()
        return outcome_of(cell, process.wait())


class _Needs(NamedTuple):
    """The resources that a cell needs on one node. Cells compare by GPUs first."""

    gpus: int
    cores: int


def _needs(cell: Cell, *, has_gpus: bool) -> _Needs:
    num_devices = cell.config.pipeline.devices
    runtime = cell.config.runtime
    uses_gpus = has_gpus and runtime.device != "cpu"
    return _Needs(num_devices if uses_gpus else 0, num_devices * (runtime.threads or 1))


def _num_places(node: Mapping[str, float], needs: _Needs) -> int:
    """How many cells have room on a node with these resources."""
    num_places = node.get("CPU", 0) // needs.cores
    if needs.gpus:
        num_places = min(num_places, node.get("GPU", 0) // needs.gpus)
    return int(num_places)


def _connect(address: str | None, num_needed: int | None) -> Any:
    """The module `ray`, connected to the cluster at an address. Without an address, it starts a
    cluster here, with at least `num_needed` CPU cores; None: with those that Ray finds."""
    try:
        import ray
    except ImportError:
        raise UserError("--launcher ray: Ray is not installed: pip install 'ray[client]'") from None
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if address is None:
        cores = None if num_needed is None else max(num_needed, num_cores())
        options |= {"num_cpus": cores, "include_dashboard": False}
    try:
        # Ray itself would wait minutes for a host that does not answer.
        if address is not None and address != "auto":
            host, _, port = address.removeprefix("ray://").rpartition(":")
            if not port.isdecimal():
                raise ValueError("must be auto, HOST:PORT or ray://HOST:PORT")
            socket.create_connection((host, int(port)), timeout=CONNECT_S).close()
        ray.init(address=address or "local", **options)
    except (OSError, ValueError, RuntimeError) as error:
        first = str(error).strip().splitlines()[0]
        raise UserError(
            f"--address {address or 'local'}: no Ray cluster there that can be used: {first}"
        ) from None
    return ray
