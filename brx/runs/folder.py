"""A run's folder: config.yaml, metrics.jsonl, summary.json, checkpoints/, and a lock that the
process that trains in it holds.

The lock on `.lock` is the operating system's (flock): it ends with the last process that holds it,
so nothing has to be cleaned up after a crash. A sweep that starts a run, and a launcher that starts
ranks, hand the lock down: the child goes on holding it when its parent is killed. (filelock's own
objects would unlock it for the child, too.)
"""

import contextlib
import errno
import functools
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any, TypeVar

from filelock import lock_descriptor

from brx.config.loading import dump_config, load_config, read_mapping, sections_of_code
from brx.config.schema import (
    DEFAULT_MODEL,
    CheckpointConfig,
    DelayCode,
    LoggingConfig,
    RunConfig,
)
from brx.config.user_code import name_without_folder
from brx.errors import DamagedRunError, UserError
from brx.files import cannot_write, write_text
from brx.names import file_name, shown
from brx.readers import parse_json, read_text

ENDED = ("finished", "diverged")
"""The statuses of runs that are results of their settings. One that failed is not."""

RATE = "optimizer.lr"
SEED = "training.seed"
FOR_TUNING = "training.for_tuning"
# What may differ between a run and its continuation, because no number of the trajectory depends on
# it. Nothing in the sections `checkpoint` and `logging` decides a number.
_MAY_CHANGE = {
    "pipeline": {"devices", "balance", "recompute", "rings", "timeout_s"},
    "data": {"directory", "max_epochs"},
    "training": {
        "stop_after",
        "checkpoint_every",
        "keep_checkpoints",
        "keep_at",
        "log_every",
        "for_tuning",
    },
    "checkpoint": set(CheckpointConfig.model_fields),
    "runtime": {"device", "share_gpus", "threads", "compile", "graphs", "deterministic"},
    "logging": set(LoggingConfig.model_fields),
}

T = TypeVar("T")
Sections = Mapping[str, Mapping[str, Any]]  # by section and key

LOCK = ".lock"
CACHE = ".parsed"  # see `brx.runs.cache`
# The environment variable with the descriptor of a lock that the parent process has handed down.
HANDED_DOWN = "BRX_RUN_LOCK"
# How long a run tries to take the lock. A process that only checks whether the folder is locked
# holds the lock for an instant.
PATIENCE_S = 0.5
POLL_S = 0.02
# Errors of file systems that have no locks.
_NO_LOCKS = {errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOLCK}


@contextlib.contextmanager
def telling(path: Path) -> Iterator[None]:
    """A context in which the error of a disk that is full, read-only or gone becomes a RunError of
    one line that names `path`."""
    try:
        yield
    except OSError as error:
        raise cannot_write(path, error) from None


def name_of_run(folder: Path) -> str:
    """The name of a run's folder, also where it is given as `.` or `..`."""
    return os.path.basename(os.path.abspath(folder))


