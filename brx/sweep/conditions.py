"""Conditions on the settings of runs: `where` and `exclude` in sweep files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from brx.config.schema import RunConfig


def matches(config: RunConfig, condition: Mapping[str, Any]) -> bool:
    """Whether settings meet a condition (`where`, `exclude`).

    Args:
        config: the settings.
        condition: dotted keys; each must have the given value, or one of a list of values.
    """
    content = config.model_dump(mode="json")
    for key, wanted in condition.items():
        values = wanted if isinstance(wanted, list) else [wanted]
        if value_at(content, key) not in values:
            return False
    return True


def first_match(config: RunConfig, conditions: Mapping[str, Mapping[str, Any]]) -> str | None:
    """The name of the first condition that settings meet (`matches`); None if there is none."""
    return next((name for name, wanted in conditions.items() if matches(config, wanted)), None)


def value_at(content: Mapping[str, Any], key: str) -> Any:
    """The value at a dotted key of nested settings; None if there is no such key."""
    value: Any = content
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def dotted_keys(content: Mapping[str, Any]) -> Iterator[str]:
    """The dotted key of each value in nested settings."""
    for key, value in content.items():
        if isinstance(value, Mapping):
            for inner in dotted_keys(value):
                yield f"{key}.{inner}"
        else:
            yield key
