"""Sweep files, and the cells that they expand into."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, field_validator

from brx.config.loading import (
    PRESETS,
    Settings,
    find_config,
    first_key_of,
    new_content,
    read_mapping,
    set_values,
    validate,
)
from brx.config.schema import RunConfig, Section
from brx.errors import UserError, did_you_mean
from brx.files import user_path
from brx.runs.folder import hides_runs_below
from brx.runs.trajectory import (
    FOR_TUNING,
    SEED,
    decides_trajectory,
    difference_beyond_trajectory,
)
from brx.sweep.cell import (
    Cell,
    Value,
    cell_name,
    folders_in,
    named_apart,
    trajectory_id,
    with_present_folders,
)
from brx.sweep.conditions import dotted_keys, matches, value_at


class Second(Section):
    """A second key to choose, with a few values, for some of the cells."""

    over: str
    """The key. The cells of the grid have its first value."""
    values: list[int | float] = Field(min_length=1)
    """The other values, tried with the best value of `choose.over`."""
    further: list[int | float] = Field(default_factory=list)
    """Values beyond these, tried one after another where the best value is the lowest or highest of
    those tried."""
    where: dict[str, Value | list[Value]] = Field(default_factory=dict)
    """Only cells that have one of these values for each of these keys."""

    @property
    def beyond_grid(self) -> list[int | float]:
        """All values that may be tried, without the one that the cells of the grid have."""
        return [*self.values, *self.further]


class Choice(Section):
    """Which value of a key is reported, as the paper does with learning rates."""

    over: str = "optimizer.lr"
    """The key to choose: for each combination of the other keys, its value with the lowest final
    validation loss wins."""
    further: list[int | float] = Field(default_factory=list)
    """Values beyond the grid, tried one after another where the best value is the lowest or highest
    of those tried; each on all seeds that the best value has."""
    seed: int | None = Field(None, ge=0)
    """The tuning seed: all cells that are compared have it, and it is never reported. Null: the
    grid's own seeds decide and are reported, too."""
    second: list[Second] = Field(default_factory=list)
    """Second keys, at most one for each cell. The search goes on until no neighbour of the best
    combination, in either key, is left to try. Needs `seed`."""

    def second_of(self, config: RunConfig) -> Second | None:
        """The second key that is chosen for a cell with these settings; None if there is none."""
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
    out: str | None = Field(None, min_length=1)
    """Folder of the cells (default: runs/NAME of the sweep file). Sweeps may share one: equal cells
    run once."""
    set: dict[str, Value | list[Value]] = Field(default_factory=dict)
    """Dotted keys that differ from the base in all cells."""
    grid: dict[str, list[Value | dict[str, Value | list[Value]]]] = Field(min_length=1)
    """Axes: either a dotted key and its values, or any name and a list of mappings of dotted keys
    to values."""
    exclude: list[dict[str, Value | list[Value]]] = Field(default_factory=list)
    """Cells to leave out, of the grid and beyond it: those that have one of the listed values for
    each key of an entry."""
    choose: Choice | None = None
    """What to choose among the cells when they are done."""
    repeat: Repeat | None = None
    """What to run again at the chosen values."""

    @field_validator("set", "grid", mode="before")
    @classmethod
    def _has_dotted_keys(cls, content: Any) -> Any:
        """Refuse settings that are nested, as in a run's file, where a dotted key belongs, and
        values for a whole section."""
        if not isinstance(content, dict):
            return content
        for key, values in content.items():
            if not isinstance(values, list):
                _check_dotted(key, values)
                continue
            for entry in values:
                if not isinstance(entry, dict):
                    _check_dotted(key, entry)
                    continue
                for inner, value in entry.items():
                    _check_dotted(inner, value)
        return content


def _check_dotted(key: Any, value: Any) -> None:
    """ValueError if a value is itself a mapping, or is meant for a whole section."""
    if isinstance(value, dict):
        inner = next(iter(value), "KEY")
        raise ValueError(f"{key}: holds settings; write each with a dotted key, {key}.{inner}")
    if key in RunConfig.model_fields:
        raise ValueError(f"{key}: is a section; set one of its keys, such as {first_key_of(key)}")


