"""What `brx toy` does: run a landscape by name, draw it and write its numbers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple

from brx.config.loading import PRESETS, load_yaml_as
from brx.errors import UserError
from brx.files import make_folder, write_json
from brx.toy.angles import SweepConfig, draw_sweep, run_sweep
from brx.toy.quadratic import QuadraticConfig, draw_quadratic, run_quadratic
from brx.toy.spiral import SpiralConfig, draw_spiral, run_spiral


class Toy(NamedTuple):
    """A landscape: the class of its settings, and how it is run and drawn."""

    config: type[Any]
    run: Callable[[Any], Any]  # takes the settings, returns a result
    draw: Callable[[Any, Path], list[Path]]  # takes a result and the figure's path without suffix


TOYS: dict[str, Toy] = {
    "quadratic": Toy(QuadraticConfig, run_quadratic, draw_quadratic),
    "spiral": Toy(SpiralConfig, run_spiral, draw_spiral),
    "sweep": Toy(SweepConfig, run_sweep, draw_sweep),  # the quadratic over angles and delays
}


def run_toy(
    landscape: Literal["quadratic", "spiral", "sweep"],
    figure: Path,
    config: Path | None = None,
    numbers: Path | None = None,
) -> list[Path]:
    """Run a landscape, draw it, and write its numbers; returns the files written.

    Args:
        landscape: a name in `TOYS`.
        figure: the figure's path without suffix.
        config: a YAML file with settings; by default the paper's.
        numbers: a JSON file for the numbers; by default none is written.

    Raises:
        UserError: the settings are invalid, or the numbers overflow with them.
    """
    toy = TOYS[landscape]
    file = config or PRESETS / "toy" / f"{landscape}.yaml"
    settings = load_yaml_as(file, toy.config)
    try:
        result = toy.run(settings)
    except UserError as error:
        raise UserError(f"{file}: {error}") from None
    written = toy.draw(result, figure)
    if numbers is not None:
        make_folder(numbers.parent)
        write_json(numbers, result.numbers())
        written.append(numbers)
    return written
