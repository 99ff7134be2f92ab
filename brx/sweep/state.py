"""The state of a cell. It is read from its folder alone, so that all sweeps agree on it."""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import time
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any

from brx.config.loading import dump_config, load_config
from brx.environment import signal_name
from brx.errors import UserError
from brx.files import write_errors_in_one_line, write_text
from brx.methods.trajectory_version import check_trajectory_version
from brx.readers import Damaged, parse_json, read_text
from brx.runs.folder import ENDED, RunFolder, has_losses
from brx.runs.lock import is_locked
from brx.runs.trajectory import first_difference, trajectory_of
from brx.sweep.cell import Cell

LOG = "log.txt"  # of all starts of the cell
START_OF_LOG = "==== started "
FAILURE = "failed.txt"
MOST_KEPT = 10_000  # configurations of cells that are kept in memory, of some kilobytes each
TAIL_BYTES = 16_384  # enough of the end of metrics.jsonl to hold its last complete line


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
        UserError: it is done, but its settings or losses are gone, or a default of brx or the
            trajectory version has changed since; or it has ended after a longer training than the
            cell asks for.
    """
    summary = RunFolder(cell.folder).read_summary()
    _check_not_longer(cell, summary)
    # A run that finished at an earlier training.stop_after is the same run, cut short: more of it
    # is to be done.
    has_all_iterations = summary.get("iteration", 0) >= cell.config.training.last_iteration
    if summary.get("status") == "finished" and has_all_iterations:
        check_same_run(cell)
        check_trajectory_version(summary, cell.folder, cell.config.optimizer.method)
        _check_complete(cell.folder)
        return State.DONE
    if is_locked(cell.folder):
        return State.RUNNING
    if (cell.folder / FAILURE).is_file():
        return State.FAILED
    return State.INTERRUPTED if (cell.folder / "checkpoints").is_dir() else State.WAITING


def _check_complete(folder: Path) -> None:
    """UserError if the folder of a finished run has lost its settings or its losses. Figures and
    tables would leave the run out."""
    lost = []
    if not RunFolder(folder).config.is_file():
        lost.append("config.yaml")
    if not has_losses(folder):
        lost.append("metrics.jsonl")
    if lost:
        raise UserError(
            f"{folder}: the run has finished, but lacks {' and '.join(lost)}; restore what is "
            f"gone, or move the folder away to train the cell again"
        )


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
        with contextlib.suppress(ValueError, KeyError, TypeError, OverflowError):
            return int(parse_json(line.decode())["iteration"])
    return 0


def prepare_folder(cell: Cell) -> None:
    """Write the config.yaml from which `brx train FOLDER --resume` starts, and a line into the log,
    below which this start's output will stand.

    Raises:
        UserError: the folder holds another run.
        RunError: the folder, or the log in it, cannot be written to.
    """
    log = cell.folder / LOG
    with write_errors_in_one_line(log):
        cell.folder.mkdir(parents=True, exist_ok=True)
        # Here, since the cell's process would have no place to say that it cannot.
        with log.open("a", encoding="utf-8") as file:
            file.write(_start_of_log())
    with write_errors_in_one_line(cell.folder / FAILURE):
        (cell.folder / FAILURE).unlink(missing_ok=True)
    check_same_run(cell)
    path = RunFolder(cell.folder).config
    # It is written for a continued run, too, because that run may have been told to stop earlier
    # than the sweep asks.
    write_text(path, dump_config(cell.config))


def _start_of_log() -> str:
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    return f"{START_OF_LOG}{now} on {socket.gethostname()}\n"


def outcome_of(cell: Cell, code: int) -> tuple[State, str]:
    """What became of a cell whose run has ended.

    Args:
        cell: the cell.
        code: the exit code of its process; negative for a signal.

    Returns:
        Its state; and why it failed, if it did, which is also written into its folder.
    """
    if code == 130:
        return State.INTERRUPTED, ""
    if code == 0:
        return State.DONE, ""
    how = f"exit code {code}" if code > 0 else f"killed by {signal_name(-code)}"
    message = _last_message(cell.folder / LOG)
    reason = f"{how}: {message}" if message else how
    write_text(cell.folder / FAILURE, reason + "\n")
    return State.FAILED, reason


def failure_of(cell: Cell) -> str:
    """Why the cell failed, as `outcome_of` has written it into its folder."""
    try:
        return read_text(cell.folder / FAILURE).strip()
    except Damaged as error:
        return f"{FAILURE}: {error}"


def _last_message(log: Path) -> str:
    """The last message of brx since the cell's last start; without one, the last line."""
    try:
        text = log.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    _, _, since_start = text.rpartition(START_OF_LOG)
    _, *lines = since_start.strip().splitlines() or [""]
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
    difference = first_difference(_trajectory_in(config, version), trajectory_of(cell.config))
    if difference is not None:
        raise UserError(
            f"{config}: {difference} in the sweep: the file was edited, or a default of brx has "
            f"changed; restore it, or move the folder away"
        )
