"""A sweep file expands into cells, or is refused."""

import pytest

from brx.errors import UserError
from brx.sweep.spec import Sweep
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
            "grid.x: sets optimizer.lr, which the axis optimizer.lr sets, too",
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
            "grid.pipeline.rings: changes no number of a run",
        ),
        (
            {"grid": {"training.stop_after": [2, "1h"]}},
            "cell stop_after1h: training.stop_after=1h ends a session of one run",
        ),
        ({"repeat": {"where": {"pipeline.stages": 16}}}, "repeat.where: matches no cell"),
        ({"grid": {"optimizer.lr.x": [1]}}, "optimizer.lr.x: 'lr' is a value, not a section"),
        ({"exclude": [{"pipeline.stages": [1, 4]}]}, "exclude: leaves no cell of the grid's 4"),
        ({"exclude": [{"optimizer.lrr": 1.0}]}, "exclude: no cell has optimizer.lrr=1.0"),
        (
            {"repeat": {"where": {"pipeline.stage": 4}}},
            "repeat.where: 'pipeline.stage' is set in no cell",
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
