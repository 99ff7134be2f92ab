"""Runs, checkpoints and folders of runs as arguments."""

import pytest

from brx.curvature.measured import runs_in_place
from brx.errors import UserError
from tests.curvature.helpers import finished_run


def test_a_folder_of_runs_stands_for_the_runs_in_it(tmp_path):
    (tmp_path / "runs").mkdir()
    run = finished_run(tmp_path / "runs", "run")
    (run.parent / "notes.md").write_text("no run")
    checkpoint = next((run / "checkpoints").iterdir())
    assert runs_in_place([run.parent, checkpoint, run]) == [run, checkpoint, run]
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="no run with losses"):
        runs_in_place([tmp_path / "empty"])
