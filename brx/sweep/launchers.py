"""Where cells run: as processes that share this machine's threads and GPUs, or on a Ray cluster.

Here a server process imports torch once, which takes seconds, and every cell is a fork of it. All
nodes of a cluster must share the cells' folder, the working folder and the prepared data, at the
same path, on a file system with locks that hold across nodes (NFS 4, Lustre mounted with `flock`).
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
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from brx.environment import brx_command, child_environment, has_room_for_sockets
from brx.errors import UserError
from brx.files import write_text
from brx.runs.folder import RunFolder, hand_down, is_locked, lock
from brx.sweep.spec import FAILURE, LOG, Cell, State, outcome_of, prepare_folder, state_of

# What macOS has started in its libraries by then does not survive a fork: there, every cell pays
#     its start.
START = "forkserver" if sys.platform == "linux" else "spawn"
SHARED_IMPORTS = ["brx.sweep.launchers", "brx.cli.train", "brx.train.loop", "torch._dynamo"]
STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)

MOST_RESTARTS = (
    3  # how often Ray continues a cell elsewhere after its node or Ray's process there was lost
)
POLL_S = 0.2
CONNECT_S = 10.0


@dataclass
class Job:
    """A cell that runs: its process, what closes at its end (the lock, pipes), and its share of the
    machine."""

    cell: Cell
    process: BaseProcess
    resources: ExitStack
    share: int


class LocalLauncher:
    """Starts cells in free places: by default one per GPU (or group of them), one per core without
    GPUs."""

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
        cores = os.cpu_count() or 1
        self.num_jobs = num_jobs or max(1, (self._num_gpus or cores) // devices_per_cell)
        # Each cell divides its threads among its devices.
        self._threads = max(1, cores // self.num_jobs)
        self.jobs: list[Job] = []

    def start(self, cell: Cell) -> bool:
        """Start or resume a cell; False if another sweep runs it, or has finished it meanwhile."""
        with ExitStack() as stack:
            descriptor = stack.enter_context(lock(cell.folder))
            if descriptor is None or state_of(cell) is State.DONE:
                return False
            prepare_folder(cell)
            share = min(set(range(self.num_jobs)) - {job.share for job in self.jobs})
            process = start_process(cell.folder, descriptor, self._environment(share))
            stack.callback(process.close)
            self.jobs.append(Job(cell, process, stack.pop_all(), share))
        return True

    def collect(self) -> list[tuple[Cell, State, str]]:
        """Take the cells that have ended since the last call: each with its state and, if it
        failed, why."""
        outcomes = []
        for job in list(self.jobs):
            if (code := job.process.exitcode) is not None:
                self.jobs.remove(job)
                outcomes.append((job.cell, *outcome_of(job.cell, code)))
                job.resources.close()
        return outcomes

    def interrupt(self) -> None:
        """Ask all cells to save and end, and wait until they have."""
        for job in self.jobs:
            if job.process.pid is not None and job.process.is_alive():
                os.kill(job.process.pid, signal.SIGINT)
        for job in self.jobs:
            job.process.join()

    def close(self) -> None:  # nothing is left to end; `RayLauncher` leaves its cluster
        pass

    def _environment(self, share: int) -> dict[str, str]:
        environment = {**child_environment(), "OMP_NUM_THREADS": str(self._threads)}
        environment.pop("RANK", None)  # only for the sweep's own process, not for its cells
        if self._gpus_per_cell:
            visible = os.environ.get("CUDA_VISIBLE_DEVICES")
            names = (
                visible.split(",") if visible else [str(index) for index in range(self._num_gpus)]
            )
            first = share % (self._num_gpus // self._gpus_per_cell) * self._gpus_per_cell
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(
                names[first : first + self._gpus_per_cell]
            )
        return environment


def start_process(
    folder: Path, lock_descriptor: int, environment: Mapping[str, str]
) -> BaseProcess:
    """Start `brx train FOLDER --resume` with this environment; it holds the folder's lock and
    writes to its log."""
    method = START if has_room_for_sockets() else "spawn"  # a server is reached by a socket
    context: Any = multiprocessing.get_context(method)
    if method == "forkserver":
        context.set_forkserver_preload(SHARED_IMPORTS)
    # The server, and a cell until it is in a session of its own, must survive what stops the whole
    # process group: the sweep tells its cells to stop itself, and waits for them through the
    # server.
    resource_tracker.ensure_running()  # by itself it would unblock them
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
    try:
        # As a Connection, a descriptor is good in the process that it is sent to, too: what is
        #     locked stays locked.
        arguments = (
            folder.absolute(),
            Path.cwd(),
            Connection(os.dup(lock_descriptor)),
            list(sys.path),
            dict(environment),
        )
        process: BaseProcess = context.Process(target=_train, args=arguments)
        with _inherited(child_environment()):  # by the server, which loads brx
            process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return process


@contextlib.contextmanager
def _inherited(environment: Mapping[str, str]) -> Iterator[None]:
    """Let processes that are started meanwhile have these environment variables."""
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
    os.setsid()  # Ctrl-C reaches it through `LocalLauncher.interrupt`, once
    with (folder / LOG).open("wb") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    os.chdir(working_folder)
    # What its own ranks get; torch, imported already, is told directly.
    os.environ.clear()
    os.environ.update(environment | hand_down(locked.fileno()))
    torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))
    sys.path[:] = import_places
    sys.argv[1:] = ["train", str(folder), "--resume"]
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)
    runpy.run_module("brx", run_name="__main__")


class RayLauncher:
    """Starts cells as tasks of a Ray cluster (None: one started here), with the methods of
    `LocalLauncher`.

    Each device of a cell asks for a GPU, if the cluster has any, and for `runtime.threads` CPU
    cores (or one). Cells beyond `num_jobs` wait in Ray's queue. UserError where Ray is missing, or
    has no node that is large enough."""

    def __init__(self, num_jobs: int | None, cells: Sequence[Cell], address: str | None) -> None:
        self._ray = _connect(
            address, None if num_jobs is None else num_jobs * max(_needs(cell)[1] for cell in cells)
        )
        self._jobs: dict[Any, Cell] = {}  # by the reference of what `run_cell` returns
        nodes = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
        self._has_gpus = any(node.get("GPU", 0) for node in nodes)
        largest = max(cells, key=lambda cell: _needs(cell, has_gpus=self._has_gpus))
        gpus, cores = _needs(largest, has_gpus=self._has_gpus)
        rooms = [
            min(node.get("CPU", 0) // cores, node.get("GPU", 0) // gpus if gpus else math.inf)
            for node in nodes
        ]
        self.num_jobs = num_jobs or int(sum(rooms))
        if self.num_jobs == 0:
            self.close()
            raise UserError(
                f"pipeline.devices: cell {largest.name} needs {cores} CPU cores and {gpus} GPUs on "
                f"one node, which no"
                " node of the cluster has; --jobs N queues cells all the same"
            )

    def start(self, cell: Cell) -> bool:
        if state_of(cell) in (State.RUNNING, State.DONE):
            return False
        gpus, cores = _needs(cell, has_gpus=self._has_gpus)
        task = self._ray.remote(run_cell).options(
            num_cpus=cores, num_gpus=gpus, max_retries=MOST_RESTARTS
        )
        self._jobs[task.remote(replace(cell, folder=cell.folder.absolute()), Path.cwd())] = cell
        return True

    def collect(self) -> list[tuple[Cell, State, str]]:
        outcomes = []
        for reference in self._wait(timeout=0):
            cell = self._jobs[reference]
            try:
                state, reason = self._ray.get(reference)
            except self._ray.exceptions.RayError as error:
                # The node was lost too often, or the task itself failed, which Ray wraps together
                # with its traceback.
                cause = getattr(error, "cause", None) or error
                state, reason = State.FAILED, f"Ray: {str(cause).strip().splitlines()[0]}"
                cell.folder.mkdir(parents=True, exist_ok=True)
                write_text(cell.folder / FAILURE, reason + "\n")
            # A network file system may show the summary some seconds after the node that wrote it
            # has told us.
            if (
                state is State.DONE
                and RunFolder(cell.folder).read_summary().get("status") != "finished"
            ):
                continue
            del self._jobs[reference]
            outcomes.append((cell, state, reason))
        return outcomes

    def interrupt(self) -> None:
        for reference in self._jobs:
            self._ray.cancel(reference)
        self._wait(timeout=None)
        while any(is_locked(cell.folder) for cell in self._jobs.values()):
            time.sleep(POLL_S)

    def _wait(self, timeout: float | None) -> list[Any]:
        """The references of the cells that have ended, after at most `timeout` seconds; None waits
        for all."""
        references = list(self._jobs)
        return (
            self._ray.wait(references, num_returns=len(references), timeout=timeout)[0]
            if references
            else []
        )

    def close(self) -> None:
        """Leave the cluster; end it, if it was started here."""
        self._ray.shutdown()


Launcher = LocalLauncher | RayLauncher


def run_cell(cell: Cell, working_folder: Path) -> tuple[State, str]:
    """Start or resume a cell where Ray has placed this task, and wait for its end; `ray.cancel`
    makes it save."""
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
        with (cell.folder / LOG).open("wb") as log:
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
            # Poll: Ray's KeyboardInterrupt comes between two instructions, and does not end a wait.
            while process.poll() is None:
                time.sleep(POLL_S)
        except KeyboardInterrupt:
            # Not SIGINT: Ray blocks it in its processes and, with them, in their children.
            process.terminate()
        return outcome_of(cell, process.wait())


def _needs(cell: Cell, *, has_gpus: bool = False) -> tuple[int, int]:
    num_devices, runtime = cell.config.pipeline.devices, cell.config.runtime
    return num_devices if has_gpus and runtime.device != "cpu" else 0, num_devices * (
        runtime.threads or 1
    )


def _connect(address: str | None, num_cores: int | None) -> Any:
    try:
        import ray
    except ImportError:
        raise UserError("--launcher ray: Ray is not installed: pip install 'ray[client]'") from None
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if address is None:
        cores = None if num_cores is None else max(num_cores, os.cpu_count() or 1)
        options |= {"num_cpus": cores, "include_dashboard": False}
    try:
        # Ray itself would wait minutes for a host that does not answer.
        if address not in (
            None,
            "auto",
        ):
            host, _, port = str(address).removeprefix("ray://").rpartition(":")
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
