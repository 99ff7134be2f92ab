"""Experiments, which are runs that differ only in learning rate and seed; and the rate that is
reported."""

from collections.abc import Iterator, Sequence

import numpy as np
import pandas as pd

from brx.errors import UserError
from brx.runs.folder import ENDED, FOR_TUNING
from brx.runs.frames import ORIGIN, RATE, SEED


def is_for_tuning(runs: pd.DataFrame) -> pd.Series:
    """Which runs only serve to choose settings (`training.for_tuning`): they are never reported."""
    if FOR_TUNING not in runs:
        return pd.Series(False, runs.index)
    return runs[FOR_TUNING].eq(True)


def deciding(runs: pd.DataFrame) -> pd.DataFrame:
    """The runs by which settings are chosen: of an experiment with tuning runs those alone."""
    tuning = is_for_tuning(runs)
    has_tuning = tuning.groupby(runs["experiment"]).transform("any")
    return runs[tuning | ~has_tuning]


def tried_rates(runs: pd.DataFrame) -> pd.DataFrame:
    """The score of every learning rate in `runs` (rows of `load`), by `score_values`: a row per
    experiment and rate. Diverged runs count as tried, with an infinite loss. Unfinished and failed
    runs are left out. The loss is the validation loss, or the training loss if some runs of the
    experiment have no validation. If an experiment has tuning runs, only these decide
    (`deciding`)."""
    ended = deciding(_ended(runs))
    is_known = np.isfinite(ended["val_loss"]) | (ended["status"] != "finished")
    losses = ended["val_loss"].where(
        is_known.groupby(ended["experiment"]).transform("all"), ended["train_loss"]
    )
    losses = losses.where(ended["status"] == "finished").fillna(np.inf)
    return score_values(ended.assign(score=losses), group="experiment", over=RATE)


def score_values(runs: pd.DataFrame, group: str, over: str) -> pd.DataFrame:
    """Score the values of a setting: the rule by which sweeps, figures and tables choose a learning
    rate alike.

    In each `group`, values (the column `over`) are compared by their mean `score`, lower is better,
    over the seeds that all of them have; if there are none, over the lowest seed that any has.
    Gives a row per group and value that has those seeds, in order, with `score`, `is_best`, and
    `at_edge`: whether the best is the lowest or highest value."""
    if runs.empty:
        return runs[[group, over, "score"]].assign(
            is_best=pd.Series(dtype=bool), at_edge=pd.Series(dtype=bool)
        )
    scores = runs.pivot(index=[group, over], columns=SEED, values="score").sort_index(
        axis="columns"
    )
    known = scores.notna().groupby(level=group)
    shared, any_has = known.transform("all"), known.transform("any")
    lowest = any_has & (any_has.cumsum(axis="columns") == 1)
    means = (
        scores.where(shared.where(shared.any(axis="columns"), lowest, axis="index"))
        .mean(axis="columns")
        .dropna()
    )
    table = means.rename("score").reset_index()
    by_group = table.groupby(group)
    table["is_best"] = table.index == by_group["score"].transform("idxmin")
    is_end = (by_group.cumcount() == 0) | (by_group.cumcount(ascending=False) == 0)
    table["at_edge"] = (table["is_best"] & is_end).groupby(table[group]).transform("any")
    order = {name: place for place, name in enumerate(runs[group].unique())}
    return table.sort_values(
        group, key=lambda names: names.map(order), kind="stable", ignore_index=True
    )


def at_best_rates(runs: pd.DataFrame, *, with_diverged: bool = False) -> pd.DataFrame:
    """The finished runs of every experiment at its best learning rate (see `tried_rates`), by seed.

    Further columns: `lr_at_edge`, `num_rates` tried, and `diverged_seeds` at this rate, the same
    list in every row of an experiment. An experiment whose runs all diverged has rows only on
    request.
    """
    rates = tried_rates(runs).rename(columns={"at_edge": "lr_at_edge"})
    rates["num_rates"] = rates.groupby("experiment")[RATE].transform("size")
    return _runs_at(runs, rates[rates["is_best"]], with_diverged=with_diverged)


