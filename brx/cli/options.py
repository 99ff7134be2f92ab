"""Arguments and options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer


def complete_config(incomplete: str) -> list[str]:
    """The presets; files are completed by the shell."""
    from brx.config.loading import preset_names

    return [name for name in preset_names() if name.startswith(incomplete)]


def complete_method(incomplete: str) -> list[str]:
    """The methods that come with brx; files are completed by the shell."""
    from brx.config.loading import method_names

    return [name for name in method_names() if name.startswith(incomplete)]


ConfigName = Annotated[
    str,
    typer.Argument(
        metavar="CONFIG", help="a YAML file or a preset's name", show_default=False, autocompletion=complete_config
    ),
]

Overrides = Annotated[
    list[str],
    typer.Option(
        "--set",
        metavar="KEY=VALUE...",
        default_factory=list,
        show_default=False,
        help="override settings, for example model.blocks=16 optimizer.lr=3e-4",
    ),
]

RunsOrCheckpoints = Annotated[
    list[Path],
    typer.Argument(metavar="RUN|CHECKPOINT", help="folders of runs, or of their checkpoints", show_default=False),
]

RunsOrFolders = Annotated[
    list[Path], typer.Argument(metavar="RUNS", help="runs, or folders that hold runs", show_default=False)
]

TableFormat = Literal["table", "markdown", "csv", "json", "latex"]
Format = Annotated[TableFormat, typer.Option(help="format of the table")]

ScaleName = Annotated[Literal["laptop", "paper"], typer.Option(help="which experiments")]

ScaleRuns = Annotated[
    Path | None, typer.Option("--runs", metavar="DIR", help="folder of the runs (default: the scale's)")
]

FigurePath = Annotated[Path | None, typer.Option(metavar="FIGURE", help="draw the figure, at this path without suffix")]

OnlyMeasured = Annotated[
    bool,
    typer.Option(
        "--measured",
        help="measure nothing: show what lies in RUN/analysis; a folder of runs will do (needs no checkpoint)",
    ),
]
