"""Sweep files, the cells that they expand into, and a cell's state, from its folder alone: all
sweeps agree on it."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, field_validator

from brx.config.loading import (
    PRESETS,
    Settings,
    dump_config,
    find_config,
    load_config,
    load_yaml_as,
    new_content,
    set_values,
    validate,
)
from brx.config.schema import RunConfig, Section
from brx.environment import signal_name
from brx.errors import UserError, did_you_mean
from brx.files import user_path, write_text
from brx.methods.trajectory_version import check_trajectory_version
from brx.names import file_name
from brx.readers import parse_json
from brx.runs.folder import (
    FOR_TUNING,
    SEED,
    RunFolder,
    decides_trajectory,
    is_locked,
    settings_key,
    trajectory_of,
)

Value = bool | int | float | str | None
LOG, FAILURE = "log.txt", "failed.txt"

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
SILENT_KEYS = {
    f"optimizer.{key}" for key in ("method", "source", "geometry", "refresh_schedule")
} | {"model.class", "pipeline.stash"}
"""Keys whose values speak for themselves in a name."""


class Second(Section):
    """A second key to choose, with a few values, for some of the cells."""

    over: str
    """The key. The cells of the grid have its first value."""
    values: list[int | float] = Field(min_length=1)
    """The other values, tried with the best value of `choose.over`."""
    where: dict[str, Value | list[Value]] = Field(default_factory=dict)
    """Only cells that have one of these values for each of these keys."""


class Choice(Section):
    """Which value of a key is reported, as the paper does with learning rates."""

    over: str = "optimizer.lr"
    """The key to choose: for each combination of the other keys, its value with the lowest final
    validation loss wins."""
    further: list[int | float] = Field(default_factory=list)
    """Values beyond the grid, tried one after another where the best value is the lowest or highest
    of those tried."""
    seed: int | None = Field(None, ge=0)
    """The tuning seed: all cells that are compared have it, and it is never reported. Null: the
    grid's own seeds decide and are reported, too."""
    second: list[Second] = Field(default_factory=list)
    """Second keys, at most one for each cell. The search goes on until no neighbour of the best
    combination, in either key, is left to try. Needs `seed`."""

    def second_of(self, config: RunConfig) -> Second | None:
        """The second key that is chosen for a cell."""
        return next((second for second in self.second if matches(config, second.where)), None)


class Repeat(Section):
    """More runs of chosen cells, usually other seeds."""

    set: dict[str, Annotated[list[Value], Field(min_length=1)]] = Field(
        {"training.seed": [1, 2]}, min_length=1
    )
    """Dotted keys and the further values."""
    where: dict[str, Value | list[Value]] = Field(default_factory=dict)
    """Only cells that have one of these values for each of these keys."""


class SweepSpec(Section, allow_inf_nan=True):
    """A sweep file."""

    base: str
    """A preset's name, or a run's YAML file."""
    out: str | None = None
    """Folder of the cells (default: runs/NAME of the sweep file). Sweeps may share one: equal cells
    run once."""
    set: dict[str, Value | list[Value]] = Field(default_factory=dict)
    """Dotted keys that differ from the base in all cells."""
    grid: dict[str, list[Value | dict[str, Value | list[Value]]]] = Field(min_length=1)
    """Axes: either a dotted key and its values, or any name and a list of mappings of dotted keys
    to values."""
    exclude: list[dict[str, Value | list[Value]]] = Field(default_factory=list)
    """Cells to leave out: those that have one of the listed values for each key of an entry."""
    choose: Choice | None = None
    """What to choose among the cells when they are done."""
    repeat: Repeat | None = None
    """What to run again at the chosen values."""

    @field_validator("set", "grid", mode="before")
    @classmethod
    def _has_dotted_keys(cls, content: Any) -> Any:
        """Refuse settings that are nested, as in a run's file, where a dotted key belongs."""
        if isinstance(content, dict):
            _refuse_nested(content)
            for values in content.values():
                for entry in values if isinstance(values, list) else []:
                    if isinstance(entry, dict):
                        _refuse_nested(entry)
        return content


def _refuse_nested(settings: Mapping[Any, Any]) -> None:
    for key, value in settings.items():
        if isinstance(value, dict):
            inner = next(iter(value), "KEY")
            raise ValueError(f"{key}: holds settings; write each with a dotted key, {key}.{inner}")


