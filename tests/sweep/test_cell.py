"""Names, identities and folders of cells."""

import shutil

import pytest

from brx.sweep.cell import folders_in, trajectory_id
from brx.sweep.spec import Sweep
from tests.sweep.helpers import end, write_sweep
from tests.train.helpers import tiny_config


def test_folder_of_a_cell_ends_with_its_identity(tmp_path):
    for cell in Sweep.load(write_sweep(tmp_path)).cells:
        assert cell.folder.name == f"{cell.name}--{trajectory_id(cell.config)}"


def test_name_of_a_cell_has_the_base_seed(tmp_path):
    names = [cell.name for cell in Sweep.load(write_sweep(tmp_path)).cells]
    assert names == ["p4-pipedream-s0", "p4-nesterov-s0", "p1-pipedream-s0", "p1-nesterov-s0"]


def test_name_of_a_cell_has_every_varied_key(tmp_path):
    grid = {
        "method": [{"optimizer.method": "basis-rotation", "optimizer.source": "1st"}],
        "optimizer.lr": [1e-3],
        "optimizer.frequency": [7],
        "training.clip": [0.5],
        "training.seed": [3],
    }
    (cell,) = Sweep.load(write_sweep(tmp_path, grid=grid)).cells
    assert cell.name == "basis-rotation-1st-lr0.001-f7-clip0.5-s3"


def test_identity_ignores_what_decides_no_number(tmp_path):
    settings = ("pipeline.devices=2", "runtime.share_gpus=true", "training.keep_checkpoints=5")
    assert trajectory_id(tiny_config(tmp_path)) == trajectory_id(tiny_config(tmp_path, *settings))


@pytest.mark.parametrize("setting", ["optimizer.lr=0.02", "training.seed=1"])
def test_identity_has_what_decides_numbers(setting, tmp_path):
    assert trajectory_id(tiny_config(tmp_path)) != trajectory_id(tiny_config(tmp_path, setting))


def test_cell_is_found_again_by_its_configuration(tmp_path):
    first = Sweep.load(write_sweep(tmp_path)).cells[0]
    first.folder.mkdir(parents=True)
    grid = {"optimizer.lr": [0.01], "pipeline.stages": [4]}  # the base's own values: the same run
    (again,) = Sweep.load(write_sweep(tmp_path, grid=grid)).cells
    assert again.name != first.name
    assert again.folder == first.folder


def test_empty_folder_does_not_hide_the_run_of_its_cell(tmp_path):
    path = write_sweep(tmp_path)
    cell = Sweep.load(path).cells[0]
    end(cell)
    (cell.folder.parent / f"aa--{cell.trajectory_id}").mkdir()
    assert Sweep.load(path).cells[0].folder == cell.folder
    assert folders_in(cell.folder.parent)[cell.trajectory_id] == cell.folder


def test_first_of_two_runs_of_a_cell_counts(tmp_path):
    cell = Sweep.load(write_sweep(tmp_path)).cells[0]
    end(cell)
    first = cell.folder.parent / f"aa--{cell.trajectory_id}"
    shutil.copytree(cell.folder, first)
    assert folders_in(cell.folder.parent)[cell.trajectory_id] == first


def test_run_that_has_ended_counts_before_one_that_has_begun(tmp_path):
    cell = Sweep.load(write_sweep(tmp_path)).cells[0]
    end(cell)
    begun = cell.folder.parent / f"aa--{cell.trajectory_id}"
    begun.mkdir()
    shutil.copy(cell.folder / "config.yaml", begun)
    assert folders_in(cell.folder.parent)[cell.trajectory_id] == cell.folder
