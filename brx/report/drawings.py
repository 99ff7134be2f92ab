"""The figures of a report, as images that are part of the page."""

from __future__ import annotations

import base64
import struct
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from brx.errors import UserError
from brx.paper.figures import FIGURES, PANEL_IN, draw_paper_figure
from brx.paper.scales import Experiments
from brx.plot.style import DPI

PNG_SIZE = slice(16, 24)
"""Where a PNG's header has its width and height, two big-endian 32-bit integers."""


@dataclass(frozen=True)
class Drawing:
    """A figure on the page.

    Attributes:
        name: on the command line, and its anchor.
        caption: what it shows.
        details: the caption's other lines: how it was made, from which runs, and what was missing.
        image: a `data:` URI.
        width: of the image in pixels.
        height: likewise.
    """

    name: str
    caption: str
    details: Sequence[str]
    image: str
    width: int
    height: int

    @property
    def across(self) -> int:
        """How many panels of the usual width it has side by side, which decides how small it may be shown."""
        return max(1, round(self.width / (PANEL_IN * DPI)))


def paper_drawings(experiments: Experiments) -> tuple[list[Drawing], list[str]]:
    """Draw the paper's figures.

    Returns:
        Those that have runs, and a line for each that has none.
    """
    drawn, undrawn = [], []
    with tempfile.TemporaryDirectory(prefix="brx-report-") as folder:
        for figure in [figure for figure in FIGURES.values() if figure.draw_to is None]:
            try:
                (image, *_), _ = draw_paper_figure(figure, experiments, Path(folder))
            except UserError as error:
                undrawn.append(f"figure {figure.name}: {error}")
            else:
                drawn.append(read_drawing(image))
    return drawn, undrawn


def further_drawings(folders: Iterable[Path]) -> list[Drawing]:
    """The figures that other commands left in some folders: each PNG with its caption in a .txt beside it.

    Raises:
        UserError: one of the files is no image; names it.
    """
    images = [path for folder in folders for path in sorted(folder.glob("*.png"))]
    return [read_drawing(path) for path in images if path.stem not in FIGURES and path.with_suffix(".txt").is_file()]


def read_drawing(image: Path) -> Drawing:
    """A PNG and the caption beside it.

    Raises:
        UserError: it is no PNG.
    """
    content = image.read_bytes()
    if not content.startswith(b"\x89PNG"):
        raise UserError(f"{image}: not a PNG image")
    width, height = struct.unpack(">II", content[PNG_SIZE])
    caption, *details = image.with_suffix(".txt").read_text(encoding="utf-8").strip().splitlines() or [image.stem]
    uri = "data:image/png;base64," + base64.b64encode(content).decode("ascii")
    return Drawing(image.stem, caption, details, uri, width, height)
