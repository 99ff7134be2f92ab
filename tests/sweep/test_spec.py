"""Before a sweep runs: its file expands into cells, each gets its share; the paper's sweeps against
its text."""

import json
from collections import defaultdict
from unittest.mock import Mock

import pytest

from brx.cli.main import main
from brx.config.loading import PRESETS
from brx.errors import UserError
from brx.methods.trajectory_version import TRAJECTORY_VERSION
from brx.sweep import launchers
from brx.sweep.launchers import LocalLauncher
from brx.sweep.run import choices_and_repetitions, remaining_seconds
from brx.sweep.spec import FAILURE, Sweep, identity, matches, prepare_folder, value_at
from tests.sweep.helpers import write_sweep
from tests.train.helpers import tiny_config


def test_cells_are_the_product_of_the_axes_and_their_names_carry_every_varied_key_and_the_seed(
    tmp_path,
):
    cells = Sweep.load(write_sweep(tmp_path)).cells
    for cell, method, stages in zip(
        cells, ["pipedream", "nesterov"] * 2, [4, 4, 1, 1], strict=True
    ):
        assert (cell.config.optimizer.method, cell.config.pipeline.stages) == (method, stages)
        assert cell.folder.name == f"p{stages}-{method}-s0--{identity(cell.config)}"
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
    path = write_sweep(
        tmp_path, exclude=[{"optimizer.method": "nesterov", "pipeline.stages": [1, 2]}]
    )
    assert [cell.name for cell in Sweep.load(path).cells] == [
        "p4-pipedream-s0",
        "p4-nesterov-s0",
        "p1-pipedream-s0",
    ]
    grid = {"case": [{"optimizer.lr": 1e-3}, {"optimizer.lr": 1e-3, "pipeline.stages": 4}]}
    assert len(Sweep.load(write_sweep(tmp_path, grid=grid)).cells) == 1


def test_identity_ignores_what_decides_no_number_and_conditions_are_of_values(tmp_path):
    config = tiny_config(tmp_path)
    assert identity(config) == identity(
        tiny_config(tmp_path, "pipeline.devices=2", "training.keep_checkpoints=5")
    )
    assert identity(config) != identity(tiny_config(tmp_path, "optimizer.lr=0.02"))
    assert identity(config) != identity(tiny_config(tmp_path, "training.seed=1"))
    assert matches(config, {"pipeline.stages": [1, 4], "optimizer.method": "pipedream"})
    assert not matches(config, {"pipeline.stages": [1, 2]})
    assert not matches(config, {"optimizer.frequency": 10})


def test_a_cell_is_found_again_by_its_configuration_and_a_method_keeps_only_what_it_knows(tmp_path):
    first = Sweep.load(write_sweep(tmp_path)).cells[0]
    first.folder.mkdir(parents=True)
    grid = {"optimizer.lr": [0.01], "pipeline.stages": [4]}  # the base's own values: the same run
    (again,) = Sweep.load(write_sweep(tmp_path, grid=grid)).cells
    assert again.name != first.name
    assert again.folder == first.folder
    (tmp_path / "tiny.yaml").write_text(
        "optimizer: {method: nesterov, momentum_decay: 0.005, lr: 0.02}\n"
    )
    (cell,) = Sweep.load(write_sweep(tmp_path, grid={"optimizer.method": ["pipedream"]})).cells
    assert cell.config.optimizer.lr == 0.02
    assert not hasattr(cell.config.optimizer, "momentum_decay")


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
        ({"grid": {"x": [{"optimizer.lr": 1.0}, 2]}}, "grid.x: either all values or all mappings"),
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
def test_mistakes_are_one_line_that_names_the_file_and_the_key(tmp_path, content, expected):
    with pytest.raises(UserError) as caught:
        Sweep.load(write_sweep(tmp_path, **content))
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


def end(cell, seconds=10.0, val_loss=1.0):
    """As if the cell had been run; without a loss it has diverged."""
    prepare_folder(cell)
    if val_loss is None:
        (cell.folder / "summary.json").write_text('{"status": "diverged"}')
        (cell.folder / FAILURE).write_text("the loss diverged")
        return
    iterations = cell.config.training.last_iteration
    summary = {
        "status": "finished",
        "iteration": iterations,
        "training_seconds": seconds,
        "final_val_loss": val_loss,
    }
    (cell.folder / "summary.json").write_text(
        json.dumps(summary | {"trajectory_version": TRAJECTORY_VERSION})
    )


