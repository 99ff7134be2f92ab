"""Times per iteration that compare methods: those of runs with the same settings for speed."""

from collections.abc import Sequence

import pandas as pd

SPEED_SETTINGS = ["runtime.device", "runtime.compile", "runtime.graphs", "runtime.threads"]
NO_COMMON_SPEED = (
    "times per iteration come from runs with different settings for speed (runtime: device, "
    "compile, graphs or threads), since none are common to all methods"
)


def fastest_paces(groups: Sequence[pd.DataFrame]) -> list[float]:
    """The seconds per iteration of the fastest run in each group.

    Some runs of a group may be compiled and others not, which says nothing about its method. So if
    all groups have runs with the same settings for speed, only those count. If there are no such
    settings (`have_common_speed`), all runs count.

    Args:
        groups: of each method, rows of `load`.

    Returns:
        Seconds; NaN for a group without times.
    """
    timed = _with_common_speed(groups)
    if timed.empty:
        timed = _timed(groups)
    seconds = timed.groupby("group")["seconds_per_iteration"].min()
    return list(seconds.reindex(range(len(groups))))


def have_common_speed(groups: Sequence[pd.DataFrame]) -> bool:
    """Whether all groups with times have runs with the same settings for speed."""
    return _timed(groups).empty or not _with_common_speed(groups).empty


def _timed(groups: Sequence[pd.DataFrame]) -> pd.DataFrame:
    """The runs with times, with the number of their group in the column `group`."""
    numbered = [runs.assign(group=number) for number, runs in enumerate(groups)]
    return pd.concat(numbered).dropna(subset="seconds_per_iteration")


def _with_common_speed(groups: Sequence[pd.DataFrame]) -> pd.DataFrame:
    """The runs with times and with the settings for speed that all groups have; of several such
    settings, those that most runs have."""
    timed = _timed(groups)
    settings = timed.reindex(columns=SPEED_SETTINGS)
    setting_of = settings.groupby(SPEED_SETTINGS, dropna=False, sort=False).ngroup()
    num_runs = pd.crosstab(setting_of, timed["group"])
    common = num_runs[(num_runs > 0).all(axis="columns")].sum(axis="columns")
    if common.empty:
        return timed.iloc[:0]
    return timed[setting_of == common.idxmax()]
