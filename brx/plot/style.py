"""One look for all figures: a method has the same colour, marker and name everywhere."""

import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib as mpl

mpl.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator
from numpy.typing import NDArray

from brx.files import replacing, write_json, write_text
from brx.names import figure_label

logging.getLogger("fontTools").setLevel(logging.ERROR)  # it warns of the dates of fonts in a PDF

# From the palettes of Okabe & Ito and of Paul Tol, and some that stay apart from these without one
# kind of cone.
_BLACK, GREY, _ORANGE, _GREEN, _BLUE, _RED = (
    "#000000",
    "#505050",
    "#E69F00",
    "#009E73",
    "#0072B2",
    "#D55E00",
)
_SKY, _PINK, _WINE, _VIOLET, _INDIGO, _BROWN = (
    "#88CCEE",
    "#CC79A7",
    "#7A0019",
    "#9933FF",
    "#332288",
    "#994F00",
)
_KHAKI = "#BBBB66"

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
)
"""Colours of methods without a colour of their own, in this order."""

GROUP_COLORS = (_BLUE, _RED, GREY)
"""Colours of verdicts on the paper's claims: yes, no, not tried."""

COLUMN_WIDTH_IN = 3.4
DPI = 200
SHORT_LABEL = 10  # characters that leave room for two columns of a legend under a panel


class Look(NamedTuple):  # of a method, in all figures
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
}


def look_of(method: str) -> Look:
    return METHOD_LOOKS.get(method, Look(figure_label(method), _RED, "o"))


def method_colors(methods: Iterable[str]) -> dict[str, str]:
    """A colour per method: known ones have theirs, others those that are left.

    The first twelve are all different; a method that brx does not know keeps its colour as long as
    the methods before it are the same."""
    methods = list(dict.fromkeys(methods))
    colors = {method: METHOD_LOOKS[method].color for method in methods if method in METHOD_LOOKS}
    free = [color for color in _PALETTE if color not in colors.values()]
    others = [method for method in methods if method not in colors]
    for place, method in enumerate(others):
        colors[method] = (free or _PALETTE)[place % len(free or _PALETTE)]
    return colors


def sequence_color(place: int, count: int) -> tuple[float, float, float, float]:
    """Colour of one of `count` ordered things, light to dark, told apart by colour-blind readers
    too."""
    shade: tuple[float, float, float, float] = mpl.colormaps["viridis_r"](
        0.1 + 0.85 * place / max(1, count - 1)
    )
    return shade


def shade(color: str, place: int, count: int) -> tuple[float, float, float]:
    """The shade of a method's colour for one of `count` ordered things, light to dark."""
    towards = -0.6 + 1.1 * place / max(1, count - 1)  # from three fifths of white to half of black
    end = 1.0 if towards < 0 else 0.0
    red, green, blue = (part + abs(towards) * (end - part) for part in to_rgb(color))
    return red, green, blue


def line_style(*, is_delayed: bool) -> str | tuple[int, tuple[float, float]]:
    return (0, (4, 1.2)) if is_delayed else "-"


@contextmanager
def new_figure(
    width: float = COLUMN_WIDTH_IN, height: float = 2.4, columns: int = 1
) -> Iterator[Figure]:
    """A figure in the common style, closed at the end; sizes in inches."""
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
    with plt.rc_context(settings):
        figure = plt.figure(figsize=(width * columns, height), layout="constrained")
        try:
            yield figure
        finally:
            plt.close(figure)


def legend_below(axes: Axes, columns: int = 1) -> None:
    # Padding in font sizes: room for the ticks and the label.
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, 0), borderaxespad=5.0, ncols=columns)


def draw_points(
    axes: Axes, x: Any, y: Any, ends: tuple[Any, Any], look: Look, **style: Any
) -> None:
    """One or several points in a method's look, with bars between `ends` (low, high); none where
    these are NaN."""
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
    """A logarithmic y axis of factors near 1, with plain numbers at 1, 2, 3, 5 and their multiples
    of 10."""
    axes.set_yscale("log")
    axes.yaxis.set_minor_locator(LogLocator(subs=(2, 3, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("{x:g}")


def finish_panel(
    axes: Axes, x_label: str, y_label: str, title: str, *, columns: int | None = None
) -> None:
    """Labels with units, and the legend under them, where it lies on no curve: by default two
    columns if they fit."""
    axes.set(xlabel=x_label, ylabel=y_label, title=title)
    _, labels = axes.get_legend_handles_labels()
    if labels:
        legend_below(axes, columns=columns or (2 if max(map(len, labels)) <= SHORT_LABEL else 1))


def say_not_run(axes: Axes, title: str) -> None:
    """Leave a panel empty but for its title and the words that its runs are missing."""
    axes.set_title(title)
    axes.tick_params(bottom=False, left=False, labelbottom=False)
    axes.text(0.5, 0.5, "not run", ha="center", va="center", transform=axes.transAxes, color="grey")


def thin(losses: pd.DataFrame, most: int = 300) -> pd.DataFrame:
    """Evenly spread rows, both ends among them: 300 points resolve means over 2 % of a run
    sixfold."""
    return losses.iloc[thin_rows(len(losses), most)]


def thin_rows(num_rows: int, most: int) -> NDArray[np.intp]:
    """At most `most` evenly spread indices of `num_rows`, both ends among them."""
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
    """Write PATH.png, .pdf, .svg and .txt (caption and command), and with details PATH.json;
    returned in this order.

    The path is without suffix; `details` are what it was drawn from, as JSON has it: the runs, and
    what was missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    files = [
        path.with_name(path.name + suffix) for suffix in (".png", ".pdf", ".svg", ".txt", ".json")
    ]
    if layout := figure.get_layout_engine():  # laid out once, for all formats alike
        layout.execute(figure)
        with mpl.rc_context({"figure.autolayout": False, "figure.constrained_layout.use": False}):
            figure.set_layout_engine(None)  # "none" keeps one, for which savefig draws twice
    for target, nothing in zip(files, ("Software", "CreationDate", "Date"), strict=False):
        form, buffer = target.suffix[1:], BytesIO()
        # No date in the file: the same runs give the same bytes.
        figure.savefig(buffer, format=form, dpi=DPI, metadata={nothing: None})
        # Two digits behind the point are a hundredth of a pixel; matplotlib writes six.
        content = buffer.getvalue()
        if form == "svg":
            content = re.sub(rb"(?<=\.\d\d)\d+", b"", content)
        with replacing(target) as file:
            file.write(content)
    write_text(files[3], caption.rstrip() + "\n" + (f"Drawn by: {command}\n" if command else ""))
    if details is None:
        return files[:4]
    write_json(files[4], details)
    return files
