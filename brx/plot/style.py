"""One look for all figures: a method has the same colour, marker and name everywhere."""

import logging
import re
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib as mpl

mpl.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.legend import Legend
from matplotlib.text import Text
from matplotlib.ticker import LogLocator
from numpy.typing import NDArray

from brx.errors import UserError
from brx.files import make_folder, replacing, write_json, write_text
from brx.names import figure_label

# fontTools warns about the dates of fonts when matplotlib writes a PDF.
logging.getLogger("fontTools").setLevel(logging.ERROR)

# Most are from the palettes of Okabe & Ito and of Paul Tol. Colour-blind readers can tell all of
# them apart.
_BLACK = "#000000"
GREY = "#505050"
_ORANGE = "#E69F00"
_GREEN = "#009E73"
_BLUE = "#0072B2"
_RED = "#D55E00"
_SKY = "#88CCEE"
_PINK = "#CC79A7"
_WINE = "#7A0019"
_VIOLET = "#9933FF"
_INDIGO = "#332288"
_BROWN = "#994F00"
_KHAKI = "#BBBB66"
_TEAL = "#004466"
_ORCHID = "#DD77FF"

_PALETTE = (
    _RED,
    _WINE,
    _PINK,
    _SKY,
    _KHAKI,
    _BROWN,
    _BLACK,
    _VIOLET,
    _INDIGO,
    _ORANGE,
    _GREEN,
    _BLUE,
    GREY,
    _TEAL,
    _ORCHID,
)
"""Colours of methods that `METHOD_LOOKS` does not have, in this order."""

CLAIM_COLORS = (_BLUE, _RED, GREY)
"""Colours of verdicts on the paper's claims: yes, no, not tried."""

COLUMN_WIDTH_IN = 3.4  # inches
DPI = 200
# The formats of a figure, each with the metadata key that changes from day to day, or with the
# version of matplotlib. `save` leaves it out, so that the same figure gives the same bytes.
VARYING_METADATA = {"png": "Software", "pdf": "CreationDate", "svg": "Date"}
_MISSING_GLYPH = re.compile(r"Glyph (\d+) .* missing from")  # a warning of matplotlib
SHORT_LABEL = 10  # characters; a legend of such labels has room for two columns under a panel
FEWEST_CHARACTERS = 10  # a line of a label or title is not made shorter than this


class Look(NamedTuple):
    """How a method looks in all figures."""

    label: str
    color: str
    marker: str


METHOD_LOOKS = {
    "pipedream": Look("PipeDream", GREY, "o"),
    "pipedream-lr": Look("PipeDream-LR", _ORANGE, "s"),
    "nesterov": Look("Nesterov", _GREEN, "^"),
    "basis-rotation": Look("Basis rotation", _BLUE, "D"),
    "basis-rotation 2nd/unilateral": Look("Basis rotation 2nd/uni", _SKY, "v"),
    "basis-rotation 1st/bilateral": Look("Basis rotation 1st/bi", _PINK, "<"),
    "basis-rotation 1st/unilateral": Look("Basis rotation 1st/uni", _WINE, ">"),
    "basis-rotation stage-aware": Look("Basis rotation, stage-aware", _BLACK, "P"),
    "basis-rotation reversed": Look("Basis rotation, reversed", _BROWN, "X"),
    "delay-compensation": Look("Delay compensation", _KHAKI, "p"),
    "soap": Look("SOAP", _RED, "h"),
    "muon": Look("Muon", _VIOLET, "*"),
    "scion": Look("Scion", _INDIGO, "d"),
    "lion": Look("Lion", _ORCHID, "H"),
    "adan": Look("Adan", _TEAL, "8"),
}


def look_of(method: str) -> Look:
    """A method's look. Methods without an entry are red circles with their own name."""
    return METHOD_LOOKS.get(method, Look(figure_label(method), _RED, "o"))


