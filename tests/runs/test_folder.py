"""Which folders are runs, and what is said of folders that lost a file."""

import pytest

from brx.errors import UserError
from brx.runs.folder import find_runs
from brx.runs.frames import load
from tests.runs.helpers import write_run


@pytest.fixture
def runs(tmp_path):
    write_run(tmp_path, "whole", iteration=400)
    return tmp_path / "runs"


@pytest.fixture
def without_settings(tmp_path, runs):
    run = write_run(tmp_path, "lost", "training.seed=1")
    (run.path / "config.yaml").unlink()
    return run.path


@pytest.fixture
def without_losses(tmp_path, runs):
    run = write_run(tmp_path, "lost", "training.seed=1", iteration=400)
    (run.path / "metrics.jsonl").unlink()
    return run.path


def test_run_without_settings_is_named(without_settings, runs, capsys):
    assert load(runs)["name"].tolist() == ["whole"]
    assert "lost: not a run's folder (it has no config.yaml)" in capsys.readouterr().err


def test_run_without_settings_says_so(without_settings):
    with pytest.raises(UserError, match=r"it has no config\.yaml"):
        load(without_settings)


def test_run_that_lost_its_losses_is_named(without_losses, runs, capsys):
    assert load(runs)["name"].tolist() == ["whole"]
    told = "holds no training loss, but summary.json says that the run has made 400 iterations"
    assert told in capsys.readouterr().err


def test_run_that_has_no_losses_yet_is_no_run(tmp_path, runs, capsys):
    (runs / "begun").mkdir()
    (runs / "begun" / "config.yaml").write_text((runs / "whole" / "config.yaml").read_text())
    assert find_runs([runs]) == [runs / "whole"]
    assert not capsys.readouterr().err


def test_named_folder_without_runs_is_told(runs, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    assert find_runs([runs, tmp_path / "empty"]) == [runs / "whole"]
    assert "empty: no run with losses there" in capsys.readouterr().err


def test_folder_above_folders_of_runs_names_them(runs, tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=rf"there; name a folder below: {runs}$"):
        find_runs([tmp_path])


def test_file_is_no_folder(runs):
    with pytest.raises(UserError, match=r"config\.yaml: is a file; name the folder of a run"):
        find_runs([runs / "whole" / "config.yaml"])
