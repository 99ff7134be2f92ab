"""Experiments, and the learning rate at which each is reported.

An experiment is a set of runs that differ only in learning rate and seed.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import pandas as pd

from brx.errors import UserError
from brx.runs.aspects import ORIGIN
from brx.runs.folder import ENDED
from brx.runs.trajectory import FOR_TUNING, RATE, SEED


def is_for_tuning(runs: pd.DataFrame) -> pd.Series:
    """Which runs only serve to choose settings (`training.for_tuning`): they are never reported."""
    if FOR_TUNING not in runs:
        return pd.Series(False, runs.index)
    return runs[FOR_TUNING].eq(True)


def deciding(runs: pd.DataFrame) -> pd.DataFrame:
    """The runs by which settings are chosen: an experiment's tuning runs if it has any, else all of
    its runs."""
    tuning = is_for_tuning(runs)
    has_tuning = tuning.groupby(runs["experiment"]).transform("any")
    return runs[tuning | ~has_tuning]


def tried_rates(runs: pd.DataFrame) -> pd.DataFrame:
    """Score every learning rate of each experiment by `score_values`: a row per experiment and
    rate.

    The score is the final validation loss; it is the training loss if any run of the experiment has
    no validation. A diverged run has an infinite score. Unfinished and failed runs are left out. If
    an experiment has tuning runs, only these decide (`deciding`).

    Args:
        runs: rows of `load`.
    """
    ended = deciding(_ended(runs))
    is_finished = ended["status"] == "finished"
    has_validation = np.isfinite(ended["val_loss"]) | ~is_finished
    all_have = has_validation.groupby(ended["experiment"]).transform("all")
    losses = ended["val_loss"].where(all_have, ended["train_loss"])
    scores = losses.where(is_finished).fillna(np.inf)
    return score_values(ended.assign(score=scores), group="experiment", over=RATE)


def score_values(runs: pd.DataFrame, group: str, over: str) -> pd.DataFrame:
    """Score the values of a setting. Sweeps, figures and tables all choose by this rule.

    Within each group, values are compared by their mean score, lower is better, over the seeds that
    all of them have. If all have none in common, the lowest seed that any has decides.

    Args:
        runs: a row per run, with the columns `group`, `over`, `score` and the seed.
        group: the column whose equal entries make a group.
        over: the column of the values.

    Returns:
        A row per group and value that has the seeds compared, in the order of the groups in `runs`,
        with the columns `group`, `over`, `score` and:

        - `is_best`: true for one value of the group.
        - `at_edge`: the best value is the lowest or highest of the group; equal in all its rows.
    """
    if runs.empty:
        return runs[[group, over, "score"]].assign(
            is_best=pd.Series(dtype=bool), at_edge=pd.Series(dtype=bool)
        )
    table = _mean_scores(runs, group, over)
    by_group = table.groupby(group)
    table["is_best"] = table.index == by_group["score"].transform("idxmin")
    is_lowest_value = by_group.cumcount() == 0
    is_highest_value = by_group.cumcount(ascending=False) == 0
    is_best_at_edge = table["is_best"] & (is_lowest_value | is_highest_value)
    table["at_edge"] = is_best_at_edge.groupby(table[group]).transform("any")
    order = {name: index for index, name in enumerate(runs[group].unique())}
    return table.sort_values(
        group, key=lambda names: names.map(order), kind="stable", ignore_index=True
    )


def _mean_scores(runs: pd.DataFrame, group: str, over: str) -> pd.DataFrame:
    """The mean score of each group and value over the seeds that are compared, by rising value;
    without values that have none of these seeds."""
    scores = runs.pivot(index=[group, over], columns=SEED, values="score")  # NaN: no such run
    scores = scores.sort_index(axis="columns")
    known = scores.notna().groupby(level=group)
    # Frames with a row per group and value, and a column per seed.
    all_have = known.transform("all")  # whether all values of the group have the seed
    any_has = known.transform("any")
    is_lowest_seed = any_has & (any_has.cumsum(axis="columns") == 1)
    # The seeds that all have; in groups without such a seed, the lowest one.
    is_compared = all_have.where(all_have.any(axis="columns"), is_lowest_seed, axis="index")
    means = scores.where(is_compared).mean(axis="columns").dropna()
    return means.rename("score").reset_index()


def at_best_rates(runs: pd.DataFrame, *, with_diverged: bool = False) -> pd.DataFrame:
    """The finished runs of every experiment at its best learning rate, by rising seed.

    Args:
        runs: rows of `load`.
        with_diverged: an experiment whose runs all diverged has rows, too.

    Returns:
        Rows of `runs`, with further columns:

        - `lr_at_edge`: the rate is the lowest or highest tried (`score_values`).
        - `num_rates` that were tried.
        - `diverged_seeds` at this rate, the same list in every row of an experiment.
    """
    rates = tried_rates(runs).rename(columns={"at_edge": "lr_at_edge"})
    rates["num_rates"] = rates.groupby("experiment")[RATE].transform("size")
    return _runs_at(runs, rates[rates["is_best"]], with_diverged=with_diverged)


def at_each_rate(runs: pd.DataFrame) -> list[pd.DataFrame]:
    """All runs of every experiment, in one frame per learning rate with the columns of
    `at_best_rates`. No rate is chosen. Experiments whose runs all diverged have rows, too."""
    rates = runs[["experiment", RATE]].drop_duplicates().assign(lr_at_edge=False, num_rates=1)
    return [_runs_at(runs, alike, with_diverged=True) for _, alike in rates.groupby(RATE)]


def of_rates(runs: pd.DataFrame, rates: Sequence[float]) -> pd.DataFrame:
    """The runs with one of some learning rates.

    Raises:
        UserError: no run has one of the rates.
    """
    known = sorted(runs[RATE].unique())
    for rate in rates:
        if rate not in known:
            rates_text = ", ".join(f"{value:g}" for value in known)
            raise UserError(f"--rates {rate:g}: no run has it (there are {rates_text})")
    return runs[runs[RATE].isin(rates)]


def _ended(runs: pd.DataFrame) -> pd.DataFrame:
    """The finished and diverged runs, which are results of their settings.

    Raises:
        UserError: two of them have the same settings and seed.
    """
    ended = runs[runs["status"].isin(ENDED)]
    keys = ["experiment", RATE, SEED]
    for (_, rate, seed), alike in ended[ended.duplicated(keys, keep=False)].groupby(keys):
        raise UserError(
            f"{alike.index[1]}: the same run as {alike.index[0]}, with the same data, settings, "
            f"learning rate ({rate:g}) and seed ({seed}): leave one of them out"
        )
    return ended


def _runs_at(runs: pd.DataFrame, rates: pd.DataFrame, *, with_diverged: bool) -> pd.DataFrame:
    """The runs at some learning rates of some experiments, and which seeds diverged there.

    Runs for tuning are left out. `rates` has the columns `experiment`, the rate, `lr_at_edge` and
    `num_rates`.
    """
    ended = _ended(runs)
    at_rates = ended[~is_for_tuning(ended)].reset_index()
    at_rates = at_rates.merge(
        rates[["experiment", RATE, "lr_at_edge", "num_rates"]], on=["experiment", RATE]
    )
    is_finished = at_rates["status"] == "finished"
    diverged = at_rates[~is_finished].groupby("experiment")[SEED].agg(list).to_dict()
    seeds = [diverged.get(experiment, []) for experiment in at_rates["experiment"]]
    at_rates["diverged_seeds"] = pd.Series(seeds, at_rates.index, dtype=object)
    is_shown = is_finished
    if with_diverged:
        has_finished = at_rates["experiment"].isin(at_rates.loc[is_finished, "experiment"])
        is_shown = is_finished | ~has_finished
    return at_rates[is_shown].sort_values(SEED, kind="stable").set_index("run")


def by_experiment(chosen: pd.DataFrame) -> Iterator[pd.DataFrame]:
    """The rows of each experiment, in the order in which experiments first appear."""
    return (seeds for _, seeds in chosen.groupby("experiment", sort=False))


def main_origin(chosen: pd.DataFrame) -> tuple[str | None, int | None]:
    """The data fingerprint and trajectory version that most experiments have.

    Losses of other experiments cannot be compared with theirs. An entry is None if it is not known.
    """
    if chosen.empty:
        return None, None
    fingerprint, version = _num_by_origin(chosen).idxmax()
    return (
        None if pd.isna(fingerprint) else fingerprint,
        None if pd.isna(version) else int(version),
    )


def of_main_origin(chosen: pd.DataFrame) -> pd.DataFrame:
    """The rows with the data fingerprint and trajectory version that most experiments have
    (`main_origin`)."""
    fingerprint, version = main_origin(chosen)
    has_data = chosen["data_fingerprint"].fillna("") == (fingerprint or "")
    has_version = chosen["trajectory_version"].fillna(0) == (version or 0)
    return chosen[has_data & has_version]


def notes(runs: pd.DataFrame, chosen: pd.DataFrame) -> list[str]:
    """A line for each kind of run that is left out, and one if the others do not all compare.

    Args:
        runs: rows of `load`.
        chosen: rows of `at_best_rates` from these.
    """
    status = runs["status"]
    kinds = {
        "diverged, counted as tried and as never reaching a target": status == "diverged",
        "failed otherwise than by diverging, left out": status == "failed",
        "not finished, left out": ~status.isin((*ENDED, "failed")),
    }
    lines = []
    for what, is_of_kind in kinds.items():
        if is_of_kind.any():
            lines.append(f"{what}: {', '.join(runs.loc[is_of_kind, 'name'])}")
    num_by_origin = _num_by_origin(chosen)
    if len(num_by_origin) > 1:
        fingerprint, version = main_origin(chosen)
        lines.append(
            f"runs on other data or of another trajectory version do not compare: of one origin "
            f"are at most {num_by_origin.max()} of {num_by_origin.sum()} experiments, on "
            f"{str(fingerprint)[:8]}, of version {version}"
        )
    return lines


def _num_by_origin(chosen: pd.DataFrame) -> pd.Series:
    """How many experiments have each data fingerprint and trajectory version."""
    return chosen.groupby(list(ORIGIN[:2]), sort=False, dropna=False)["experiment"].nunique()
