"""Tables of texts, to be read, from the frames of numbers of `experiments` and `comparison`."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from brx.runs.comparison import passage
from brx.runs.experiments import by_experiment, tried_rates
from brx.runs.frames import DEPTH, RATE
from brx.runs.slowdown import geometric_mean


def loss_table(runs: pd.DataFrame, target: float) -> pd.DataFrame:
    """A row per run: losses, speed, and the iterations to a training loss of `target`."""
    reached = [passage(run, target) for run in runs.index]
    return pd.DataFrame(
        {
            "method": runs["method"],
            "P": runs[DEPTH].astype(str),
            "final training loss": runs["train_loss"].map("{:.3f}".format),
            "validation loss": runs["val_loss"].map("{:.3f}".format),
            "iterations/s": (runs["iteration"] / runs["seconds"]).map("{:.1f}".format),
            f"iterations to {target:.2f}": ["never" if t is None else f"{t:.0f}" for t in reached],
        }
    )


def slowdown_table(slowdowns: pd.DataFrame) -> pd.DataFrame:
    """A row per method and number of stages, from the rows of `comparison.slowdowns`."""
    return pd.DataFrame(
        {
            "model": row["model"],
            "method": row["method"],
            "P": str(row["stages"]),
            **(
                {"of training": str(row["last_iteration"])}
                if slowdowns["last_iteration"].nunique() > 1
                else {}
            ),
            "slowdown": slowdown_text(row) + (" (early)" if row["is_early"] else ""),
            "iterations": _iterations_text(row["iterations"], is_censored=row["is_censored"]),
            "reference P": str(row["reference_stages"]),
            "its iterations": _iterations_text(
                row["reference_iterations"], is_censored=row["reference_is_censored"]
            ),
            "lr": rate_text(row["lr"], at_edge=row["lr_at_edge"]),
            "its lr": rate_text(row["reference_lr"], at_edge=row["reference_lr_at_edge"]),
            "seeds": seeds_text(row),
            "target loss": "none" if math.isnan(row["target"]) else f"{row['target']:.4f}",
        }
        for row in slowdowns.to_dict("records")
    )


def slowdown_text(slowdown: Mapping[str, Any]) -> str:
    """A slowdown as `4.24`, `1.27 [1.21, 1.35]`, or `> 8.1` for a run that never got there.

    Where an interval is finer than the recorded iterations can tell, that resolution: `1.00 (to
    0.01)`."""
    ratio, low, high, resolution = (
        slowdown.get(key, math.nan) for key in ("ratio", "low", "high", "resolution")
    )
    if pd.isna(ratio):
        return "target on a plateau" if slowdown.get("is_plateau") else "reference never reaches it"
    if slowdown["is_censored"]:
        return f"> {ratio:.2f}"
    if pd.isna(low):
        return f"{ratio:.2f}"
    if high - low < 2 * resolution or f"{low:.2f}" == f"{high:.2f}":
        return f"{ratio:.2f} (to {np.nanmax([resolution, 0.005]):.1g})"
    return f"{ratio:.2f} [{low:.2f}, {high:.2f}]"


def reduction_table(reductions: pd.DataFrame) -> pd.DataFrame:
    """A row per method and number of stages, from the rows of `comparison.reductions`."""
    return pd.DataFrame(
        {
            "model": reductions["model"],
            "method": reductions["method"],
            "P": reductions["stages"].astype(str),
            **(
                {"of training": lengths.astype(str)}
                if (lengths := reductions["last_iteration"]).nunique() > 1
                else {}
            ),
            "best baseline": reductions["baseline"],
            "its final loss": reductions["baseline_final_loss"].map("{:.3f}".format),
            "iterations saved": [saved_text(row) for row in reductions.to_dict("records")],
        }
    )


def experiment_table(chosen: pd.DataFrame) -> pd.DataFrame:
    """A row per experiment: its final losses at its best rate; of several seeds [range] and
    (standard error)."""
    by_size = ["model.blocks", "model.width", "last_iteration", DEPTH, "variant"]
    return pd.DataFrame(
        {
            "model": first["architecture"],
            "iterations": str(first["last_iteration"]),
            "method": first["variant"],
            "P": str(first[DEPTH]),
            "lr": rate_text(first[RATE], at_edge=first["lr_at_edge"]),
            "seeds": str(len(seeds)),
            "final training loss": final_loss_text(seeds),
            "final validation loss": f"{seeds['val_loss'].mean():.3f}"
            + _standard_error(seeds["val_loss"]),
        }
        for seeds in by_experiment(chosen.sort_values(by_size, kind="stable"))
        for first in [seeds.iloc[0]]
    )


def _standard_error(values: pd.Series) -> str:
    return f" ({values.sem():.3f})" if len(values) > 1 else ""


def rate_table(runs: pd.DataFrame, chosen: pd.DataFrame) -> pd.DataFrame:
    """A row per experiment of `chosen`: its best learning rate, and the final validation loss of
    each among `runs`."""
    tried = tried_rates(runs).groupby("experiment")
    return pd.DataFrame(
        {
            "model": first["architecture"],
            "method": first["variant"],
            "P": str(first[DEPTH]),
            "chosen": f"{first[RATE]:g}",
            "seeds": str(len(seeds)),
            "at the edge": _edge_text(first["lr_at_edge"], len(scores)),
            "final validation loss of each": ", ".join(
                f"{rate:g}: {score:.3f}" for rate, score in scores
            ),
        }
        for seeds in by_experiment(chosen)
        for first in [seeds.iloc[0]]
        for scores in [tried.get_group(first["experiment"])[[RATE, "score"]].to_numpy()]
    )


def _edge_text(at_edge: bool, num_rates: int) -> str:
    """Whether the best rate is the lowest or highest of those tried; with one it is both."""
    if num_rates == 1:
        return "the only one"
    return "yes" if at_edge else ""


def final_loss_text(seeds: pd.DataFrame) -> str:
    """Mean final training loss of an experiment's runs, and its range over seeds where there are
    several."""
    losses = seeds["train_loss"]
    return f"{losses.mean():.3f}" + (
        f" [{losses.min():.3f}, {losses.max():.3f}]" if len(losses) > 1 else ""
    )


def rate_text(rate: float, *, at_edge: bool) -> str:
    """A chosen learning rate; with a star when it is the lowest or highest of those tried, or the
    only one."""
    return f"{rate:g}{'*' if at_edge else ''}"


def saved_text(reduction: Mapping[str, Any]) -> str:
    if pd.isna(reduction["share"]):
        return str(reduction["missing"])
    interval = (
        "" if pd.isna(reduction["low"]) else f" [{reduction['low']:.1%}, {reduction['high']:.1%}]"
    )
    return f"{reduction['share']:.1%}{interval}"


def seeds_text(slowdown: Mapping[str, Any]) -> str:
    """How many seeds it is from; under delay / without where they differ, and there is no
    interval."""
    ours, theirs = len(slowdown["iterations"]), len(slowdown["reference_iterations"])
    return str(ours) if ours == theirs else f"{ours} / {theirs}"


def _iterations_text(iterations: list[float], *, is_censored: bool) -> str:
    return f"{'> ' if is_censored else ''}{geometric_mean(iterations):.0f}"


def leaderboard_table(board: pd.DataFrame, delays: list[str]) -> pd.DataFrame:
    """A row per method, from the rows of `comparison.leaderboard`; the first delay is the
    reference."""
    reference, *others = [delay for delay in delays if delay in set(board["delay"])]
    rows = []
    for _, alike in board.groupby("rank"):
        first, under = alike.iloc[0], {row["delay"]: row for row in alike.to_dict("records")}
        losses = {delay: f"{row['loss']:.3f}" for delay, row in under.items()}
        compared = {
            delay: row for delay, row in under.items() if isinstance(row.get("is_censored"), bool)
        }
        early = {
            delay: " (early)" if row["is_early"] and row["ratio"] > 0 else ""
            for delay, row in compared.items()
        }
        slowdowns = {delay: slowdown_text(row) + early[delay] for delay, row in compared.items()}
        rates = {
            delay: rate_text(row["lr"], at_edge=row["lr_at_edge"]) for delay, row in under.items()
        }
        saved = under[others[-1]]["saved"] if others and others[-1] in under else None
        rows.append(
            {
                "method": first["method"],
                "final loss": losses.get(reference, ""),
                **{f"with {delay}": losses.get(delay, "") for delay in others},
                **{f"slowdown, {delay}": slowdowns.get(delay, "") for delay in others},
                "saved": saved_text(saved) if saved else "",
                "ms": f"{first['milliseconds']:.1f}",
                "lr": "/".join(rates.get(delay, "") for delay in (reference, *others)),
                "seeds": str(first["num_seeds"]),
            }
        )
    return pd.DataFrame(rows)