@dataclass(frozen=True)
class Cell:
    """One run of a sweep; `varied` are the dotted keys that it sets in addition to the sweep's
    base."""

    name: str
    varied: Mapping[str, Any]
    config: RunConfig
    folder: Path


@dataclass(frozen=True)
class Sweep:
    """A sweep file, read and checked; `out` is the folder of its cells, `cells` are the grid's,
    without repetitions."""

    path: Path
    spec: SweepSpec
    out: Path
    cells: list[Cell]

    @classmethod
    def load(cls, path: Path, out: Path | None = None) -> Sweep:
        """Read a sweep file, or the one of that name that comes with brx (`laptop/main`), and
        expand its grid."""
        if not path.exists():
            folder = PRESETS / "sweeps"
            shipped = {
                str(file.relative_to(folder).with_suffix("")): file
                for file in sorted(folder.rglob("*.yaml"))
            }
            if str(path) not in shipped:
                raise UserError(f"{path}: no such sweep file{did_you_mean(str(path), shipped)}")
            path = shipped[str(path)]
        spec = load_yaml_as(path, SweepSpec)
        return cls.expand(
            path, spec, out or (user_path(spec.out) if spec.out else Path("runs") / path.stem)
        )

    @classmethod
    def expand(cls, path: Path, spec: SweepSpec, folder: Path) -> Sweep:
        """A sweep from its content; messages say that it is from `path`."""
        base = new_content(find_config(spec.base))
        _check_tuning_seed(path, spec)
        cells = [
            _cell(path, spec, base, folder, {**varied, **_tuning(spec)})
            for varied in _combinations(path, spec)
        ]
        _check_keys(path, spec, cells)
        included = [
            cell for cell in cells if not any(matches(cell.config, entry) for entry in spec.exclude)
        ]
        if not included:
            raise UserError(f"{path}: exclude: leaves no cell of the grid's {len(cells)}")
        # Equal cells keep the name of the first one
        distinct = {identity(cell.config): cell for cell in reversed(included)}
        sweep = cls(path, spec, folder, _named_apart(reversed(distinct.values())))
        # Values beyond the grid that make no run are refused before the grid has been paid for.
        if spec.choose is not None:
            sweep.varied_further(
                (sweep.cells[0], {spec.choose.over: value}) for value in spec.choose.further
            )
            for cell in sweep.cells:
                second = spec.choose.second_of(cell.config)
                if second is not None:
                    sweep.varied_further((cell, {second.over: value}) for value in second.values)
        if spec.repeat is not None:
            repeated = [cell for cell in sweep.cells if matches(cell.config, spec.repeat.where)]
            if not repeated and (spec.choose is None or spec.choose.over not in spec.repeat.where):
                raise UserError(f"{path}: repeat.where: matches no cell")
            sweep.repetitions(repeated[:1])
        return sweep

    def varied_further(self, variations: Iterable[tuple[Cell, Settings]]) -> list[Cell]:
        """Cells beyond the grid: each equals a cell of the grid except for some dotted keys."""
        base = new_content(find_config(self.spec.base))
        return [
            _cell(self.path, self.spec, base, self.out, {**of.varied, **more})
            for of, more in variations
        ]

    def repetitions(self, chosen: Sequence[Cell]) -> list[Cell]:
        repeat = self.spec.repeat
        if repeat is None:
            return []
        combinations = [
            {**dict(zip(repeat.set, values, strict=True)), **_reported(self.spec)}
            for values in itertools.product(*repeat.set.values())
        ]
        matching = [cell for cell in chosen if matches(cell.config, repeat.where)]
        repeated = self.varied_further(itertools.product(matching, combinations))
        tried = {cell.folder for cell in chosen}  # the grid may have some of the seeds
        return list({cell.folder: cell for cell in repeated if cell.folder not in tried}.values())


def matches(config: RunConfig, condition: Mapping[str, Any]) -> bool:
    content = config.model_dump(mode="json")
    options = {
        key: wanted if isinstance(wanted, list) else [wanted] for key, wanted in condition.items()
    }
    return all(value_at(content, key) in values for key, values in options.items())


def value_at(content: Mapping[str, Any], key: str) -> Any:
    value: Any = content
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def identity(config: RunConfig) -> str:  # of what decides a run's trajectory
    return hashlib.sha256(settings_key(config).encode()).hexdigest()[:8]


