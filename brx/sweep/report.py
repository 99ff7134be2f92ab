"""What a sweep leaves to be read: the choice with its runners-up, and what failed."""

from __future__ import annotations

import csv
import io
import math
from pathlib import Path

from rich.table import Table

from brx.files import write_text
from brx.sweep.choice import Chosen
from brx.sweep.spec import Choice, Sweep

EDGE = "at the edge: widen the grid"


def choice_table(chosen: list[Chosen], rule: Choice) -> Table:
    """A row a group: the chosen value and what every value scored."""
    table = Table("cells", rule.over, "remark", f"{rule.by} of each", title=f"chosen by the lowest {rule.by}")
    for one in chosen:
        scores = ", ".join(f"{value:g}: {_shown(score)}" for value, score in one.scores.items())
        table.add_row(one.group, f"{one.best:g}", EDGE if one.at_edge else "", scores)
    return table


def write_choices(chosen: list[Chosen], sweep: Sweep) -> list[Path]:
    """Write the same as CSV into the sweep's folder, a line a value."""
    rule = sweep.spec.choose
    assert rule is not None
    text = io.StringIO()
    lines = csv.writer(text, lineterminator="\n")
    lines.writerow(["cells", rule.over, rule.by, "chosen", "remark"])
    for one in chosen:
        for value, score in one.scores.items():
            is_best = value == one.best
            remark = EDGE if is_best and one.at_edge else ""
            lines.writerow([one.group, f"{value:g}", _shown(score), "yes" if is_best else "", remark])
    path = sweep.out / f"choice-{sweep.path.stem}.csv"
    write_text(path, text.getvalue())
    return [path]


def failure_table(failures: dict[str, str]) -> Table:
    """A row a failed cell, with its run's last line."""
    table = Table("failed cell", "why")
    for name, reason in failures.items():
        table.add_row(name, reason)
    return table


def _shown(score: float) -> str:
    return f"{score:.4f}" if math.isfinite(score) else "failed"
