"""A run's folder: config.yaml, metrics.jsonl, summary.json, checkpoints/, and the lock of who
trains in it.

The lock on `.lock` is the operating system's (flock): it ends with the last process that holds it,
so nothing has to be cleaned up after a crash. A sweep that starts a run, and a launcher that starts
ranks, hand it down: the child goes on holding it when its parent is killed. (filelock's own objects
would unlock it for the child, too.)"""

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
from brx.config.schema import DEFAULT_MODEL, DelayCode, RunConfig
from brx.config.user_code import name_without_folder
from brx.errors import DamagedRunError, UserError
from brx.files import cannot_write, write_text
from brx.names import file_name, shown
from brx.readers import parse_json, read_text

ENDED = ("finished", "diverged")
"""The statuses of runs that say what their settings come to; one that failed for another reason
does not."""

# What may differ between a run and its continuation, because no number of the trajectory depends on
# it.
SEED, FOR_TUNING = "training.seed", "training.for_tuning"
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
    "checkpoint": {"background", "rings"},
    "runtime": {"device", "threads", "compile", "graphs", "deterministic"},
    "logging": {"tensorboard", "wandb", "trackio", "update_norms", "staleness_every"},
}

T = TypeVar("T")
Sections = Mapping[str, Mapping[str, Any]]  # by section and key

LOCK = ".lock"
CACHE = ".parsed"  # see `brx.runs.cache`
# has the descriptor of a lock that the parent holds and this process goes on holding
HANDED_DOWN = "BRX_RUN_LOCK"
# A process that checks whether a folder is locked holds its lock for an instant.
PATIENCE_S, POLL_S = (
    0.5,
    0.02,
)
_NO_LOCKS = {errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOLCK}


@contextlib.contextmanager
def telling(path: Path) -> Iterator[None]:
    """Make a RunError, one line, of a disk that is full, read-only or gone."""
    try:
        yield
    except OSError as error:
        raise cannot_write(path, error) from None


class RunFolder:
    """The paths of one run, and whether a run may begin or go on there."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config, self.metrics = path / "config.yaml", path / "metrics.jsonl"
        self.summary = path / "summary.json"

    def read_summary(self) -> dict[str, Any]:
        """What the summary says; empty if there is none (yet), or none that can be read."""
        try:
            return parse_summary(read_text(self.summary))
        except ValueError:
            return {}

    def check(self, config: RunConfig, *, resume: bool) -> None:
        """Refuse a folder that holds a run already, unless it is this one and to be continued: a
        UserError."""
        if not resume and any(
            path.exists() for path in (self.config, self.metrics, self.path / "checkpoints")
        ):
            raise UserError(
                f"{self.path}: holds a run; continue it (--resume; record: resume=True), or choose "
                f"another folder"
            )
        if not self.config.exists():
            return
        if (
            difference := first_difference(
                trajectory_of(load_config(self.config)), trajectory_of(config)
            )
        ) is not None:
            raise UserError(
                f"{self.config}: {difference}: a run resumes with its own; choose another folder "
                f"for a new one"
            )

    def create(self, config: RunConfig, *, resume: bool) -> None:
        """Make the folder for a new run, or note the settings with which the run in it continues;
        see `check`."""
        self.check(config, resume=resume)
        with telling(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
        write_text(self.config, dump_config(config))


def parse_summary(text: str) -> dict[str, Any]:
    """The content of a summary.json; ValueError where it is none, or what runs are sorted by is of
    another type."""
    content = parse_json(text)
    if not isinstance(content, dict):
        raise ValueError("must be a JSON object")
    for key, kind in {
        "status": str,
        "iteration": int,
        "trajectory_version": int,
        "data_fingerprint": str,
    }.items():
        if not isinstance(content.get(key, kind()), kind):
            raise ValueError(f"{key} is {content[key]!r}, must be of type {kind.__name__}")
    return content


def status_of(summary: Mapping[str, Any], config: RunConfig) -> str:
    """What a run's summary says; unfinished while there is none of the whole run."""
    # A run that stopped early (`training.stop_after`) and was taken up again keeps its old summary
    # for a while.
    last = config.training.last_iteration
    is_old = summary.get("status") == "finished" and summary.get("last_iteration", last) < last
    return "unfinished" if is_old else str(summary.get("status", "unfinished"))


