"""Metrics, progress and summary.json of a run, from the numbers that its devices report."""

import math
import platform
import resource
import subprocess
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple, Self

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
    """A `StepResult` on the host: one iteration's numbers from one device."""

    iteration: int
    loss: float | None
    """In nats; None on all devices but the last."""
    auxiliary_losses: list[float]
    """Per stage with a mixture of experts."""
    grad_norms: list[float]
    """Per stage, before clipping."""
    update_norms: list[float]
    """Per stage; empty where they were not measured."""
    update_seconds: float
    """Time of the method's step."""
    failed_refreshes: int
    """Refreshes of a basis that have failed since the run began."""

    @classmethod
    def of(cls, result: StepResult, failed_refreshes: int) -> Self:
        """Fetch a result from its device; waits for a GPU."""
        auxiliary_losses: list[float] = []
        if result.auxiliary_losses is not None:
            auxiliary_losses = result.auxiliary_losses.tolist()
        update_norms: list[float] = []
        if result.update_norms is not None:
            update_norms = result.update_norms.tolist()
        return cls(
            iteration=result.iteration,
            loss=None if result.loss is None else result.loss.item(),
            auxiliary_losses=auxiliary_losses,
            grad_norms=result.grad_norms.tolist(),
            update_norms=update_norms,
            update_seconds=result.update_time.seconds(),
            failed_refreshes=failed_refreshes,
        )


class RunPoint(NamedTuple):
    """A point of the run."""

    iteration: int
    seconds: float  # of training until then, over all sessions


