"""One run's folder, read."""

import math
from collections import OrderedDict
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np

from brx.config.loading import config_of
from brx.config.schema import (
    RECORDED,
    BasisRotationConfig,
    DelayCode,
    DelayCompensationConfig,
    DelayLike,
    RunConfig,
)
from brx.config.user_code import name_without_folder, reading
from brx.errors import UserError
from brx.names import path_of_text
from brx.pipeline.delay import StageDelay, delays_from_facts, stage_delays
from brx.runs.cache import FileState, file_states, read_parsed
from brx.runs.folder import status_of
from brx.runs.slowdown import Series

MOST_BYTES = 2**28
"""How much memory may keep runs that have been read: enough for 800 runs of 10,000 iterations."""

SETTINGS_BYTES = 20_000
"""About how much memory the settings and the summary of a run take."""

SMOOTHING = 0.02  # the share of a run's iterations over which its training loss is averaged
PACE_EVERY = 20  # iterations over which a run's pace is measured
UNDISTURBED = 0.05  # this quantile of a run's paces counts as its undisturbed pace

NAMED = {
    "method",
    "lr",
    "code_sha256",
    "facts",
    "source",
    "geometry",
    "refresh_schedule",
    "compensation",
}
"""Settings of optimizers that `unusual_optimizer_settings` leaves out."""
STASH_MODES = {"none": "no stashing", "predict": "weight prediction"}
"""Stash modes in the names of variants."""