def find_runs(folders: Iterable[str | os.PathLike[str]]) -> list[Path]:
    """The run folders among `folders` and directly below them, that have losses or diverged;
    UserError for none."""
    runs: list[Path] = []
    for folder in (paths := list(map(Path, folders))):
        if not folder.is_dir():
            raise UserError(f"{folder}: no such folder")
        below = [path for path in sorted(folder.iterdir()) if not _is_temporary(path)]
        candidates = [folder] if (folder / "config.yaml").is_file() else _without_links(below)
        runs += [path for path in candidates if _is_run(path)]
    if not runs:
        raise UserError(f"{', '.join(map(str, paths))}: no run with losses there")
    return list(dict.fromkeys(runs))  # one that is named twice once


# None in a command that has no option `--strict`.
_is_strict: ContextVar[bool | None] = ContextVar("is_strict", default=None)


def stop_at_damage(is_strict: bool) -> None:
    """Say whether `read_each` raises for a damaged run (`--strict`), until the command ends."""
    _is_strict.set(is_strict)


def read_each(paths: Iterable[Path], read: Callable[[Path], T]) -> list[tuple[Path, T]]:
    """Each run with what `read` gives for it. Damaged runs are left out, and named on stderr.

    Raises:
        UserError: every run is damaged; it names the first.
        DamagedRunError: a run is damaged, after `stop_at_damage(True)`.
    """
    found: list[tuple[Path, T]] = []
    problems: list[UserError] = []
    for path in paths:
        try:
            found.append((path, read(path)))
        except UserError as error:
            if _is_strict.get():
                raise DamagedRunError(str(error)) from None
            problems.append(error)
    if problems and not found:
        raise problems[0]
    hint = " (--strict stops)" if _is_strict.get() is False else ""
    for problem in problems:
        print(f"brx: note: left out{hint}: {shown(str(problem))}", file=sys.stderr)
    return found


def _without_links(paths: Sequence[Path]) -> list[Path]:
    """The paths without links to others among them (`latest`), which are told."""
    links = {path for path in paths if path.is_symlink()}
    if not links:
        return list(paths)
    places = {path.resolve() for path in paths if path not in links}
    kept = []
    for path in paths:
        if path in links and path.resolve() in places:
            print(
                f"brx: note: {shown(str(path))}: left out, a link to {path.resolve().name} beside "
                f"it",
                file=sys.stderr,
            )
        else:
            kept.append(path)
    return kept


def _is_temporary(path: Path) -> bool:
    """Whether the folder is an export's under way."""
    return path.name.startswith(".") and path.name.endswith((".tmp", ".tmp.old"))


def _is_run(path: Path) -> bool:
    losses = [path / "metrics.jsonl", path / "curves.npz"]
    has_losses = any(file.is_file() and file.stat().st_size > 0 for file in losses)
    is_config = (path / "config.yaml").is_file()
    return is_config and (has_losses or RunFolder(path).read_summary().get("status") == "diverged")


def first_difference(old: Sections, new: Sections, *, ignore_new: bool = False) -> str | None:
    """The first setting of `trajectory_of` that differs, in words; on request, of those alone that
    `old` knows."""
    for section, values in new.items():
        before = old.get(section, {})
        for key in before if ignore_new else {**values, **before}:
            if before.get(key) != values.get(key):
                return f"{section}.{key} was {before.get(key)!r} and is now {values.get(key)!r}"
    return None


def decides_trajectory(key: str) -> bool:
    """Whether a number of the trajectory depends on the setting of this dotted key."""
    section, _, name = key.partition(".")
    return section in RunConfig.model_fields and name.partition(".")[0] not in _MAY_CHANGE.get(
        section, set()
    )