def test_the_time_is_of_what_is_left_with_the_repetitions_that_the_choice_asks_for(tmp_path):
    grid = {"pipeline.stages": [4, 1], "optimizer.lr": [1e-3, 1e-2]}
    repeat = {"set": {"training.seed": [1, 2]}, "where": {"pipeline.stages": 4}}
    sweep = Sweep.load(
        write_sweep(tmp_path, grid=grid, choose={"over": "optimizer.lr"}, repeat=repeat)
    )
    end(sweep.cells[0], 40.0, val_loss=2.0)
    end(sweep.cells[1], 60.0, val_loss=1.0)
    _, repetitions = choices_and_repetitions(sweep, sweep.cells)
    assert [cell.name for cell in repetitions] == ["p4-lr0.01-s1", "p4-lr0.01-s2"]
    cells = [*sweep.cells, *repetitions]
    # Two cells of the grid and two repetitions, 50 s each, two at a time; nothing needs to be
    # calibrated.
    assert remaining_seconds(cells, 2, pytest.fail) == pytest.approx(100.0)
    end(repetitions[0], 50.0)
    assert remaining_seconds(cells, 2, pytest.fail) == pytest.approx(75.0)
    end(sweep.cells[2], val_loss=None)  # what has failed counts only if it runs again
    assert remaining_seconds(cells, 2, pytest.fail) == pytest.approx(50.0)
    assert remaining_seconds(cells, 2, pytest.fail, retry_failed=True) == pytest.approx(75.0)


def test_a_cell_that_was_killed_decides_nothing_and_seeds_of_the_grid_are_not_repeated(tmp_path):
    grid = {"training.seed": [0, 1], "optimizer.lr": [1e-3, 3e-3]}
    repeat = {"set": {"training.seed": [1, 2]}}
    sweep = Sweep.load(
        write_sweep(tmp_path, grid=grid, choose={"over": "optimizer.lr"}, repeat=repeat)
    )
    for cell, val_loss in zip(sweep.cells, (None, 2.0, 1.0, 1.5), strict=True):
        end(cell, val_loss=val_loss)
    (sweep.cells[0].folder / "summary.json").unlink()
    choices, repetitions = choices_and_repetitions(sweep, sweep.cells)
    assert choices.loc[choices["is_best"], "optimizer.lr"].tolist() == [1e-3]
    assert [cell.config.training.seed for cell in repetitions] == [2]


def test_where_every_rate_diverges_none_is_chosen_or_repeated(tmp_path):
    grid = {"pipeline.stages": [4], "optimizer.lr": [1e29, 1e30]}
    path = write_sweep(
        tmp_path, grid=grid, choose={"over": "optimizer.lr"}, repeat={"set": {"training.seed": [1]}}
    )
    for cell in Sweep.load(path).cells:
        end(cell, val_loss=None)
    assert main(["sweep", str(path), "--jobs", "2"]) == 1
    assert "p4,1e+29,failed,," in (tmp_path / "cells" / "choice-sweep.csv").read_text()
    assert not list((tmp_path / "cells").glob("*-s1--*"))


@pytest.mark.parametrize(
    ("num_gpus", "devices", "jobs", "expected"),
    [
        (4, 2, None, ["0,1", "2,3"]),
        (3, 2, 2, ["0,1", "0,1"]),
        (1, 1, 2, ["0", "0"]),
        (0, 2, 2, [None, None]),
    ],
)
def test_cells_get_whole_groups_of_gpus_and_all_cores(
    tmp_path, monkeypatch, num_gpus, devices, jobs, expected
):
    environments = []
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("RANK", "0")  # of the sweep's own process
    monkeypatch.setattr(launchers.torch.cuda, "device_count", lambda: num_gpus)
    monkeypatch.setattr(launchers.os, "cpu_count", lambda: 8)
    monkeypatch.setattr(
        launchers, "start_process", lambda *given: environments.append(given[-1]) or Mock()
    )
    launcher = LocalLauncher(jobs, devices)
    for cell in Sweep.load(write_sweep(tmp_path)).cells[: launcher.num_jobs]:
        assert launcher.start(cell)
    assert [environment.get("CUDA_VISIBLE_DEVICES") for environment in environments] == expected
    assert all("RANK" not in environment for environment in environments)
    # The ranks of a cell divide its threads among themselves.
    assert {int(environment["OMP_NUM_THREADS"]) for environment in environments} == {
        8 // launcher.num_jobs
    }
    for job in launcher.jobs:
        job.resources.close()
    assert LocalLauncher(None, 2, on_gpus=False).num_jobs == 4  # on the CPU, GPUs are no limit


