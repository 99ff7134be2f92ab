"""What a sweep leaves to be read: the choice with its runners-up, and what failed."""

from __future__ import annotations

import math
from pathlib import Path

import pandas as pd
from rich.table import Table

from brx.files import write_text
from brx.runs.formats import format_table
from brx.sweep.spec import Choice, Sweep

EDGE = "at the edge: widen the grid"


def choice_table(choices: pd.DataFrame, rule: Choice) -> Table:
    """A row per group of `choose`: the best value and what every value scored."""
    table = Table("cells", rule.over, "remark", f"{rule.by} of each", title=f"chosen by the lowest {rule.by}")
    for _, alike in choices.groupby("group", sort=False):
        scores = ", ".join(
            f"{value:g}: {_shown(score)}" for value, score in alike.set_index(rule.over)["score"].items()
        )
        best = alike[alike["is_best"]].iloc[0]
        has_one = math.isfinite(best["score"])
        chosen = f"{best[rule.over]:g}" if has_one else "none"
        table.add_row(best["cells"], chosen, EDGE if best["at_edge"] and has_one else "", scores)
    return table


def write_choices(choices: pd.DataFrame, sweep: Sweep) -> list[Path]:
    """Write the same as CSV into the sweep's folder, a line per value."""
    rule = sweep.spec.choose
    assert rule is not None
    is_chosen = choices["is_best"] & choices["score"].map(math.isfinite)
    texts = pd.DataFrame(
        {
            "cells": choices["cells"],
            rule.over: choices[rule.over].map("{:g}".format),
            rule.by: choices["score"].map(_shown),
            "chosen": is_chosen.map({True: "yes", False: ""}),
            "remark": (is_chosen & choices["at_edge"]).map({True: EDGE, False: ""}),
        }
    )
    path = sweep.out / f"choice-{sweep.path.stem}.csv"
    write_text(path, format_table(texts, "csv") + "\n")
    return [path]


def failure_table(failures: dict[str, str]) -> Table:
    """One row per failed cell, with its run's last line."""
    table = Table("failed cell", "why")
    for name, reason in failures.items():
        table.add_row(name, reason)
    return table


def _shown(score: float) -> str:
    return f"{score:.4f}" if math.isfinite(score) else "failed"