def method_colors(methods: Iterable[str]) -> dict[str, str]:
    """A colour per method: known methods have their own, and others get the remaining colours.

    They are all different as long as there are colours for all. A method that brx does not know
    keeps its colour as long as the methods before it stay the same."""
    methods = list(dict.fromkeys(methods))
    colors = {method: METHOD_LOOKS[method].color for method in methods if method in METHOD_LOOKS}
    remaining = [color for color in _PALETTE if color not in colors.values()]
    palette = remaining or _PALETTE
    others = [method for method in methods if method not in colors]
    for index, method in enumerate(others):
        colors[method] = palette[index % len(palette)]
    return colors


def sequence_color(place: int, count: int) -> tuple[float, float, float, float]:
    """The colour of item `place` (from 0) of `count` ordered items, light to dark.

    Colour-blind readers can tell the colours apart."""
    position = 0.1 + 0.85 * place / max(1, count - 1)
    color: tuple[float, float, float, float] = mpl.colormaps["viridis_r"](position)
    return color


def shade(color: str, place: int, count: int) -> tuple[float, float, float]:
    """The shade of a method's colour for item `place` (from 0) of `count` ordered items, light to
    dark."""
    # From -0.6 (60 % of white mixed in) to 0.5 (50 % of black mixed in).
    mix = -0.6 + 1.1 * place / max(1, count - 1)
    end = 1.0 if mix < 0 else 0.0
    red, green, blue = (part + abs(mix) * (end - part) for part in to_rgb(color))
    return red, green, blue


def line_style(*, is_delayed: bool) -> str | tuple[int, tuple[float, float]]:
    """Dashed for runs with delay, solid for runs without."""
    return (0, (4, 1.2)) if is_delayed else "-"


@contextmanager
def new_figure(
    width: float = COLUMN_WIDTH_IN, height: float = 2.4, columns: int = 1
) -> Iterator[Figure]:
    """A figure in the common style, closed when the block ends.

    Args:
        width: the width of one column, in inches.
        height: the height of the whole figure, in inches.
        columns: the number of columns.
    """
    settings: Any = {
        "font.size": 8,
        "axes.titlesize": 8,
        "axes.labelsize": 8,
        "legend.fontsize": 7,
        "legend.frameon": False,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "grid.alpha": 0.25,
        "grid.linewidth": 0.5,
        "lines.linewidth": 1.3,
        "pdf.fonttype": 42,
        "svg.fonttype": "none",  # text stays text
        "svg.hashsalt": "brx",
    }
    # A matplotlibrc of the user's own (`text.usetex`, for example) does not change our figures.
    with plt.style.context(["default", settings]), warnings.catch_warnings():
        # Fitting a legend measures its labels. `save` tells which characters the font lacks.
        warnings.filterwarnings("ignore", _MISSING_GLYPH.pattern)
        figure = plt.figure(figsize=(width * columns, height), layout="constrained")
        try:
            yield figure
        finally:
            plt.close(figure)


def legend_below(axes: Axes, columns: int = 1) -> None:
    """Put the legend under the panel, below the ticks and label of the x axis.

    It has at most `columns` columns and is no wider than the panel's place in the figure."""

    def make(num_columns: int) -> Legend:
        # The padding, in units of the font size, leaves room for the ticks and the label.
        return axes.legend(
            loc="upper center", bbox_to_anchor=(0.5, 0), borderaxespad=5.0, ncols=num_columns
        )

    _fit_legend(make, columns, _room_of(axes))


def legend_below_all(
    figure: Figure, handles: Sequence[Artist], labels: Sequence[str], columns: int
) -> None:
    """Put one legend under all panels. It has at most `columns` columns and is no wider than the
    figure."""

    def make(num_columns: int) -> Legend:
        return figure.legend(handles, labels, loc="outside lower center", ncols=num_columns)

    _fit_legend(make, columns, figure.bbox.width)


