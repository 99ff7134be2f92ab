"""Sweep files expand into the cells that they name, and every mistake is one line."""

from pathlib import Path

import pytest

from brx.config.loading import PRESETS
from brx.errors import UserError
from brx.sweep.spec import Sweep, identity, matches
from tests.sweep.helpers import write_sweep
from tests.train.helpers import tiny_config


def test_cells_are_the_product_of_the_axes_in_the_file_s_order(tmp_path):
    sweep = Sweep.load(write_sweep(tmp_path))
    names = ["p4-pipedream-s0", "p4-nesterov-s0", "p1-pipedream-s0", "p1-nesterov-s0"]
    assert [cell.name for cell in sweep.cells] == names
    for cell in sweep.cells:
        assert cell.config.optimizer.method in cell.name
        assert cell.config.pipeline.stages == int(cell.name[1])
        assert cell.folder.name == f"{cell.name}--{identity(cell.config)}"


def test_names_carry_every_varied_key_and_the_seed(tmp_path):
    grid = {
        "method": [{"optimizer.method": "basis-rotation", "optimizer.source": "1st"}],
        "optimizer.lr": [1e-3],
        "optimizer.frequency": [7],
        "training.clip": [0.5],
        "training.seed": [3],
    }
    (cell,) = Sweep.load(write_sweep(tmp_path, grid=grid)).cells
    assert cell.name == "basis-rotation-1st-lr0.001-f7-clip0.5-s3"


def test_exclusions_match_resolved_values_and_equal_cells_are_one(tmp_path):
    # P = 4 is the base's own value: an exclusion may name keys that the grid does not vary.
    path = write_sweep(tmp_path, exclude=[{"optimizer.method": "nesterov", "pipeline.stages": [1, 2]}])
    assert [cell.name for cell in Sweep.load(path).cells] == ["p4-pipedream-s0", "p4-nesterov-s0", "p1-pipedream-s0"]
    grid = {"case": [{"optimizer.lr": 1e-3}, {"optimizer.lr": 1e-3, "pipeline.stages": 4}]}
    assert len(Sweep.load(write_sweep(tmp_path, grid=grid)).cells) == 1


def test_identity_ignores_what_decides_no_number_and_conditions_are_of_values(tmp_path):
    config = tiny_config(tmp_path)
    assert identity(config) == identity(tiny_config(tmp_path, "pipeline.devices=2", "training.keep_checkpoints=5"))
    assert identity(config) != identity(tiny_config(tmp_path, "optimizer.lr=0.02"))
    assert identity(config) != identity(tiny_config(tmp_path, "training.seed=1"))
    assert matches(config, {"pipeline.stages": [1, 4], "optimizer.method": "pipedream"})
    assert not matches(config, {"pipeline.stages": [1, 2]})
    assert not matches(config, {"optimizer.frequency": 10})


def test_a_cell_is_found_again_by_its_configuration_under_another_name(tmp_path):
    first = Sweep.load(write_sweep(tmp_path)).cells[0]
    first.folder.mkdir(parents=True)
    grid = {"optimizer.lr": [0.01], "pipeline.stages": [4]}  # the base's own values: the same run
    (again,) = Sweep.load(write_sweep(tmp_path, grid=grid)).cells
    assert again.name != first.name
    assert again.folder == first.folder


def test_a_method_keeps_only_what_it_knows_of_the_base_s_settings(tmp_path):
    base = tmp_path / "tiny.yaml"
    base.write_text("optimizer: {method: nesterov, momentum_decay: 0.005, lr: 0.02}\n")
    (cell,) = Sweep.load(write_sweep(tmp_path, grid={"optimizer.method": ["pipedream"]})).cells
    assert cell.config.optimizer.lr == 0.02
    assert not hasattr(cell.config.optimizer, "momentum_decay")


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ({"grid": {"optimizer.lrr": [1e-3]}}, "optimizer.lrr: unknown key, did you mean 'lr'?"),
        ({"grid": {"optimizer.lr": []}}, "grid.optimizer.lr: needs at least one value"),
        ({"grid": {"x": [{"optimizer.lr": 1.0}, 2]}}, "grid.x: either all values or all mappings"),
        ({"grid": {"pipeline.stages": [9]}}, "cell p9: pipeline.stages must be at most model.blocks (4), got 9"),
        ({"grid": {"optimizer.lr.x": [1]}}, "optimizer.lr.x: 'lr' is a value, not a section"),
        ({"exclude": [{"pipeline.stages": [1, 4]}]}, "exclude: leaves no cell of the grid's 4"),
        ({"gird": {}}, "gird: unknown key, did you mean 'grid'?"),
        ({"exclude": [{"optimizer.lrr": 1.0}]}, "exclude: 'optimizer.lrr' has a value in no cell"),
        ({"repeat": {"where": {"pipeline.stage": 4}}}, "repeat.where: 'pipeline.stage' has a value in no cell"),
        ({"choose": {"over": "pipeline.stash"}}, "choose.over: needs a key of numbers, pipeline.stash is 'exact'"),
        ({"choose": {"over": "training.seed"}}, "choose.over: seeds are repetitions"),
        ({"choose": {"over": "optimizer.lr", "further": [-1]}}, "optimizer.lr: input should be greater than 0"),
        ({"repeat": {"set": {"training.sed": [1]}}}, "training.sed: unknown key, did you mean 'seed'?"),
        ({"base": "quik"}, "quik: no such file or preset, did you mean 'quick'?"),
    ],
)
def test_mistakes_are_one_line_that_names_the_file_and_the_key(tmp_path, content, expected):
    with pytest.raises(UserError) as caught:
        Sweep.load(write_sweep(tmp_path, **content))
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


NESTEROV_APART = ("seeds", "stashing", "prediction", "width", "moe")
"""Sweeps of the laptop in which it has a rate of its own."""
THREE_RATES = ("main", "preconditioned", "preconditioned-long", "first-basis", "first-basis-short")
RATES = {"rates": 2} | dict.fromkeys(THREE_RATES, 3) | dict.fromkeys(NESTEROV_APART, 2)
LENGTHS = {
    "ladder": {2000, 4000, 16000, 32000, 64000, 128000},
    "strategies-long": {16000},
    "preconditioned-long": {16000},
    "block-scaling-long": {32000},
    "frequency-long": {32000},
    "first-basis-short": {1000},
}


def test_the_laptops_sweeps_expand(tmp_path, monkeypatch):
    """Those of the paper's scale are in test_paper_sweeps.py."""
    files = sorted((PRESETS / "sweeps" / "laptop").glob("*.yaml"))
    assert len(files) >= 11
    for file in files:
        configs = [cell.config for cell in Sweep.load(file).cells]
        assert len({config.optimizer.lr for config in configs}) == RATES.get(file.stem, 1)
        assert {config.training.iterations for config in configs} == LENGTHS.get(file.stem, {8000})
    monkeypatch.chdir(tmp_path)
    assert len(Sweep.load(Path("laptop/main")).cells) == 24  # by its name
