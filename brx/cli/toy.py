"""`brx toy`: the two toy landscapes on which the effect of basis alignment on delay can be seen."""

from __future__ import annotations

import argparse
from pathlib import Path

HELP = "draw what delay does to Adam on a quadratic or in a spiral valley, aligned with the axes or not"
EXAMPLES = """\
  brx toy quadratic                                     AdaSGD and Adam on an aligned and a misaligned quadratic
  brx toy spiral                                        the spiral as the paper states it
  brx toy spiral configs/toy/spiral-small-steps.yaml    with steps small enough to get all the way

The figure is figures/toy-NAME, its numbers are results/toy/NAME.json, where NAME is the configuration's.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("landscape", choices=["quadratic", "spiral"])
    parser.add_argument(
        "config", nargs="?", type=Path, metavar="CONFIG", help="set-up (default: configs/toy/LANDSCAPE.yaml)"
    )
    parser.add_argument("--out", type=Path, help="the figure's path without suffix (default: figures/toy-NAME)")
    parser.add_argument("--json", type=Path, help="where the numbers go (default: results/toy/NAME.json)")


def run(args: argparse.Namespace) -> int:
    """Run the descents, keep the numbers, and draw."""
    from brx.config import load_yaml_as
    from brx.config.loading import PRESETS
    from brx.files import write_json

    config_path = args.config or PRESETS / "toy" / f"{args.landscape}.yaml"
    figure = args.out or Path("figures") / f"toy-{config_path.stem}"
    numbers = args.json or Path("results") / "toy" / f"{config_path.stem}.json"
    if args.landscape == "quadratic":
        from brx.paper.toy.figures import draw_quadratic
        from brx.paper.toy.quadratic import QuadraticConfig, run_quadratic

        quadratic = run_quadratic(load_yaml_as(config_path, QuadraticConfig))
        content, written = quadratic.numbers(), draw_quadratic(quadratic, figure)
    else:
        from brx.paper.toy.figures import draw_spiral
        from brx.paper.toy.spiral import SpiralConfig, run_spiral

        spiral = run_spiral(load_yaml_as(config_path, SpiralConfig))
        content, written = spiral.numbers(), draw_spiral(spiral, figure)
    numbers.parent.mkdir(parents=True, exist_ok=True)
    write_json(numbers, content)
    print(written[-1].read_text(encoding="utf-8"), end="")
    for path in (*written, numbers):
        print(path)
    return 0