def _fit_legend(make: Callable[[int], Legend], columns: int, room: float) -> None:
    """Draw a legend with as many columns as fit.

    Run names may be so long that one column does not fit; their labels get several lines. A legend
    wider than the figure would be cut off, and the layout engine would shrink the panel to nothing.
    The figure becomes taller by what the legend takes in addition.

    Args:
        make: draws the legend with a number of columns.
        columns: the largest number of columns.
        room: the largest width, in pixels.
    """
    legend = make(columns)
    height_before = legend.get_window_extent().height
    while legend.get_window_extent().width > room and columns > 1:
        legend.remove()
        columns -= 1
        legend = make(columns)
    texts = legend.get_texts()
    longest = max(text.get_window_extent().width for text in texts)
    handle_and_margins = legend.get_window_extent().width - longest
    for text in texts:
        break_into_lines(text, room - handle_and_margins)
    more_pixels = legend.get_window_extent().height - height_before
    if more_pixels > 0:
        figure = legend.figure
        assert isinstance(figure, Figure)  # brx has no figures within figures
        figure.set_figheight(figure.get_figheight() + more_pixels / figure.dpi)


def break_into_lines(text: Text, room: float) -> None:
    """Break the lines of a text that are wider than `room` pixels."""
    lines = text.get_text().splitlines()
    most = max(map(len, lines), default=0)  # characters per line
    while text.get_window_extent().width > room and most > FEWEST_CHARACTERS:
        most = int(0.9 * most)
        broken = "\n".join(textwrap.fill(line, most) for line in lines)
        # `\$` is one character, a dollar sign (`figure_label`).
        text.set_text(broken.replace("\\\n$", "\n\\$"))


def _room_of(axes: Axes) -> float:
    """The width of a panel's place in the figure, in pixels."""
    place = axes.get_subplotspec()
    num_places = 1 if place is None else place.get_gridspec().ncols
    width: float = axes.figure.bbox.width
    return width / num_places


def legend_entries(panels: Iterable[Axes]) -> tuple[list[Artist], list[str]]:
    """The handles and labels of all lines of several panels; each label once, with its handle in
    the last panel that has it."""
    handles: dict[str, Artist] = {}
    for axes in panels:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            handles[label] = handle
    return list(handles.values()), list(handles)


def draw_points(
    axes: Axes, x: Any, y: Any, ends: tuple[Any, Any], look: Look, **style: Any
) -> None:
    """Draw one or several points in a method's look, with error bars.

    Args:
        axes: the panel.
        x: a number, or an array with one number per point.
        y: the same for the y axis.
        ends: low and high ends of the bars; no bars are drawn if a low end is NaN.
        look: the method's look.
        style: keyword arguments of `Axes.errorbar` that replace the usual ones.
    """
    low, high = ends
    bars = None if np.isnan(low).any() else np.reshape([y - low, high - y], (2, -1))
    usual = {
        "color": look.color,
        "marker": look.marker,
        "markersize": 4,
        "capsize": 2,
        "linestyle": "none",
    }
    axes.errorbar(x, y, **{"yerr": bars, **usual, **style})


