"""Runs and checkpoints as they are named on the command line."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from brx.errors import UserError
from brx.runs.checkpoint import run_and_iteration
from brx.runs.frames import find_runs


def refuse_two_checkpoints(paths: Iterable[Path], checkpoint: int | None) -> None:
    """Refuse an iteration beside paths that name one already.

    Raises:
        UserError: names the path.
    """
    for path in paths:
        if checkpoint is not None and run_and_iteration(path)[1] is not None:
            raise UserError(f"--checkpoint {checkpoint}: {path} is a checkpoint already; give one of the two")


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
