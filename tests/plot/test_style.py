"""Methods have colours that everybody can tell apart; what the font lacks is told in one line."""

import warnings
from itertools import combinations

import matplotlib as mpl
import numpy as np
import pytest
from matplotlib.colors import to_rgb

from brx.errors import RunError
from brx.plot.style import (
    METHOD_LOOKS,
    break_into_lines,
    finish_panel,
    look_of,
    new_figure,
    save,
)

# Machado, Oliveira and Fernandes (2009): what linear RGB becomes to the eyes of somebody without
# one kind of cone.
WITHOUT_RED = [
    [0.152286, 1.052583, -0.204868],
    [0.114503, 0.786281, 0.099216],
    [-0.003882, -0.048116, 1.051998],
]
WITHOUT_GREEN = [
    [0.367322, 0.860646, -0.227968],
    [0.280085, 0.672501, 0.047413],
    [-0.011820, 0.042940, 0.968881],
]


def lab(color):
    """CIELAB of linear RGB in [0, 1], white point D65."""
    to_xyz = np.array(
        [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
    )
    x, y, z = np.cbrt(to_xyz @ np.clip(color, 0, 1) / [0.9505, 1.0, 1.089])
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def linear(color):
    """Linear RGB of sRGB, both in [0, 1]."""
    return np.where(color <= 0.04045, color / 12.92, ((color + 0.055) / 1.055) ** 2.4)


@pytest.mark.parametrize(
    "eyes", [np.eye(3), WITHOUT_RED, WITHOUT_GREEN], ids=["all cones", "no red", "no green"]
)
def test_methods_can_be_told_apart_by_colour(eyes):
    # The reversed schedule is drawn next to the other two schedules only.
    together = [method for method in METHOD_LOOKS if method != "basis-rotation reversed"]
    srgb = [np.array(to_rgb(look_of(method).color)) for method in together]
    seen = [lab(np.array(eyes) @ linear(color)) for color in srgb]
    distances = {
        pair: np.linalg.norm(seen[pair[0]] - seen[pair[1]])
        for pair in combinations(range(len(seen)), 2)
    }
    closest = min(distances, key=distances.get)
    assert distances[closest] > 15, [together[place] for place in closest]


def test_characters_that_the_font_lacks_are_told_in_one_line(tmp_path, capsys, recwarn):
    with new_figure() as figure:
        figure.add_subplot().set_title("\u6a21\u578b a")
        save(figure, tmp_path / "figure", "caption")
    (line,) = capsys.readouterr().err.splitlines()
    assert "figure: the font lacks \u6a21 \u578b; the .png and the .pdf have boxes" in line
    assert [str(one.message) for one in recwarn] == []


def test_characters_of_a_legend_are_told_in_one_line(tmp_path, capsys, recwarn):
    with new_figure() as figure:
        panel = figure.add_subplot()
        panel.plot([1, 2], label="\u6a21\u578b a")
        finish_panel(panel, "iteration", "loss", "title")
        save(figure, tmp_path / "figure", "caption")
    assert capsys.readouterr().err.count("\n") == 1
    assert not recwarn.list


def test_matplotlibrc_of_the_user_does_not_change_figures(tmp_path):
    contents = []
    # `text.usetex` fails where LaTeX is not installed.
    for theirs in ({}, {"text.usetex": True, "axes.facecolor": "black", "savefig.bbox": "tight"}):
        with mpl.rc_context(theirs):
            with new_figure() as figure:
                figure.add_subplot().set_title("a_b")
                png, *_ = save(figure, tmp_path / "figure", "caption")
            contents.append(png.read_bytes())
    assert contents[0] == contents[1]


def test_folder_that_cannot_be_made_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with new_figure() as figure, pytest.raises(RunError, match="file is a file, not a folder"):
        save(figure, tmp_path / "file" / "figure", "caption")


def test_other_warnings_of_a_figure_are_shown(tmp_path, monkeypatch):
    def warn(figure):
        warnings.warn("something else", stacklevel=1)

    monkeypatch.setattr("brx.plot.style._fix_layout", warn)
    with new_figure() as figure, pytest.warns(UserWarning, match="something else"):
        save(figure, tmp_path / "figure", "caption")


def test_dollar_at_a_line_break_stays_escaped():
    with new_figure() as figure:
        text = figure.text(0, 0, "x" * 90 + r"\$\$\$\$\$\$\$\$" + "x" * 90)
        for room in range(200, 400, 5):
            break_into_lines(text, room)
            assert text.get_text().count("$") == text.get_text().count(r"\$") == 8
