"""Sweep files: a base preset, a grid and exclusions that expand into cells, each of them one run."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from brx.config.loading import PRESETS, Settings, find_config, load_yaml_as, read_mapping, set_values, validate
from brx.config.schema import RunConfig, Section
from brx.errors import UserError, did_you_mean
from brx.runs.folder import settings_key

Value = bool | int | float | str | None

# How a key is written in a cell's name; other keys are written as they end.
SHORT_NAMES = {
    "model.blocks": "b",
    "model.width": "d",
    "pipeline.stages": "p",
    "optimizer.lr": "lr",
    "optimizer.frequency": "f",
    "optimizer.compensation": "lambda",
    "training.iterations": "t",
    "training.seed": "s",
}
SILENT_KEYS = {f"optimizer.{key}" for key in ("method", "source", "geometry", "refresh_schedule")} | {"pipeline.stash"}
"""Keys whose values speak for themselves in a name."""


class Choice(Section):
    """Which value of a key is reported, as the paper does with learning rates."""

    over: str = "optimizer.lr"
    """The key whose best value is taken, separately for each combination of the others (seeds aside)."""
    by: Literal["final_val_loss", "best_val_loss"] = "final_val_loss"
    """What is lowest for the best value (averaged over seeds)."""
    further: list[int | float] = Field(default_factory=list)
    """Values beyond the grid, tried one after another where the best value is the lowest or highest of those tried."""


class Repeat(Section):
    """More runs of chosen cells, usually other seeds."""

    set: dict[str, list[Value]] = Field({"training.seed": [1, 2]}, min_length=1)
    """Dotted keys and the further values."""
    where: dict[str, Value | list[Value]] = Field(default_factory=dict)
    """Only cells that have one of these values for each of these keys."""


class SweepSpec(Section):
    """A sweep file."""

    base: str
    """A preset's name, or a run's YAML file."""
    out: str | None = None
    """Folder of the cells (default: runs/NAME of the sweep file). Sweeps may share one: equal cells run once."""
    set: dict[str, Value | list[Value]] = Field(default_factory=dict)
    """Dotted keys that differ from the base in all cells."""
    grid: dict[str, list[Value | dict[str, Value | list[Value]]]] = Field(min_length=1)
    """Axes: either a dotted key and its values, or any name and a list of mappings of dotted keys to values."""
    exclude: list[dict[str, Value | list[Value]]] = Field(default_factory=list)
    """Cells to leave out: those that have one of the listed values for each key of an entry."""
    choose: Choice | None = None
    """What to choose among the cells when they are done."""
    repeat: Repeat | None = None
    """What to run again at the chosen values."""


@dataclass(frozen=True)
class Cell:
    """One run of a sweep; `varied` are the dotted keys that it sets in addition to the sweep's base."""

    name: str
    varied: Mapping[str, Any]
    config: RunConfig
    folder: Path


@dataclass(frozen=True)
class Sweep:
    """A sweep file, read and checked; `out` is the folder of its cells, `cells` are the grid's, without repetitions."""

    path: Path
    spec: SweepSpec
    out: Path
    cells: list[Cell]

    @classmethod
    def load(cls, path: Path, out: Path | None = None) -> Sweep:
        """Read a sweep file, or the one of that name that comes with brx (`laptop/main`), and expand its grid.

        A UserError names the file, the key, and the cell.
        """
        if not path.exists():
            folder = PRESETS / "sweeps"
            shipped = {str(file.relative_to(folder).with_suffix("")): file for file in sorted(folder.rglob("*.yaml"))}
            if str(path) not in shipped:
                raise UserError(f"{path}: no such sweep file{did_you_mean(str(path), shipped)}")
            path = shipped[str(path)]
        spec = load_yaml_as(path, SweepSpec)
        return cls.expand(path, spec, out or (Path(spec.out) if spec.out else Path("runs") / path.stem))

    @classmethod
    def expand(cls, path: Path, spec: SweepSpec, folder: Path) -> Sweep:
        """A sweep from its content; messages say that it is from `path`."""
        base = read_mapping(find_config(spec.base))
        cells = [_cell(path, spec, base, folder, varied) for varied in _combinations(path, spec)]
        _check_keys(path, spec, cells)
        included = [cell for cell in cells if not any(matches(cell.config, entry) for entry in spec.exclude)]
        if not included:
            raise UserError(f"{path}: exclude: leaves no cell of the grid's {len(cells)}")
        distinct = {identity(cell.config): cell for cell in reversed(included)}  # of equal cells, the first one's name
        sweep = cls(path, spec, folder, list(reversed(distinct.values())))
        # Values beyond the grid that make no run are refused before the grid has been paid for.
        if spec.choose is not None:
            sweep.varied_further((sweep.cells[0], {spec.choose.over: value}) for value in spec.choose.further)
        if spec.repeat is not None:
            sweep.repetitions([cell for cell in sweep.cells if matches(cell.config, spec.repeat.where)][:1])
        return sweep

    def varied_further(self, variations: Iterable[tuple[Cell, Settings]]) -> list[Cell]:
        """Cells beyond the grid: each the same as one of it but for some dotted keys."""
        base = read_mapping(find_config(self.spec.base))
        return [_cell(self.path, self.spec, base, self.out, {**of.varied, **more}) for of, more in variations]

    def repetitions(self, chosen: Sequence[Cell]) -> list[Cell]:
        """The further cells that `repeat` asks for, of those chosen."""
        repeat = self.spec.repeat
        if repeat is None:
            return []
        return self.varied_further(
            (cell, dict(zip(repeat.set, values, strict=True)))
            for cell in chosen
            if matches(cell.config, repeat.where)
            for values in itertools.product(*repeat.set.values())
        )


