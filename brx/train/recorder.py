"""From what the devices report to metrics and progress: of rank 0, which gathers it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from brx.config.schema import RunConfig
from brx.pipeline.engine import StepResult
from brx.progress import ProgressBar
from brx.runs.metrics import MetricsWriter, Record, exact
from brx.train.efficiency import Efficiency
from brx.train.staleness import Measures


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
    """Fetch a result from its device; waits for a GPU."""
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


@dataclass(frozen=True)
class DeviceReport:
    """What one device tells rank 0 at a log point: its steps since the last one, and its peak memory in bytes."""

    steps: list[StepNumbers]
    peak_memory_bytes: int


class RunRecorder:
    """Turns what the devices report into metrics and progress.

    Args:
        lr: the learning rate of an iteration, of a stage without delay.
        others: are shown the records as well: the summary, trackers.
        start: the iteration and the training seconds where this session begins.
        staleness: what was measured of it at an iteration, if anything.
    """

    def __init__(
        self,
        config: RunConfig,
        lr: Callable[[int], float],
        metrics: MetricsWriter,
        others: Sequence[Callable[[list[Record]], None]],
        progress: ProgressBar,
        efficiency: Efficiency,
        start: tuple[int, float],
        staleness: Callable[[int], Measures],
    ) -> None:
        self._tokens_per_iteration = config.tokens_per_update
        self._lr = lr
        self._metrics = metrics
        self._others = others
        self._progress = progress
        self._log_every = config.training.log_every
        self._efficiency = efficiency
        self._reported = start
        self._staleness = staleness

    def record(self, reports: list[DeviceReport], seconds: list[float]) -> None:
        """Write one record per iteration; the newest also tells speed and memory."""
        steps = [merge(list(parts)) for parts in zip(*(report.steps for report in reports), strict=True)]
        for step in steps:
            self._efficiency.refresh.see(step.iteration, step.update_seconds)
        records = [self._record(step, second) for step, second in zip(steps, seconds, strict=True)]
        newest = records[-1]
        iteration, second = self._reported
        rate = (newest["iteration"] - iteration) * self._tokens_per_iteration / max(seconds[-1] - second, 1e-9)
        self._reported = (newest["iteration"], seconds[-1])
        measured = {
            "tokens_per_second": rate,
            "mfu": self._efficiency.utilization.mfu(rate),
            "update_seconds": sum(step.update_seconds for step in steps) / len(steps),
            "refresh_seconds": self._efficiency.refresh.seconds,
        }
        newest["peak_memory_bytes"] = max(report.peak_memory_bytes for report in reports)
        newest |= {key: float(f"{value:.5g}") for key, value in measured.items() if value is not None}
        self._write(records)
        self._progress.update(newest["iteration"], f"loss {newest['train_loss']:.3f}  {rate:,.0f} tokens/s")

    def record_validation(self, iteration: int, losses: list[float | None]) -> None:
        """Write a validation."""
        loss = losses[-1]
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
        for name, numbers in self._staleness(step.iteration).items():
            record[name] = [None if number is None else exact(number) for number in numbers]
        return record

    def _write(self, records: list[Record]) -> None:
        self._metrics.write(records)
        for show in self._others:
            show(records)
