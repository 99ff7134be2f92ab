"""What a run leaves on disk but its checkpoints: metrics and progress, from what the devices
report; summary.json."""

import math
import platform
import resource
import subprocess
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any, Self

import torch

import brx
from brx.accelerators import peak_flops
from brx.config.schema import BasisRotationConfig, RunConfig
from brx.environment import environment_for_git
from brx.files import write_json
from brx.methods.trajectory_version import TRAJECTORY_VERSION
from brx.model.sizes import count_parameters, training_flops
from brx.pipeline.engine import StepResult
from brx.progress import ProgressBar
from brx.runs.folder import RunFolder
from brx.runs.metrics import MetricsWriter, Record, exact, read_metrics
from brx.train.build import Assembly
from brx.train.trackers import open_trackers, scalars_of


@dataclass(frozen=True)
class StepNumbers:
    """A StepResult on the host."""

    iteration: int
    loss: float | None
    auxiliary_losses: list[float]  # per stage with a mixture
    grad_norms: list[float]
    update_norms: list[float]
    update_seconds: float
    failed_refreshes: int

    @classmethod
    def of(cls, result: StepResult, failed_refreshes: int) -> Self:
        """Fetch a result from its device; waits for a GPU."""
        loss = None if result.loss is None else result.loss.item()
        auxiliary_losses = (
            [] if result.auxiliary_losses is None else result.auxiliary_losses.tolist()
        )
        update_norms = [] if result.update_norms is None else result.update_norms.tolist()
        grad_norms, seconds = result.grad_norms.tolist(), result.update_time.seconds()
        return cls(
            result.iteration,
            loss,
            auxiliary_losses,
            grad_norms,
            update_norms,
            seconds,
            failed_refreshes,
        )


