"""Runs cells as processes of this machine, several at a time, with threads and GPUs divided among them.

A start of Python with torch and its compiler costs some seconds of computing. It is paid once: a server process imports
them, and every cell is a fork of it. A cell is still a process of its own: its memory, random numbers, threads, GPU and
crashes are nobody else's.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import signal
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import Any

import torch

from brx.errors import UserError
from brx.runs.lock import hand_down, lock
from brx.sweep.cell_state import LOG, State, outcome_of, prepare_folder, state_of
from brx.sweep.spec import Cell

# What macOS has started in its libraries by then does not survive a fork: there, every cell pays its start.
START = "forkserver" if sys.platform == "linux" else "spawn"
SHARED_IMPORTS = ["brx.sweep.local", "brx.cli.train", "brx.train.loop", "torch._dynamo"]
STOPS = (signal.SIGINT, signal.SIGTERM)


@dataclass
class Job:
    """A cell that runs: its process, what closes at its end (the lock, pipes), and its share of the machine."""

    cell: Cell
    process: BaseProcess
    resources: ExitStack
    share: int


class LocalLauncher:
    """Starts cells in free places: by default one per GPU (or group of them), one per core without GPUs."""

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
        return len(self.jobs) >= self.num_jobs

    def start(self, cell: Cell) -> bool:
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
        outcomes = []
        for job in list(self.jobs):
            if (code := job.process.exitcode) is not None:
                self.jobs.remove(job)
                outcomes.append((job.cell, *outcome_of(job.cell, code)))
                job.resources.close()
        return outcomes

    def interrupt(self) -> None:
        for job in self.jobs:
            if job.process.pid is not None and job.process.is_alive():
                os.kill(job.process.pid, signal.SIGINT)
        for job in self.jobs:
            job.process.join()

    def _environment(self, share: int) -> dict[str, str]:
        environment = {**os.environ, "OMP_NUM_THREADS": str(self._threads)}
        if self._gpus_per_cell:
            visible = os.environ.get("CUDA_VISIBLE_DEVICES")
            names = visible.split(",") if visible else [str(index) for index in range(self._num_gpus)]
            first = share % (self._num_gpus // self._gpus_per_cell) * self._gpus_per_cell
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(names[first : first + self._gpus_per_cell])
        return environment


def start_process(folder: Path, lock_descriptor: int, environment: Mapping[str, str]) -> BaseProcess:
    """Start `brx train FOLDER --resume` with this environment; it holds the folder's lock and writes to its log."""
    context: Any = multiprocessing.get_context(START)
    if START == "forkserver":
        context.set_forkserver_preload(SHARED_IMPORTS)
    # The server, and a cell until it is in a session of its own, must survive what stops the whole process group: the
    # sweep tells its cells to stop itself, and waits for them through the server.
    resource_tracker.ensure_running()  # by itself it would unblock them
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
    try:
        process: BaseProcess = context.Process(
            target=_train, args=(folder.absolute(), Path.cwd(), OpenFile(lock_descriptor), dict(environment))
        )
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return process


@dataclass
class OpenFile:
    """A descriptor that is good in the process that it is sent to, too: what is locked stays locked."""

    descriptor: int

    def __reduce__(self) -> tuple[Any, ...]:
        return _received, (DupFd(self.descriptor),)


def _received(duplicate: Any) -> OpenFile:
    return OpenFile(duplicate.detach())


def _train(folder: Path, working_folder: Path, locked: OpenFile, environment: dict[str, str]) -> None:
    os.setsid()  # Ctrl-C reaches it through `LocalLauncher.interrupt`, once
    with (folder / LOG).open("wb") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    os.chdir(working_folder)
    # What its own ranks get; torch, imported already, is told directly.
    os.environ.clear()
    os.environ.update(environment | hand_down(locked.descriptor))
    torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))
    sys.argv[1:] = ["train", str(folder), "--resume"]
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)
    runpy.run_module("brx", run_name="__main__")