class RunRecorder:
    """Turns what the devices report into metrics and progress, and sums the run up. Rank 0 has one.

    Args:
        stack: closes the files and trackers that this opens.
        assembly: what this device trains with.
        fingerprint: the fingerprint of the data.
        start: the beginning of this session.
    """

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
        start: RunPoint,
    ) -> None:
        self._config = config
        self._folder = folder
        self._progress = progress
        self.metrics = stack.enter_context(MetricsWriter(folder.metrics))
        self._trackers = open_trackers(config, folder.path, start.iteration + 1)
        for tracker in self._trackers:
            stack.callback(tracker.close)
        self._assembly = assembly
        self._device = device
        self._fingerprint = fingerprint
        self._utilization = Utilization(config, device)
        self._refresh_time = RefreshTime(config)
        self._started = time.monotonic()
        self._start = start
        self._reported = start  # the last iteration that was reported

    def record(self, reports: list[tuple[list[StepNumbers], int]], seconds: list[float]) -> None:
        """Write a record per iteration.

        Args:
            reports: from each device, in order of rank: its numbers of these iterations, and its
                peak memory in bytes.
            seconds: the training seconds at the end of each iteration.
        """
        steps_by_device = [steps for steps, _ in reports]
        steps_by_iteration = list(zip(*steps_by_device, strict=True))
        update_seconds: list[float] = []
        records: list[Record] = []
        for steps, second in zip(steps_by_iteration, seconds, strict=True):
            # Devices update at the same time, so the slowest counts.
            slowest = max(step.update_seconds for step in steps)
            update_seconds.append(slowest)
            self._refresh_time.add(steps[0].iteration, slowest)
            records.append(self._record(steps, second))
        newest = records[-1]
        iteration = newest["iteration"]
        rate = self._rate(self._reported, iteration, seconds[-1])
        self._reported = RunPoint(iteration, seconds[-1])
        newest["peak_memory_bytes"] = max(peak for _, peak in reports)
        measured = {
            "tokens_per_second": rate,
            "mfu": self._utilization.mfu(rate),
            "update_seconds": sum(update_seconds) / len(update_seconds),
            "refresh_seconds": self._refresh_time.seconds,
        }
        for name, value in measured.items():
            if value is not None:
                newest[name] = float(f"{value:.5g}")
        self._write(records)
        self._progress.update(iteration, f"loss {newest['train_loss']:.3f}  {rate:,.0f} tokens/s")

    def record_validation(self, iteration: int, loss: float) -> None:
        """Write a validation loss, in nats."""
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
        """Write summary.json.

        Args:
            status: `finished`, `interrupted`, `failed` or `diverged`.
            iteration: the last one that was made.
            training_seconds: over all sessions, without validations and checkpoints.
            error: why the run failed.
            memory: per rank, its measured and its planned peak in bytes. Empty if the ranks can no
                longer be asked.
        """
        if status == "finished" and self._was_finished_before(iteration):
            return  # this session had nothing to add
        peaks = [measured for measured, _ in memory] or [peak_memory(self._device)]
        planned_peaks = [planned for _, planned in memory] or None
        num_parameters, _ = count_parameters(self._config.model, self._config.data.vocabulary_size)
        write_summary(
            self._folder,
            self._config,
            status,
            error,
            iteration,
            self._fingerprint,
            num_parameters=num_parameters,
            tokens=iteration * self._config.tokens_per_update,
            training_seconds=round(training_seconds, 3),
            session_wall_seconds=round(time.monotonic() - self._started, 3),
            **self._rates_of_session(iteration, training_seconds),
            refresh_seconds=self._refresh_time.seconds,
            peak_memory_bytes=peaks,
            planned_memory_bytes=planned_peaks,
            device=_description_of(self._device),
        )

    def _was_finished_before(self, iteration: int) -> bool:
        """Whether the run had reached this iteration, its last, before this session."""
        before = self._folder.read_summary()
        is_in_summary = before.get("status") == "finished" and before.get("iteration") == iteration
        return is_in_summary and iteration == self._start.iteration

    def _rates_of_session(self, iteration: int, training_seconds: float) -> dict[str, Any]:
        """Mean rates since this session began; None where it has trained nothing."""
        if training_seconds <= self._start.seconds:
            return {"tokens_per_second": None, "model_flops_per_second": None, "mfu": None}
        rate = self._rate(self._start, iteration, training_seconds)
        return {
            "tokens_per_second": round(rate, 1),
            "model_flops_per_second": round(rate * self._utilization.flops_per_token),
            "mfu": self._utilization.mfu(rate),
        }

    def _rate(self, since: RunPoint, iteration: int, seconds: float) -> float:
        """Tokens per second of training from a point to an iteration and its training seconds."""
        num_tokens = (iteration - since.iteration) * self._config.tokens_per_update
        return num_tokens / max(seconds - since.seconds, 1e-9)

    def _record(self, steps: Sequence[StepNumbers], seconds: float) -> Record:
        """One iteration from the numbers of all devices, in order of rank."""
        iteration = steps[0].iteration
        loss = steps[-1].loss  # the last device has the head
        assert loss is not None
        grad_norms: list[float] = []
        update_norms: list[float] = []
        auxiliary_losses: list[float] = []
        for step in steps:
            grad_norms += step.grad_norms
            update_norms += step.update_norms
            auxiliary_losses += step.auxiliary_losses
        record: Record = {
            "iteration": iteration,
            "train_loss": exact(loss),
            "lr": self._assembly.updater.lr(iteration),
            "grad_norm": exact(math.hypot(*grad_norms)),
            "tokens": iteration * self._config.tokens_per_update,
            "seconds": round(seconds, 4),
        }
        if auxiliary_losses:
            # Rounded once: the same sum on any number of devices.
            record["auxiliary_loss"] = exact(math.fsum(auxiliary_losses))
        if iteration % self._config.training.log_every == 0:
            record["stage_grad_norms"] = [exact(norm) for norm in grad_norms]
            failed_refreshes = sum(step.failed_refreshes for step in steps)
            if failed_refreshes:
                record["failed_refreshes"] = failed_refreshes
        if update_norms:
            record["stage_update_norms"] = [exact(norm) for norm in update_norms]
        if self._assembly.probe is not None:
            for name, numbers in self._assembly.probe.take(iteration).items():
                record[name] = [None if number is None else exact(number) for number in numbers]
        return record

    def _write(self, records: list[Record]) -> None:
        self.metrics.write(records)
        for tracker in self._trackers:
            for record in records:
                tracker.log(scalars_of(record), record["iteration"])


