"""A cell of a sweep: one run of its grid, with a name and a folder."""

from __future__ import annotations

import hashlib
import math
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from brx.config.schema import RunConfig
from brx.files import make_folder
from brx.names import file_name
from brx.runs.folder import ENDED, RunFolder
from brx.runs.lock import lock
from brx.runs.trajectory import FOR_TUNING, settings_key

Value = bool | int | float | str | None
CELLS_LOCK = ".cells.lock"  # in the folder of the cells' folders; held while a cell's is made

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


@dataclass(frozen=True)
class Cell:
    """One run of a sweep."""

    name: str
    varied: Mapping[str, Any]
    """The dotted keys that the cell sets in addition to the sweep's base, with their values."""
    config: RunConfig
    folder: Path

    @property
    def trajectory_id(self) -> str:
        """A text that is equal for cells with the same trajectory, whatever their names. It is
        `trajectory_id` of the settings, and the folder's name ends with it."""
        return self.folder.name.rpartition("--")[2]


def trajectory_id(config: RunConfig) -> str:
    """Eight hexadecimal digits that are equal for runs with the same trajectory."""
    return hashlib.sha256(settings_key(config).encode()).hexdigest()[:8]


def folders_in(out: Path) -> dict[str, Path]:
    """The folders that cells have in `out`, by trajectory id, whatever the rest of their names."""
    try:
        names = os.listdir(out)
    except OSError:  # it is made when the first cell starts
        return {}
    folders: dict[str, Path] = {}
    for name in sorted(names):
        _, dashes, ending = name.rpartition("--")
        if not dashes:
            continue
        # If one cell has several folders, all sweeps take the first of those that are furthest on.
        first = folders.get(ending)
        if first is None or _progress(first) < _progress(out / name):
            folders[ending] = out / name
    return folders


def _progress(path: Path) -> int:
    """2 if the run there has ended, 1 if it has begun, 0 if there is none."""
    folder = RunFolder(path)
    if folder.read_summary().get("status") in ENDED:
        return 2
    return 1 if folder.config.is_file() or folder.summary.is_file() else 0


def with_present_folders(cells: Sequence[Cell]) -> list[Cell]:
    """The cells of one sweep, with the folders that another sweep may have made for them since.

    This lists the folder of the cells' folders once, however many cells there are.
    """
    if not cells:
        return []
    there = folders_in(cells[0].folder.parent)
    return [replace(cell, folder=there.get(cell.trajectory_id, cell.folder)) for cell in cells]


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
        make_folder(present.folder)
    return present


def named_apart(cells: Iterable[Cell]) -> list[Cell]:
    """The cells; to names that several cells share, their trajectory id is added."""
    cells = list(cells)
    count = Counter(cell.name for cell in cells)
    named = []
    for cell in cells:
        is_alone = count[cell.name] == 1
        name = cell.name if is_alone else f"{cell.name}-{trajectory_id(cell.config)}"
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
