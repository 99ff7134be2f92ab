"""Runs cells on a Ray cluster: the same processes in the same folders, on whichever node has room.

The cells' folder, the working folder and the prepared data must be on a file system that all nodes share, at the same
path, with locks that hold across nodes (NFS 4, Lustre mounted with `flock`).
"""

from __future__ import annotations

import logging
import math
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from brx.errors import UserError
from brx.files import write_text
from brx.runs.folder import RunFolder
from brx.runs.lock import hand_down, is_locked, lock
from brx.sweep.cell_state import FAILURE, LOG, State, outcome_of, prepare_folder, state_of
from brx.sweep.spec import Cell

MOST_RESTARTS = 3
"""How often a cell is continued elsewhere after its node or Ray's process there was lost."""
POLL_S = 0.2
CONNECT_S = 10.0


def run_cell(cell: Cell, working_folder: Path) -> tuple[State, str]:
    """Start or resume a cell where Ray has placed this task, and wait for its end; `ray.cancel` makes it save and end.

    Its folder is absolute; other paths of its configuration are meant against the working folder.

    Raises:
        UserError: this node does not see the sweep's folders.
    """
    for folder in (cell.folder.parent, working_folder):
        if not folder.is_dir():
            raise UserError(f"{folder}: not there on node {socket.gethostname()}: all nodes must share it")
    # A process that outlived the loss of its task, or of another sweep, may still hold the cell.
    with lock(cell.folder, patience_s=math.inf) as descriptor:
        assert descriptor is not None
        if state_of(cell) is State.DONE:
            return State.DONE, ""
        prepare_folder(cell)
        with (cell.folder / LOG).open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "brx", "train", str(cell.folder), "--resume"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=working_folder,
                env=os.environ | hand_down(descriptor),
                pass_fds=(descriptor,),
                start_new_session=True,
            )
        try:
            while process.poll() is None:  # Ray's KeyboardInterrupt comes between two instructions, not into a wait
                time.sleep(POLL_S)
        except KeyboardInterrupt:
            # Not SIGINT: Ray blocks it in its processes and, with them, in their children.
            process.terminate()
        return outcome_of(cell, process.wait())


class RayLauncher:
    """Starts cells on a cluster. Call `close` at the end.

    Each device of a cell asks for a GPU, if the cluster has any, and for as many CPU cores as `runtime.threads` says
    (one, if it says nothing).

    Args:
        num_jobs: how many run at a time; by default as many as the cluster has room for. More wait in Ray's queue.
        cells: of the sweep.
        address: of the cluster, as `ray.init` takes it; None starts one on this machine.

    Raises:
        UserError: Ray is not installed, does not answer, or has no node that is large enough for a cell.
    """

    def __init__(self, num_jobs: int | None, cells: Sequence[Cell], address: str | None) -> None:
        self._ray = _import_ray()
        most_cores = max(_cores(cell) for cell in cells)
        self._connect(address, None if num_jobs is None else num_jobs * most_cores)
        nodes = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
        self._has_gpus = any(node.get("GPU", 0) for node in nodes)
        largest = max(cells, key=lambda cell: (self._gpus(cell), _cores(cell)))
        self.num_jobs = num_jobs or sum(self._room(node, largest) for node in nodes)
        if self.num_jobs == 0:
            self.close()
            needs = f"{_cores(largest)} CPU cores and {self._gpus(largest)} GPUs"
            raise UserError(
                f"pipeline.devices: cell {largest.name} needs {needs} on one node, which no node of the cluster has;"
                " --jobs N queues cells all the same"
            )
        self._jobs: dict[Any, Cell] = {}  # by the reference of what `run_cell` returns

    @property
    def is_full(self) -> bool:
        return len(self._jobs) >= self.num_jobs

    def start(self, cell: Cell) -> bool:
        if state_of(cell) in (State.RUNNING, State.DONE):
            return False
        task = self._ray.remote(run_cell).options(
            num_cpus=_cores(cell), num_gpus=self._gpus(cell), max_retries=MOST_RESTARTS
        )
        self._jobs[task.remote(replace(cell, folder=cell.folder.absolute()), Path.cwd())] = cell
        return True

    def collect(self) -> list[tuple[Cell, State, str]]:
        outcomes = []
        for reference in self._wait(timeout=0):
            cell = self._jobs[reference]
            state, reason = self._ended(reference, cell)
            # A network file system may show the summary some seconds after the node that wrote it has told us.
            if state is State.DONE and RunFolder(cell.folder).read_summary().get("status") != "finished":
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
        """The references of the cells that have ended, after at most `timeout` seconds; None waits for all."""
        references = list(self._jobs)
        return self._ray.wait(references, num_returns=len(references), timeout=timeout)[0] if references else []

    def close(self) -> None:
        """Leave the cluster; end it, if it was started here."""
        self._ray.shutdown()

    def _connect(self, address: str | None, num_cores: int | None) -> None:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
        if address is None:
            cores = None if num_cores is None else max(num_cores, os.cpu_count() or 1)
            options |= {"num_cpus": cores, "include_dashboard": False}
        try:
            if address is not None and address != "auto":
                _check_reachable(address)
            self._ray.init(address=address or "local", **options)
        except (OSError, ValueError, RuntimeError) as error:
            first = str(error).strip().splitlines()[0]
            raise UserError(f"--address {address or 'local'}: no Ray cluster there that can be used: {first}") from None

    def _gpus(self, cell: Cell) -> int:
        return cell.config.pipeline.devices if self._has_gpus and cell.config.runtime.device != "cpu" else 0

    def _room(self, node: dict[str, float], cell: Cell) -> int:
        """How many cells like this one fit on a node."""
        by_cores, gpus = int(node.get("CPU", 0)) // _cores(cell), self._gpus(cell)
        return min(by_cores, int(node.get("GPU", 0)) // gpus) if gpus else by_cores

    def _ended(self, reference: Any, cell: Cell) -> tuple[State, str]:
        try:
            state, reason = self._ray.get(reference)
            return state, reason
        except self._ray.exceptions.RayError as error:
            # The node was lost too often, or the task itself failed, which Ray wraps together with its traceback.
            cause = getattr(error, "cause", None) or error
            reason = f"Ray: {str(cause).strip().splitlines()[0]}"
            write_text(cell.folder / FAILURE, reason + "\n")
            return State.FAILED, reason


def _cores(cell: Cell) -> int:
    return cell.config.pipeline.devices * (cell.config.runtime.threads or 1)


def _check_reachable(address: str) -> None:
    """Ray itself waits for minutes for a host that does not answer.

    Raises:
        OSError: nothing listens there.
        ValueError: the address has no port.
    """
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not port.isdecimal():
        raise ValueError("must be auto, HOST:PORT or ray://HOST:PORT")
    socket.create_connection((host, int(port)), timeout=CONNECT_S).close()


def _import_ray() -> Any:
    try:
        import ray
    except ImportError:
        raise UserError("--launcher ray: Ray is not installed: pip install 'brx[ray]'") from None
    return ray
