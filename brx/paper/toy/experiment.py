"""One toy experiment from its configuration to its figure and numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from brx.config import load_yaml_as
from brx.files import write_json
from brx.paper.toy.figures import draw_quadratic, draw_spiral
from brx.paper.toy.quadratic import QuadraticConfig, run_quadratic
from brx.paper.toy.spiral import SpiralConfig, run_spiral
from brx.paper.toy.sweep import SweepConfig, run_sweep
from brx.paper.toy.sweep_figure import draw_sweep

Landscape = Literal["quadratic", "spiral", "sweep"]
"""`sweep`: the quadratic over angle and delay."""


def run_toy(landscape: Landscape, config: Path, figure: Path, numbers: Path) -> tuple[str, list[Path]]:
    """Run the descents of one landscape, draw them, and keep their numbers.

    Args:
        landscape: which one.
        config: YAML file of its set-up.
        figure: the figure's path without suffix.
        numbers: the JSON file to write.

    Returns:
        The figure's caption, and all files written.
    """
    if landscape == "quadratic":
        quadratic = run_quadratic(load_yaml_as(config, QuadraticConfig))
        content, drawn = quadratic.numbers(), draw_quadratic(quadratic, figure)
    elif landscape == "sweep":
        sweep = run_sweep(load_yaml_as(config, SweepConfig))
        content, drawn = sweep.numbers(), draw_sweep(sweep, figure)
    else:
        spiral = run_spiral(load_yaml_as(config, SpiralConfig))
        content, drawn = spiral.numbers(), draw_spiral(spiral, figure)
    numbers.parent.mkdir(parents=True, exist_ok=True)
    write_json(numbers, content)
    return drawn[-1].read_text(encoding="utf-8"), [*drawn, numbers]