class RunFolder:
    """The paths of one run, and whether a run may begin or go on there."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.yaml"
        self.metrics = path / "metrics.jsonl"
        self.summary = path / "summary.json"

    def read_summary(self) -> dict[str, Any]:
        """The content of summary.json; empty if the file is missing or cannot be read."""
        try:
            return parse_summary(read_text(self.summary))
        except ValueError:
            return {}

    def check(self, config: RunConfig, *, resume: bool) -> None:
        """Refuse a folder that holds another run, or without `resume` this run.

        Raises:
            UserError: the run cannot begin, or with `resume` cannot continue, in this folder.
        """
        files = (self.config, self.metrics, self.path / "checkpoints")
        if not resume and any(path.exists() for path in files):
            raise UserError(
                f"{self.path}: holds a run; continue it (--resume; record: resume=True), or choose "
                f"another folder"
            )
        if not self.config.exists():
            return
        settings_there = trajectory_of(load_config(self.config))
        difference = first_difference(settings_there, trajectory_of(config))
        if difference is not None:
            raise UserError(
                f"{self.config}: {difference}: a run resumes with its own; choose another folder "
                f"for a new one"
            )

    def create(self, config: RunConfig, *, resume: bool) -> None:
        """Make the folder if there is none, and write the run's settings into it.

        Raises:
            UserError: as `check`.
            RunError: the folder cannot be written.
        """
        self.check(config, resume=resume)
        with telling(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
        write_text(self.config, dump_config(config))


_SUMMARY_KINDS: dict[str, type] = {
    "status": str,
    "iteration": int,
    "trajectory_version": int,
    "data_fingerprint": str,
}
"""The types of the values by which runs are sorted, where a summary has them."""


def parse_summary(text: str) -> dict[str, Any]:
    """The content of a summary.json.

    Raises:
        ValueError: it is not a JSON object, or a value by which runs are sorted has another type.
    """
    content = parse_json(text)
    if not isinstance(content, dict):
        raise ValueError("must be a JSON object")
    for key, kind in _SUMMARY_KINDS.items():
        if key in content and not isinstance(content[key], kind):
            raise ValueError(f"{key} is {content[key]!r}, must be of type {kind.__name__}")
    return content


def status_of(summary: Mapping[str, Any], config: RunConfig) -> str:
    """The status of a run: finished, diverged, failed, interrupted, or unfinished while there is no
    summary of the whole run."""
    # A run that stopped early (`training.stop_after`) and was continued keeps its old summary until
    # it ends.
    last = config.training.last_iteration
    is_old = summary.get("status") == "finished" and summary.get("last_iteration", last) < last
    return "unfinished" if is_old else str(summary.get("status", "unfinished"))


def find_runs(folders: Iterable[str | os.PathLike[str]]) -> list[Path]:
    """Find runs that have losses or diverged, and what is left of runs that lost a file.

    Whoever reads the latter gets a UserError that says what is missing. Folders in which nothing is
    found are named on stderr.

    Args:
        folders: folders of runs, or folders directly above some.

    Returns:
        The folder of each run, once.

    Raises:
        UserError: a folder does not exist, or none holds a run.
    """
    paths = [Path(folder) for folder in folders]
    runs: list[Path] = []
    without_runs = []
    for folder in paths:
        if folder.is_file():
            raise UserError(
                f"{folder}: is a file; name the folder of a run, or one that holds some"
            )
        if not folder.is_dir():
            raise UserError(f"{folder}: no such folder")
        found = _runs_in(folder)
        runs += found
        if not found:
            without_runs.append(str(folder))
    if not runs:
        raise UserError(f"{', '.join(without_runs)}: no run with losses there")
    if without_runs:
        note = f"left out: {shown(', '.join(without_runs))}: no run with losses there"
        print(f"brx: note: {note}", file=sys.stderr)
    return list(dict.fromkeys(runs))


def has_runs(folder: Path) -> bool:
    """Whether a folder exists and `find_runs` would find a run in it."""
    return folder.is_dir() and bool(_runs_in(folder))


def _runs_in(folder: Path) -> list[Path]:
    """The run whose folder this is, or the runs directly below it."""
    if (folder / "config.yaml").is_file() or has_losses(folder):
        candidates = [folder]
    else:
        below = [path for path in sorted(folder.iterdir()) if not _is_temporary(path)]
        candidates = _without_links(below)
    return [path for path in candidates if _is_run(path)]


# Whether the command was given `--strict`; None in a command that has no such option.
_is_strict: ContextVar[bool | None] = ContextVar("is_strict", default=None)


def stop_at_damage(is_strict: bool) -> None:
    """Say whether `read_each` raises for a damaged run (`--strict`), until the command ends."""
    _is_strict.set(is_strict)


def read_each(paths: Iterable[Path], read: Callable[[Path], T]) -> list[tuple[Path, T]]:
    """Read runs; damaged ones are left out and named on stderr.

    Args:
        paths: the folders of the runs.
        read: reads one; a UserError means that the run is damaged.

    Returns:
        Each run's folder with the result of `read`.

    Raises:
        UserError: every run is damaged; it names the first.
        DamagedRunError: a run is damaged, after `stop_at_damage(True)`.
    """
    results: list[tuple[Path, T]] = []
    problems: list[UserError] = []
    for path in paths:
        try:
            results.append((path, read(path)))
        except UserError as error:
            if _is_strict.get():
                raise DamagedRunError(str(error)) from None
            problems.append(error)
    if problems and not results:
        raise problems[0]
    hint = " (--strict stops)" if _is_strict.get() is False else ""
    for problem in problems:
        print(f"brx: note: left out{hint}: {shown(str(problem))}", file=sys.stderr)
    return results


def _without_links(paths: Sequence[Path]) -> list[Path]:
    """The paths, without links to other paths among them (such as `latest`). The links are named on
    stderr."""
    links = {path for path in paths if path.is_symlink()}
    if not links:
        return list(paths)
    places = {path.resolve() for path in paths if path not in links}
    kept = []
    for path in paths:
        place = path.resolve()
        if path in links and place in places:
            note = f"{shown(str(path))}: left out, a link to {place.name} in the same folder"
            print(f"brx: note: {note}", file=sys.stderr)
        else:
            kept.append(path)
    return kept


def _is_temporary(path: Path) -> bool:
    """Whether the folder is an export under way."""
    return path.name.startswith(".") and path.name.endswith((".tmp", ".tmp.old"))


def _is_run(path: Path) -> bool:
    """Whether the folder has losses, or the settings of a run that diverged or had losses."""
    if has_losses(path):
        return True
    if not (path / "config.yaml").is_file():
        return False
    summary = RunFolder(path).read_summary()
    return summary.get("status") == "diverged" or summary.get("iteration", 0) > 0


def has_losses(path: Path) -> bool:
    """Whether a run's folder has its metrics, or the losses that `brx export` made of them."""
    files = [path / "metrics.jsonl", path / "curves.npz"]
    return any(file.is_file() and file.stat().st_size > 0 for file in files)


