"""What has become of a cell, read from its folder alone, so that any number of sweeps agree on it."""

from __future__ import annotations

import contextlib
import json
import os
from enum import Enum
from pathlib import Path

from brx.config.loading import dump_config, load_config
from brx.errors import UserError
from brx.files import write_text
from brx.methods.trajectory_version import check_trajectory_version
from brx.runs.folder import RunFolder, is_locked, trajectory_of
from brx.sweep.spec import Cell

LOG, FAILURE = "log.txt", "failed.txt"


class State(Enum):
    WAITING = "waiting"
    INTERRUPTED = "interrupted"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"


def state_of(cell: Cell) -> State:
    """The cell's state; UserError where a default of brx or the trajectory version has changed since it was done."""
    summary = RunFolder(cell.folder).read_summary()
    # A run that finished at an earlier training.stop_after is the same run, cut short: there is more of it to do.
    if summary.get("status") == "finished" and summary["iteration"] >= cell.config.training.last_iteration:
        _check_same_run(cell)
        check_trajectory_version(summary, cell.folder)
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
            return int(json.loads(line)["iteration"])
    return 0


def prepare_folder(cell: Cell) -> None:
    """Write the cell's configuration, from which `brx train FOLDER --resume` starts or continues it.

    UserError where the folder holds another run (a default of brx has changed since).
    """
    cell.folder.mkdir(parents=True, exist_ok=True)
    (cell.folder / FAILURE).unlink(missing_ok=True)
    path = RunFolder(cell.folder).config
    if path.exists():
        _check_same_run(cell)
    # Anew for a run to be continued, too: it may have been told to stop earlier than the sweep asks for.
    write_text(path, dump_config(cell.config))


def outcome_of(cell: Cell, code: int) -> tuple[State, str]:
    """The state of a cell whose run ended with an exit code, and why it failed, which its folder then says, too."""
    if code in (0, 130):
        return State.INTERRUPTED if code else State.DONE, ""
    try:
        lines = (cell.folder / LOG).read_text(encoding="utf-8", errors="replace").strip().splitlines()
    except OSError:
        lines = []
    said = next((line for line in reversed(lines) if line.startswith("brx: ")), lines[-1] if lines else "")
    told = f"exit code {code}: {said.removeprefix('brx: ')}"
    write_text(cell.folder / FAILURE, told + "\n")
    return State.FAILED, told


def _check_same_run(cell: Cell) -> None:
    config = RunFolder(cell.folder).config
    if trajectory_of(load_config(config)) != trajectory_of(cell.config):
        raise UserError(f"{config}: differs from what the sweep asks for, in a default of brx; move the folder away")
