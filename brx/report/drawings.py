"""The figures of a report: the paper's, drawn where they are not there yet, and those that other commands left."""

from __future__ import annotations

import base64
import json
import re
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from brx.errors import UserError
from brx.paper.figures import FIGURES, PANEL_IN, draw_paper_figure
from brx.paper.scales import Experiments

POINTS_PER_INCH = 72


class Drawing(NamedTuple):
    """A figure on the page: its name on the command line, caption, the caption's other lines, and the drawing."""

    name: str
    caption: str
    details: Sequence[str]
    svg: str
    width: int
    height: int

    @property
    def across(self) -> int:
        """How many panels of the usual width it has side by side, which decides how small it may be shown."""
        return max(1, round(self.width / (PANEL_IN * POINTS_PER_INCH)))

    @property
    def uri(self) -> str:
        """The drawing as an address."""
        return "data:image/svg+xml;base64," + base64.b64encode(self.svg.encode()).decode("ascii")


def paper_drawings(experiments: Experiments, folders: Iterable[Path]) -> tuple[list[Drawing], list[str]]:
    """The paper's figures: taken from some folders where they were drawn from these very runs, else drawn.

    Returns:
        Those that have runs, and a line for each that has none.
    """
    drawn, undrawn = [], []
    with tempfile.TemporaryDirectory(prefix="brx-report-") as scratch:
        for figure in [figure for figure in FIGURES.values() if figure.draw_to is None]:
            paths = (folder / f"{figure.name}.svg" for folder in folders)
            kept = next((path for path in paths if _is_of(path, experiments)), None)
            try:
                drawn.append(read_drawing(kept or draw_paper_figure(figure, experiments, Path(scratch))[0][2]))
            except UserError as error:
                undrawn.append(f"figure {figure.name}: {error}")
    return drawn, undrawn


def _is_of(path: Path, experiments: Experiments) -> bool:
    """Whether a figure was drawn from these runs as they are now."""
    try:
        details = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return path.is_file() and details.get("fingerprint") == experiments.fingerprint


def further_drawings(folders: Iterable[Path]) -> list[Drawing]:
    """The figures that other commands left in some folders: each SVG with its caption in a .txt beside it.

    Raises:
        UserError: one of the files is no such image; names it.
    """
    from_runs = {name for name, figure in FIGURES.items() if figure.draw_to is None}
    images = [path for folder in folders for path in sorted(folder.glob("*.svg"))]
    return [read_drawing(path) for path in images if path.stem not in from_runs and path.with_suffix(".txt").is_file()]


def read_drawing(image: Path) -> Drawing:
    """An SVG, and the caption beside it.

    Raises:
        UserError: it is no SVG of a known size.
    """
    svg = image.read_text(encoding="utf-8", errors="replace")
    size = {side: float(points) for side, points in re.findall(r' (width|height)="([\d.]+)pt"', svg[:2000])}
    if "<svg" not in svg or len(size) < 2:
        raise UserError(f"{image}: not an SVG image with a size in points")
    caption, *details = image.with_suffix(".txt").read_text(encoding="utf-8").strip().splitlines() or [image.stem]
    return Drawing(image.stem, caption, details, svg, round(size["width"]), round(size["height"]))
