"""docs/methods.md: its table is complete, its numbers are the code's."""

import re
from pathlib import Path

from brx.methods.refresh_schedule import refresh_intervals, refreshes_per_iteration
from brx.methods.table import METHODS
from brx.pipeline.delay import pipeline_delays

TEXT = (Path(__file__).parents[2] / "docs" / "methods.md").read_text()


def test_the_table_has_every_method_and_its_optimizers():
    rows = {name: row for row in TEXT.splitlines() for name in re.findall(r"^\| `(.+?)` \|", row)}
    assert list(rows) == list(METHODS)
    for name, method in METHODS.items():
        for optimizer in method.gets:
            assert re.sub(r"SCION, |the class", "", optimizer).lower() in rows[name].lower()


def test_the_budgets_are_those_of_the_code():
    uniform, aware, exact = (
        refreshes_per_iteration(refresh_intervals(pipeline_delays(32), 10, name))
        for name in ("uniform", "stage-aware", "stage-aware-exact")
    )
    assert f"{aware:.2f} refreshes per iteration instead of {uniform:g} at P = 32" in " ".join(TEXT.split())
    assert f"spend {exact:g}." in TEXT
