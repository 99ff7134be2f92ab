"""Names chosen by users stay distinct on disk, harmless in a terminal and unchanged in a figure."""

import matplotlib.pyplot as plt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from brx.names import (
    LONGEST_FILE_NAME,
    figure_label,
    file_name,
    path_of_text,
    path_text,
    shown,
)

NAMES = (
    st.text() | st.text(alphabet="./:_-a$\x1b\udce9\ufeff ") | st.text(alphabet="é", min_size=99)
)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (("quick", "basis-rotation", "p8", "s0"), "quick-basis-rotation-p8-s0"),
        (("./my_method.py:Mine", "p2"), "my_method.Mine-p2"),
        (("../a/my_method.py:Mine",), "a.my_method.Mine"),
        (("torch.optim:Adamax", "lr1e-05"), "torch.optim.Adamax-lr1e-05"),
        (("größe",), "größe"),
    ],
)
def test_usual_values_make_readable_names(values, expected):
    assert file_name(*values) == expected


@given(NAMES)
def test_any_value_makes_a_name_for_disk(value):
    name = file_name(value)
    assert name
    assert name[0] not in ".-"
    assert not set(name) & set('/\\:*?"<>|$ \0')
    assert len(name.encode()) <= LONGEST_FILE_NAME


@pytest.mark.parametrize(
    ("one", "other"), [("a b", "a-b"), ("a" * 300, "a" * 301), ("\udce9", "\udce8"), ("[1]", "1")]
)
def test_changed_names_stay_apart(one, other):
    assert file_name(one) != file_name(other)


@given(NAMES)
def test_shown_text_is_one_harmless_line(text):
    line = shown(text)
    assert len(line.splitlines()) <= 1
    assert "\x1b" not in line
    line.encode()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("plain é 漢\u3000x", "plain é 漢\u3000x"),
        ("\x1b[31mred", "\\x1b[31mred"),
        ("caf\udce9", "caf\\xe9"),
        ("\ufeffa\nb", "\\ufeffa\\nb"),
        ("\u202eabc", "\\u202eabc"),
    ],
)
def test_invisible_characters_are_written_out(text, expected):
    assert shown(text) == expected


@pytest.mark.parametrize(
    "text", ["from $5 to $9", "cost$5_$x", "_hidden", "a_b^c\\d", "\x07\ufeff"]
)
def test_label_is_drawn_as_written(text):
    figure, axes = plt.subplots()
    (line,) = axes.plot([0, 1], label=figure_label(text))
    (drawn,) = axes.legend().get_texts()
    figure.canvas.draw()
    assert line in axes.get_legend_handles_labels()[0]
    assert drawn.get_text().replace(r"\$", "$").strip() == shown(text)
    assert drawn.get_text().count("$") == drawn.get_text().count(r"\$")
    plt.close(figure)


def test_path_that_is_not_utf8_comes_back(tmp_path):
    path = tmp_path / "caf\udce9"
    path.mkdir()
    text = path_text(path)
    text.encode()
    assert path_of_text(text) == path


def test_path_with_a_backslash_stays_itself(tmp_path):
    path = tmp_path / "a\\xe9"
    path.mkdir()
    assert path_of_text(path_text(path)) == path
