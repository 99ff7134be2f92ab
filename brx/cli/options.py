"""Arguments and options that several commands share."""

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from brx.errors import UserError


def argument(metavar: str, help: str, **settings: Any) -> Any:
    """An argument; its help text, not Typer, states the default if there is one."""
    return typer.Argument(metavar=metavar, help=help, **{"show_default": False, **settings})


def option(metavar: str, help: str, *flags: str, **settings: Any) -> Any:
    """An option with a value. Without `flags`, its flag is the parameter's name."""
    return typer.Option(*flags, metavar=metavar, help=help, **settings)


FORMATS = (".png", ".pdf", ".svg")
OTHER_FORMATS = (".jpg", ".jpeg", ".gif", ".tif", ".tiff", ".webp", ".bmp", ".eps", ".ps")


def refuse_other_formats(flag: str, path: Path) -> None:
    """UserError if a path names an image in a format that figures are not written in."""
    if path.suffix.lower() in OTHER_FORMATS:
        raise UserError(f"{flag} {path}: a figure is written as {', '.join(FORMATS)}")


def figure_option(help: str) -> Any:
    """An option with the path of a figure. Its files get a suffix each, so `x.png` stands for
    `x`."""

    def without_suffix(parameter: typer.CallbackParam, path: Path | None) -> Path | None:
        if path is None:
            return None
        refuse_other_formats(parameter.opts[0], path)
        return path.with_suffix("") if path.suffix.lower() in FORMATS else path

    return option("FIGURE", help, callback=without_suffix)


def flag(name: str, help: str) -> Any:
    """A switch without a `--no-...` form."""
    return typer.Option(name, help=help)


def completing(module: str, catalogue: str, *more: str) -> Callable[[str], list[str]]:
    """A function that completes names for the shell.

    Args:
        module: the module of the catalogue, imported when the shell asks for names.
        catalogue: its attribute that holds the names, or is a function that returns them.
        more: further names.
    """

    def complete(incomplete: str) -> list[str]:
        names = getattr(import_module(module), catalogue)
        known = [*more, *(names() if callable(names) else names)]
        return [name for name in known if name.startswith(incomplete)]

    return complete


# Names that come with brx; the shell itself completes files.
complete_config = completing("brx.config.loading", "preset_names")
complete_method = completing("brx.config.loading", "method_names")
complete_model = completing("brx.config.loading", "model_names")

CONFIG_HELP = "a YAML file or a preset's name"
ConfigName = Annotated[str, argument("CONFIG", CONFIG_HELP, autocompletion=complete_config)]
Overrides = Annotated[
    list[str],
    option(
        "KEY=VALUE...",
        "override settings, for example model.blocks=16 optimizer.lr=3e-4",
        "--set",
        default_factory=list,
        show_default=False,
    ),
]

RunsOrCheckpoints = Annotated[
    list[Path], argument("RUN|CHECKPOINT", "folders of runs or checkpoints")
]
RunsOrFolders = Annotated[list[Path], argument("RUNS", "runs, or folders that hold runs")]
ScaleName = Annotated[
    Literal["similar", "tuned", "llama", "laptop", "paper"],
    typer.Option(help="which set of experiments"),
]
ScaleRuns = Annotated[
    Path | None, option("DIR", "folder of the runs (default: the folder of the scale)", "--runs")
]
OnlyMeasured = Annotated[
    bool,
    flag("--measured", "show earlier measurements (in RUN/analysis or a folder of runs) instead"),
]

Jobs = Annotated[
    int | None, option("N", "number of runs at a time (default: one per GPU or core)", min=1)
]
Strict = Annotated[bool, flag("--strict", "stop at a damaged run instead of leaving it out")]
DryRun = Annotated[bool, flag("--dry-run", "list the runs and estimate their time; train nothing")]
RetryFailed = Annotated[bool, flag("--retry-failed", "train failed runs again")]

DeviceMemory = Annotated[
    str | None, option("SIZE", "memory of each device, for example 24GB or 80GiB")
]
Throughput = Annotated[
    str | None,
    option(
        "FLOPS",
        "FLOP/s of each device: a measured rate (23T; see model_flops_per_second in a run's "
        "summary.json), or the device's name (40 % of its data sheet's peak, which small models do "
        "not reach)",
    ),
]
Bandwidth = Annotated[
    str | None, option("BYTES", "bytes per second between neighbouring devices; needs --throughput")
]

TableFormat = Literal["table", "markdown", "csv", "json", "latex"]
Format = Annotated[TableFormat, typer.Option(help="format of the table")]
FigurePath = Annotated[Path | None, figure_option("draw the figure to this path, without suffix")]