def first_difference(old: Sections, new: Sections, *, ignore_new: bool = False) -> str | None:
    """The first setting that differs, in words; None if all are equal.

    Args:
        old: the earlier settings, from `trajectory_of`.
        new: the present settings, from `trajectory_of`.
        ignore_new: leave out settings that `old` does not have.
    """
    for section, values in new.items():
        before = old.get(section, {})
        for key in before if ignore_new else {**values, **before}:
            if before.get(key) != values.get(key):
                return f"{section}.{key} was {before.get(key)!r} and is now {values.get(key)!r}"
    return None


def decides_trajectory(key: str) -> bool:
    """Whether a number of the trajectory depends on the setting of this dotted key."""
    section, _, rest = key.partition(".")
    name, _, _ = rest.partition(".")
    is_setting = section in RunConfig.model_fields
    return is_setting and name not in _MAY_CHANGE.get(section, set())


def deciding_settings(settings: Sections) -> dict[str, dict[str, Any]]:
    """The settings without those that no number of the trajectory depends on.

    A checkpoint of an older brx may hold some of these, which it still counted.
    """
    kept: dict[str, dict[str, Any]] = {section: {} for section in settings}
    for section, values in settings.items():
        for key, value in values.items():
            if decides_trajectory(f"{section}.{key}"):
                kept[section][key] = value
    return kept


def trajectory_of(config: RunConfig, *, with_defaults: bool = True) -> dict[str, dict[str, Any]]:
    """The settings that decide a run's trajectory, by section and key.

    For a method, model or delay function in a user's file, the name and the content of the file
    count, not its folder.

    Args:
        config: the settings of the run.
        with_defaults: include settings that have their default values.
    """
    trajectory = deciding_settings(
        config.model_dump(mode="json", exclude_defaults=not with_defaults)
    )
    for settings in sections_of_code(trajectory):
        settings.pop("facts", None)  # they follow from the file
    if "method" in trajectory.get("optimizer", {}):
        trajectory["optimizer"]["method"] = name_without_folder(config.optimizer.method)
    if "class" in trajectory.get("model", {}):
        trajectory["model"]["class"] = name_without_folder(config.model.name)
    if isinstance(config.pipeline.delay, DelayCode):
        function = name_without_folder(config.pipeline.delay.function)
        trajectory["pipeline"]["delay"]["function"] = function
    return trajectory


def settings_key(config: RunConfig, *, without: Iterable[str] = ()) -> str:
    """A text that is equal for runs whose settings that decide trajectories are equal.

    Args:
        config: the settings of a run.
        without: dotted keys that do not count, of any depth (`optimizer.arguments.eps`). A section
            that is empty without them does not count, either.
    """
    # Defaults are left out, so that a setting that is added to brx later leaves the texts of older
    # runs as they are.
    content = trajectory_of(config, with_defaults=False)
    for dotted in without:
        _drop(content, dotted.split("."))
    filled = {section: values for section, values in content.items() if values}
    return json.dumps(filled, sort_keys=True)


def _drop(content: dict[str, Any], parts: Sequence[str]) -> None:
    """Remove a key, given in parts, in place; also a section that is empty afterwards."""
    first, *rest = parts
    if not rest:
        content.pop(first, None)
    elif isinstance(section := content.get(first), dict):
        _drop(section, rest)
        if not section:
            del content[first]


