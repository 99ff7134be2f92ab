"""Finished (or running) runs as the analyses read them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from brx.config.loading import load_config
from brx.config.schema import BasisRotationConfig, DelayCompensationConfig, DelayLike, RunConfig
from brx.config.user_code import name_without_folder
from brx.errors import UserError
from brx.pipeline.delay import stage_delays
from brx.runs.folder import parse_summary
from brx.runs.metrics import read_curves

Series = NDArray[np.float64]

# The share of a run's iterations over which its training loss is averaged before anything is read off it.
SMOOTHING = 0.02

RECORDED = "recorded:"
"""Before the method's name of a run that `brx.record` wrote."""

NAMED = {"method", "lr", "code_sha256", "source", "geometry", "refresh_schedule", "compensation"}
"""Settings of optimizers that `Run.unusual_settings` leaves out."""


@dataclass(frozen=True)
class Run:
    """One run's folder, read; losses in nats."""

    path: Path
    config: RunConfig
    summary: dict[str, Any]  # empty while the run is under way
    iterations: Series  # of the training losses, from 1
    train_loss: Series
    seconds: Series  # of training at each iteration, without validations and checkpoints
    val_iterations: Series
    val_loss: Series

    @classmethod
    def load(cls, path: Path) -> Run:
        """Read a run's folder; UserError where it is none, or has no training loss yet."""
        if not (path / "config.yaml").is_file():
            raise UserError(f"{path}: not a run's folder (it has no config.yaml)")
        summary_path = path / "summary.json"
        try:
            summary = parse_summary(summary_path.read_text(encoding="utf-8")) if summary_path.is_file() else {}
        except ValueError as error:
            raise UserError(f"{summary_path}: not readable: {error}") from None
        config = load_config(path / "config.yaml")
        return cls(path, config, summary, *read_curves(path))

    @property
    def largest_delay(self) -> float:
        """Of a stage, in updates; 0 without delay, NaN where a delay function is no longer there."""
        try:
            delays = stage_delays(self.config.pipeline, self.config.training.seed)
        except UserError:  # the file of a delay function has gone or changed since
            return math.nan
        return max(delay.tau_updates for delay in delays)

    @property
    def architecture(self) -> str:
        """The model in a few words; of a recorded run the task."""
        model = self.config.model
        if self.config.optimizer.method.startswith(RECORDED):
            return self.config.data.source
        mixture = f", {model.moe.experts} experts" if model.moe else ""
        return f"{model.blocks} blocks, d {model.width}{mixture}"

    @property
    def method(self) -> str:
        """The method with what tells its variants apart, for example `basis-rotation 1st/unilateral`."""
        optimizer = self.config.optimizer
        if optimizer.method.startswith(RECORDED):
            return optimizer.method.removeprefix(RECORDED).replace("_", "-")
        name = name_without_folder(optimizer.method)
        if isinstance(optimizer, BasisRotationConfig):
            if (optimizer.source, optimizer.geometry) != ("2nd", "bilateral"):
                name += f" {optimizer.source}/{optimizer.geometry}"
            if optimizer.refresh_schedule != "uniform":
                name += f" {optimizer.refresh_schedule}"
        return name

    @property
    def unusual_settings(self) -> list[str]:
        """As `key value` the optimizer's settings that are no defaults and that `method` and `variant` do not name."""
        optimizer = self.config.optimizer
        unusual = {key: getattr(optimizer, key) for key in optimizer.model_dump(exclude_defaults=True)}
        unusual |= unusual.pop("arguments", {})
        named = NAMED | ({"frequency"} if isinstance(optimizer, BasisRotationConfig) else set())
        return [
            f"{key} {value:g}" if isinstance(value, float) else f"{key} {value}"
            for key, value in unusual.items()
            if key not in named
        ]

    @property
    def variant(self) -> str:
        """The method, and what else about it differs from its usual form."""
        optimizer, parts = self.config.optimizer, [self.method, *self.unusual_settings]
        if isinstance(optimizer, BasisRotationConfig) and optimizer.frequency != 10:
            parts.append(f"refresh every {optimizer.frequency}")
        if isinstance(optimizer, DelayCompensationConfig):
            parts.append(f"lambda {optimizer.compensation:g}")
        if self.config.pipeline.stash != "exact":
            parts.append({"none": "no stashing", "predict": "weight prediction"}[self.config.pipeline.stash])
        if self.config.pipeline.forecast is not None:
            parts.append(f"forecast by {self.config.pipeline.forecast.replace('-', ' ')}")
        delay = self.config.pipeline.delay
        if delay != "pipeline" and not isinstance(delay, DelayLike):
            parts.append(f"delay {self.config.pipeline.delay_text}")
        return ", ".join(parts)

    @property
    def status(self) -> str:
        """What the summary says; unfinished while there is none of the whole run.

        A run that stopped early (`training.stop_after`) and has been taken up again keeps its old summary for a while.
        """
        last = self.config.training.last_iteration
        is_old = self.summary.get("status") == "finished" and self.summary.get("last_iteration", last) < last
        return "unfinished" if is_old else str(self.summary.get("status", "unfinished"))

    @cached_property
    def smoothed(self) -> Series:
        """The training loss averaged over windows of 2 % of the schedule; the last one is the final training loss.

        A mean belongs to the middle of its window (`centres`): dated at the end, it would come late by half a window.
        """
        window = self._window
        sums = np.cumsum(np.concatenate([[0.0], self.train_loss]))
        means: Series = (sums[window:] - sums[:-window]) / window
        return means

    @property
    def centres(self) -> slice:
        """The indices, into `iterations`, of the smoothed losses."""
        return slice(self._window // 2, len(self.iterations) - self._window // 2)

    @property
    def _window(self) -> int:
        """An odd number of iterations."""
        longest = min(SMOOTHING * self.config.training.iterations, len(self.iterations))
        return max(1, 2 * math.ceil(longest / 2) - 1)

    @property
    def undisturbed_pace(self) -> float:
        """Seconds per iteration while nothing else used the machine: the 5 % quantile of the pace over 20 iterations.

        Cells of a sweep share a machine, whose other work can only slow them down.
        """
        marks = self.seconds[::20]
        if len(marks) < 2:
            return float(self.seconds[-1] / self.iterations[-1])
        return float(np.quantile(np.diff(marks) / 20, 0.05))
