"""YAML that is wrong, endless or huge: one line, at once; numbers with a unit."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from brx.config.parsing import dump_yaml, parse_bytes, parse_flops, parse_value, parse_yaml
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


def test_aliases_are_followed():
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


@pytest.mark.parametrize("text", ["10Gb", "10 Gbit", "10Gbits"])
def test_bits_are_not_taken_for_bytes(text):
    with pytest.raises(UserError, match=r"are bits; give bytes: 1\.25GB, or 10GB if"):
        parse_bytes(text, "--bandwidth")


@pytest.mark.parametrize("text", ["", "GB", "24", "24Q", "-1GB", "0GB", "1.2.3GB"])
def test_anything_else_is_one_line(text):
    with pytest.raises(
        UserError, match=r"^--option .*must be a number above 0 with a unit, for example 80GB"
    ):
        parse_bytes(text, "--option")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("010", 10),
        ("0o10", 8),
        ("0x1F", 31),
        ("-7", -7),
        ("3e-4", 3e-4),
        ("1:30", "1:30"),
        ("1_000", 1000),
        ("1_00", "1_00"),
        ("0b11", "0b11"),
        ("yes", "yes"),
        ("off", "off"),
        ("True", True),
        ("2001-01-01", "2001-01-01"),
        ("~", None),
        ("", None),
        ("12e", "12e"),
    ],
)
def test_plain_words_are_read_as_yaml_1_2(text, expected):
    value = parse_yaml(text, "here")
    assert value == expected
    assert type(value) is type(expected)


TEXTS = st.text() | st.from_regex(r"[-+0-9.eExo:_~<]{1,8}", fullmatch=True)
PLAIN = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXTS


@given(st.dictionaries(TEXTS.filter(lambda text: text != "<<"), PLAIN | st.lists(PLAIN)))
def test_what_is_dumped_reads_back(content):
    read = parse_yaml(dump_yaml(content), "here")
    assert repr(read) == repr(content)


@pytest.mark.parametrize("text", ["set #2", "a#b", "it's #1", "'set #2'", "C# #5", "a  #  b"])
def test_number_sign_of_a_value_is_kept(text):
    assert parse_value(text, "--set a") == text.strip("'")


@pytest.mark.parametrize("text", ["[1, 2] # two", "{a: 1} #x", "'a' # b", "# all"])
def test_comment_behind_a_value_is_refused(text):
    with pytest.raises(UserError, match="would be a comment; quote it, or leave it out"):
        parse_value(text, "--set a")