def _combinations(path: Path, spec: SweepSpec) -> Iterator[Settings]:
    axes: list[list[Settings]] = []
    for axis, values in spec.grid.items():
        if not values:
            raise UserError(f"{path}: grid.{axis}: needs at least one value")
        kinds = {isinstance(value, dict) for value in values}
        if len(kinds) > 1:
            raise UserError(
                f"{path}: grid.{axis}: either all values or all mappings of dotted keys, not both"
            )
        axes.append([dict(value) if isinstance(value, dict) else {axis: value} for value in values])
    for combination in itertools.product(*axes):
        yield {key: value for settings in combination for key, value in settings.items()}


def _tuning(spec: SweepSpec) -> Settings:
    """What all cells have that are compared by a tuning seed."""
    if spec.choose is None or spec.choose.seed is None:
        return {}
    return {SEED: spec.choose.seed, FOR_TUNING: True}


def _reported(spec: SweepSpec) -> Settings:
    """What takes the mark of a tuning run from a repetition."""
    return {FOR_TUNING: False} if _tuning(spec) else {}


def _check_tuning_seed(path: Path, spec: SweepSpec) -> None:
    """Refuse a tuning seed that would be reported, or after which nothing would be."""
    rule = spec.choose
    if rule is None:
        return
    if rule.seed is None:
        if rule.second:
            raise UserError(
                f"{path}: choose.second: needs choose.seed, the one seed on which all combinations "
                f"are compared"
            )
        return
    axes: list[str] = [*spec.set, *spec.grid]
    for values in spec.grid.values():
        axes += [key for value in values if isinstance(value, dict) for key in value]
    if SEED in axes:
        raise UserError(
            f"{path}: choose.seed: sets {SEED} of all cells that are compared; leave {SEED} out of "
            f"set and grid"
        )
    reported = spec.repeat.set.get(SEED) if spec.repeat is not None else None
    if not reported:
        raise UserError(
            f"{path}: choose.seed: is never reported; name the seeds that are under "
            f"repeat.set.{SEED}"
        )
    if rule.seed in reported:
        raise UserError(
            f"{path}: choose.seed: {rule.seed} is among the reported seeds of repeat.set, which a "
            f"tuning seed must not be"
        )


def _check_keys(path: Path, spec: SweepSpec, cells: Sequence[Cell]) -> None:
    """Refuse axes that make no cells, conditions that cannot hold, choices that cannot be made:
    before days of runs."""
    contents = [cell.config.model_dump(mode="json") for cell in cells]
    for key, values in spec.grid.items():
        if "." in key and len(values) > 1 and not decides_trajectory(key):
            raise UserError(
                f"{path}: grid.{key}: changes no number of a run, so that its values would be one "
                f"cell"
            )
    for entry in spec.exclude:
        if not any(matches(cell.config, entry) for cell in cells):
            raise UserError(
                f"{path}: exclude: no cell has {', '.join(f'{key}={entry[key]}' for key in entry)}"
            )
    for key in {} if spec.repeat is None else spec.repeat.where:
        if all(value_at(content, key) is None for content in contents):
            raise UserError(f"{path}: repeat.where: '{key}' is set in no cell")
    if spec.choose is not None:
        if spec.choose.over == SEED:
            raise UserError(f"{path}: choose.over: must not be a seed: seeds are repetitions")
        for content in contents:
            _check_is_number(path, "choose.over", spec.choose.over, content)
        _check_seconds(path, spec.choose, cells)


def _check_is_number(path: Path, where: str, key: str, content: Mapping[str, Any]) -> None:
    value = value_at(content, key)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise UserError(f"{path}: {where}: needs a key of numbers, {key} is {value!r}")


def _check_seconds(path: Path, rule: Choice, cells: Sequence[Cell]) -> None:
    """Refuse second keys that are of no cell, of no number, or two of one cell."""
    for number, second in enumerate(rule.second):
        where = f"choose.second[{number}]"
        matching = [cell for cell in cells if matches(cell.config, second.where)]
        if not matching:
            raise UserError(f"{path}: {where}.where: matches no cell")
        if second.over in (rule.over, SEED):
            raise UserError(
                f"{path}: {where}.over: another key than {rule.over} and {SEED}, got {second.over}"
            )
        for cell in matching:
            _check_is_number(
                path, f"{where}.over", second.over, cell.config.model_dump(mode="json")
            )
            if rule.second_of(cell.config) is not second:
                raise UserError(f"{path}: {where}.where: cell {cell.name} has a second key already")