@dataclass(frozen=True)
class Sweep:
    """A sweep file, read and checked."""

    path: Path
    spec: SweepSpec
    out: Path
    """The folder of the cells' folders."""
    cells: list[Cell]
    """The cells of the grid, without repetitions."""
    base: Mapping[str, Any]
    """The content of `spec.base`. It is read once: a sweep takes days, and its last cells must have
    the settings of its first ones even if somebody edits the file meanwhile."""

    @classmethod
    def load(cls, path: str | os.PathLike[str], out: str | os.PathLike[str] | None = None) -> Sweep:
        """Read a sweep file and expand its grid.

        Args:
            path: the file, or the name of one that comes with brx (`laptop/main`).
            out: the folder for the cells, instead of the one that the file names.

        Raises:
            UserError: there is no such file, or it holds a mistake.
        """
        file = user_path(path)
        if not file.is_file():
            file = _shipped_file(file)
        content = read_mapping(file)
        if not content.keys() & SweepSpec.model_fields and content.keys() & RunConfig.model_fields:
            raise UserError(f"{file}: holds the settings of a run, not a sweep; brx train runs it")
        spec = validate(content, SweepSpec, str(file))
        if out is None:
            out = spec.out or Path("runs") / file.stem
        return cls.expand(file, spec, user_path(out))

    @classmethod
    def expand(cls, path: Path, spec: SweepSpec, folder: Path) -> Sweep:
        """Make the cells of a sweep.

        Args:
            path: the sweep's file, for messages.
            spec: the content of this file.
            folder: the folder for the cells.

        Raises:
            UserError: the grid, or a cell, repetition or choice that it leads to, cannot be made.
        """
        base = _base_content(path, spec)
        _check_tuning_seed(path, spec)
        _check_clashes(path, spec)
        for place in (folder, *folder.parents):
            if place.is_file():
                raise UserError(f"{path}: out: {place} is a file; name a folder")
        if hides_runs_below(folder):
            raise UserError(
                f"{path}: out: {folder} is the folder of a run, so no command would find the "
                f"cells below it; choose another folder"
            )
        there = folders_in(folder)
        cells = [
            _cell(path, spec, base, folder, there, {**varied, **_tuning(spec)})
            for varied in _combinations(path, spec)
        ]
        _check_keys(path, spec, cells)
        included = [cell for cell in cells if not _is_excluded(cell, spec)]
        if not included:
            raise UserError(f"{path}: exclude: leaves no cell of the grid's {len(cells)}")
        sweep = cls(path, spec, folder, named_apart(_distinct(path, included)), base)
        sweep._check_beyond_grid()
        return sweep

    def with_present_folders(self) -> Sweep:
        """The sweep, with the folders that another sweep may have made for its cells since."""
        return replace(self, cells=with_present_folders(self.cells))

    def _check_beyond_grid(self) -> None:
        """Refuse further values and repetitions that are not valid runs, before the grid is paid
        for."""
        choose = self.spec.choose
        if choose is not None:
            first = self.cells[0]
            self.varied_further((first, {choose.over: value}) for value in choose.further)
            for cell in self.cells:
                second = choose.second_of(cell.config)
                if second is not None:
                    values = second.beyond_grid
                    self.varied_further((cell, {second.over: value}) for value in values)
        repeat = self.spec.repeat
        if repeat is not None:
            repeated = [cell for cell in self.cells if matches(cell.config, repeat.where)]
            is_of_chosen_value = choose is not None and choose.over in repeat.where
            if not repeated and not is_of_chosen_value:
                raise UserError(f"{self.path}: repeat.where: matches no cell")
            self.repetitions(repeated[:1])
            _check_decides(self.path, "repeat.set", repeat.set)

    def varied_further(self, variations: Iterable[tuple[Cell, Settings]]) -> list[Cell]:
        """Cells beyond the grid, without those that are excluded.

        Args:
            variations: for each new cell, the cell that it is made from, and the dotted keys in
                which it differs from that one.
        """
        there = folders_in(self.out)
        cells = []
        for origin, changed in variations:
            varied = {**origin.varied, **changed}
            cell = _cell(self.path, self.spec, self.base, self.out, there, varied)
            if not _is_excluded(cell, self.spec):
                cells.append(cell)
        return cells

    def repetitions(self, chosen: Sequence[Cell]) -> list[Cell]:
        """The cells that repeat chosen ones, usually with other seeds, without those that are among
        the chosen ones already."""
        repeat = self.spec.repeat
        if repeat is None:
            return []
        changes = []
        for values in itertools.product(*repeat.set.values()):
            changed = dict(zip(repeat.set, values, strict=True))
            changes.append({**changed, **_reported(self.spec)})
        matching = [cell for cell in chosen if matches(cell.config, repeat.where)]
        repeated = self.varied_further(itertools.product(matching, changes))
        distinct = {cell.trajectory_id: cell for cell in repeated}
        for cell in chosen:  # the grid may have some of the seeds
            distinct.pop(cell.trajectory_id, None)
        return list(distinct.values())


