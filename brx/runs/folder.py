"""A run's folder: config.yaml, metrics.jsonl, summary.json, checkpoints/; and how runs are found.

`brx.runs.lock` has the lock that the process that trains in it holds.
"""

import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any, TypeVar

from brx.config.loading import dump_config, load_config, read_mapping
from brx.config.schema import DEFAULT_MODEL, RunConfig
from brx.config.user_code import name_without_folder
from brx.errors import DamagedRunError, UserError
from brx.files import make_folder, write_text
from brx.names import file_name, shown
from brx.readers import parse_json, read_text
from brx.runs.trajectory import first_difference, trajectory_of

ENDED = ("finished", "diverged")
"""The statuses of runs that are results of their settings. One that failed is not."""

CACHE = ".parsed"  # see `brx.runs.cache`

T = TypeVar("T")


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
        make_folder(self.path)
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
        deeper = [str(path) for folder in paths for path in _with_runs_below(folder)]
        hint = f"; name a folder below: {shown(', '.join(deeper))}" if deeper else ""
        raise UserError(f"{', '.join(without_runs)}: no run with losses there{hint}")
    if without_runs:
        note = f"left out: {shown(', '.join(without_runs))}: no run with losses there"
        print(f"brx: note: {note}", file=sys.stderr)
    return list(dict.fromkeys(runs))


def has_runs(folder: Path) -> bool:
    """Whether a folder exists and `find_runs` would find a run in it."""
    return folder.is_dir() and bool(_runs_in(folder))


def _with_runs_below(folder: Path) -> list[Path]:
    """The folders directly below that hold runs, for somebody who named one level too few."""
    below = [path for path in sorted(folder.iterdir()) if os.access(path, os.R_OK | os.X_OK)]
    return [path for path in below if has_runs(path)]


def _runs_in(folder: Path) -> list[Path]:
    """The run whose folder this is, or the runs directly below it."""
    if hides_runs_below(folder):
        candidates = [folder]
    else:
        below = [path for path in sorted(folder.iterdir()) if not _is_temporary(path)]
        candidates = _without_links(below)
    return [path for path in candidates if _is_run(path)]


def hides_runs_below(folder: Path) -> bool:
    """Whether `find_runs` takes a folder for that of a single run, and looks for none below it."""
    return (folder / "config.yaml").is_file() or has_losses(folder)


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
