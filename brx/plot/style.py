"""One look for all figures: a method has the same colour, marker and name everywhere."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from brx.files import replacing, write_text

# Okabe & Ito's palette, which colour-blind readers can tell apart, and three of Paul Tol's.
_COLORS = {
    "black": "#000000",
    "orange": "#E69F00",
    "sky": "#56B4E9",
    "green": "#009E73",
    "yellow": "#B8A900",
    "blue": "#0072B2",
    "red": "#D55E00",
    "purple": "#CC79A7",
    "grey": "#777777",
    "brown": "#8C564B",
    "teal": "#44AA99",
    "wine": "#882255",
    "olive": "#999933",
}

VERDICT_COLORS = {"yes": _COLORS["green"], "no": _COLORS["red"], "not tried": _COLORS["grey"]}
"""Of a claim of the paper: reproduced or not."""

COLUMN_WIDTH_IN = 3.4
DPI = 200


@dataclass(frozen=True)
class Look:
    """How a method is drawn.

    Attributes:
        label: its name in legends.
        color: of its lines.
        marker: of its points.
    """

    label: str
    color: str
    marker: str


METHOD_LOOKS = {
    "pipedream": Look("PipeDream", _COLORS["grey"], "o"),
    "pipedream-lr": Look("PipeDream-LR", _COLORS["orange"], "s"),
    "nesterov": Look("Nesterov", _COLORS["green"], "^"),
    "basis-rotation": Look("Basis rotation", _COLORS["blue"], "D"),
    "basis-rotation 2nd/unilateral": Look("Basis rotation 2nd/uni", _COLORS["sky"], "v"),
    "basis-rotation 1st/bilateral": Look("Basis rotation 1st/bi", _COLORS["purple"], "<"),
    "basis-rotation 1st/unilateral": Look("Basis rotation 1st/uni", _COLORS["yellow"], ">"),
    "basis-rotation stage-aware": Look("Basis rotation, stage-aware", _COLORS["black"], "P"),
    "basis-rotation reversed": Look("Basis rotation, reversed", _COLORS["brown"], "X"),
    "delay-compensation": Look("Delay compensation", _COLORS["olive"], "p"),
    "soap": Look("SOAP", _COLORS["red"], "h"),
    "muon": Look("Muon", _COLORS["teal"], "*"),
    "scion": Look("Scion", _COLORS["wine"], "d"),
}

# Delay is told by the line: solid without, dashed and dotted with.
_NO_DELAY, _DELAY = "-", (0, (4, 1.2))


def look_of(method: str) -> Look:
    """How a method is drawn; one that is not in the table keeps its own name."""
    return METHOD_LOOKS.get(method, Look(method, _COLORS["red"], "o"))


def sequence_color(place: int, count: int) -> tuple[float, float, float, float]:
    """Colour of one of `count` ordered things, light to dark, told apart by colour-blind readers too."""
    shade: tuple[float, float, float, float] = mpl.colormaps["viridis_r"](0.1 + 0.85 * place / max(1, count - 1))
    return shade


def line_style(*, is_delayed: bool) -> str | tuple[int, tuple[float, float]]:
    """Solid without delay, dashed with."""
    return _DELAY if is_delayed else _NO_DELAY


@contextmanager
def new_figure(width: float = COLUMN_WIDTH_IN, height: float = 2.4, columns: int = 1) -> Iterator[Figure]:
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
    }
    with plt.rc_context(settings):
        figure = plt.figure(figsize=(width * columns, height), layout="constrained")
        try:
            yield figure
        finally:
            plt.close(figure)


def legend_below(axes: Axes, columns: int = 1, **options: Any) -> None:
    """A panel's legend under the label of its horizontal axis, where it lies on no curve."""
    # Padding in font sizes: room for the ticks and the label.
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, 0), borderaxespad=5.0, ncols=columns, **options)


def save(figure: Figure, path: Path, caption: str) -> list[Path]:
    """Write PATH.png, PATH.pdf and PATH.txt (the caption: what is shown and which runs it is from)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    written = []
    for suffix in (".png", ".pdf"):
        target = path.with_name(path.name + suffix)
        # No date in the file: the same runs give the same bytes.
        metadata = {"CreationDate": None} if suffix == ".pdf" else {"Software": None}
        with replacing(target) as file:
            figure.savefig(file, format=suffix[1:], dpi=DPI, metadata=metadata)
        written.append(target)
    text = path.with_name(path.name + ".txt")
    write_text(text, caption.rstrip() + "\n")
    return [*written, text]
