"""Runs and checkpoints as they are named on the command line."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from brx.runs.checkpoint import run_and_iteration
from brx.runs.frames import find_runs


def runs_in_place(paths: Iterable[Path]) -> list[Path]:
    """The paths, of runs or checkpoints; in place of a folder that is neither, the runs in it.

    Raises:
        UserError: there is none in such a folder.
    """
    places: list[Path] = []
    for path in paths:
        run, iteration = run_and_iteration(path)
        is_folder_of_runs = iteration is None and run.is_dir() and not (run / "config.yaml").is_file()
        places += find_runs([path]) if is_folder_of_runs else [path]
    return places
