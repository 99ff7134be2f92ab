"""Sweep files, the cells that they expand into, and the state of a cell.

A cell's state is read from its folder alone, so that all sweeps agree on it.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import math
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
    ENDED,
    FOR_TUNING,
    SEED,
    RunFolder,
    decides_trajectory,
    is_locked,
    lock,
    settings_key,
    telling,
    trajectory_of,
)

Value = bool | int | float | str | None
LOG = "log.txt"
FAILURE = "failed.txt"
CELLS_LOCK = ".cells.lock"  # in the folder of the cells' folders; held while a cell's is made
MOST_KEPT = 10_000  # configurations of cells that are kept in memory, of some kilobytes each
TAIL_BYTES = 16_384  # enough of the end of metrics.jsonl to hold its last complete line

# What stands before a key's value in a cell's name; for other keys it is the key's last part.
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
    "model.class",
    "optimizer.geometry",
    "optimizer.method",
    "optimizer.refresh_schedule",
    "optimizer.source",
    "pipeline.stash",
}
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
    out: str | None = None
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
        """Refuse settings that are nested, as in a run's file, where a dotted key belongs."""
        if not isinstance(content, dict):
            return content
        _refuse_nested(content)
        for values in content.values():
            entries = values if isinstance(values, list) else []
            for entry in entries:
                if isinstance(entry, dict):
                    _refuse_nested(entry)
        return content


def _refuse_nested(settings: Mapping[Any, Any]) -> None:
    """ValueError if a value is itself a mapping."""
    for key, value in settings.items():
        if isinstance(value, dict):
            inner = next(iter(value), "KEY")
            raise ValueError(f"{key}: holds settings; write each with a dotted key, {key}.{inner}")


@dataclass(frozen=True)
class Cell:
    """One run of a sweep."""

    name: str
    varied: Mapping[str, Any]
    """The dotted keys that the cell sets in addition to the sweep's base, with their values."""
    config: RunConfig
    folder: Path

    @property
    def identity(self) -> str:
        """A text that is equal for cells with the same trajectory, whatever their names. It is
        `identity` of the settings, and the folder's name ends with it."""
        return self.folder.name.rpartition("--")[2]


@dataclass(frozen=True)
class Sweep:
    """A sweep file, read and checked."""

    path: Path
    spec: SweepSpec
    out: Path
    """The folder of the cells' folders."""
    cells: list[Cell]
    """The cells of the grid, without repetitions."""

    @classmethod
    def load(cls, path: Path, out: Path | None = None) -> Sweep:
        """Read a sweep file and expand its grid.

        Args:
            path: the file, or the name of one that comes with brx (`laptop/main`).
            out: the folder for the cells, instead of the one that the file names.

        Raises:
            UserError: there is no such file, or it holds a mistake.
        """
        if not path.exists():
            path = _shipped_file(path)
        spec = load_yaml_as(path, SweepSpec)
        if out is None:
            out = user_path(spec.out) if spec.out else Path("runs") / path.stem
        return cls.expand(path, spec, out)

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
        base = new_content(find_config(spec.base))
        _check_tuning_seed(path, spec)
        there = _folders_in(folder)
        cells = [
            _cell(path, spec, base, folder, there, {**varied, **_tuning(spec)})
            for varied in _combinations(path, spec)
        ]
        _check_keys(path, spec, cells)
        included = [cell for cell in cells if not _is_excluded(cell, spec)]
        if not included:
            raise UserError(f"{path}: exclude: leaves no cell of the grid's {len(cells)}")
        # Equal cells are one, with the name of the first.
        distinct = {identity(cell.config): cell for cell in reversed(included)}
        sweep = cls(path, spec, folder, _named_apart(reversed(distinct.values())))
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
                    self.varied_further((cell, {second.over: value}) for value in second.values)
        repeat = self.spec.repeat
        if repeat is not None:
            repeated = [cell for cell in self.cells if matches(cell.config, repeat.where)]
            is_of_chosen_value = choose is not None and choose.over in repeat.where
            if not repeated and not is_of_chosen_value:
                raise UserError(f"{self.path}: repeat.where: matches no cell")
            self.repetitions(repeated[:1])

    def varied_further(self, variations: Iterable[tuple[Cell, Settings]]) -> list[Cell]:
        """Cells beyond the grid, without those that are excluded.

        Args:
            variations: for each new cell, the cell that it is made from, and the dotted keys in
                which it differs from that one.
        """
        base = new_content(find_config(self.spec.base))
        there = _folders_in(self.out)
        varied = [
            _cell(self.path, self.spec, base, self.out, there, {**cell.varied, **changed})
            for cell, changed in variations
        ]
        return [cell for cell in varied if not _is_excluded(cell, self.spec)]

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
        distinct = {cell.identity: cell for cell in repeated}
        for cell in chosen:  # the grid may have some of the seeds
            distinct.pop(cell.identity, None)
        return list(distinct.values())