def _shipped_file(name: Path) -> Path:
    """The sweep file that comes with brx under this name; UserError if there is none."""
    folder = PRESETS / "sweeps"
    files = sorted(folder.rglob("*.yaml"))
    shipped = {str(file.relative_to(folder).with_suffix("")): file for file in files}
    if str(name) in shipped:
        return shipped[str(name)]
    if name.is_dir():
        raise UserError(f"{name}: is a folder; name a sweep file")
    with_ending = name.with_name(f"{name.name}.yaml")
    if with_ending.is_file():
        raise UserError(f"{name}: no such sweep file, did you mean '{with_ending}'?")
    near = [*shipped, *map(str, name.parent.glob("*.yaml"))]
    raise UserError(f"{name}: no such sweep file{did_you_mean(str(name), near)}")


def _base_content(path: Path, spec: SweepSpec) -> dict[str, Any]:
    """The content of a sweep's base; UserError if it cannot be read."""
    try:
        return new_content(find_config(spec.base))
    except UserError as error:
        hint = ""
        if not Path(spec.base).exists() and (path.parent / spec.base).is_file():
            hint = (
                f"; paths count from the working folder, not from the sweep file: write "
                f"{path.parent / spec.base}, or change the working folder (cd)"
            )
        raise UserError(f"{path}: base: {error}{hint}") from None


def _distinct(path: Path, cells: Sequence[Cell]) -> list[Cell]:
    """The cells without repetitions: equal cells are one, with the name of the first.

    Raises:
        UserError: two cells differ only in a setting that decides no number. They would have one
            folder, and only one of the two values would count.
    """
    distinct: dict[str, Cell] = {}
    for cell in cells:
        first = distinct.setdefault(trajectory_id(cell.config), cell)
        difference = difference_beyond_trajectory(first.config, cell.config)
        if difference is not None:
            raise UserError(
                f"{path}: grid: cells {first.name} and {cell.name} differ only in {difference}, "
                f"which changes no number of a run, so they would be the same cell"
            )
    return list(distinct.values())


def _is_excluded(cell: Cell, spec: SweepSpec) -> bool:
    return any(matches(cell.config, entry) for entry in spec.exclude)


def _may_exclude(entry: Mapping[str, Any], cell: Cell, spec: SweepSpec) -> bool:
    """Whether an entry of `exclude` matches a cell, or one beyond the grid that may follow from
    it."""
    beyond: dict[str, list[Value]] = {}
    if spec.repeat is not None:
        beyond = {key: list(values) for key, values in spec.repeat.set.items()}
    if spec.choose is not None:
        beyond.setdefault(spec.choose.over, []).extend(spec.choose.further)
        second = spec.choose.second_of(cell.config)
        if second is not None:
            beyond.setdefault(second.over, []).extend(second.beyond_grid)
    left_to_cell = {}  # the conditions that no value beyond the grid meets
    for key, wanted in entry.items():
        values = wanted if isinstance(wanted, list) else [wanted]
        if not any(value in values for value in beyond.get(key, ())):
            left_to_cell[key] = wanted
    return matches(cell.config, left_to_cell)


def _combinations(path: Path, spec: SweepSpec) -> Iterator[Settings]:
    """The dotted keys and values of each cell of the grid: the product of its axes."""
    for combination in itertools.product(*_axes(path, spec).values()):
        varied: dict[str, Any] = {}
        for settings in combination:
            varied.update(settings)
        yield varied


def _axes(path: Path, spec: SweepSpec) -> dict[str, list[Settings]]:
    """For each axis of the grid, the dotted keys that each of its values sets."""
    axes: dict[str, list[Settings]] = {}
    for axis, values in spec.grid.items():
        if not values:
            raise UserError(f"{path}: grid.{axis}: needs at least one value")
        kinds = {isinstance(value, dict) for value in values}
        if len(kinds) > 1:
            raise UserError(
                f"{path}: grid.{axis}: either all values or all mappings of dotted keys, not both"
            )
        axes[axis] = [_settings_of(axis, value) for value in values]
    return axes