@dataclass(frozen=True)
class Run:
    """One run's folder, read; losses in nats."""

    path: Path
    config: RunConfig
    summary: dict[str, Any]  # empty while the run is under way
    iterations: Series  # (n,): iterations of the training losses, from 1
    train_loss: Series  # (n,)
    seconds: Series  # (n,): training time up to each iteration, without validations and checkpoints
    val_iterations: Series  # (m,)
    val_loss: Series  # (m,)

    @classmethod
    def load(cls, path: Path, states: tuple[FileState, ...] | None = None) -> Self:
        """Read a run's folder.

        Args:
            path: the folder.
            states: the states of its files (`brx.runs.cache.file_states`), if they have just been
                taken.

        Raises:
            UserError: it is not a run's folder, is damaged, or has no training loss yet.
        """
        config_path = path / "config.yaml"
        if not config_path.is_file():
            raise UserError(f"{path}: not a run's folder (it has no config.yaml)")
        parsed = read_parsed(path, states)
        config = config_of(parsed.settings, str(config_path))
        return cls(path, config, parsed.summary, *parsed.curves)

    @property
    def delays(self) -> list[StageDelay]:
        """The delay of each stage.

        If a function of the user's own gives the delays, these are the ones that the run recorded.

        Raises:
            UserError: the run is older than such records, and its function may not run.
        """
        pipeline = self.config.pipeline
        if isinstance(pipeline.delay, DelayCode) and pipeline.delay.facts is not None:
            return delays_from_facts(pipeline)
        with reading():
            return stage_delays(pipeline, self.config.training.seed)

    @property
    def largest_delay(self) -> float:
        """The largest delay of a stage, in updates: 0 without delay, NaN if `delays` fails."""
        try:
            return max(delay.tau_updates for delay in self.delays)
        except UserError:
            return math.nan

    @property
    def architecture(self) -> str:
        """The model in a few words; the task if the run was recorded from a user's own loop."""
        if self.config.is_recorded:
            return self.config.data.source
        return self.config.model.in_words

    @property
    def method(self) -> str:
        """The method, with its strategy if that is not the usual one: `basis-rotation
        1st/unilateral`."""
        optimizer = self.config.optimizer
        if self.config.is_recorded:
            return optimizer.method.removeprefix(RECORDED).replace("_", "-")
        name = name_without_folder(optimizer.method)
        if isinstance(optimizer, BasisRotationConfig):
            if (optimizer.source, optimizer.geometry) != ("2nd", "bilateral"):
                name += f" {optimizer.source}/{optimizer.geometry}"
            if optimizer.refresh_schedule != "uniform":
                name += f" {optimizer.refresh_schedule}"
        return name

    @property
    def variant(self) -> str:
        """The method and everything else about it that differs from its usual form, separated by
        commas."""
        optimizer = self.config.optimizer
        pipeline = self.config.pipeline
        parts = [self.method, *unusual_optimizer_settings(self.config)]
        if isinstance(optimizer, BasisRotationConfig) and optimizer.frequency != 10:
            parts.append(f"refresh every {optimizer.frequency}")
        if isinstance(optimizer, DelayCompensationConfig):
            parts.append(f"lambda {optimizer.compensation:g}")
        if pipeline.stash != "exact":
            parts.append(STASH_MODES.get(pipeline.stash, f"stash {pipeline.stash}"))
        if pipeline.forecast is not None:
            parts.append(f"forecast by {pipeline.forecast.replace('-', ' ')}")
        if pipeline.error_feedback:
            parts.append(f"error feedback {pipeline.error_feedback:g}")
        if pipeline.delay != "pipeline" and not isinstance(pipeline.delay, DelayLike):
            parts.append(f"delay {pipeline.delay_text}")
        if self.config.is_recorded and pipeline.accumulation > 1:
            parts.append(f"M = {pipeline.accumulation}")
        return ", ".join(parts)

    @property
    def status(self) -> str:
        """finished, diverged, failed, interrupted or unfinished (`brx.runs.folder.status_of`)."""
        return status_of(self.summary, self.config)

    @cached_property
    def smoothed(self) -> Series:
        """Running means of the training loss, in nats: the window is 2 % of the schedule.

        A mean belongs to the middle of its window: `iterations[centres]`.
        """
        window = self._window
        # The mean of losses i+1 .. i+w is (S[i+w] - S[i]) / w, with the sums S[0] = 0, S[1], ...
        sums = np.cumsum(np.concatenate([[0.0], self.train_loss]))
        with np.errstate(invalid="ignore"):  # NaN after the first loss that is infinite
            means: Series = (sums[window:] - sums[:-window]) / window
        return means

    @property
    def centres(self) -> slice:
        """The indices, into `iterations`, of the smoothed losses."""
        return slice(self._window // 2, len(self.iterations) - self._window // 2)

    @property
    def _window(self) -> int:
        """The length of the window of `smoothed`: an odd number of iterations."""
        longest = min(SMOOTHING * self.config.training.iterations, len(self.iterations))
        return max(1, 2 * math.ceil(longest / 2) - 1)

    @property
    def undisturbed_pace(self) -> float:
        """Seconds per iteration while nothing else used the machine.

        Other work only slows a run, so a low quantile of its paces comes from its quiet moments.
        """
        marks = self.seconds[::PACE_EVERY]
        if len(marks) < 2:
            return float(self.seconds[-1] / self.iterations[-1])
        return _quantile(np.diff(marks) / PACE_EVERY, UNDISTURBED)


def _quantile(
    values: Series,  # (n,)
    share: float,
) -> float:
    """The same as `numpy.quantile`, ten times as fast: a frame needs one per run."""
    ordered = np.sort(values)  # NaN at the end
    if np.isnan(ordered[-1]):
        return math.nan
    place = share * (len(ordered) - 1)
    below = math.floor(place)
    low = float(ordered[below])
    high = float(ordered[min(below + 1, len(ordered) - 1)])
    part = place - below
    # From the nearer end, as numpy does.
    return high - (high - low) * (1 - part) if part >= 0.5 else low + (high - low) * part


def read_run(path: Path) -> Run:
    """Read a run's folder; it is read again only after one of its files has changed.

    Args:
        path: the folder, also as a frame's index has it (`brx.names.path_text`).

    Raises:
        UserError: as `Run.load`.
    """
    path = path_of_text(path)
    return _recent.run(path, file_states(path))


def unusual_optimizer_settings(config: RunConfig) -> list[str]:
    """The optimizer's settings that are not defaults, as `key value`.

    Settings that `Run.method` or `Run.variant` names in its own words are left out.
    """
    optimizer = config.optimizer
    unusual = {key: getattr(optimizer, key) for key in optimizer.beyond_defaults()}
    unusual |= unusual.pop("arguments", {})  # the arguments of an optimizer of the user's choice
    named = NAMED
    if isinstance(optimizer, BasisRotationConfig):
        named = NAMED | {"frequency"}
    texts = []
    for key, value in unusual.items():
        if key not in named:
            text = f"{value:g}" if isinstance(value, float) else str(value)
            texts.append(f"{key} {text}")
    return texts


class _RecentRuns:
    """The runs that were read last, as many as fit into `MOST_BYTES`.

    Commands read all runs several times in the same order. With room for n runs, a folder of n + 1
    would be parsed again in each pass, so the room is large and counted in bytes.
    """

    def __init__(self) -> None:
        self._runs: OrderedDict[Path, tuple[tuple[FileState, ...], Run]] = OrderedDict()
        self._num_bytes = 0

    def run(self, path: Path, states: tuple[FileState, ...]) -> Run:
        """The run in a folder whose files have these states: kept, or read now."""
        known = self._runs.get(path)
        if known is not None and known[0] == states:
            self._runs.move_to_end(path)
            return known[1]
        run = Run.load(path, states)
        self._drop(path)
        self._runs[path] = (states, run)
        self._num_bytes += _size(run)
        while self._num_bytes > MOST_BYTES:
            self._drop(next(iter(self._runs)))
        return run

    def _drop(self, path: Path) -> None:
        if path in self._runs:
            _, run = self._runs.pop(path)
            self._num_bytes -= _size(run)


def _size(run: Run) -> int:
    """About the bytes that a run takes in memory."""
    # iterations, train_loss, seconds and smoothed; val_iterations and val_loss
    num_values = 4 * len(run.iterations) + 2 * len(run.val_iterations)
    return 8 * num_values + SETTINGS_BYTES


_recent = _RecentRuns()