def _shipped_file(name: Path) -> Path:
    """The sweep file that comes with brx under this name; UserError if there is none."""
    folder = PRESETS / "sweeps"
    files = sorted(folder.rglob("*.yaml"))
    shipped = {str(file.relative_to(folder).with_suffix("")): file for file in files}
    if str(name) not in shipped:
        raise UserError(f"{name}: no such sweep file{did_you_mean(str(name), shipped)}")
    return shipped[str(name)]


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
            beyond.setdefault(second.over, []).extend(second.values)
    left_to_cell = {}  # the conditions that no value beyond the grid meets
    for key, wanted in entry.items():
        values = wanted if isinstance(wanted, list) else [wanted]
        if not any(value in values for value in beyond.get(key, ())):
            left_to_cell[key] = wanted
    return matches(cell.config, left_to_cell)


def matches(config: RunConfig, condition: Mapping[str, Any]) -> bool:
    """Whether settings meet a condition (`where`, `exclude`).

    Args:
        config: the settings.
        condition: dotted keys; each must have the given value, or one of a list of values.
    """
    content = config.model_dump(mode="json")
    for key, wanted in condition.items():
        values = wanted if isinstance(wanted, list) else [wanted]
        if value_at(content, key) not in values:
            return False
    return True


def first_match(config: RunConfig, conditions: Mapping[str, Mapping[str, Any]]) -> str | None:
    """The name of the first condition that settings meet (`matches`); None if there is none."""
    return next((name for name, wanted in conditions.items() if matches(config, wanted)), None)


def value_at(content: Mapping[str, Any], key: str) -> Any:
    """The value at a dotted key of nested settings; None if there is no such key."""
    value: Any = content
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def identity(config: RunConfig) -> str:
    """Eight hexadecimal digits that are equal for runs with the same trajectory."""
    return hashlib.sha256(settings_key(config).encode()).hexdigest()[:8]


def _combinations(path: Path, spec: SweepSpec) -> Iterator[Settings]:
    """The dotted keys and values of each cell of the grid: the product of its axes."""
    axes: list[list[Settings]] = []
    axis_of: dict[str, str] = {}  # by the dotted key that an axis sets
    for axis, values in spec.grid.items():
        if not values:
            raise UserError(f"{path}: grid.{axis}: needs at least one value")
        kinds = {isinstance(value, dict) for value in values}
        if len(kinds) > 1:
            raise UserError(
                f"{path}: grid.{axis}: either all values or all mappings of dotted keys, not both"
            )
        settings_of_axis = [_settings_of(axis, value) for value in values]
        for key in {key: None for settings in settings_of_axis for key in settings}:
            if key in axis_of:
                raise UserError(
                    f"{path}: grid.{axis}: sets {key}, which the axis {axis_of[key]} sets, too, so "
                    f"that one of the two values would not count; set it in one axis"
                )
            axis_of[key] = axis
        axes.append(settings_of_axis)
    for combination in itertools.product(*axes):
        varied: dict[str, Any] = {}
        for settings in combination:
            varied.update(settings)
        yield varied


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
    for key, values in spec.grid.items():
        if "." in key and len(values) > 1 and not decides_trajectory(key):
            raise UserError(
                f"{path}: grid.{key}: changes no number of a run, so all its values would be the "
                f"same cell"
            )
    for entry in spec.exclude:
        if not any(_may_exclude(entry, cell, spec) for cell in cells):
            wanted = ", ".join(f"{key}={entry[key]}" for key in entry)
            raise UserError(f"{path}: exclude: no cell has {wanted}")
    condition = {} if spec.repeat is None else spec.repeat.where
    for key in condition:
        if all(value_at(content, key) is None for content in contents):
            raise UserError(f"{path}: repeat.where: '{key}' is set in no cell")
    if spec.choose is not None:
        if spec.choose.over == SEED:
            raise UserError(f"{path}: choose.over: must not be a seed: seeds are repetitions")
        for content in contents:
            _check_is_number(path, "choose.over", spec.choose.over, content)
        _check_seconds(path, spec.choose, cells)


