from pathlib import Path

import pytest

from brx.errors import UserError
from brx.paper.study_runs import load_study_runs


def test_a_missing_folder_is_refused_with_the_sweep_that_makes_its_runs(tmp_path: Path) -> None:
    missing = tmp_path / "missing"

    with pytest.raises(UserError) as refusal:
        load_study_runs(missing, "configs/sweeps/tuned/main.yaml")

    sweep = "brx sweep configs/sweeps/tuned/main.yaml"
    assert str(refusal.value) == f"{missing}: no such folder; make the runs with {sweep}"


def test_a_folder_without_runs_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no run with losses there"):
        load_study_runs(tmp_path, "configs/sweeps/tuned/main.yaml")