FOLDER = PRESETS / "sweeps" / "paper"
MAIN = {"pipedream", "pipedream-lr", "nesterov", "basis-rotation"}
METHOD, STAGES, STASH, LR = "optimizer.method", "pipeline.stages", "pipeline.stash", "optimizer.lr"
SIZE = ("model.blocks", "model.width")
STRATEGY = ("optimizer.source", "optimizer.geometry")
ROTATED = {METHOD: {"basis-rotation"}}
ALL_STAGES = {1, 2, 4, 8, 16, 32}
# Appendix "Experimental Details": of cells where nothing else is said below. A tuple of keys has
# values together.
LENGTH = ("training.iterations", "training.stop_after", "training.batch_size", "training.clip")
USUAL = {
    METHOD: MAIN,
    STAGES: {32},
    STASH: {"exact"},
    LR: {1e-4, 3e-4, 1e-3},
    "training.seed": {0},
    "model.sequence_length": {512},
    LENGTH: {(250_000, None, 8, 1.0)},
    ("training.warmup_fraction", "training.validation_every", "training.validation_examples"): {
        (0.012, 1000, 200)
    },
}
SWEEPS = {
    "1b": {STAGES: {24}, LR: {1e-4}, (*SIZE, "model.heads"): {(24, 1728, 27)}},
    # appendix "Results on 3B Model"
    "3b": {LR: {1e-4, 3e-5}, SIZE: {(32, 2688)}, LENGTH: {(250_000, 82_000, 8, 1.0)}},
    "block-scaling": {STAGES: {4, 8, 16}, SIZE: {(4, 384), (8, 384), (16, 384)}},
    "curvature": {METHOD: {"pipedream", "basis-rotation"}, STAGES: {1, 32}},
    "delay-compensation": {
        METHOD: {"delay-compensation"},
        STAGES: {8, 16, 32},
        "optimizer.compensation": {0.04, 0.1, 0.5, 1.0},
    },
    "frequency": ROTATED | {"optimizer.frequency": {1, 100}},
    "main": {
        STAGES: ALL_STAGES,
        (*STRATEGY, "optimizer.frequency"): {(None, None, None), ("2nd", "bilateral", 10)},
    },
    "moe": {("model.moe.experts", "model.moe.top_k"): {(8, 2)}},
    "prediction": {STASH: {"predict"}},
    "preconditioned": {METHOD: {"soap", "muon", "scion"}, STAGES: {1, 32}},
    "stage-aware": ROTATED | {"optimizer.refresh_schedule": {"stage-aware", "reversed"}},
    "stage-aware-exact": ROTATED
    | {"optimizer.refresh_schedule": {"stage-aware-exact", "reversed-exact"}},
    "stashing": {STASH: {"none"}},
    "strategies": ROTATED
    | {  # the three others
        STAGES: ALL_STAGES,
        STRATEGY: {("2nd", "unilateral"), ("1st", "bilateral"), ("1st", "unilateral")},
    },
    "width": {STAGES: {24}, SIZE: {(24, 384)}},
}


@pytest.mark.parametrize("name", sorted(file.stem for file in FOLDER.glob("*.yaml")))
def test_a_sweep_is_the_papers_experiment(name):
    cells = Sweep.load(FOLDER / f"{name}.yaml").cells
    contents = [cell.config.model_dump(mode="json") for cell in cells]
    expected = USUAL | SWEEPS.get(name, {})
    for keys, together in expected.items():
        wanted = together if isinstance(keys, tuple) else {(value,) for value in together}
        keys = keys if isinstance(keys, tuple) else (keys,)
        assert {tuple(value_at(content, key) for key in keys) for content in contents} == wanted
    rates = defaultdict(set)  # the same rates for every method and P
    for config in (cell.config for cell in cells):
        optimizer = config.optimizer
        rates[optimizer.method, config.pipeline.stages].add(optimizer.lr)
        if optimizer.method != "scion":  # it bounds the weights instead
            assert optimizer.weight_decay == 0.01
        if optimizer.method in (*MAIN, "delay-compensation"):
            assert (optimizer.beta1, optimizer.beta2) == (
                0.99 if optimizer.method == "nesterov" else 0.9,
                0.999,
            )
        assert config.model.blocks % config.pipeline.stages == 0  # as many blocks in each stage
    assert all(tried == expected[LR] for tried in rates.values())