class RunRecorder:
    """Turns what the devices report into metrics and progress, and sums the run up; of rank 0,
    which gathers it.

    `fingerprint` is the data's, `start` the iteration and training seconds before this session;
    `stack` closes what it opens."""

    def __init__(
        self,
        config: RunConfig,
        folder: RunFolder,
        progress: ProgressBar,
        stack: ExitStack,
        *,
        assembly: Assembly,
        device: torch.device,
        fingerprint: str,
        start: tuple[int, float],
    ) -> None:
        self._config, self._folder, self._progress = config, folder, progress
        self.metrics = stack.enter_context(MetricsWriter(folder.metrics))
        self._trackers = open_trackers(config, folder.path, start[0] + 1)
        for tracker in self._trackers:
            stack.callback(tracker.close)
        self._assembly, self._device, self._fingerprint = assembly, device, fingerprint
        self._utilization, self._refresh_time = Utilization(config, device), RefreshTime(config)
        self._started = time.monotonic()  # which no clock change turns back
        self._first = self._reported = start

    def record(self, reports: list[tuple[list[StepNumbers], int]], seconds: list[float]) -> None:
        """Write a record per iteration, with the seconds at its end, from each device's steps and
        peak memory."""
        # By iteration and device.
        steps = list(zip(*(own_steps for own_steps, _ in reports), strict=True))
        # Devices update at the same time, so the slowest counts.
        update_seconds = [max(part.update_seconds for part in parts) for parts in steps]
        for parts, update in zip(steps, update_seconds, strict=True):
            self._refresh_time.see(parts[0].iteration, update)
        records = [
            self._record(parts, second) for parts, second in zip(steps, seconds, strict=True)
        ]
        newest = records[-1]
        rate = self._rate(self._reported, newest["iteration"], seconds[-1])
        self._reported = (newest["iteration"], seconds[-1])
        measured = {
            "tokens_per_second": rate,
            "mfu": self._utilization.mfu(rate),
            "update_seconds": sum(update_seconds) / len(steps),
            "refresh_seconds": self._refresh_time.seconds,
        }
        newest["peak_memory_bytes"] = max(peak for _, peak in reports)
        newest |= {
            key: float(f"{value:.5g}") for key, value in measured.items() if value is not None
        }
        self._write(records)
        self._progress.update(
            newest["iteration"], f"loss {newest['train_loss']:.3f}  {rate:,.0f} tokens/s"
        )

    def record_validation(self, iteration: int, loss: float) -> None:
        self._write([{"iteration": iteration, "val_loss": loss}])
        self._progress.say(f"iteration {iteration}: validation loss {loss:.4f}")

    def summarize(
        self,
        status: str,
        iteration: int,
        training_seconds: float,
        error: str | None = None,
        memory: Sequence[tuple[int, int]] = (),
    ) -> None:
        """Write summary.json. `training_seconds` sums all sessions, without validations and
        checkpoints; `memory` has each rank's measured and planned peak in bytes, if they could
        still be asked."""
        before = self._folder.read_summary()
        has_finished_here = (
            before.get("status") == "finished" and before.get("iteration") == iteration
        )
        if status == "finished" and iteration == self._first[0] and has_finished_here:
            return  # this session had nothing to add
        rate = (
            self._rate(self._first, iteration, training_seconds)
            if training_seconds > self._first[1]
            else None
        )
        device = self._device
        is_cuda = device.type == "cuda"
        name = (
            torch.cuda.get_device_name(device)
            if is_cuda
            else platform.processor() or platform.machine()
        )
        write_summary(
            self._folder,
            self._config,
            status,
            error,
            iteration,
            self._fingerprint,
            num_parameters=count_parameters(self._config.model, self._config.data.vocabulary_size)[
                0
            ],
            tokens=iteration * self._config.tokens_per_update,
            training_seconds=round(training_seconds, 3),
            session_wall_seconds=round(time.monotonic() - self._started, 3),
            tokens_per_second=None if rate is None else round(rate, 1),
            model_flops_per_second=None
            if rate is None
            else round(rate * self._utilization.flops_per_token),
            mfu=None if rate is None else self._utilization.mfu(rate),
            refresh_seconds=self._refresh_time.seconds,
            peak_memory_bytes=[measured for measured, _ in memory] or [peak_memory(device)],
            planned_memory_bytes=[planned for _, planned in memory] or None,
            device={"type": device.type, "name": name, "threads": torch.get_num_threads()},
        )

    def _rate(self, since: tuple[int, float], iteration: int, seconds: float) -> float:
        return (
            (iteration - since[0]) * self._config.tokens_per_update / max(seconds - since[1], 1e-9)
        )

    def _record(self, parts: Sequence[StepNumbers], seconds: float) -> Record:
        """One iteration as all devices saw it, in order of rank."""
        iteration, loss = parts[0].iteration, parts[-1].loss
        assert loss is not None  # the last device has the head
        grad_norms = [norm for part in parts for norm in part.grad_norms]
        record: Record = {
            "iteration": iteration,
            "train_loss": exact(loss),
            "lr": self._assembly.updater.lr(iteration),
            "grad_norm": exact(math.hypot(*grad_norms)),
            "tokens": iteration * self._config.tokens_per_update,
            "seconds": round(seconds, 4),
        }
        auxiliary_losses = [loss for part in parts for loss in part.auxiliary_losses]
        if auxiliary_losses:
            # Rounded once: the same sum on any number of devices.
            record["auxiliary_loss"] = exact(math.fsum(auxiliary_losses))
        if iteration % self._config.training.log_every == 0:
            record["stage_grad_norms"] = [exact(norm) for norm in grad_norms]
            if failed_refreshes := sum(part.failed_refreshes for part in parts):
                record["failed_refreshes"] = failed_refreshes
        if update_norms := [exact(norm) for part in parts for norm in part.update_norms]:
            record["stage_update_norms"] = update_norms
        probe = self._assembly.probe
        for name, numbers in ({} if probe is None else probe.take(iteration)).items():
            record[name] = [None if number is None else exact(number) for number in numbers]
        return record

    def _write(self, records: list[Record]) -> None:
        self.metrics.write(records)
        for tracker, record in product(self._trackers, records):
            tracker.log(scalars_of(record), record["iteration"])


