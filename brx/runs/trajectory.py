"""Which settings decide a run's trajectory. They tell runs apart, and a run resumes only with its
own."""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from brx.config.loading import sections_of_code
from brx.config.schema import (
    FP32_ON_A_CPU,
    PRECISIONS,
    CheckpointConfig,
    DelayCode,
    LoggingConfig,
    RunConfig,
)
from brx.config.user_code import name_without_folder

RATE = "optimizer.lr"
SEED = "training.seed"
FOR_TUNING = "training.for_tuning"
# What may differ between a run and its continuation, because no number of the trajectory depends on
# it. Nothing in the sections `checkpoint` and `logging` decides a number.
_MAY_CHANGE = {
    "pipeline": {"devices", "balance", "recompute", "rings", "timeout_s"},
    "data": {"directory", "max_epochs"},
    "training": {
        "stop_after",
        "checkpoint_every",
        "keep_checkpoints",
        "keep_at",
        "log_every",
        "for_tuning",
    },
    "checkpoint": set(CheckpointConfig.model_fields),
    "runtime": {"device", "share_gpus", "threads", "compile", "graphs", "deterministic"},
    "logging": set(LoggingConfig.model_fields),
}

Sections = Mapping[str, Mapping[str, Any]]  # by section and key


def first_difference(old: Sections, new: Sections, *, ignore_new: bool = False) -> str | None:
    """The first setting that differs, in words; None if all are equal.

    Args:
        old: the earlier settings, from `trajectory_of`.
        new: the present settings, from `trajectory_of`.
        ignore_new: leave out settings that `old` does not have.
    """
    for section, values in new.items():
        before = old.get(section, {})
        for key in before if ignore_new else {**values, **before}:
            if before.get(key) != values.get(key):
                return f"{section}.{key} was {before.get(key)!r} and is now {values.get(key)!r}"
    return None


def decides_trajectory(key: str) -> bool:
    """Whether a number of the trajectory depends on the setting of this dotted key."""
    section, _, rest = key.partition(".")
    name, _, _ = rest.partition(".")
    is_setting = section in RunConfig.model_fields
    return is_setting and name not in _MAY_CHANGE.get(section, set())


def difference_beyond_trajectory(one: RunConfig, other: RunConfig) -> str | None:
    """The first setting that differs although no number of the trajectory depends on it, as a
    dotted key; None if all are equal."""
    other_settings = other.model_dump(mode="json")
    for section, values in one.model_dump(mode="json").items():
        for name, value in values.items():
            key = f"{section}.{name}"
            if not decides_trajectory(key) and value != other_settings[section].get(name):
                return key
    return None


def deciding_settings(settings: Sections) -> dict[str, dict[str, Any]]:
    """The settings without those that no number of the trajectory depends on.

    A checkpoint of an older brx may hold some of these, which it still counted.
    """
    kept: dict[str, dict[str, Any]] = {section: {} for section in settings}
    for section, values in settings.items():
        for key, value in values.items():
            if decides_trajectory(f"{section}.{key}"):
                kept[section][key] = value
    return kept


def trajectory_of(config: RunConfig, *, with_defaults: bool = True) -> dict[str, dict[str, Any]]:
    """The settings that decide a run's trajectory, by section and key.

    For a method, model or delay function in a user's file, the name and the content of the file
    count, not its folder.

    Args:
        config: the settings of the run.
        with_defaults: include settings that have their default values.
    """
    content = config.model_dump(mode="json", exclude_defaults=not with_defaults)
    if not with_defaults and "optimizer" in content:
        content["optimizer"] = config.optimizer.beyond_defaults()
    trajectory = deciding_settings(content)
    for key in PRECISIONS:
        if trajectory.get("optimizer", {}).get(key) in FP32_ON_A_CPU:
            trajectory["optimizer"][key] = "highest"
    for settings in sections_of_code(trajectory):
        settings.pop("facts", None)  # they follow from the file
    if "method" in trajectory.get("optimizer", {}):
        trajectory["optimizer"]["method"] = name_without_folder(config.optimizer.method)
    if "class" in trajectory.get("model", {}):
        trajectory["model"]["class"] = name_without_folder(config.model.name)
    if isinstance(config.pipeline.delay, DelayCode):
        function = name_without_folder(config.pipeline.delay.function)
        trajectory["pipeline"]["delay"]["function"] = function
    return trajectory


def settings_key(config: RunConfig, *, without: Iterable[str] = ()) -> str:
    """A text that is equal for runs whose settings that decide trajectories are equal.

    Args:
        config: the settings of a run.
        without: dotted keys that do not count, of any depth (`optimizer.arguments.eps`). A section
            that is empty without them does not count, either.
    """
    # Defaults are left out, so that a setting that is added to brx later leaves the texts of older
    # runs as they are.
    content = trajectory_of(config, with_defaults=False)
    for dotted in without:
        _drop(content, dotted.split("."))
    filled = {section: values for section, values in content.items() if values}
    return json.dumps(filled, sort_keys=True)


def _drop(content: dict[str, Any], parts: Sequence[str]) -> None:
    """Remove a key, given in parts, in place; also a section that is empty afterwards."""
    first, *rest = parts
    if not rest:
        content.pop(first, None)
    elif isinstance(section := content.get(first), dict):
        _drop(section, rest)
        if not section:
            del content[first]