def default_folder(config: RunConfig, file: Path) -> Path:
    """runs/<preset>-<method>-p<stages>-s<seed>. For a method in a file, the name has no folder.

    If the model is not the preset's own, its class follows the preset's name.

    Args:
        config: the settings of the run.
        file: the preset or other configuration file that they come from.
    """
    parts = [file.stem]
    section = read_mapping(file).get("model") or {}
    if config.model.name != section.get("class", DEFAULT_MODEL):
        parts.append(name_without_folder(config.model.name))
    parts.append(name_without_folder(config.optimizer.method))
    parts += [f"p{config.pipeline.stages}", f"s{config.training.seed}"]
    return Path("runs") / file_name(*parts)


@contextlib.contextmanager
def hold(folder: Path) -> Iterator[int]:
    """A context that holds the lock of a run's folder while a run trains in it. It yields the
    lock's descriptor.

    The folder is made if there is none. If it holds only the lock at the end, it is removed again.

    Raises:
        UserError: another process holds the lock.
    """
    handed_down = _handed_down(folder)
    if handed_down is not None:
        _sign(handed_down)
        yield handed_down
        return
    with lock(folder, patience_s=PATIENCE_S) as descriptor:
        if descriptor is None:
            note = (folder / LOCK).read_text(encoding="utf-8", errors="replace")  # see `_sign`
            holder = note or "another process"
            raise UserError(
                f"{folder}: {holder} trains in this folder; wait until it has ended, or choose "
                f"another folder"
            )
        try:
            yield descriptor
        finally:
            with contextlib.suppress(OSError):
                if [path.name for path in folder.iterdir()] == [LOCK]:
                    (folder / LOCK).unlink()
                    folder.rmdir()


@contextlib.contextmanager
def lock(folder: Path, *, patience_s: float = 0.0, name: str = LOCK) -> Iterator[int | None]:
    """A context that takes the lock of a run's folder, which is made if there is none.

    Args:
        folder: the run's folder.
        patience_s: how long to try, in seconds.
        name: the name of the lock's file. With another name, something else than the run is locked.

    Yields:
        The lock's descriptor; None if another process has the lock.
    """
    deadline = time.monotonic() + patience_s
    while (descriptor := _take(folder / name)) is None and time.monotonic() < deadline:
        time.sleep(POLL_S)
    try:
        yield descriptor
    finally:
        if descriptor is not None:
            os.close(descriptor)


def is_locked(folder: Path) -> bool:
    """Whether a process trains in the folder, or a sweep is about to start one."""
    try:
        descriptor = os.open(folder / LOCK, os.O_RDWR)
    except OSError:
        return False
    try:
        return not _try(descriptor, folder)
    finally:
        os.close(descriptor)


def hand_down(descriptor: int) -> dict[str, str]:
    """Environment variables that tell a child process, which inherits `descriptor`, that it holds
    the lock."""
    return {HANDED_DOWN: str(descriptor)}


def _handed_down(folder: Path) -> int | None:
    """The descriptor of this folder's lock, if the parent process has handed it down."""
    text = os.environ.get(HANDED_DOWN, "")
    with contextlib.suppress(OSError):
        if text.isdecimal() and os.path.samestat(os.fstat(int(text)), (folder / LOCK).stat()):
            return int(text)
    return None


def _take(file: Path) -> int | None:
    """Try once to take the lock: its descriptor, or None if another process has it."""
    with telling(file):
        file.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o644)
    # `hold` of another process may have removed the file before we locked it.
    if _try(descriptor, file.parent) and os.fstat(descriptor).st_nlink > 0:
        _sign(descriptor)
        return descriptor
    os.close(descriptor)
    return None


def _try(descriptor: int, folder: Path) -> bool:
    """Try once to lock the file. Returns whether that succeeded; True, with a note on stderr, on a
    file system without locks."""
    try:
        return lock_descriptor(descriptor, blocking=False)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        _tell_no_locks(folder.parent)
        return True


@functools.cache
def _tell_no_locks(folder: Path) -> None:
    note = (
        f"brx: note: {folder}: this file system has no locks; let no two processes train in one "
        f"folder"
    )
    print(note, file=sys.stderr, flush=True)


def _sign(descriptor: int) -> None:
    """Write into the lock's file who holds it, for messages."""
    with contextlib.suppress(OSError):  # a full disk
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
