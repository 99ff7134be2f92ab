"""How robust each method is against delay: final losses, slowdowns and cost, a row per method."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pandas as pd

from brx.runs.comparison import common_target, reached_by_seed, reductions
from brx.runs.experiments import by_experiment
from brx.runs.frames import RATE, SEED, same_but_for
from brx.runs.slowdown import iteration_ratio
from brx.runs.tables import rate_text, saved_text, slowdown_text

CODE = "optimizer.code_sha256"
SAVING = ("baseline", "share", "low", "high")
"""Columns of `reductions`: the best baseline, the iterations saved over it, and their interval."""


def leaderboard(
    chosen: pd.DataFrame, delay_of: Callable[[pd.Series], str], reference: str, target_method: str
) -> pd.DataFrame:
    """A row per method, best under the longest delay first.

    Columns: `method`, `num_seeds`, `milliseconds` per iteration (of the fastest run while nothing else used the
    machine), `target` in nats, and for every delay D that it has runs at: `loss D` (the final training loss, mean over
    seeds), `lr D`, `lr_at_edge D`; beside the reference `ratio D`, `low D`, `high D`, `is_censored D` (the slowdown
    against the same method's reference); and `saved baseline D`, `saved share D`, `saved low D`, `saved high D` (see
    `reductions`), missing for the baselines themselves.

    `chosen` are rows of `at_best_rates` of comparable runs, `delay_of` names a run's delay, `reference` is the name of
    none; slowdowns are at the loss that `target_method` reaches under every delay.
    """
    chosen = chosen.assign(delay=[delay_of(run) for _, run in chosen.iterrows()], label=_labels(chosen))
    of_target = chosen[chosen["variant"] == target_method]
    target = common_target(of_target) if len(of_target) else float("nan")
    saved = {
        row["experiment"]: row for _, alike in chosen.groupby("delay") for row in reductions(alike).to_dict("records")
    }
    rows = []
    for _, alike in chosen.groupby(same_but_for(chosen, RATE, SEED, "pipeline"), sort=False):
        by_delay = {seeds["delay"].iloc[0]: seeds for seeds in by_experiment(alike)}
        row: dict[str, Any] = {
            "method": alike["label"].iloc[0],
            "num_seeds": min(len(seeds) for seeds in by_delay.values()),
            "milliseconds": 1e3 * alike["seconds_per_iteration"].min(),
            "target": target,
        }
        for delay, seeds in by_delay.items():
            row |= _under_delay(delay, seeds, by_delay.get(reference), target)
            saving = saved.get(seeds["experiment"].iloc[0], {})
            row |= {f"saved {name} {delay}": saving[name] for name in SAVING if name in saving}
        rows.append(row)
    losses = [f"loss {delay}" for delay in chosen["delay"].unique() if delay != reference]
    board = pd.DataFrame(rows)
    hardest = max(losses, key=lambda name: board[name].mean()) if losses else f"loss {reference}"
    return board.sort_values(hardest, ignore_index=True)


def _labels(runs: pd.DataFrame) -> pd.Series:
    """The variants; where a user's file made several of one name, with the beginning of its SHA-256."""
    if CODE not in runs:
        return runs["variant"]
    is_ambiguous = runs.groupby("variant")[CODE].transform("nunique") > 1
    return runs["variant"].where(~is_ambiguous, runs["variant"] + " (" + runs[CODE].str[:6] + ")")


def leaderboard_table(board: pd.DataFrame, delays: list[str]) -> pd.DataFrame:
    """The same as texts; the first of the delays is the reference."""
    reference, *others = [delay for delay in delays if f"loss {delay}" in board]
    rows = []
    for row in board.to_dict("records"):
        known = {key: value for key, value in row.items() if not pd.isna(value)}
        # What is known under each delay, by the first words of its columns.
        under = {
            delay: {key.removesuffix(f" {delay}"): known[key] for key in known if key.endswith(f" {delay}")}
            for delay in (reference, *others)
        }
        rows.append(
            {
                "method": row["method"],
                "final loss": _loss_text(under[reference]),
                **{f"with {delay}": _loss_text(under[delay]) for delay in others},
                **{
                    f"slowdown, {delay}": slowdown_text(under[delay]) if "is_censored" in under[delay] else ""
                    for delay in others
                },
                "saved": _saved_text(under[others[-1]]) if others else "",
                "ms": f"{row['milliseconds']:.1f}",
                "lr": "/".join(map(_rate_text, under.values())),
                "seeds": str(row["num_seeds"]),
            }
        )
    return pd.DataFrame(rows)


def _loss_text(known: Mapping[str, Any]) -> str:
    return f"{known['loss']:.3f}" if "loss" in known else ""


def _saved_text(known: Mapping[str, Any]) -> str:
    return saved_text({name: known.get(f"saved {name}") for name in SAVING}) if "saved baseline" in known else ""


def _rate_text(known: Mapping[str, Any]) -> str:
    return rate_text(known["lr"], at_edge=bool(known["lr_at_edge"])) if "lr" in known else ""


def _under_delay(delay: str, seeds: pd.DataFrame, reference: pd.DataFrame | None, target: float) -> dict[str, Any]:
    first = seeds.iloc[0]
    row: dict[str, Any] = {
        f"loss {delay}": seeds["train_loss"].mean(),
        f"lr {delay}": first[RATE],
        f"lr_at_edge {delay}": first["lr_at_edge"],
    }
    if reference is None or reference is seeds or pd.isna(target):
        return row
    reached = reached_by_seed(seeds, target)
    ratio = iteration_ratio(reached, reached_by_seed(reference, target))
    return row | {
        f"ratio {delay}": ratio and ratio.ratio,
        f"low {delay}": ratio and ratio.low,
        f"high {delay}": ratio and ratio.high,
        f"is_censored {delay}": not all(run.is_reached for run in reached.values()),
    }