def _check_clashes(path: Path, spec: SweepSpec) -> None:
    """Refuse values that would not count, because another place sets the same key, or the section
    around it, in the same cells."""
    _check_one_value_per_key(path, "set", spec.set)
    axis_of: dict[str, str] = {}  # by the dotted key that an axis sets
    for axis, settings_of_axis in _axes(path, spec).items():
        for settings in settings_of_axis:
            _check_one_value_per_key(path, f"grid.{axis}", settings)
        of_this_axis = dict.fromkeys(itertools.chain.from_iterable(settings_of_axis))  # each once
        for key in of_this_axis:
            other = _overlapping(key, axis_of)
            if other is not None:
                clash = "it" if other == key else other
                raise UserError(
                    f"{path}: grid.{axis}: sets {key}, and the axis {axis_of[other]} sets {clash}, "
                    f"too, so that one of the two values would not count; set it in one axis"
                )
        axis_of |= dict.fromkeys(of_this_axis, axis)
        for key in spec.set:
            if all(_overlapping(key, settings) is not None for settings in settings_of_axis):
                raise UserError(
                    f"{path}: set.{key}: would not count, since the axis {axis} of the grid sets "
                    f"it in all cells; remove one of the two"
                )


def _check_one_value_per_key(path: Path, where: str, settings: Settings) -> None:
    """UserError if one of the dotted keys is inside another (`pipeline.delay.like` and
    `pipeline.delay`); `where` is the sweep's key."""
    keys = list(settings)
    for number, key in enumerate(keys):
        other = _overlapping(key, keys[:number])
        if other is not None:
            raise UserError(
                f"{path}: {where}: sets both {other} and {key}, so that one of the two values "
                f"would not count; remove one of them"
            )


def _overlapping(key: str, others: Iterable[str]) -> str | None:
    """The first of other dotted keys that is the same key, a section around it, or inside it."""
    for other in others:
        if f"{key}.".startswith(f"{other}.") or f"{other}.".startswith(f"{key}."):
            return other
    return None


def _settings_of(axis: str, value: Any) -> Settings:
    """The dotted keys that a value of an axis sets: a mapping has its own keys; for any other
    value, the axis is the key."""
    if isinstance(value, dict):
        return dict(value)
    return {axis: value}


def _tuning(spec: SweepSpec) -> Settings:
    """The settings that a tuning seed adds to every cell of the grid; none without a tuning
    seed."""
    if spec.choose is None or spec.choose.seed is None:
        return {}
    return {SEED: spec.choose.seed, FOR_TUNING: True}


def _reported(spec: SweepSpec) -> Settings:
    """The settings that are added to every repetition: it is reported, even if the cell that it
    repeats was for tuning."""
    return {FOR_TUNING: False} if _tuning(spec) else {}


def _check_tuning_seed(path: Path, spec: SweepSpec) -> None:
    """Refuse a tuning seed that is among the reported ones, or without any reported ones."""
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
    if SEED in _keys_set_by(spec):
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


def _keys_set_by(spec: SweepSpec) -> set[str]:
    """The dotted keys that `set` and `grid` set (and the names of axes of mappings)."""
    keys = {*spec.set, *spec.grid}
    for values in spec.grid.values():
        for value in values:
            if isinstance(value, dict):
                keys |= value.keys()
    return keys


def _check_keys(path: Path, spec: SweepSpec, cells: Sequence[Cell]) -> None:
    """Refuse axes that make no cells, conditions that no cell meets and choices that cannot be
    made, before days of runs."""
    contents = [cell.config.model_dump(mode="json") for cell in cells]
    for entry in spec.exclude:
        if not any(_may_exclude(entry, cell, spec) for cell in cells):
            wanted = ", ".join(f"{key}={entry[key]}" for key in entry)
            hint = "".join(_hint_if_unset(key, contents) for key in entry)
            raise UserError(f"{path}: exclude: no cell has {wanted}{hint}")
    condition = {} if spec.repeat is None else spec.repeat.where
    for key in condition:
        if _is_unset(key, contents):
            hint = _hint_if_unset(key, contents)
            raise UserError(f"{path}: repeat.where: '{key}' is set in no cell{hint}")
    if spec.choose is not None:
        if spec.choose.over == SEED:
            raise UserError(f"{path}: choose.over: must not be a seed: seeds are repetitions")
        for content in contents:
            _check_is_number(path, "choose.over", spec.choose.over, content)
        _check_choice(path, spec.choose, cells)


