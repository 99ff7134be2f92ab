"""Turns the frames of numbers from `experiments` and `comparison` into tables of texts for
readers."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from brx.runs.comparison import passage
from brx.runs.experiments import by_experiment, tried_rates
from brx.runs.frames import DEPTH
from brx.runs.slowdown import geometric_mean
from brx.runs.trajectory import RATE


def loss_table(runs: pd.DataFrame, target: float) -> pd.DataFrame:
    """A row per run: losses, speed, and the iterations to a training loss of `target`."""
    reached = [passage(run, target) for run in runs.index]
    reached_texts = [_passage_text(iterations) for iterations in reached]
    return pd.DataFrame(
        {
            "method": runs["method"],
            "P": runs[DEPTH].astype(str),
            "final training loss": runs["train_loss"].map("{:.3f}".format),
            "validation loss": runs["val_loss"].map("{:.3f}".format),
            "iterations/s": (runs["iteration"] / runs["seconds"]).map("{:.1f}".format),
            f"iterations to {target:.2f}": reached_texts,
        }
    )


def _passage_text(iterations: float | None) -> str:
    return "never" if iterations is None else f"{iterations:.0f}"


def slowdown_table(slowdowns: pd.DataFrame) -> pd.DataFrame:
    """A row per method and number of stages, from the rows of `comparison.slowdowns`.

    The length of training is a column if it differs.
    """
    rows = slowdowns.to_dict("records")
    has_lengths = len({row["last_iteration"] for row in rows}) > 1
    return pd.DataFrame(_slowdown_cells(row, with_length=has_lengths) for row in rows)


def _slowdown_cells(row: Mapping[str, Any], *, with_length: bool) -> dict[str, str]:
    cells = {"model": row["model"], "method": row["method"], "P": str(row["stages"])}
    if with_length:
        cells["of training"] = str(row["last_iteration"])
    has_target = not math.isnan(row["target"])
    cells |= {
        "slowdown": slowdown_text(row) + (" (early)" if row["is_early"] else ""),
        "iterations": _iterations_text(row["iterations"], is_censored=row["is_censored"]),
        "reference P": str(row["reference_stages"]),
        "its iterations": _iterations_text(
            row["reference_iterations"], is_censored=row["reference_is_censored"]
        ),
        "lr": rate_text(row["lr"], at_edge=row["lr_at_edge"]),
        "its lr": rate_text(row["reference_lr"], at_edge=row["reference_lr_at_edge"]),
        "seeds": seeds_text(row),
        "target loss": f"{row['target']:.4f}" if has_target else "none",
    }
    return cells


def slowdown_text(slowdown: Mapping[str, Any]) -> str:
    """A slowdown as `4.24`, `1.27 [1.21, 1.35]`, or `> 8.1` for a run that never got there.

    If the interval is narrower than the recorded iterations can resolve, the resolution stands in
    its place: `1.00 (to 0.01)`.

    Args:
        slowdown: a row of `comparison.slowdowns`.
    """
    ratio = slowdown.get("ratio", math.nan)
    low = slowdown.get("low", math.nan)
    high = slowdown.get("high", math.nan)
    resolution = slowdown.get("resolution", math.nan)
    if pd.isna(ratio):
        return "target on a plateau" if slowdown.get("is_plateau") else "reference never reaches it"
    if slowdown["is_censored"]:
        return f"> {ratio:.2f}"
    if pd.isna(low):
        return f"{ratio:.2f}"
    is_finer_than_recorded = high - low < 2 * resolution
    if is_finer_than_recorded or f"{low:.2f}" == f"{high:.2f}":
        return f"{ratio:.2f} (to {np.nanmax([resolution, 0.005]):.1g})"
    return f"{ratio:.2f} [{low:.2f}, {high:.2f}]"


def reduction_table(reductions: pd.DataFrame) -> pd.DataFrame:
    """A row per method and number of stages, from the rows of `comparison.reductions`.

    The length of training is a column if it differs.
    """
    lengths = reductions["last_iteration"]
    columns: dict[str, Any] = {
        "model": reductions["model"],
        "method": reductions["method"],
        "P": reductions["stages"].astype(str),
    }
    if lengths.nunique() > 1:
        columns["of training"] = lengths.astype(str)
    # A narrow terminal drops the rightmost columns (formats.py), so the answer comes first.
    columns |= {
        "iterations saved": [saved_text(row) for row in reductions.to_dict("records")],
        "best baseline": reductions["baseline"],
        "its final loss": reductions["baseline_final_loss"].map("{:.3f}".format),
    }
    return pd.DataFrame(columns)


def experiment_table(chosen: pd.DataFrame) -> pd.DataFrame:
    """A row per experiment: its final losses at its best rate, with [range] and (standard error) if
    it has several seeds.

    Args:
        chosen: rows of `experiments.at_best_rates`.
    """
    order = ["model.blocks", "model.width", "last_iteration", DEPTH, "variant"]
    rows = []
    for seeds in by_experiment(chosen.sort_values(order, kind="stable")):
        first = seeds.iloc[0]
        val_loss = seeds["val_loss"]
        row = {
            "model": first["architecture"],
            "iterations": str(first["last_iteration"]),
            "method": first["variant"],
            "P": str(first[DEPTH]),
            "lr": rate_text(first[RATE], at_edge=first["lr_at_edge"]),
            "seeds": str(len(seeds)),
            "final training loss": final_loss_text(seeds),
            "final validation loss": _validation_text(val_loss),
        }
        rows.append(row)
    return pd.DataFrame(rows)


def _validation_text(val_loss: pd.Series) -> str:
    """The mean and its standard error; `none` where a run has no validation, as loops that are
    recorded may."""
    if not np.isfinite(val_loss).all():
        return "none"
    return f"{val_loss.mean():.3f}{_standard_error(val_loss)}"


def _standard_error(values: pd.Series) -> str:
    return f" ({values.sem():.3f})" if len(values) > 1 else ""


def rate_table(runs: pd.DataFrame, chosen: pd.DataFrame) -> pd.DataFrame:
    """A row per experiment: its best learning rate, and the final validation loss at each rate.

    Args:
        runs: rows of `load`.
        chosen: rows of `experiments.at_best_rates` from these.
    """
    tried = tried_rates(runs).groupby("experiment")
    rows = []
    for seeds in by_experiment(chosen):
        first = seeds.iloc[0]
        scores = tried.get_group(first["experiment"])[[RATE, "score"]].to_numpy()
        scored_by = "" if np.isfinite(seeds["val_loss"]).all() else " (training losses)"
        row = {
            "model": first["architecture"],
            "method": first["variant"],
            "P": str(first[DEPTH]),
            "chosen": f"{first[RATE]:g}",
            "seeds": str(len(seeds)),
            "at the edge": _edge_text(first["lr_at_edge"], len(scores)),
            "final validation loss of each": ", ".join(
                f"{rate:g}: {score:.3f}" for rate, score in scores
            )
            + scored_by,
        }
        rows.append(row)
    return pd.DataFrame(rows)


def _edge_text(at_edge: bool, num_rates: int) -> str:
    """Whether the best rate is the lowest or highest of those tried; with one it is both."""
    if num_rates == 1:
        return "the only one"
    return "yes" if at_edge else ""


def final_loss_text(seeds: pd.DataFrame) -> str:
    """The mean final training loss of an experiment's finished runs; with its range if there are
    several seeds, and with the number of seeds that diverged: `2.876 [2.870, 2.881], 1 diverged`.

    Args:
        seeds: the experiment's rows of `experiments.at_best_rates`.
    """
    losses = seeds["train_loss"]
    text = f"{losses.mean():.3f}"
    if len(losses) > 1:
        text += f" [{losses.min():.3f}, {losses.max():.3f}]"
    diverged = seeds["diverged_seeds"].iloc[0]
    return f"{text}, {len(diverged)} diverged" if diverged else text


def rate_text(rate: float, *, at_edge: bool) -> str:
    """A chosen learning rate; with a star if it is the lowest or highest that was tried, or the
    only one."""
    return f"{rate:g}{'*' if at_edge else ''}"


def saved_text(reduction: Mapping[str, Any]) -> str:
    """The share of iterations saved, as `71.6%` or `71.6% [65.0%, 78.1%]`; or why there is none.

    Args:
        reduction: a row of `comparison.reductions`.
    """
    if pd.isna(reduction["share"]):
        return str(reduction["missing"])
    if pd.isna(reduction["low"]):
        return f"{reduction['share']:.1%}"
    return f"{reduction['share']:.1%} [{reduction['low']:.1%}, {reduction['high']:.1%}]"


def seeds_text(slowdown: Mapping[str, Any]) -> str:
    """The number of seeds under a slowdown (a row of `comparison.slowdowns`): `3`, or `3 / 2` if
    the delayed runs and the reference have different numbers."""
    delayed = len(slowdown["iterations"])
    reference = len(slowdown["reference_iterations"])
    return str(delayed) if delayed == reference else f"{delayed} / {reference}"


def _iterations_text(iterations: list[float], *, is_censored: bool) -> str:
    return f"{'> ' if is_censored else ''}{geometric_mean(iterations):.0f}"


def leaderboard_table(board: pd.DataFrame, delays: list[str]) -> pd.DataFrame:
    """A row per method, from the rows of `comparison.leaderboard`.

    Args:
        board: the rows.
        delays: names of delays, from none to the longest; those that are in no row are left out.
    """
    reference, *others = [delay for delay in delays if delay in set(board["delay"])]
    rows = []
    for _, alike in board.groupby("rank"):
        by_delay = {row["delay"]: row for row in alike.to_dict("records")}
        rows.append(_leaderboard_cells(by_delay, reference, others))
    return pd.DataFrame(rows)


def _leaderboard_cells(
    by_delay: Mapping[str, Mapping[str, Any]], reference: str, others: list[str]
) -> dict[str, str]:
    """One method's row of `leaderboard_table`.

    Args:
        by_delay: the method's rows of the leaderboard.
        reference: the delay that the others are compared with.
        others: all other delays.
    """
    losses = {}
    slowdowns = {}
    rates = {}
    for delay, row in by_delay.items():
        losses[delay] = f"{row['loss']:.3f}"
        rates[delay] = rate_text(row["lr"], at_edge=row["lr_at_edge"])
        is_compared = isinstance(row.get("is_censored"), bool)  # else NaN: no reference
        if is_compared:
            is_early = row["is_early"] and row["ratio"] > 0
            slowdowns[delay] = slowdown_text(row) + (" (early)" if is_early else "")
    saved = None
    if others and others[-1] in by_delay:
        saved = by_delay[others[-1]]["saved"]
    first = next(iter(by_delay.values()))
    return {
        "method": first["method"],
        "final loss": losses.get(reference, ""),
        **{f"with {delay}": losses.get(delay, "") for delay in others},
        **{f"slowdown, {delay}": slowdowns.get(delay, "") for delay in others},
        "saved": saved_text(saved) if saved else "",
        "ms": f"{first['milliseconds']:.1f}",
        "lr": "/".join(rates.get(delay, "") for delay in (reference, *others)),
        "seeds": str(first["num_seeds"]),
    }
