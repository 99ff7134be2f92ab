"""Tables of the terminal: they fit, and what they leave out is named."""

import re
from collections import Counter

import pandas as pd
import pytest

from brx.runs.formats import DROPPED_FIRST, format_table, terminal_text


def wide(num_rows, num_columns=12):
    """A column of names, two that are dropped first, and numbers."""
    numbers = {f"number {place}": ["1234567"] * num_rows for place in range(num_columns - 3)}
    names = [f"a method, variant {row}" for row in range(num_rows)]
    return pd.DataFrame(
        {"method": names, DROPPED_FIRST[1]: "0.1", DROPPED_FIRST[0]: "0.2", **numbers}
    )


NOTES = pd.DataFrame(
    [{"method": "basis-rotation 1st/unilateral", "time": "1.25", "note": "word " * 9}] * 9
)
HEADINGS = [
    "method",
    "slowdown at P = 32",
    "seeds",
    "lr at P = 1",
    "lr at P = 32",
    "the paper's",
    "target loss",
]
CELLS = [
    "basis-rotation 1st/bilateral",
    "12.03 [9.80, 14.77]",
    "6",
    "0.001*",
    "0.001*",
    "5.43x",
    "2.672",
]
RESULTS = pd.DataFrame([CELLS] * 9, columns=HEADINGS)


@pytest.mark.parametrize(
    ("table", "width", "num_left_out"),
    [
        (wide(4), 40, 9),
        (wide(20), 80, 5),
        (wide(1), 400, 0),
        (wide(2), 80, 0),  # few wide rows stand upright
        (NOTES, 44, 0),
        (RESULTS, 74, 0),
        (RESULTS, 105, 0),
    ],
)
def test_table_of_the_terminal_loses_nothing_silently(table, width, num_left_out):
    lines = terminal_text(table, width).splitlines()
    left_out = []
    if lines[-1].startswith("Too narrow for: "):
        left_out = lines.pop().removeprefix("Too narrow for: ").partition(" (")[0].split(", ")
    # Every line fits and ends with a border.
    assert max(map(len, lines)) <= width
    assert all(line[-1] in "┓┃┩│┘" for line in lines)
    # Columns are left out by rank, and then from the right.
    ranked = [name for name in DROPPED_FIRST if name in table] + [*reversed(table.columns[1:])]
    assert set(left_out) == {*list(dict.fromkeys(ranked))[:num_left_out]}
    # All words of the others are there, unbroken.
    shown = table.drop(columns=left_out)
    words = Counter(" ".join([*shown.columns, *shown.to_numpy().ravel()]).split())
    assert Counter(re.sub("[\u2500-\u257f]", " ", " ".join(lines)).split()) == words


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        ("markdown", "| a & b\\|c | 50% |"),
        ("csv", "a & b|c,50%"),
        ("json", '"slow_down":"50%"'),
        ("latex", "slow\\_down \\\\\n\\midrule\na \\& b|c & 50\\%"),
        ("table", "│ &  │"),
    ],
)
def test_a_table_in_every_format(form, expected, monkeypatch):
    monkeypatch.setenv("COLUMNS", "12")  # the terminal's width counts
    assert expected in format_table(
        pd.DataFrame({"method": ["a & b|c"], "slow_down": ["50%"]}), form
    )


def test_headings_are_printed_as_they_are():
    # rich would take them for markup and an emoji.
    table = pd.DataFrame({"x[lr=0.1]": ["1"], "a:b:c": ["2"]})
    text = format_table(table, "table")
    assert "x[lr=0.1]" in text
    assert "a:b:c" in text