def trajectory_of(config: RunConfig, *, with_defaults: bool = True) -> dict[str, dict[str, Any]]:
    """The settings, by section and key, that decide a run's trajectory; on request only those that
    are no defaults.

    Of a user's own method, model or delay function the file's name and content count, not where it
    is.
    """
    trajectory = {
        section: {
            key: value
            for key, value in values.items()
            if key not in _MAY_CHANGE.get(section, set())
        }
        for section, values in config.model_dump(
            mode="json", exclude_defaults=not with_defaults
        ).items()
    }
    for section in sections_of_code(trajectory):
        section.pop("facts", None)
    if "method" in trajectory.get("optimizer", {}):
        trajectory["optimizer"]["method"] = name_without_folder(config.optimizer.method)
    if "class" in trajectory.get("model", {}):
        trajectory["model"]["class"] = name_without_folder(config.model.name)
    if isinstance(config.pipeline.delay, DelayCode):
        trajectory["pipeline"]["delay"]["function"] = name_without_folder(
            config.pipeline.delay.function
        )
    return trajectory


def settings_key(config: RunConfig, *, without: Iterable[str] = ()) -> str:
    """A text that is equal for runs with the same settings that decide trajectories, except for the
    dotted keys `without`."""
    # Without defaults: a setting that is added to brx later leaves the keys of older runs as they
    #     are.
    content = trajectory_of(config, with_defaults=False)
    for dotted in without:
        section, _, name = dotted.partition(".")
        content.get(section, {}).pop(name, None)
    return json.dumps(
        {section: values for section, values in content.items() if values}, sort_keys=True
    )


def default_folder(config: RunConfig, file: Path) -> Path:
    """runs/<preset>-<method>-p<stages>-s<seed>; of a file's method, without the file's folder.

    Behind the preset's name stands the class of the model, where it is not the preset's own.

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
    """Hold a run's folder (made if there is none) while it is trained in; gives the lock's
    descriptor.

    UserError if another process holds it. A folder that holds only the lock at the end is removed
    again."""
    if (handed_down := _handed_down(folder)) is not None:
        _sign(handed_down)
        yield handed_down
        return
    with lock(folder, patience_s=PATIENCE_S) as descriptor:
        if descriptor is None:
            holder = (folder / LOCK).read_text(
                encoding="utf-8", errors="replace"
            ) or "another process"
            told = "trains in this folder; wait until it has ended, or choose another folder"
            raise UserError(f"{folder}: {holder} {told}")
        try:
            yield descriptor
        finally:
            with contextlib.suppress(OSError):
                if [path.name for path in folder.iterdir()] == [LOCK]:
                    (folder / LOCK).unlink()
                    folder.rmdir()


@contextlib.contextmanager
def lock(folder: Path, *, patience_s: float = 0.0) -> Iterator[int | None]:
    """Take the lock of a run's folder, made if there is none: its descriptor, or None when another
    process has it."""
    deadline = time.monotonic() + patience_s
    while (descriptor := _take(folder)) is None and time.monotonic() < deadline:
        time.sleep(POLL_S)
    try:
        yield descriptor
    finally:
        if descriptor is not None:
            os.close(descriptor)


def is_locked(folder: Path) -> bool:
    """Whether a process trains in the folder, or a sweep is about to."""
    try:
        descriptor = os.open(folder / LOCK, os.O_RDWR)
    except OSError:
        return False
    try:
        return not _try(descriptor, folder)
    finally:
        os.close(descriptor)


def hand_down(descriptor: int) -> dict[str, str]:
    """The environment that tells a child process, which inherits `descriptor`, that it holds the
    lock."""
    return {HANDED_DOWN: str(descriptor)}


def _handed_down(folder: Path) -> int | None:
    """The descriptor of this folder's lock, if the parent process has handed it down."""
    text = os.environ.get(HANDED_DOWN, "")
    with contextlib.suppress(OSError):
        if text.isdecimal() and os.path.samestat(os.fstat(int(text)), (folder / LOCK).stat()):
            return int(text)
    return None


def _take(folder: Path) -> int | None:
    with telling(folder / LOCK):
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    # A file without a name is one that `hold` has removed between the two calls.
    if _try(descriptor, folder) and os.fstat(descriptor).st_nlink > 0:
        _sign(descriptor)
        return descriptor
    os.close(descriptor)
    return None


def _try(descriptor: int, folder: Path) -> bool:
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
    """Leave a note of who holds the lock, for messages."""
    with contextlib.suppress(OSError):  # a full disk
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
