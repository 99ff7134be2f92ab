"""`brx toy`: the two toy landscapes on which the effect of basis alignment on delay can be seen."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from brx.cli.usage import Application, Command

EXAMPLES = """\
  brx toy quadratic                                     AdaSGD and Adam on an aligned and a misaligned quadratic
  brx toy spiral                                        the spiral as the paper states it
  brx toy spiral configs/toy/spiral-small-steps.yaml    with steps small enough to get all the way
  brx toy sweep                                         slowdown over angle and delay, beside the (1,1)-norm
  brx toy sweep configs/toy/sweep-small-steps.yaml      with smaller steps, where momentum is at home

The figure is figures/toy-NAME, its numbers are results/toy/NAME.json, where NAME is the configuration's.
"""
Landscape = Annotated[
    Literal["quadratic", "spiral", "sweep"],
    typer.Argument(metavar="LANDSCAPE", help="quadratic, spiral or sweep", show_default=False),
]
Config = Annotated[Path | None, typer.Argument(metavar="CONFIG", help="set-up (default: configs/toy/LANDSCAPE.yaml)")]
Figure = Annotated[
    Path | None, typer.Option(metavar="FIGURE", help="the figure's path without suffix (default: figures/toy-NAME)")
]
Numbers = Annotated[
    Path | None, typer.Option(metavar="FILE", help="where the numbers go (default: results/toy/NAME.json)")
]

app = Application()


@app.command(cls=Command, epilog=EXAMPLES)
def toy(landscape: Landscape, config: Config = None, *, out: Figure = None, json: Numbers = None) -> None:
    """Run the descents, keep the numbers, and draw."""
    from brx.paper.toy_figures import run_toy

    name = config.stem if config else landscape
    figure = out or Path("figures") / f"toy-{name}"
    written = run_toy(landscape, figure, config, json or Path("results") / "toy" / f"{name}.json")
    print(figure.with_name(f"{figure.name}.txt").read_text(encoding="utf-8"), end="")
    for file in written:
        print(file)
