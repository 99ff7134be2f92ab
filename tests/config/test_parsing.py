"""YAML that is wrong, endless or huge: one line, at once; numbers with a unit."""

import pytest

from brx.config.parsing import parse_bytes, parse_flops, parse_yaml
from brx.errors import UserError

BOMB = "a: &a [x,x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{name}: &{name} [{','.join([f'*{before}'] * 10)}]\n"
    for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)
MERGE_BOMB = "a: &a {x: 1}\n" + "".join(
    f"{name}: &{name} {{<<: [{','.join([f'*{before}'] * 10)}]}}\n"
    for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)
TRAPS = {
    "a list that holds itself": ("model: &a [*a]", "an alias that contains itself"),
    "an alias bomb": (BOMB, "more than 100,000 values, its aliases written out"),
    "a bomb of merged keys": (MERGE_BOMB, "more than 100,000 values, its aliases written out"),
    "brackets without end": ("[" * 100_000, "nested more than 50 levels deep"),
    "deep by aliases": (
        "a0: &a0 [x]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}]\n" for n in range(1, 60)),
        "nested more than 50 levels",
    ),
    "an impossible date": ("training: 2001-99-99", "month must be in 1..12"),
    "a number of thousands of digits": ("training: " + "9" * 5000, "4300 digits"),
    "many keys": (
        "\n".join(f"k{number}: 1" for number in range(60_000)),
        "more than 100,000 values",
    ),
    "a control character": ("a: \x07", "not valid YAML"),
    "an unknown tag": ("a: !!python/object:os.system x", "not valid YAML"),
    "a key that is a list": ("? [a]\n: 1", "not valid YAML"),
    "an alias of nothing": ("a: *b", "undefined alias"),
}


@pytest.mark.parametrize("trap", TRAPS)
def test_traps_are_one_short_line(trap):
    text, expected = TRAPS[trap]
    with pytest.raises(UserError, match=r"^here: not valid YAML: ") as error:
        parse_yaml(text, "here")
    assert expected in str(error.value)
    assert len(str(error.value)) < 300
    assert "\n" not in str(error.value)


def test_aliases_and_merged_keys_are_fine():
    assert parse_yaml("a: &a {x: 1}\nb: {<<: *a, y: 3e-4}\nc: [*a, *a]", "here") == {
        "a": {"x": 1},
        "b": {"x": 1, "y": 3e-4},
        "c": [{"x": 1}] * 2,
    }


@pytest.mark.parametrize(
    ("parse", "text", "expected"),
    [
        (parse_bytes, "24GB", 24e9),
        (parse_bytes, "80GiB", 80 * 2**30),
        (parse_bytes, "1.5T", 1.5e12),
        (parse_bytes, "8e9 B", 8e9),
        (parse_flops, "120 TFLOPS", 120e12),
        (parse_flops, "1.2e14FLOP/s", 1.2e14),
    ],
)
def test_numbers_with_a_unit(parse, text, expected):
    assert parse(text, "here") == expected


@pytest.mark.parametrize("text", ["", "GB", "24", "24Q", "-1GB", "0GB", "1.2.3GB"])
def test_anything_else_is_one_line(text):
    with pytest.raises(
        UserError, match=r"^--option .*must be a number above 0 with a unit, for example 80GB"
    ):
        parse_bytes(text, "--option")
