"""A sweep file expands into cells, or is refused."""

from pathlib import Path

import pytest

from brx.config.loading import load_config
from brx.errors import UserError
from brx.sweep.spec import Sweep
from tests.runs.helpers import write_run
from tests.sweep.helpers import write_sweep


def test_cells_are_the_product_of_the_axes(tmp_path):
    cells = Sweep.load(write_sweep(tmp_path)).cells
    varied = [(cell.config.optimizer.method, cell.config.pipeline.stages) for cell in cells]
    assert varied == [("pipedream", 4), ("nesterov", 4), ("pipedream", 1), ("nesterov", 1)]


def test_exclusion_matches_a_value_of_the_base(tmp_path):
    # The grid does not vary P, which is 4 in the base.
    grid = {"optimizer.method": ["pipedream", "nesterov"]}
    excluded = [{"optimizer.method": "nesterov", "pipeline.stages": [1, 4]}]
    (cell,) = Sweep.load(write_sweep(tmp_path, grid=grid, exclude=excluded)).cells
    assert cell.name == "pipedream-s0"


def test_exclusion_needs_all_of_its_values(tmp_path):
    excluded = [{"optimizer.method": "nesterov", "pipeline.stages": [1, 2]}]
    cells = Sweep.load(write_sweep(tmp_path, exclude=excluded)).cells
    assert [cell.name for cell in cells] == ["p4-pipedream-s0", "p4-nesterov-s0", "p1-pipedream-s0"]


def test_equal_cells_are_one(tmp_path):
    grid = {"case": [{"optimizer.lr": 1e-3}, {"optimizer.lr": 1e-3, "pipeline.stages": 4}]}
    assert len(Sweep.load(write_sweep(tmp_path, grid=grid)).cells) == 1


def test_repetitions_keep_the_base_that_the_grid_had(tmp_path):
    path = write_sweep(tmp_path, repeat={"set": {"training.seed": [1]}})
    sweep = Sweep.load(path)
    base = tmp_path / "tiny.yaml"
    base.write_text(base.read_text().replace("batch_size: ", "batch_size: 1"))  # edited meanwhile
    assert Sweep.load(path).cells[0].config.training != sweep.cells[0].config.training
    (repetition,) = sweep.repetitions(sweep.cells[:1])
    expected = sweep.cells[0].config.training.model_copy(update={"seed": 1})
    assert repetition.config.training == expected


def test_other_method_drops_options_it_lacks(tmp_path):
    section = "{method: nesterov, momentum_decay: 0.005, lr: 0.02}"
    (tmp_path / "tiny.yaml").write_text(f"optimizer: {section}\n")
    (cell,) = Sweep.load(write_sweep(tmp_path, grid={"optimizer.method": ["pipedream"]})).cells
    assert not hasattr(cell.config.optimizer, "momentum_decay")
    assert cell.config.optimizer.lr == 0.02


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ({"grid": {"optimizer.lrr": [1e-3]}}, "optimizer.lrr: unknown key, did you mean 'lr'?"),
        (
            {"grid": {"model": [{"model": {"class": "gpt", "width": 16}}]}},
            "grid: model: holds settings; write each with a dotted key, model.class",
        ),
        (
            {"set": {"optimizer": {"lr": 1.0}}},
            "set: optimizer: holds settings; write each with a dotted key, optimizer.lr",
        ),
        ({"grid": {"optimizer.lr": []}}, "grid.optimizer.lr: needs at least one value"),
        ({"base": "nope"}, "sweep.yaml: base: nope: no such file or preset"),
        ({"grid": {"x": [{"optimizer.lr": 1.0}, 2]}}, "grid.x: either all values or all mappings"),
        (
            {"grid": {"optimizer.lr": [1.0], "x": [{"optimizer.lr": 2.0}]}},
            "grid.x: sets optimizer.lr, and the axis optimizer.lr sets it, too",
        ),
        (
            {"grid": {"pipeline.stages": [9]}},
            "cell p9: pipeline.stages must be at most model.blocks (4), got 9",
        ),
        (
            {"grid": {"training.clip": [float("inf")], "pipeline.stages": [9]}},
            "cell clipinf-p9: pipeline.stages must",
        ),
        (
            {"grid": {"pipeline.rings": ["device", "host"]}},
            "differ only in pipeline.rings, which changes no number of a run",
        ),
        (
            {"grid": {"x": [{"training.stop_after": 2}, {"training.stop_after": 3}]}},
            "grid: cells stop_after2-s0 and stop_after3-s0 differ only in training.stop_after",
        ),
        (
            {"grid": {"pipeline.delay": ["2bw"], "pipeline.delay.like": [32]}},
            "grid.pipeline.delay.like: sets pipeline.delay.like, and the axis pipeline.delay sets",
        ),
        (
            {"grid": {"x": [{"pipeline.delay": "2bw", "pipeline.delay.like": 32}]}},
            "grid.x: sets both pipeline.delay and pipeline.delay.like",
        ),
        (
            {"set": {"pipeline.stages": 2}},
            "set.pipeline.stages: would not count, since the axis pipeline.stages of the grid",
        ),
        (
            {"grid": {"optimizer": ["nesterov", "muon"]}},
            "grid: optimizer: is a section; set one of its keys, such as optimizer.method",
        ),
        ({"grid": {"lr": [1e-3]}}, "lr: unknown key, did you mean 'optimizer.lr'?"),
        (
            {"grid": {"pipeline.delay": [[1, 0]]}},
            "grid.pipeline.delay.0: must be true or false, a number, a text or a mapping of",
        ),
        ({"grid": {}}, "grid: must not be empty"),
        ({"out": ""}, "out: must not be empty"),
        (
            {"grid": {"training.stop_after": [2, "1h"]}},
            "cell stop_after1h: training.stop_after=1h ends a session of one run",
        ),
        ({"repeat": {"where": {"pipeline.stages": 16}}}, "repeat.where: matches no cell"),
        ({"grid": {"optimizer.lr.x": [1]}}, "optimizer.lr.x: 'lr' is a value, not a section"),
        ({"exclude": [{"pipeline.stages": [1, 4]}]}, "exclude: leaves no cell of the grid's 4"),
        (
            {"exclude": [{"optimizer.lrr": 1.0}]},
            "exclude: no cell has optimizer.lrr=1.0, did you mean 'optimizer.lr'?",
        ),
        (
            {"repeat": {"where": {"pipeline.stage": 4}}},
            "repeat.where: 'pipeline.stage' is set in no cell",
        ),
        (
            {"repeat": {"where": {"pipeline.stage": 4}}},
            "'pipeline.stage' is set in no cell, did you mean 'pipeline.stages'?",
        ),
        (
            {"repeat": {"set": {"training.log_every": [1, 2]}}},
            "repeat.set: training.log_every changes no number of a run",
        ),
        (
            {"choose": {"over": "training.log_every"}},
            "choose.over: training.log_every changes no number of a run",
        ),
        (
            {"choose": {}, "set": {"training.stop_after": 1, "training.validation_every": 2}},
            "choose: goes by validation losses, of which cell p4-pipedream-s0 has none",
        ),
        (
            {"choose": {"over": "pipeline.stash"}},
            "choose.over: needs a key of numbers, pipeline.stash is 'exact'",
        ),
        ({"choose": {"over": "training.seed"}}, "choose.over: must not be a seed"),
        (
            {"choose": {"over": "optimizer.lr", "further": [-1]}},
            "optimizer.lr: input should be greater than 0",
        ),
        (
            {"repeat": {"set": {"training.sed": [1]}}},
            "training.sed: unknown key, did you mean 'seed'?",
        ),
    ],
)
def test_mistake_is_one_line_with_the_key(tmp_path, content, expected):
    with pytest.raises(UserError) as caught:
        Sweep.load(write_sweep(tmp_path, **content))
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