def _check_is_number(path: Path, where: str, key: str, content: Mapping[str, Any]) -> None:
    """UserError if a key of a cell's settings is not a number; `where` is the sweep's key."""
    value = value_at(content, key)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise UserError(f"{path}: {where}: needs a key of numbers, {key} is {value!r}")


def _check_seconds(path: Path, rule: Choice, cells: Sequence[Cell]) -> None:
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
            _check_is_number(
                path, f"{where}.over", second.over, cell.config.model_dump(mode="json")
            )
            if rule.second_of(cell.config) is not second:
                raise UserError(f"{path}: {where}.where: cell {cell.name} has a second key already")


def _cell(
    path: Path,
    spec: SweepSpec,
    base: Mapping[str, Any],
    out: Path,
    there: Mapping[str, Path],
    varied: Settings,
) -> Cell:
    """Make one cell. The name of its folder ends with its identity, by which a folder that another
    sweep has made for an equal cell is found (`there`, from `_folders_in`)."""
    content = set_values(base, {**spec.set, **varied}, f"{path}:")
    name = cell_name(varied)
    config = validate(content, RunConfig, f"{path}: cell {name}")
    stop_after = config.training.stop_after
    if isinstance(stop_after, str):
        raise UserError(
            f"{path}: cell {name}: training.stop_after={stop_after} ends a session of one run; a "
            f"sweep's runs need an iteration. Send SIGTERM to end a session of the sweep: every "
            f"run saves, and the same command continues"
        )
    if SEED not in varied:
        name += f"-s{config.training.seed}"
    digits = identity(config)
    folder = there.get(digits, out / f"{name}--{digits}")
    return Cell(name, varied, config, folder)


def _folders_in(out: Path) -> dict[str, Path]:
    """The folders that cells have in `out`, by identity, whatever the rest of their names."""
    try:
        names = os.listdir(out)
    except OSError:  # it is made when the first cell starts
        return {}
    # In reverse, because a later entry replaces an earlier one: if one cell has two folders, all
    # sweeps take the first.
    in_reverse = sorted((name for name in names if "--" in name), reverse=True)
    return {name.rpartition("--")[2]: out / name for name in in_reverse}


def with_present_folders(cells: Sequence[Cell]) -> list[Cell]:
    """The cells of one sweep, with the folders that another sweep may have made for them since.

    This lists the folder of the cells' folders once, however many cells there are.
    """
    if not cells:
        return []
    there = _folders_in(cells[0].folder.parent)
    return [replace(cell, folder=there.get(cell.identity, cell.folder)) for cell in cells]


def placed(cell: Cell) -> Cell:
    """The cell with the folder that it has by now; one is made if it has none.

    Sweeps that share a folder may name an equal cell differently. The first one to start it
    decides: one process at a time looks whether there is a folder, and makes it.

    Raises:
        RunError: the folder cannot be written to.
    """
    if cell.folder.is_dir():
        return cell
    with lock(cell.folder.parent, patience_s=math.inf, name=CELLS_LOCK):
        (present,) = with_present_folders([cell])
        with telling(present.folder):
            present.folder.mkdir(exist_ok=True)
    return present


def _named_apart(cells: Iterable[Cell]) -> list[Cell]:
    """The cells; to names that several cells share, their identity is added."""
    cells = list(cells)
    count = Counter(cell.name for cell in cells)
    named = []
    for cell in cells:
        is_alone = count[cell.name] == 1
        name = cell.name if is_alone else f"{cell.name}-{identity(cell.config)}"
        named.append(replace(cell, name=name))
    return named


def cell_name(varied: Mapping[str, Any]) -> str:
    """The varied values in one word, for example `basis-rotation-p32-lr0.001-s0`; `all` without
    any."""
    parts = []
    for key, value in varied.items():
        if value is None or key == FOR_TUNING:
            continue
        entries = value if isinstance(value, list) else [value]
        shown = ".".join(_in_name(entry) for entry in entries)
        prefix = "" if key in SILENT_KEYS else SHORT_NAMES.get(key, key.rpartition(".")[2])
        parts.append(prefix + shown)
    return file_name(*parts) if parts else "all"


def _in_name(value: Value) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