def _cell(
    path: Path, spec: SweepSpec, base: Mapping[str, Any], out: Path, varied: Settings
) -> Cell:
    content = set_values(base, {**spec.set, **varied}, f"{path}:")
    name = cell_name(varied)
    config = validate(content, RunConfig, f"{path}: cell {name}")
    if SEED not in varied:
        name += f"-s{config.training.seed}"
    digest = identity(config)
    folder = next(iter(sorted(out.glob(f"*--{digest}"))), None)
    return Cell(name, varied, config, folder or out / f"{name}--{digest}")


def _named_apart(cells: Iterable[Cell]) -> list[Cell]:
    """The cells, with the hash of its folder in the name of each that has another's name."""
    cells = list(cells)
    count = Counter(cell.name for cell in cells)
    named = []
    for cell in cells:
        is_alone = count[cell.name] == 1
        name = cell.name if is_alone else f"{cell.name}-{identity(cell.config)}"
        named.append(replace(cell, name=name))
    return named


def cell_name(varied: Mapping[str, Any]) -> str:
    """The varied values in one word, for example `basis-rotation-p32-lr0.001-s0`."""
    parts = []
    for key, value in varied.items():
        if value is not None and key != FOR_TUNING:
            numbers = value if isinstance(value, list) else [value]
            shown = ".".join(
                f"{part:g}" if isinstance(part, float) else str(part) for part in numbers
            )
            short = SHORT_NAMES.get(key, "" if key in SILENT_KEYS else key.rpartition(".")[2])
            parts.append(short + shown)
    return file_name(*parts)


class State(Enum):
    WAITING = "waiting"
    INTERRUPTED = "interrupted"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"


def state_of(cell: Cell) -> State:
    """The cell's state; UserError where a default of brx or the trajectory version has changed
    since it was done."""
    summary = RunFolder(cell.folder).read_summary()
    # A run that finished at an earlier training.stop_after is the same run, cut short: there is
    # more of it to do.
    if (
        summary.get("status") == "finished"
        and summary.get("iteration", 0) >= cell.config.training.last_iteration
    ):
        _check_same_run(cell)
        check_trajectory_version(summary, cell.folder, cell.config.optimizer.method)
        return State.DONE
    if is_locked(cell.folder):
        return State.RUNNING
    if (cell.folder / FAILURE).is_file():
        return State.FAILED
    return State.INTERRUPTED if (cell.folder / "checkpoints").is_dir() else State.WAITING


def iterations_done(folder: Path) -> int:
    """The newest iteration in the folder's metrics, read from the file's end."""
    try:
        with (folder / "metrics.jsonl").open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - 16384))
            lines = file.read().split(b"\n")
    except OSError:
        return 0
    for line in reversed(lines):
        with contextlib.suppress(ValueError, KeyError, TypeError):
            return int(parse_json(line.decode())["iteration"])
    return 0


def prepare_folder(cell: Cell) -> None:
    """Write what `brx train FOLDER --resume` starts from; UserError where the folder holds another
    run."""
    cell.folder.mkdir(parents=True, exist_ok=True)
    (cell.folder / FAILURE).unlink(missing_ok=True)
    path = RunFolder(cell.folder).config
    if path.exists():
        _check_same_run(cell)
    # Anew for a run to be continued, too: it may have been told to stop earlier than the sweep asks
    #     for.
    write_text(path, dump_config(cell.config))


def outcome_of(cell: Cell, code: int) -> tuple[State, str]:
    """The state of a cell whose run ended with an exit code, and why it failed, which its folder
    then says, too."""
    is_out_of_time = (
        code == 0 and RunFolder(cell.folder).read_summary().get("status") == "interrupted"
    )
    if code == 130 or is_out_of_time:
        return State.INTERRUPTED, ""
    if code == 0:
        return State.DONE, ""
    try:
        lines = (
            (cell.folder / LOG).read_text(encoding="utf-8", errors="replace").strip().splitlines()
        )
    except OSError:
        lines = []
    said = next(
        (line for line in reversed(lines) if line.startswith("brx: ")), lines[-1] if lines else ""
    )
    how = f"exit code {code}" if code > 0 else f"killed by {signal_name(-code)}"
    told = f"{how}: {said.removeprefix('brx: ')}"
    write_text(cell.folder / FAILURE, told + "\n")
    return State.FAILED, told


def _check_same_run(cell: Cell) -> None:
    config = RunFolder(cell.folder).config
    if trajectory_of(load_config(config)) != trajectory_of(cell.config):
        raise UserError(
            f"{config}: differs from what the sweep asks for, in a default of brx; move the folder "
            f"away"
        )