def test_set_may_be_the_default_of_an_axis(tmp_path):
    axis = [{"optimizer.method": "nesterov"}, {"optimizer.method": "pipedream", "optimizer.lr": 1}]
    path = write_sweep(tmp_path, set={"optimizer.lr": 0.5}, grid={"method": axis})
    assert [cell.config.optimizer.lr for cell in Sweep.load(path).cells] == [0.5, 1.0]


def test_path_may_be_a_text(tmp_path):
    path = write_sweep(tmp_path)
    assert Sweep.load(str(path), out="elsewhere").out == Path("elsewhere")


def test_grid_without_content_has_no_default(tmp_path):
    with pytest.raises(UserError, match=r"grid: must be a section .* got nothing$"):
        Sweep.load(write_sweep(tmp_path, grid=None))


def test_mistake_in_the_base_names_the_base(tmp_path):
    path = write_sweep(tmp_path)
    base = tmp_path / "tiny.yaml"
    base.write_text(base.read_text().replace("batch_size:", "batchsize:"))
    with pytest.raises(UserError) as refused:
        Sweep.load(path)
    assert f"base: {base}: training.batchsize: unknown key" in str(refused.value)


def test_base_next_to_the_sweep_file_is_told(tmp_path):
    path = write_sweep(tmp_path, base="tiny.yaml")
    with pytest.raises(UserError) as refused:
        Sweep.load(path)
    assert "paths count from the working folder" in str(refused.value)
    assert str(tmp_path / "tiny.yaml") in str(refused.value)


def test_folder_of_a_run_is_no_folder_of_cells(tmp_path):
    run = write_run(tmp_path, "one").path
    with pytest.raises(UserError) as refused:
        Sweep.load(write_sweep(tmp_path), out=run)
    assert f"out: {run} is the folder of a run" in str(refused.value)


def test_file_is_no_folder_of_cells(tmp_path):
    path = write_sweep(tmp_path)
    with pytest.raises(UserError) as refused:
        Sweep.load(path, out=path / "cells")
    assert f"out: {path} is a file; name a folder" in str(refused.value)


def test_sweep_file_without_its_ending_is_found_near(tmp_path):
    path = write_sweep(tmp_path)
    with pytest.raises(UserError) as refused:
        Sweep.load(path.with_suffix(""))
    assert f"did you mean '{path}'?" in str(refused.value)


def test_sweeps_and_runs_are_told_apart(tmp_path):
    path = write_sweep(tmp_path)
    with pytest.raises(UserError) as of_run:
        Sweep.load(tmp_path / "tiny.yaml")
    assert "holds the settings of a run, not a sweep; brx train runs it" in str(of_run.value)
    with pytest.raises(UserError) as of_sweep:
        load_config(path)
    assert "is a sweep file, not the settings of a run; brx sweep runs it" in str(of_sweep.value)
