"""summary.json: what a run came to, with what, on what."""

from __future__ import annotations

import math
import platform
import resource
import subprocess
import time
from pathlib import Path
from typing import Any

import torch

import brx
from brx.config.schema import RunConfig
from brx.files import write_json
from brx.methods.trajectory_version import TRAJECTORY_VERSION
from brx.runs.folder import RunFolder
from brx.runs.metrics import Record, read_metrics
from brx.train.efficiency import Efficiency


class Summary:
    """Follows a run's records and writes its summary."""

    def __init__(
        self,
        folder: RunFolder,
        config: RunConfig,
        fingerprint: str,
        device: torch.device,
        first_iteration: int,
        efficiency: Efficiency,
    ) -> None:
        self._folder = folder
        self._config = config
        self._fingerprint = fingerprint
        self._device = device
        self._first_iteration = first_iteration
        self._started = time.time()
        self._efficiency = efficiency
        self._train_loss = _Best()
        self._val_loss = _Best()
        self._first_seconds = 0.0
        for record in read_metrics(folder.metrics):
            self.log([record])
            self._first_seconds = record.get("seconds", self._first_seconds)

    def log(self, records: list[Record]) -> None:
        """Take in records that were written."""
        for record in records:
            self._train_loss.see(record.get("train_loss"), record["iteration"])
            self._val_loss.see(record.get("val_loss"), record["iteration"])

    def write(
        self,
        status: str,
        iteration: int,
        training_seconds: float,
        error: str | None = None,
        memory: list[tuple[int, int]] | None = None,
    ) -> None:
        """Write the summary; that of a finished run stays, if this session had nothing to add to it.

        Args:
            status: finished, interrupted, diverged or failed.
            training_seconds: time spent training over all sessions, without validations and checkpoints.
            memory: of each rank, the measured and the planned peak in bytes, if they could still be asked.
        """
        if status == "finished" and iteration == self._first_iteration == self._finished_iteration():
            return
        training = self._config.training
        tokens_per_iteration = self._config.tokens_per_update
        session_seconds = training_seconds - self._first_seconds
        session_tokens = (iteration - self._first_iteration) * tokens_per_iteration
        rate = session_tokens / session_seconds if session_seconds > 0 else None
        utilization = self._efficiency.utilization
        content = {
            "status": status,
            "error": error,
            "iteration": iteration,
            "last_iteration": training.last_iteration,
            "final_train_loss": self._train_loss.newest,
            "best_train_loss": self._train_loss.best,
            "final_val_loss": self._val_loss.newest,
            "best_val_loss": self._val_loss.best,
            "best_val_iteration": self._val_loss.best_iteration,
            "tokens": iteration * tokens_per_iteration,
            "training_seconds": round(training_seconds, 3),
            "session_wall_seconds": round(time.time() - self._started, 3),
            "tokens_per_second": None if rate is None else round(rate, 1),
            "model_flops_per_second": None if rate is None else round(rate * utilization.flops_per_token),
            "mfu": None if rate is None else utilization.mfu(rate),
            "refresh_seconds": self._efficiency.refresh.seconds,
            "peak_memory_bytes": [measured for measured, _ in memory] if memory else [peak_memory(self._device)],
            "planned_memory_bytes": [planned for _, planned in memory] if memory else None,
            "device": describe_device(self._device),
            "data_fingerprint": self._fingerprint,
            "trajectory_version": TRAJECTORY_VERSION,
            "versions": {"brx": brx.__version__, "torch": torch.__version__, "python": platform.python_version()},
            "git_commit": git_commit(),
            "finished_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        }
        write_json(self._folder.summary, content)

    def _finished_iteration(self) -> int | None:
        """Where the run had finished before, if it had."""
        before = self._folder.read_summary()
        return before["iteration"] if before.get("status") == "finished" else None


class _Best:
    """The newest and the lowest of a series."""

    def __init__(self) -> None:
        self.newest: float | None = None
        self.best: float | None = None
        self.best_iteration: int | None = None

    def see(self, value: Any, iteration: int) -> None:
        if value is None:
            return
        self.newest = value
        if not math.isnan(value) and (self.best is None or value < self.best):
            self.best, self.best_iteration = value, iteration


def peak_memory(device: torch.device) -> int:
    """Largest memory in bytes that this process has held: on the GPU its allocator's, else resident memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if platform.system() == "Darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def describe_device(device: torch.device) -> dict[str, Any]:
    """The device's kind and name, and the CPU threads."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    return {"type": device.type, "name": name, "threads": torch.get_num_threads()}


def git_commit() -> str | None:
    """The commit of the checkout that this code runs from, with `-dirty` if its code has changed; None outside of one.

    An installed copy may lie in somebody else's checkout: it is this code's only if it knows this file.
    """
    package = Path(brx.__file__).parent

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(package), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", Path(brx.__file__).name)
        return git("rev-parse", "HEAD") + ("-dirty" if git("status", "--porcelain", "--", ".") else "")
    except (OSError, subprocess.SubprocessError):
        return None
