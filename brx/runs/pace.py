"""Times per iteration that compare methods: those of runs with the same settings for speed."""

import pandas as pd

SPEED_SETTINGS = ["runtime.device", "runtime.compile", "runtime.graphs", "runtime.threads"]


def fastest_pace(runs: pd.DataFrame, groups: pd.Series) -> pd.Series:
    """The seconds per iteration of each group's fastest run.

    Some runs of a group may be compiled and others not, which says nothing about its method. So if
    all groups have runs with the same settings for speed, only those count; of several such
    settings, those that most runs have. If there are none, all runs count.

    Args:
        runs: rows of `load`.
        groups: the group of each run, by the index of `runs`.

    Returns:
        Seconds by group; NaN for a group without times.
    """
    timed = runs["seconds_per_iteration"].dropna()
    group_of = groups[timed.index]
    settings = runs.reindex(columns=SPEED_SETTINGS)
    setting_of = settings.groupby(SPEED_SETTINGS, dropna=False, sort=False).ngroup()[timed.index]
    if len(timed):
        num_runs = pd.crosstab(setting_of, group_of)
        is_shared = (num_runs > 0).all(axis="columns")
        if is_shared.any():
            most_runs = num_runs[is_shared].sum(axis="columns").idxmax()
            timed = timed[setting_of == most_runs]
    return timed.groupby(group_of).min().reindex(groups.unique())