def _check_choice(path: Path, rule: Choice, cells: Sequence[Cell]) -> None:
    """Refuse a choice without the losses by which it is made, one whose keys decide nothing, and
    further keys that are no numbers."""
    for cell in cells:
        training = cell.config.training
        last = training.last_iteration
        if last < min(training.validation_every, training.iterations):
            raise UserError(
                f"{path}: choose: goes by validation losses, of which cell {cell.name} has none: "
                f"its first one is at iteration {training.validation_every} "
                f"(training.validation_every), and it stops at {last} (training.stop_after)"
            )
    _check_decides(path, "choose.over", [rule.over])
    _check_second_keys(path, rule, cells)


def _is_unset(key: str, contents: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a dotted key is set in none of these settings."""
    return all(value_at(content, key) is None for content in contents)


def _hint_if_unset(key: str, contents: Sequence[Mapping[str, Any]]) -> str:
    """A hint with the key that may have been meant by a dotted key that no cell sets; else
    empty."""
    if not _is_unset(key, contents):
        return ""
    known: set[str] = set()
    for content in contents:
        known.update(dotted_keys(content))
    return did_you_mean(key, sorted(known))


def _check_decides(path: Path, where: str, keys: Iterable[str]) -> None:
    """UserError if a key changes no number of a run, so that cells with its values would be one;
    `where` is the sweep's key."""
    for key in keys:
        if not decides_trajectory(key):
            raise UserError(
                f"{path}: {where}: {key} changes no number of a run, so all its values would be "
                f"the same cell"
            )


def _check_is_number(path: Path, where: str, key: str, content: Mapping[str, Any]) -> None:
    """UserError if a key of a cell's settings is not a number; `where` is the sweep's key."""
    value = value_at(content, key)
    if isinstance(value, bool) or not isinstance(value, int | float):
        hint = _hint_if_unset(key, [content])
        raise UserError(f"{path}: {where}: needs a key of numbers, {key} is {value!r}{hint}")


def _check_second_keys(path: Path, rule: Choice, cells: Sequence[Cell]) -> None:
    """Refuse a second key that no cell has or that is not a number, and two of them in one cell."""
    for number, second in enumerate(rule.second):
        where = f"choose.second[{number}]"
        matching = [cell for cell in cells if matches(cell.config, second.where)]
        if not matching:
            raise UserError(f"{path}: {where}.where: matches no cell")
        if second.over in (rule.over, SEED):
            raise UserError(
                f"{path}: {where}.over: must not be {rule.over} or {SEED}, got {second.over}"
            )
        for cell in matching:
            content = cell.config.model_dump(mode="json")
            _check_is_number(path, f"{where}.over", second.over, content)
            if rule.second_of(cell.config) is not second:
                raise UserError(f"{path}: {where}.where: cell {cell.name} has a second key already")
        _check_decides(path, f"{where}.over", [second.over])


def _cell(
    path: Path,
    spec: SweepSpec,
    base: Mapping[str, Any],
    out: Path,
    there: Mapping[str, Path],
    varied: Settings,
) -> Cell:
    """Make one cell.

    The name of its folder ends with its trajectory id. So a folder that another sweep has made for
    an equal cell is found by this id (`there`, from `folders_in`)."""
    content = set_values(base, {**spec.set, **varied}, f"{path}:")
    name = cell_name(varied)
    try:
        config = validate(content, RunConfig, f"{path}: cell {name}")
    except UserError as error:
        raise _from_base(error, path, spec, base, name) from None
    stop_after = config.training.stop_after
    if isinstance(stop_after, str):
        raise UserError(
            f"{path}: cell {name}: training.stop_after={stop_after} ends a session of one run; a "
            f"sweep's runs need an iteration. Send SIGTERM to end a session of the sweep: every "
            f"run saves, and the same command continues"
        )
    if SEED not in varied:
        name += f"-s{config.training.seed}"
    digits = trajectory_id(config)
    folder = there.get(digits, out / f"{name}--{digits}")
    return Cell(name, varied, config, folder)


def _from_base(
    error: UserError, path: Path, spec: SweepSpec, base: Mapping[str, Any], name: str
) -> UserError:
    """The error of a cell; if the base has the same mistake, the error names the base instead."""
    where = f"{path}: base: {spec.base}"
    try:
        validate(base, RunConfig, where)
    except UserError as of_base:
        if str(of_base).removeprefix(where) == str(error).removeprefix(f"{path}: cell {name}"):
            return of_base
    return error
