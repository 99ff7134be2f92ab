"""Numbers with units."""

import pytest

from brx.config.quantities import parse_bytes, parse_flops
from brx.errors import UserError


@pytest.mark.parametrize(
    ("text", "expected"),
    [("24GB", 24e9), ("24 gb", 24e9), ("80GiB", 80 * 2**30), ("1.5T", 1.5e12), ("123B", 123), ("8e9 B", 8e9)],
)
def test_bytes(text, expected):
    assert parse_bytes(text, "here") == expected


@pytest.mark.parametrize(("text", "expected"), [("120T", 120e12), ("120 TFLOPS", 120e12), ("1.2e14FLOP/s", 1.2e14)])
def test_flops(text, expected):
    assert parse_flops(text, "here") == expected


@pytest.mark.parametrize("text", ["", "GB", "24", "8e9", "24Q", "-1GB", "0GB", "1.2.3GB", "24GBB"])
def test_anything_else_is_one_line(text):
    with pytest.raises(UserError, match=r"^--option .*must be a number above 0 with a unit, for example 80GB"):
        parse_bytes(text, "--option")
