"""Reads the runs of a study of the paper, or says which sweep makes them."""

from pathlib import Path

import pandas as pd

from brx.errors import UserError
from brx.runs.frames import load


def load_study_runs(folder: Path, sweep: str) -> pd.DataFrame:
    """The runs in the folder of a study (`load`).

    Args:
        folder: the study's.
        sweep: the file, or the files, whose cells are the study's runs.

    Raises:
        UserError: there is no such folder, or no run in it.
    """
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; make the runs with brx sweep {sweep}")
    return load(folder)
