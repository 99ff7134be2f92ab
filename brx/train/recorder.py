"""From what the devices report to metrics, progress and summary (rank 0)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from brx.config.schema import RunConfig
from brx.pipeline.engine import StepResult
from brx.runs.metrics import MetricsWriter, Record, exact
from brx.runs.summary import Summary
from brx.train.efficiency import RefreshTime
from brx.train.progress import TrainingProgress
from brx.train.trackers import Tracker


@dataclass(frozen=True)
class StepNumbers:
    """A StepResult on the host."""

    iteration: int
    loss: float | None
    auxiliary_loss: float | None
    grad_norms: list[float]
    update_norms: list[float]
    update_seconds: float
    failed_refreshes: int


def to_numbers(result: StepResult, failed_refreshes: int) -> StepNumbers:
    """Fetch a result from its device; waits for a GPU.

    Args:
        result: of an iteration.
        failed_refreshes: how many there have been when it was fetched.
    """
    return StepNumbers(
        result.iteration,
        None if result.loss is None else result.loss.item(),
        None if result.auxiliary_loss is None else result.auxiliary_loss.item(),
        result.grad_norms.tolist(),
        [] if result.update_norms is None else result.update_norms.tolist(),
        result.update_time.seconds(),
        failed_refreshes,
    )


def merge(parts: list[StepNumbers]) -> StepNumbers:
    """One iteration as all devices saw it, in order of rank; of the updates, which run at one time, the slowest."""
    auxiliary_losses = [part.auxiliary_loss for part in parts if part.auxiliary_loss is not None]
    return StepNumbers(
        parts[0].iteration,
        parts[-1].loss,
        sum(auxiliary_losses) if auxiliary_losses else None,
        [norm for part in parts for norm in part.grad_norms],
        [norm for part in parts for norm in part.update_norms],
        max(part.update_seconds for part in parts),
        sum(part.failed_refreshes for part in parts),
    )


class Recorder:
    """Turns what the devices report into metrics, progress and summary.

    Args:
        config: the run.
        lr: the learning rate of an iteration, of a stage without delay.
        metrics: where records go.
        trackers: where else.
        progress: what the user sees.
        summary: follows along.
    """

    def __init__(
        self,
        config: RunConfig,
        lr: Callable[[int], float],
        metrics: MetricsWriter,
        trackers: list[Tracker],
        progress: TrainingProgress,
        summary: Summary,
    ) -> None:
        self.summary = summary
        self._tokens_per_iteration = config.training.batch_size * config.model.sequence_length
        self._lr = lr
        self._metrics = metrics
        self._trackers = trackers
        self._progress = progress
        self._log_every = config.training.log_every
        self._refresh = RefreshTime(config)
        self._reported = (0, 0.0)

    def start(self, iteration: int, training_seconds: float) -> None:
        """Where this session begins."""
        self._reported = (iteration, training_seconds)

    def record(self, steps: list[StepNumbers], seconds: list[float], peak_memory_bytes: int) -> None:
        """Write one record an iteration; the newest also tells speed and memory.

        Args:
            steps: in order of iteration.
            seconds: the training time at the end of each.
            peak_memory_bytes: of the rank that has needed most.
        """
        for step in steps:
            self._refresh.see(step.iteration, step.update_seconds)
        records = [self._record(step, second) for step, second in zip(steps, seconds, strict=True)]
        newest = records[-1]
        iteration, second = self._reported
        rate = (newest["iteration"] - iteration) * self._tokens_per_iteration / max(seconds[-1] - second, 1e-9)
        self._reported = (newest["iteration"], seconds[-1])
        self.summary.refresh_seconds = self._refresh.seconds
        measured = {
            "tokens_per_second": rate,
            "mfu": self.summary.utilization.mfu(rate),
            "update_seconds": sum(step.update_seconds for step in steps) / len(steps),
            "refresh_seconds": self._refresh.seconds,
        }
        newest["peak_memory_bytes"] = peak_memory_bytes
        newest |= {key: float(f"{value:.5g}") for key, value in measured.items() if value is not None}
        self._write(records)
        self._progress.update(newest["iteration"], newest["train_loss"], rate)

    def record_validation(self, iteration: int, loss: float | None) -> None:
        """Write a validation."""
        assert loss is not None
        self._write([{"iteration": iteration, "val_loss": loss}])
        self._progress.say(f"iteration {iteration}: validation loss {loss:.4f}")

    def sync(self) -> None:
        """Let the metrics written so far survive a power cut."""
        self._metrics.sync()

    def _record(self, step: StepNumbers, seconds: float) -> Record:
        assert step.loss is not None
        record: Record = {
            "iteration": step.iteration,
            "train_loss": exact(step.loss),
            "lr": self._lr(step.iteration),
            "grad_norm": exact(math.hypot(*step.grad_norms)),
            "tokens": step.iteration * self._tokens_per_iteration,
            "seconds": round(seconds, 4),
        }
        if step.auxiliary_loss is not None:
            record["auxiliary_loss"] = exact(step.auxiliary_loss)
        if step.iteration % self._log_every == 0:
            record["stage_grad_norms"] = [exact(norm) for norm in step.grad_norms]
            if step.failed_refreshes:
                record["failed_refreshes"] = step.failed_refreshes
        if step.update_norms:
            record["stage_update_norms"] = [exact(norm) for norm in step.update_norms]
        return record

    def _write(self, records: list[Record]) -> None:
        self._metrics.write(records)
        self.summary.see(records)
        for tracker in self._trackers:
            tracker.log(records)
