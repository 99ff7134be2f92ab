"""`brx toy`: one landscape by name, from its set-up to figure and numbers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from brx.config.loading import PRESETS, load_yaml_as
from brx.files import write_json
from brx.toy.angles import SweepConfig, draw_sweep, run_sweep
from brx.toy.quadratic import QuadraticConfig, draw_quadratic, run_quadratic
from brx.toy.spiral import SpiralConfig, draw_spiral, run_spiral

TOYS: dict[str, tuple[type[Any], Callable[[Any], Any], Callable[[Any, Path], list[Path]]]] = {
    "quadratic": (QuadraticConfig, run_quadratic, draw_quadratic),
    "spiral": (SpiralConfig, run_spiral, draw_spiral),
    "sweep": (SweepConfig, run_sweep, draw_sweep),  # the quadratic over angle and delay
}


def run_toy(
    landscape: Literal["quadratic", "spiral", "sweep"],
    figure: Path,
    config: Path | None = None,
    numbers: Path | None = None,
) -> list[Path]:
    """Run a landscape's descents, draw them, and keep their numbers.

    Args: figure: the figure's path without suffix. config: a YAML file (default: the paper's
    set-up). numbers: a JSON file for the numbers (default: none is written). Returns the files
    written; UserError for a set-up that cannot be run."""
    section, run, draw = TOYS[landscape]
    result = run(load_yaml_as(config or PRESETS / "toy" / f"{landscape}.yaml", section))
    written = draw(result, figure)
    if numbers is not None:
        numbers.parent.mkdir(parents=True, exist_ok=True)
        write_json(numbers, result.numbers())
        written.append(numbers)
    return written
