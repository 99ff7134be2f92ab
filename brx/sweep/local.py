"""Runs cells as processes of this machine, several at a time, with threads and GPUs divided among them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import dataclass

import torch

from brx.errors import UserError
from brx.runs.lock import hand_down, lock
from brx.sweep.cell_state import LOG, State, prepare_folder, record_failure, state_of
from brx.sweep.spec import Cell


@dataclass
class Job:
    """A cell that runs.

    Attributes:
        cell: which.
        process: its `brx train`.
        resources: what closes when it has ended (the lock, the log).
        share: its number among the shares of the machine.
    """

    cell: Cell
    process: subprocess.Popen[bytes]
    resources: ExitStack
    share: int


class LocalLauncher:
    """Starts cells in free places.

    Args:
        num_jobs: how many run at a time; by default one per GPU (or group of them), one per core without.
        devices_per_cell: devices that a cell needs.
        on_gpus: whether cells compute on the GPUs, if there are any.
    """

    def __init__(self, num_jobs: int | None, devices_per_cell: int, *, on_gpus: bool = True) -> None:
        self._num_gpus = torch.cuda.device_count() if on_gpus else 0
        if 0 < self._num_gpus < devices_per_cell:
            raise UserError(f"pipeline.devices: cells need {devices_per_cell} GPUs each, there are {self._num_gpus}")
        self._gpus_per_cell = devices_per_cell if self._num_gpus else 0
        cores = os.cpu_count() or 1
        fitting = self._num_gpus // devices_per_cell if self._num_gpus else max(1, cores // devices_per_cell)
        self.num_jobs = num_jobs or fitting
        self._threads = max(1, cores // self.num_jobs)  # a cell divides them among its devices itself
        self.jobs: list[Job] = []

    @property
    def is_full(self) -> bool:
        """Whether every share is taken."""
        return len(self.jobs) >= self.num_jobs

    def start(self, cell: Cell) -> bool:
        """Start or resume a cell; False if another sweep runs it, or has finished it meanwhile."""
        with ExitStack() as stack:
            descriptor = stack.enter_context(lock(cell.folder))
            if descriptor is None or state_of(cell) is State.DONE:
                return False
            prepare_folder(cell)
            log = stack.enter_context((cell.folder / LOG).open("wb"))
            share = min(set(range(self.num_jobs)) - {job.share for job in self.jobs})
            process = subprocess.Popen(
                [sys.executable, "-m", "brx", "train", str(cell.folder), "--resume"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._environment(share) | hand_down(descriptor),
                pass_fds=(descriptor,),
                start_new_session=True,  # Ctrl-C reaches it through `interrupt`, once
            )
            self.jobs.append(Job(cell, process, stack.pop_all(), share))
        return True

    def collect(self) -> list[tuple[Cell, State, str]]:
        """Take the cells that have ended since the last call: each with its state and, if it failed, why."""
        ended = [job for job in self.jobs if job.process.poll() is not None]
        self.jobs = [job for job in self.jobs if job not in ended]
        outcomes: list[tuple[Cell, State, str]] = []
        for job in ended:
            code = job.process.returncode
            if code == 0:
                outcomes.append((job.cell, State.DONE, ""))
            elif code == 130:
                outcomes.append((job.cell, State.INTERRUPTED, ""))
            else:
                outcomes.append((job.cell, State.FAILED, record_failure(job.cell.folder, code)))
            job.resources.close()
        return outcomes

    def interrupt(self) -> None:
        """Ask all cells to save and end, and wait until they have."""
        for job in self.jobs:
            job.process.send_signal(signal.SIGINT)
        for job in self.jobs:
            job.process.wait()

    def _environment(self, share: int) -> dict[str, str]:
        environment = {**os.environ, "OMP_NUM_THREADS": str(self._threads)}
        if self._gpus_per_cell:
            visible = os.environ.get("CUDA_VISIBLE_DEVICES")
            names = visible.split(",") if visible else [str(index) for index in range(self._num_gpus)]
            first = share % (self._num_gpus // self._gpus_per_cell) * self._gpus_per_cell
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(names[first : first + self._gpus_per_cell])
        return environment