def matches(config: RunConfig, condition: Mapping[str, Any]) -> bool:
    """Whether a run has, for each dotted key, the value or one of the listed values."""
    content = config.model_dump(mode="json")
    options = {key: wanted if isinstance(wanted, list) else [wanted] for key, wanted in condition.items()}
    return all(value_at(content, key) in values for key, values in options.items())


def value_at(content: Mapping[str, Any], key: str) -> Any:
    """The value at a dotted key of nested mappings; None where there is none."""
    value: Any = content
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def identity(config: RunConfig) -> str:
    """Eight hexadecimal digits of everything that decides a run's trajectory."""
    return hashlib.sha256(settings_key(config).encode()).hexdigest()[:8]


def _combinations(path: Path, spec: SweepSpec) -> Iterator[Settings]:
    axes: list[list[Settings]] = []
    for axis, values in spec.grid.items():
        if not values:
            raise UserError(f"{path}: grid.{axis}: needs at least one value")
        kinds = {isinstance(value, dict) for value in values}
        if len(kinds) > 1:
            raise UserError(f"{path}: grid.{axis}: either all values or all mappings of dotted keys, not both")
        axes.append([dict(value) if isinstance(value, dict) else {axis: value} for value in values])
    for combination in itertools.product(*axes):
        yield {key: value for settings in combination for key, value in settings.items()}


def _check_keys(path: Path, spec: SweepSpec, cells: Sequence[Cell]) -> None:
    """Refuse a condition that can never hold, and a choice that cannot be made: both would show after days only."""
    contents = [cell.config.model_dump(mode="json") for cell in cells]
    repeated = [] if spec.repeat is None else [("repeat.where", spec.repeat.where)]
    for name, condition in [*(("exclude", entry) for entry in spec.exclude), *repeated]:
        for key in condition:
            if all(value_at(content, key) is None for content in contents):
                raise UserError(f"{path}: {name}: '{key}' has a value in no cell")
    if spec.choose is not None:
        if spec.choose.over == "training.seed":
            raise UserError(f"{path}: choose.over: seeds are repetitions, among which nothing is chosen")
        for content in contents:
            value = value_at(content, spec.choose.over)
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise UserError(f"{path}: choose.over: needs a key of numbers, {spec.choose.over} is {value!r}")


def _cell(path: Path, spec: SweepSpec, base: Mapping[str, Any], out: Path, varied: Settings) -> Cell:
    content = set_values(base, {**spec.set, **varied}, f"{path}:")
    name = cell_name(varied)
    config = validate(content, RunConfig, f"{path}: cell {name}")
    if "training.seed" not in varied:
        name += f"-s{config.training.seed}"
    digest = identity(config)
    folder = next(iter(sorted(out.glob(f"*--{digest}"))), None)
    return Cell(name, varied, config, folder or out / f"{name}--{digest}")


def cell_name(varied: Mapping[str, Any]) -> str:
    """The varied values in one word, for example `basis-rotation-p32-lr0.001-s0`."""
    parts = []
    for key, value in varied.items():
        if value is not None:
            numbers = value if isinstance(value, list) else [value]
            shown = ".".join(f"{part:g}" if isinstance(part, float) else str(part) for part in numbers)
            short = SHORT_NAMES.get(key, "" if key in SILENT_KEYS else key.rpartition(".")[2])
            parts.append(short + shown.replace(":", ".").replace("/", "."))
    return "-".join(parts)