def at_each_rate(runs: pd.DataFrame) -> list[pd.DataFrame]:
    """The runs of every experiment, a frame per learning rate as `at_best_rates` with diverged
    ones; none is chosen."""
    rates = runs[["experiment", RATE]].drop_duplicates().assign(lr_at_edge=False, num_rates=1)
    return [_runs_at(runs, alike, with_diverged=True) for _, alike in rates.groupby(RATE)]


def of_rates(runs: pd.DataFrame, rates: Sequence[float]) -> pd.DataFrame:
    """The runs with one of some learning rates; UserError where there is none with one of them."""
    known = sorted(runs[RATE].unique())
    for rate in rates:
        if rate not in known:
            raise UserError(
                f"--rates {rate:g}: no run has it (there are "
                f"{', '.join(f'{value:g}' for value in known)})"
            )
    return runs[runs[RATE].isin(rates)]


def _ended(runs: pd.DataFrame) -> pd.DataFrame:
    """Those that say what their settings come to; UserError where two of them have the same
    settings and seed."""
    ended, keys = runs[runs["status"].isin(ENDED)], ["experiment", RATE, SEED]
    for _, alike in ended[ended.duplicated(keys, keep=False)].groupby(keys):
        raise UserError(
            f"{alike.index[1]}: the same run as {alike.index[0]}: leave one of them out"
        )
    return ended


def _runs_at(runs: pd.DataFrame, rates: pd.DataFrame, *, with_diverged: bool) -> pd.DataFrame:
    """The runs at some learning rates of some experiments, and which seeds diverged there; none
    that is for tuning alone."""
    ended = _ended(runs)
    at_rates = ended[~is_for_tuning(ended)].reset_index()
    at_rates = at_rates.merge(
        rates[["experiment", RATE, "lr_at_edge", "num_rates"]], on=["experiment", RATE]
    )
    is_finished = at_rates["status"] == "finished"
    diverged = at_rates[~is_finished].groupby("experiment")[SEED].agg(list).to_dict()
    seeds = [diverged.get(experiment, []) for experiment in at_rates["experiment"]]
    at_rates["diverged_seeds"] = pd.Series(seeds, at_rates.index, dtype=object)
    if with_diverged:
        is_finished |= ~at_rates["experiment"].isin(at_rates.loc[is_finished, "experiment"])
    return at_rates[is_finished].sort_values(SEED, kind="stable").set_index("run")


def by_experiment(chosen: pd.DataFrame) -> Iterator[pd.DataFrame]:
    return (seeds for _, seeds in chosen.groupby("experiment", sort=False))


def main_origin(chosen: pd.DataFrame) -> tuple[str | None, int | None]:
    """The data fingerprint and trajectory version of most experiments: losses of others do not
    compare with theirs."""
    if chosen.empty:
        return None, None
    fingerprint, version = _num_by_origin(chosen).idxmax()
    return None if pd.isna(fingerprint) else fingerprint, None if pd.isna(version) else int(version)


def notes(runs: pd.DataFrame, chosen: pd.DataFrame) -> list[str]:
    """A line for everything that the chosen runs leave out, and where the others do not all
    compare."""
    said = {
        "diverged, counted as tried and as never reaching a target": runs["status"] == "diverged",
        "failed otherwise than by diverging, left out": runs["status"] == "failed",
        "not finished, left out": ~runs["status"].isin((*ENDED, "failed")),
    }
    lines = [
        f"{what}: {', '.join(runs.loc[which, 'name'])}"
        for what, which in said.items()
        if which.any()
    ]
    by_origin = _num_by_origin(chosen)
    if len(by_origin) > 1:
        fingerprint, version = main_origin(chosen)
        lines.append(
            "runs on other data or of another trajectory version do not compare: of one origin are "
            "at most"
            f" {by_origin.max()} of {by_origin.sum()} experiments, on {str(fingerprint)[:8]}, of "
            f"version {version}"
        )
    return lines


def _num_by_origin(chosen: pd.DataFrame) -> pd.Series:
    return chosen.groupby(list(ORIGIN[:2]), sort=False, dropna=False)["experiment"].nunique()