def factor_axis(axes: Axes) -> None:
    """Make the y axis logarithmic, for factors near 1: with plain numbers at 1, 2, 3, 5 and at
    these times powers of 10."""
    axes.set_yscale("log")
    axes.yaxis.set_minor_locator(LogLocator(subs=(2, 3, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("{x:g}")


def finish_panel(
    axes: Axes, x_label: str, y_label: str, title: str, *, columns: int | None = None
) -> None:
    """Set labels (with units) and title, and put a legend below, where it covers no curve.

    It has at most `columns` columns: by default two if its labels are short, else one."""
    axes.set(xlabel=x_label, ylabel=y_label, title=title)
    break_into_lines(axes.title, _room_of(axes))
    _, labels = axes.get_legend_handles_labels()
    if not labels:
        return
    if columns is None:
        columns = 2 if max(map(len, labels)) <= SHORT_LABEL else 1
    legend_below(axes, columns)


def say_not_run(axes: Axes, title: str) -> None:
    """Draw an empty panel with a title and a note that its experiments were not run."""
    axes.set_title(title)
    axes.tick_params(bottom=False, left=False, labelbottom=False)
    axes.text(0.5, 0.5, "not run", ha="center", va="center", transform=axes.transAxes, color="grey")


def thin(losses: pd.DataFrame, most: int = 300) -> pd.DataFrame:
    """At most `most` evenly spread rows, including the first and the last.

    Losses are means over 2 % of a run, so that 300 points are six per such window."""
    return losses.iloc[thin_rows(len(losses), most)]


def thin_rows(num_rows: int, most: int) -> NDArray[np.intp]:
    """At most `most` evenly spread indices of `num_rows`, including the first and the last."""
    spread = np.linspace(0, num_rows - 1, min(num_rows, most))
    return np.unique(spread.astype(np.intp))


def save(
    figure: Figure,
    path: Path,
    caption: str,
    *,
    command: str = "",
    details: Mapping[str, Any] | None = None,
) -> list[Path]:
    """Write a figure in several formats; returns the files written.

    They are PATH.png, PATH.pdf, PATH.svg, PATH.txt (caption and command) and, if there are details,
    PATH.json, in this order. The same figure gives the same bytes.

    Args:
        figure: a figure from `new_figure`.
        path: the path without suffix.
        caption: what the figure shows, one or several lines.
        command: the command that draws the figure.
        details: what it was drawn from, such as the runs, and what was missing.

    Raises:
        UserError: the path has no name of a file, such as `.`.
        RunError: a file cannot be written.
    """
    if path.name in ("", ".."):
        raise UserError(f"{path}: is a folder; name the figure, without suffix")
    make_folder(path.parent)
    files = []
    with _missing_characters_told(path):
        _fix_layout(figure)
        for form, varying in VARYING_METADATA.items():
            file = path.with_name(f"{path.name}.{form}")
            buffer = BytesIO()
            figure.savefig(buffer, format=form, dpi=DPI, metadata={varying: None})
            content = buffer.getvalue()
            if form == "svg":
                # Two decimal places are a hundredth of a pixel; matplotlib writes six.
                content = re.sub(rb"(?<=\.\d\d)\d+", b"", content)
            with replacing(file) as target:
                target.write(content)
            files.append(file)

    text = caption.rstrip() + "\n"
    if command:
        text += f"Drawn by: {command}\n"
    files.append(path.with_name(f"{path.name}.txt"))
    write_text(files[-1], text)
    if details is not None:
        files.append(path.with_name(f"{path.name}.json"))
        write_json(files[-1], details)
    return files


@contextmanager
def _missing_characters_told(path: Path) -> Iterator[None]:
    """A context in which a line on stderr names the characters that the font lacks, such as
    Chinese ones. It takes the place of matplotlib's warnings, several per character."""
    missing: dict[str, None] = {}  # in the order of the figure
    show_warning = warnings.showwarning

    def collect(message: Warning | str, *details: Any) -> None:
        found = _MISSING_GLYPH.match(str(message))
        if found:
            missing[chr(int(found[1]))] = None
        else:
            show_warning(message, *details)

    with warnings.catch_warnings():
        warnings.filterwarnings("always", _MISSING_GLYPH.pattern)
        warnings.showwarning = collect  # type: ignore[assignment]  # it passes on what it gets
        yield
    if missing:
        print(
            f"brx: note: {path}: the font lacks {' '.join(missing)}; the .png and the .pdf have "
            f"boxes in their place",
            file=sys.stderr,
        )


def _fix_layout(figure: Figure) -> None:
    """Lay the figure out once, so that all formats have the same layout."""
    layout = figure.get_layout_engine()
    if layout is None:
        return
    layout.execute(figure)
    with mpl.rc_context({"figure.autolayout": False, "figure.constrained_layout.use": False}):
        # "none" instead of None would keep a placeholder engine, for which savefig draws twice.
        figure.set_layout_engine(None)
