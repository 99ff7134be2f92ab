"""A run's folder: config.yaml, metrics.jsonl, summary.json, checkpoints/."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from brx.config.loading import dump_config, load_config
from brx.config.schema import DelayCode, RunConfig
from brx.config.user_code import name_without_folder
from brx.errors import UserError
from brx.files import cannot_write, write_text

# What may differ between a run and its continuation, because no number of the trajectory depends on it.
_MAY_CHANGE = {
    "pipeline": {"devices", "balance", "recompute", "rings", "timeout_s"},
    "data": {"directory", "max_epochs"},
    "training": {"stop_after", "checkpoint_every", "keep_checkpoints", "keep_at", "log_every"},
    "runtime": {"device", "threads", "compile", "deterministic"},
    "logging": {"tensorboard", "wandb", "trackio", "update_norms", "staleness_every"},
}


@dataclass(frozen=True)
class RunFolder:
    """The paths of one run, and whether a run may begin or go on there."""

    path: Path

    @property
    def config(self) -> Path:
        """The resolved configuration; reloads to the same run."""
        return self.path / "config.yaml"

    @property
    def metrics(self) -> Path:
        """One JSON object per line."""
        return self.path / "metrics.jsonl"

    @property
    def summary(self) -> Path:
        """Final and best losses, status, times, versions."""
        return self.path / "summary.json"

    def read_summary(self) -> dict[str, Any]:
        """What the summary says; empty if there is none (yet), or none that can be read."""
        try:
            return parse_summary(self.summary.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}

    @property
    def has_diverged(self) -> bool:
        """Whether the run ended because its loss or a gradient was no longer finite."""
        return self.read_summary().get("status") == "diverged"

    def check(self, config: RunConfig, *, resume: bool) -> None:
        """Check that the folder is free for a new run, or holds the run to be continued.

        Raises:
            UserError: it holds a run already and `resume` is off, or holds a run of another configuration.
        """
        if not resume and any(path.exists() for path in (self.config, self.metrics, self.path / "checkpoints")):
            raise UserError(f"{self.path}: holds a run already; continue it with --resume, or choose another --out")
        if not self.config.exists():
            return
        difference = first_difference(trajectory_of(load_config(self.config)), trajectory_of(config))
        if difference is not None:
            raise UserError(
                f"{self.config}: {difference}: a run resumes with its own configuration; choose another --out for a"
                " new run"
            )

    def create(self, config: RunConfig, *, resume: bool) -> None:
        """Make the folder for a new run, or note the settings with which the run in it continues; see `check`."""
        self.check(config, resume=resume)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise cannot_write(self.path, error) from None
        write_text(self.config, dump_config(config))


def parse_summary(text: str) -> dict[str, Any]:
    """The content of a summary.json; ValueError where it is none, or what runs are sorted by is of another type."""
    content = json.loads(text)
    if not isinstance(content, dict):
        raise ValueError("must be a JSON object")
    kinds = {"status": str, "iteration": int, "trajectory_version": int, "data_fingerprint": str}
    for key, kind in kinds.items():
        if not isinstance(content.get(key, kind()), kind):
            raise ValueError(f"{key} is {content[key]!r}, must be of type {kind.__name__}")
    return content


SettingsBySection = Mapping[str, Mapping[str, Any]]
"""Values by section and key."""


def first_difference(old: SettingsBySection, new: SettingsBySection, *, ignore_new: bool = False) -> str | None:
    """The first setting of `trajectory_of` that differs, in words; on request, of those alone that `old` knows."""
    for section, values in new.items():
        before = old.get(section, {})
        for key in before if ignore_new else {**values, **before}:
            if before.get(key) != values.get(key):
                return f"{section}.{key} was {before.get(key)!r} and is now {values.get(key)!r}"
    return None


def decides_trajectory(key: str) -> bool:
    """Whether a number of the trajectory depends on the setting of this dotted key."""
    section, _, name = key.partition(".")
    return section in RunConfig.model_fields and name.partition(".")[0] not in _MAY_CHANGE.get(section, set())


def trajectory_of(config: RunConfig, *, with_defaults: bool = True) -> dict[str, dict[str, Any]]:
    """The settings, by section and key, that decide a run's trajectory; on request only those that are no defaults.

    Of a user's own method or delay function the file's name and content count, not where it is.
    """
    trajectory = {
        section: {key: value for key, value in values.items() if key not in _MAY_CHANGE.get(section, set())}
        for section, values in config.model_dump(mode="json", exclude_defaults=not with_defaults).items()
    }
    if "method" in trajectory.get("optimizer", {}):
        trajectory["optimizer"]["method"] = name_without_folder(config.optimizer.method)
    if isinstance(config.pipeline.delay, DelayCode):
        trajectory["pipeline"]["delay"]["function"] = name_without_folder(config.pipeline.delay.function)
    return trajectory


def settings_key(config: RunConfig, *, without: Iterable[str] = ()) -> str:
    """A text that is equal for runs whose trajectories are decided by the same settings.

    Defaults are left out, so that a setting that is added to brx later leaves the keys of older runs as they are; so
    are the dotted keys of `without`.
    """
    content = trajectory_of(config, with_defaults=False)
    for dotted in without:
        section, _, name = dotted.partition(".")
        content.get(section, {}).pop(name, None)
    return json.dumps({section: values for section, values in content.items() if values}, sort_keys=True)


def default_folder(config: RunConfig, name: str) -> Path:
    """runs/<preset>-<method>-p<stages>-s<seed>; of a file's method, without the file's folder."""
    method = name_without_folder(config.optimizer.method).replace(".py:", ".").replace(":", ".")
    return Path("runs") / f"{name}-{method}-p{config.pipeline.stages}-s{config.training.seed}"
