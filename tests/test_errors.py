"""The words of messages."""

import ast
import re
from pathlib import Path

import pytest

from brx.errors import counted, counted_choices

BRX = Path(__file__).resolve().parents[1] / "brx"


@pytest.mark.parametrize(
    ("count", "noun", "form", "expected"),
    [
        (0, "run", "", "0 runs"),
        (1, "run", "", "1 run"),
        (2, "run", "", "2 runs"),
        (1, "micro-batch", "", "1 micro-batch"),
        (2, "micro-batch", "", "2 micro-batches"),
        (2, "backward pass", "", "2 backward passes"),
        (4000, "token", ",", "4,000 tokens"),
        (1.0, "update", ".3g", "1 update"),
        (0.5, "update", ".3g", "0.5 updates"),
    ],
)
def test_noun_follows_its_number(count, noun, form, expected):
    assert counted(count, noun, form) == expected


@pytest.mark.parametrize(
    ("counts", "expected"),
    [([1], "1 device"), ([3, 4], "3 or 4 devices"), ([1, 2, 4], "1 or 2 or 4 devices")],
)
def test_noun_follows_the_last_of_several_numbers(counts, expected):
    assert counted_choices(counts, "device") == expected


def test_no_text_leaves_the_plural_open():
    """`1 run(s)`: `counted` decides."""
    for path in BRX.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                assert not re.search(r"[a-z]\(e?s\)", node.value), f"{path}: {node.value}"
