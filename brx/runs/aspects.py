"""Which runs compare: the aspects that decide it, and what makes two runs one experiment."""

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pandas as pd

from brx.config.schema import RunConfig
from brx.methods.trajectory_version import oldest_alike
from brx.runs.trajectory import RATE, SEED, decides_trajectory, settings_key

MOST_NAMES = 3  # how many runs a line names when there are many
DEPTH = "depth"
"""The column with P, the stages of the pipeline whose delays a run has."""
ORIGIN = ("data_fingerprint", "trajectory_version", "last_iteration")
"""Properties that decide a run's losses in addition to its settings: its data, the version of brx's
numbers, and its last iteration."""
OWN_COLUMNS = (RATE, SEED, "pipeline.stages", "pipeline.delay")
"""Settings that tables show next to a variant's name: they are never added to it."""
UNKNOWN_DATA = "data fingerprint (unknown without summary.json)"


def same_but_for(runs: pd.DataFrame, *settings: str) -> pd.Series:
    """Label runs so that two runs with the same label are equal except for the named settings.

    The origin (`ORIGIN`) and all other settings that decide numbers are compared.

    Args:
        runs: rows of `load`.
        settings: dotted keys (`training.seed`) or whole sections (`optimizer`).

    Returns:
        An integer per run.
    """
    ignored = tuple(f"{setting}." for setting in settings)
    decisive = [key for key in runs.columns if decides_trajectory(key)]
    kept = [key for key in decisive if not f"{key}.".startswith(ignored)]
    # Each run's values as one text: pandas takes milliseconds to group by a hundred columns, and
    # some of them hold lists.
    rows = zip(*(runs[key].tolist() for key in (*ORIGIN, *kept)), strict=True)
    texts = [repr([_without_nan(value) for value in row]) for row in rows]
    return pd.Series(pd.factorize(pd.Series(texts, dtype=object))[0], runs.index)


def _without_nan(value: Any) -> Any:
    """The value; None in the place of NaN, by which pandas says that a run has no such setting."""
    return None if is_missing(value) else value


def experiment_id(
    config: RunConfig,
    data_fingerprint: str | None,
    trajectory_version: int | None,
    second: str | None = None,
) -> str:
    """The text that is equal for runs that differ only in learning rate and seed.

    Args:
        config: the settings of a run.
        data_fingerprint: the fingerprint of the data that it was trained on.
        trajectory_version: the trajectory version of the brx that trained it, or any other in which
            its method computes the same: the text is equal for all of them.
        second: a further setting, as a dotted key, in which the runs may differ.
    """
    if trajectory_version is not None:
        trajectory_version = oldest_alike(trajectory_version, config.optimizer.method)
    ignored = [RATE, SEED]
    if second:
        ignored.append(second)
    settings = settings_key(config, without=ignored)
    text = f"{settings} {config.training.last_iteration} {data_fingerprint} {trajectory_version}"
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def comparable(runs: pd.DataFrame, *, any_split: bool = False) -> list[pd.DataFrame]:
    """Divide runs into sets whose losses compare, the largest set first.

    Settings shared by every method of a set are dropped from variant names.

    Args:
        runs: rows of `load`.
        any_split: runs compare if their updates have equal numbers of examples, however these are
            divided into micro-batches.
    """
    keys: list[str] = []
    for columns in _aspects(runs, any_split=any_split).values():
        keys += columns
    sets = []
    for _, alike in runs.groupby(keys, dropna=False, sort=False):
        variants = without_settings(alike["variant"], _optimizer_settings_of_all(alike))
        sets.append(alike.assign(variant=variants))
    return sorted(sets, key=len, reverse=True)


def with_distinct_variants(runs: pd.DataFrame) -> pd.DataFrame:
    """Comparable runs with variants for display: two experiments at the same P have two names. The
    settings that differ between them follow the name that both have: `pipedream, clip 0.5` and
    `pipedream, clip 1.0`.

    Args:
        runs: a set of `comparable`.
    """
    ignored = tuple(f"{setting}." for setting in OWN_COLUMNS)
    settings = []
    for key in runs.columns:
        if decides_trajectory(key) and not f"{key}.".startswith(ignored):
            settings.append(key)
    variants = runs["variant"].copy()
    for _, alike in runs.groupby("variant", sort=False):
        differing: list[str] = []
        for _, at_depth in alike.groupby(DEPTH, sort=False):
            if at_depth["experiment"].nunique() > 1:
                differing += [key for key in settings if at_depth[key].map(text_of).nunique() > 1]
        append_settings(variants, alike, dict.fromkeys(differing))
    return runs.assign(variant=variants)


def append_settings(names: pd.Series, runs: pd.DataFrame, keys: Iterable[str]) -> None:
    """Append settings of some runs to their names, in place; those that a run lacks are left out.

    Args:
        names: the names of these runs and perhaps of others; its index is theirs.
        runs: rows with a column per setting.
        keys: dotted keys, which appear without their section: `, clip 0.5`.
    """
    for key in keys:
        values = runs[key].map(text_of)
        parts = f", {key.partition('.')[2]} " + values
        names[runs.index] += parts.where(values != "", "")


