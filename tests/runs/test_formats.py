"""Tables of the terminal: they fit, and what they leave out is named."""

import pandas as pd
import pytest

from brx.runs.formats import DROPPED_FIRST, format_table, terminal_text


def wide(num_rows, num_columns=12):
    """A column of names, two that are dropped first, and numbers."""
    numbers = {f"number {place}": ["1234567"] * num_rows for place in range(num_columns - 3)}
    names = [f"a method, variant {row}" for row in range(num_rows)]
    return pd.DataFrame({"method": names, DROPPED_FIRST[1]: "0.1", DROPPED_FIRST[0]: "0.2", **numbers})


@pytest.mark.parametrize(("width", "num_rows"), [(40, 4), (60, 1), (80, 20), (120, 4), (400, 1)])
def test_tables_fit_and_name_what_they_leave_out(width, num_rows):
    table = wide(num_rows)
    lines = terminal_text(table, width).splitlines()
    named = []
    if lines[-1].startswith("Too narrow for: "):
        named = lines.pop().removeprefix("Too narrow for: ").partition(" (")[0].split(", ")
    assert max(map(len, lines)) <= width
    assert all(line[-1] in "┓┃┩│┘" for line in lines)
    # By rank, and then from the right.
    assert set(named) == {*[*DROPPED_FIRST[:2], *reversed(table.columns[3:])][: len(named)]}
    assert "\n".join(lines).count("1234567") == num_rows * (9 - len(set(named) - set(DROPPED_FIRST)))


def test_few_wide_rows_stand_upright_with_all_columns_and_words_are_never_broken():
    text = terminal_text(wide(2), 80)
    assert "Too narrow" not in text
    assert text.count("1234567") == 2 * 9
    row = {"method": "basis-rotation 1st/unilateral", "time": "1.25", "note": "word " * 9}
    text = terminal_text(pd.DataFrame([row] * 9), 44)
    assert "…" not in text
    assert text.count("basis-rotation") == text.count("1st/unilateral") == 9


@pytest.mark.parametrize("width", [74, 80, 105])
def test_no_line_is_cut_at_the_right(width):
    headings = ["method", "slowdown at P = 32", "seeds", "lr at P = 1", "lr at P = 32", "the paper's", "target loss"]
    row = ["basis-rotation 1st/bilateral", "12.03 [9.80, 14.77]", "6", "0.001*", "0.001*", "5.43x", "2.672"]
    lines = terminal_text(pd.DataFrame([row] * 9, columns=headings), width).splitlines()
    assert all(len(line) <= width and line[-1] in "┓┃┩│┘" for line in lines)
    assert "".join(lines).count("5.43x") == 9


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        ("markdown", "| a & b | 50% |"),
        ("csv", "a & b,50%"),
        ("json", '"slow_down":"50%"'),
        ("latex", "slow\\_down \\\\\n\\midrule\na \\& b & 50\\%"),
        ("table", "a & b"),
    ],
)
def test_a_table_in_every_format(form, expected):
    assert expected in format_table(pd.DataFrame({"method": ["a & b"], "slow_down": ["50%"]}), form)


def test_the_terminals_width_counts(monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    assert "Too narrow" not in format_table(wide(20), "table")
    monkeypatch.setenv("COLUMNS", "80")
    assert "Too narrow" in format_table(wide(20), "table")