class Utilization:
    """MFU (model FLOPs utilization): the model's FLOPs per second as a share of the devices' peak
    (PaLM, arXiv:2204.02311, appendix B).

    Recomputation and the method's own products do not count. In a mixture, only the experts that a
    token is sent to count.
    """

    def __init__(self, config: RunConfig, device: torch.device) -> None:
        flops = training_flops(
            config.model, config.data.vocabulary_size, config.training.batch_size
        )
        num_tokens = config.training.batch_size * config.model.sequence_length
        self.flops_per_token = flops / num_tokens
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
        self._peak = peak_flops(name, config.runtime.precision)  # FLOPs per second of a device
        self._num_devices = config.pipeline.devices

    def mfu(self, tokens_per_second: float) -> float | None:
        """The share (0 to 1) at a rate; None if the devices' peak is not known."""
        if self._peak is None:
            return None
        used = tokens_per_second * self.flops_per_token
        return used / (self._peak * self._num_devices)


class RefreshTime:
    """The time that a refresh of the bases adds to an update: mean time of the updates with a
    refresh, minus mean time of the updates without one.

    It is known for schedules with which all stages refresh in the same iterations.
    """

    def __init__(self, config: RunConfig) -> None:
        optimizer = config.optimizer
        self._frequency: int | None = None  # None where stages refresh in different iterations
        if isinstance(optimizer, BasisRotationConfig) and not optimizer.staggered:
            if optimizer.refresh_schedule == "uniform":
                self._frequency = optimizer.frequency
            self._first = optimizer.first_refresh
        self._with_refresh: list[float] = []  # seconds per update
        self._without_refresh: list[float] = []

    def add(self, iteration: int, update_seconds: float) -> None:
        """Count the time of an iteration's update."""
        # The first basis takes longer, because it needs eigenvectors.
        if self._frequency is None or iteration <= self._first:
            return
        if iteration % self._frequency == 0:
            self._with_refresh.append(update_seconds)
        else:
            self._without_refresh.append(update_seconds)

    @property
    def seconds(self) -> float | None:
        """The difference; None until updates of both kinds have been seen."""
        if not self._with_refresh or not self._without_refresh:
            return None
        return fmean(self._with_refresh) - fmean(self._without_refresh)


def write_summary(
    folder: RunFolder,
    config: RunConfig,
    status: str,
    error: str | None,
    iteration: int,
    fingerprint: str,
    **measured: Any,
) -> None:
    """Write summary.json from the metrics of a run and from further measurements.

    Args:
        status: `finished`, `interrupted`, `failed`, `diverged` or `unfinished`.
        error: why the run failed.
        iteration: the last one that was made.
        fingerprint: the fingerprint of the data.
        measured: further entries, by name.
    """
    train: list[float] = []
    val: list[tuple[float, int]] = []  # loss and iteration
    for record in read_metrics(folder.metrics):
        if "train_loss" in record:
            train.append(record["train_loss"])
        if "val_loss" in record:
            val.append((record["val_loss"], record["iteration"]))
    best_train = min((loss for loss in train if not math.isnan(loss)), default=None)
    best_val, best_val_iteration = min(
        (entry for entry in val if not math.isnan(entry[0])), default=(None, None)
    )
    content = {
        "status": status,
        "error": error,
        "iteration": iteration,
        "last_iteration": config.training.last_iteration,
        "final_train_loss": train[-1] if train else None,
        "best_train_loss": best_train,
        "final_val_loss": val[-1][0] if val else None,
        "best_val_loss": best_val,
        "best_val_iteration": best_val_iteration,
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
    """The most memory that this process has held, in bytes: on CUDA, in torch's allocator;
    elsewhere, resident memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit_bytes = 1 if platform.system() == "Darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit_bytes


def _description_of(device: torch.device) -> dict[str, Any]:
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    else:
        name = platform.processor() or platform.machine()
    return {"type": device.type, "name": name, "threads": torch.get_num_threads()}


def git_commit() -> str | None:
    """The commit of the checkout that this code runs from, followed by `-dirty` if the code has
    changed since; None if brx is not part of a checkout."""
    package = Path(brx.__file__).parent

    def git(*arguments: str) -> str:
        done = subprocess.run(
            ["git", "-C", str(package), *arguments],
            capture_output=True,
            text=True,
            check=True,
            timeout=10,
            env=environment_for_git(),
        )
        return done.stdout.strip()

    try:
        # Fails if the checkout is another project's, which only holds a copy of brx.
        git("ls-files", "--error-unmatch", Path(brx.__file__).name)
        commit = git("rev-parse", "HEAD")
        is_changed = bool(git("status", "--porcelain", "--", "."))
        return f"{commit}-dirty" if is_changed else commit
    except (OSError, subprocess.SubprocessError):
        return None