class State(Enum):
    """What has become of a cell so far."""

    WAITING = "waiting"
    INTERRUPTED = "interrupted"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"


def state_of(cell: Cell) -> State:
    """The cell's state, by its folder.

    Raises:
        UserError: it is done, but a default of brx or the trajectory version has changed since; or
            it has ended after a longer training than the cell asks for.
    """
    summary = RunFolder(cell.folder).read_summary()
    _check_not_longer(cell, summary)
    # A run that finished at an earlier training.stop_after is the same run, cut short: more of it
    # is to be done.
    has_all_iterations = summary.get("iteration", 0) >= cell.config.training.last_iteration
    if summary.get("status") == "finished" and has_all_iterations:
        check_same_run(cell)
        check_trajectory_version(summary, cell.folder, cell.config.optimizer.method)
        return State.DONE
    if is_locked(cell.folder):
        return State.RUNNING
    if (cell.folder / FAILURE).is_file():
        return State.FAILED
    return State.INTERRUPTED if (cell.folder / "checkpoints").is_dir() else State.WAITING


def _check_not_longer(cell: Cell, summary: Mapping[str, Any]) -> None:
    """UserError if the run in the cell's folder has ended after a longer training than the cell
    asks for. Its final losses would be compared with those of shorter runs."""
    if summary.get("status") not in ENDED:
        return
    made = summary.get("iteration", 0)
    last = cell.config.training.last_iteration
    if made > last:
        raise UserError(
            f"training.stop_after: {last}: the run in {cell.folder} has made {made} "
            f"already; give as many, or choose another folder (out)"
        )


def iterations_done(folder: Path) -> int:
    """The newest iteration in the folder's metrics, read from the file's end."""
    try:
        with (folder / "metrics.jsonl").open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES))
            lines = file.read().split(b"\n")
    except OSError:
        return 0
    for line in reversed(lines):
        with contextlib.suppress(ValueError, KeyError, TypeError):
            return int(parse_json(line.decode())["iteration"])
    return 0


def prepare_folder(cell: Cell) -> None:
    """Write the config.yaml from which `brx train FOLDER --resume` starts.

    Raises:
        UserError: the folder holds another run.
    """
    cell.folder.mkdir(parents=True, exist_ok=True)
    (cell.folder / FAILURE).unlink(missing_ok=True)
    check_same_run(cell)
    path = RunFolder(cell.folder).config
    # It is written for a continued run, too, because that run may have been told to stop earlier
    # than the sweep asks.
    write_text(path, dump_config(cell.config))


def outcome_of(cell: Cell, code: int) -> tuple[State, str]:
    """What became of a cell whose run has ended.

    Args:
        cell: the cell.
        code: the exit code of its process; negative for a signal.

    Returns:
        Its state; and why it failed, if it did, which is also written into its folder.
    """
    status = RunFolder(cell.folder).read_summary().get("status")
    is_out_of_time = code == 0 and status == "interrupted"
    if code == 130 or is_out_of_time:
        return State.INTERRUPTED, ""
    if code == 0:
        return State.DONE, ""
    how = f"exit code {code}" if code > 0 else f"killed by {signal_name(-code)}"
    reason = f"{how}: {_last_message(cell.folder / LOG)}"
    write_text(cell.folder / FAILURE, reason + "\n")
    return State.FAILED, reason


def _last_message(log: Path) -> str:
    """The last message of brx in a log; without one, the last line."""
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    except OSError:
        return ""
    for line in reversed(lines):
        if line.startswith("brx: "):
            return line.removeprefix("brx: ")
    return lines[-1] if lines else ""


@functools.lru_cache(maxsize=MOST_KEPT)
def _trajectory_in(
    config: Path,
    version: tuple[int, ...],  # tells its contents apart
) -> dict[str, dict[str, Any]]:
    """What `trajectory_of` gives for a configuration file.

    It is kept, because a sweep looks at each cell that is done several times per round, and YAML is
    slow to parse.
    """
    return trajectory_of(load_config(config))


def check_same_run(cell: Cell) -> None:
    """UserError if there is a run in the cell's folder with other settings than the cell."""
    config = RunFolder(cell.folder).config
    try:
        status = config.stat()
    except (FileNotFoundError, NotADirectoryError):
        return
    version = (status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
    if _trajectory_in(config, version) != trajectory_of(cell.config):
        raise UserError(
            f"{config}: differs from what the sweep asks for, in a default of brx; move the folder "
            f"away"
        )