def text_of(value: Any) -> str:
    """A setting as a text; empty where it is missing (None, NaN)."""
    return "" if is_missing(value) else str(value)


def _optimizer_settings_of_all(runs: pd.DataFrame) -> list[str]:
    """The unusual settings of optimizers that all runs share whose methods have such a setting.

    A setting that only one method has is not among them: it belongs to the method's name.
    """
    texts = runs["unusual"].str.split(", ")  # by run, each as `key value`
    shared = []
    for text in texts.explode().unique():
        key, _, _ = text.partition(" ")
        settings = runs.get(f"optimizer.{key}")
        if settings is None:
            continue
        has_it = np.array([text in run_texts for run_texts in texts])
        is_of_all = (has_it == settings.notna()).all()
        num_methods = runs.loc[has_it, "method"].nunique()
        if is_of_all and num_methods > 1:
            shared.append(text)
    return shared


def without_settings(variants: pd.Series, unusual: Sequence[str]) -> pd.Series:
    """Names of variants (`Run.variant`) without some of `unusual_optimizer_settings`."""

    def shorten(variant: str) -> str:
        return ", ".join(part for part in variant.split(", ") if part not in unusual)

    return variants.map(shorten)


def differences(runs: pd.DataFrame) -> list[str]:
    """Say what makes runs incomparable with the first of them: a line for all that differ from it
    in the same aspects.

    The first is the first run whose data are known. A run that has not ended has no summary.json
    that names them.
    """
    runs = runs.sort_values("data_fingerprint", key=pd.isna, kind="stable")
    first = runs.index[0]
    aspects = _differing_aspects(runs)
    lines = []
    for differing, others in aspects[aspects != ""].groupby(aspects, sort=False):
        names = first_names([*others.index])
        if differing == UNKNOWN_DATA:
            line = (
                f"{names}: without a summary.json, as of a run that has not ended, nothing says on "
                f"which data; if they are those of {first}, their losses compare"
            )
        else:
            line = f"{names} and {first} differ in {differing}: their losses do not compare"
        lines.append(line)
    return lines


def _differing_aspects(runs: pd.DataFrame, *, any_split: bool = False) -> pd.Series:
    """For each run but the first: the aspects in which it cannot be compared with the first, in
    words; empty if there are none. Of data that are known for one of the two alone, they say
    `UNKNOWN_DATA`."""
    differing: list[list[str]] = [[] for _ in range(len(runs))]
    for aspect, keys in _aspects(runs, any_split=any_split).items():
        # A tuple per run with a value per key: pandas takes a millisecond to compare two rows.
        rows = list(zip(*(runs[key].tolist() for key in keys), strict=True))
        for aspects, row in zip(differing, rows, strict=True):
            if all(map(_is_same, row, rows[0])):
                continue
            is_unknown = keys == ["data_fingerprint"] and any(map(is_missing, row + rows[0]))
            aspects.append(UNKNOWN_DATA if is_unknown else aspect)
    texts = [", ".join(aspects) for aspects in differing[1:]]
    return pd.Series(texts, runs.index[1:], dtype=object)


def _is_same(one: Any, other: Any) -> bool:
    """Whether two values of a frame are equal, or both missing (None, NaN)."""
    both_missing = is_missing(one) and is_missing(other)
    return both_missing or bool(one == other)


def is_missing(value: Any) -> bool:
    """Whether a frame has no such value (None, NaN)."""
    return value is None or value != value


def left_out(
    shown: pd.DataFrame, others: list[pd.DataFrame], *, any_split: bool = False
) -> dict[str, pd.DataFrame]:
    """The runs of other sets of `comparable`, by what makes them incomparable with those shown.

    Keys are texts, such as `data fingerprint, iterations`.
    """
    first_and_others = pd.concat([shown.iloc[:1], *others])
    aspects = _differing_aspects(first_and_others, any_split=any_split)
    return dict(iter(first_and_others.iloc[1:].groupby(aspects, sort=False)))


def first_names(names: Sequence[str]) -> str:
    """The first few names, and how many more there are: `a, b, c and 4 more`."""
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return ", ".join(names[:MOST_NAMES]) + more


def _aspects(runs: pd.DataFrame, *, any_split: bool) -> dict[str, list[str]]:
    """The columns that must be equal for losses to be comparable, by a name for what they are."""
    aspects = {
        "data fingerprint": ["data_fingerprint"],
        "trajectory version": ["trajectory_version"],
        "model": [key for key in runs.columns if key.startswith("model.")],
        "iterations": ["training.iterations", "last_iteration"],
    }
    if any_split:
        aspects["examples per update"] = ["examples_per_update"]
    else:
        aspects["batch size"] = ["training.batch_size"]
        aspects["micro-batches per update"] = ["pipeline.accumulation"]
    return aspects