class Utilization:
    """MFU: the model's multiplications per second as a share of the devices' peak (PaLM,
    arXiv:2204.02311, appendix B).

    Recomputation and the method's own products do not count; of a mixture, the chosen experts do.
    """

    def __init__(self, config: RunConfig, device: torch.device) -> None:
        flops = training_flops(
            config.model, config.data.vocabulary_size, config.training.batch_size
        )
        self.flops_per_token = flops / (config.training.batch_size * config.model.sequence_length)
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
        self._peak, self._num_devices = (
            peak_flops(name, config.runtime.precision),
            config.pipeline.devices,
        )

    def mfu(self, tokens_per_second: float) -> float | None:
        """The share at that rate; None where the devices' peak is not known."""
        used = tokens_per_second * self.flops_per_token
        return None if self._peak is None else used / (self._peak * self._num_devices)


class RefreshTime:
    """What a refresh of the basis adds to an update: mean time of updates with one, less mean time
    of those without."""

    def __init__(self, config: RunConfig) -> None:
        optimizer = config.optimizer
        self._frequency: int | None = None  # where not all stages refresh in the same iterations
        if isinstance(optimizer, BasisRotationConfig) and not optimizer.staggered:
            self._frequency = (
                optimizer.frequency if optimizer.refresh_schedule == "uniform" else None
            )
            self._first = optimizer.first_refresh
        # Updates with a refresh, and without.
        self._seconds: dict[bool, list[float]] = {
            True: [],
            False: [],
        }

    def see(self, iteration: int, update_seconds: float) -> None:
        # The first basis takes longer, because it needs eigenvectors.
        if self._frequency is not None and iteration > self._first:
            self._seconds[iteration % self._frequency == 0].append(update_seconds)

    @property
    def seconds(self) -> float | None:
        """The difference; None as long as one of the two kinds has not been seen."""
        return (
            fmean(self._seconds[True]) - fmean(self._seconds[False])
            if all(self._seconds.values())
            else None
        )


def write_summary(
    folder: RunFolder,
    config: RunConfig,
    status: str,
    error: str | None,
    iteration: int,
    fingerprint: str,
    **measured: Any,
) -> None:
    records = list(read_metrics(folder.metrics))
    train = [record["train_loss"] for record in records if "train_loss" in record]
    val = [(record["val_loss"], record["iteration"]) for record in records if "val_loss" in record]
    best_val = min((entry for entry in val if not math.isnan(entry[0])), default=(None, None))
    content = {
        "status": status,
        "error": error,
        "iteration": iteration,
        "last_iteration": config.training.last_iteration,
        "final_train_loss": train[-1] if train else None,
        "best_train_loss": min((loss for loss in train if not math.isnan(loss)), default=None),
        "final_val_loss": val[-1][0] if val else None,
        "best_val_loss": best_val[0],
        "best_val_iteration": best_val[1],
        **measured,
        "data_fingerprint": fingerprint,
        "trajectory_version": TRAJECTORY_VERSION,
        "versions": {
            "brx": brx.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "git_commit": git_commit(),
        "finished_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    write_json(folder.summary, content)


def peak_memory(device: torch.device) -> int:
    """Largest memory in bytes that this process has held: on the GPU its allocator's, else resident
    memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
        1 if platform.system() == "Darwin" else 1024
    )


def git_commit() -> str | None:
    """The commit of the checkout that this code runs from, with `-dirty` if its code has
    changed."""
    package = Path(brx.__file__).parent

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(package), *arguments]
        return subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=True,
            timeout=10,
            env=environment_for_git(),
        ).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", Path(brx.__file__).name)  # else it is not brx's own
        return git("rev-parse", "HEAD") + (
            "-dirty" if git("status", "--porcelain", "--", ".") else ""
        )
    except (OSError, subprocess.SubprocessError):
        return None
