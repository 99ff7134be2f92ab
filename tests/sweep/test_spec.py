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
from brx.sweep import launchers, spec
from brx.sweep.launchers import LocalLauncher
from brx.sweep.run import choices_and_repetitions, remaining_seconds
from brx.sweep.spec import FAILURE, Sweep, identity, matches, prepare_folder, value_at
from tests.sweep.helpers import write_sweep
from tests.train.helpers import tiny_config


def test_cells_are_the_product_of_the_axes(tmp_path):
    cells = Sweep.load(write_sweep(tmp_path)).cells
    varied = [(cell.config.optimizer.method, cell.config.pipeline.stages) for cell in cells]
    assert varied == [("pipedream", 4), ("nesterov", 4), ("pipedream", 1), ("nesterov", 1)]


def test_folder_of_a_cell_ends_with_its_identity(tmp_path):
    for cell in Sweep.load(write_sweep(tmp_path)).cells:
        assert cell.folder.name == f"{cell.name}--{identity(cell.config)}"


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


def test_identity_ignores_what_decides_no_number(tmp_path):
    settings = ("pipeline.devices=2", "runtime.share_gpus=true", "training.keep_checkpoints=5")
    assert identity(tiny_config(tmp_path)) == identity(tiny_config(tmp_path, *settings))


@pytest.mark.parametrize("setting", ["optimizer.lr=0.02", "training.seed=1"])
def test_identity_has_what_decides_numbers(setting, tmp_path):
    assert identity(tiny_config(tmp_path)) != identity(tiny_config(tmp_path, setting))


@pytest.mark.parametrize(
    ("condition", "expected"),
    [
        ({"pipeline.stages": [1, 4], "optimizer.method": "pipedream"}, True),
        ({"pipeline.stages": [1, 2]}, False),
        ({"optimizer.frequency": 10}, False),  # no setting of this method
    ],
    ids=["both", "another value", "no such key"],
)
def test_condition_needs_one_of_each_values(condition, expected, tmp_path):
    assert matches(tiny_config(tmp_path), condition) == expected


def test_cell_is_found_again_by_its_configuration(tmp_path):
    first = Sweep.load(write_sweep(tmp_path)).cells[0]
    first.folder.mkdir(parents=True)
    grid = {"optimizer.lr": [0.01], "pipeline.stages": [4]}  # the base's own values: the same run
    (again,) = Sweep.load(write_sweep(tmp_path, grid=grid)).cells
    assert again.name != first.name
    assert again.folder == first.folder


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


@pytest.fixture
def half_done(tmp_path):
    """A sweep of two rates at P = 4, which are done, and two at P = 1, with further seeds of the
    better rate at P = 4."""
    grid = {"pipeline.stages": [4, 1], "optimizer.lr": [1e-3, 1e-2]}
    repeat = {"set": {"training.seed": [1, 2]}, "where": {"pipeline.stages": 4}}
    path = write_sweep(tmp_path, grid=grid, choose={"over": "optimizer.lr"}, repeat=repeat)
    sweep = Sweep.load(path)
    end(sweep.cells[0], 40.0, val_loss=2.0)
    end(sweep.cells[1], 60.0, val_loss=1.0)
    return sweep


def cells_of(sweep):
    """The cells of the grid, and the repetitions that the choice asks for."""
    _, repetitions = choices_and_repetitions(sweep, sweep.cells)
    return [*sweep.cells, *repetitions]


def time_left(sweep, **options):
    """With two cells at a time, and without a calibration."""
    return remaining_seconds(cells_of(sweep), 2, pytest.fail, **options)


def test_repetitions_are_of_the_best_rate(half_done):
    _, repetitions = choices_and_repetitions(half_done, half_done.cells)
    assert [cell.name for cell in repetitions] == ["p4-lr0.01-s1", "p4-lr0.01-s2"]


def test_time_left_includes_repetitions(half_done):
    # Two cells of the grid and two repetitions, 50 s each
    assert time_left(half_done) == pytest.approx(100.0)


def test_time_left_falls_with_a_finished_repetition(half_done):
    end(cells_of(half_done)[-1], 50.0)
    assert time_left(half_done) == pytest.approx(75.0)


@pytest.mark.parametrize(("retry_failed", "expected"), [(False, 75.0), (True, 100.0)])
def test_time_left_has_failed_cells_on_request(retry_failed, expected, half_done):
    end(half_done.cells[2], val_loss=None)
    assert time_left(half_done, retry_failed=retry_failed) == pytest.approx(expected)


@pytest.fixture
def with_killed_cell(tmp_path):
    """A sweep of two seeds and two rates, with a cell that was killed. Seeds 1 and 2 of the better
    rate are repetitions."""
    grid = {"training.seed": [0, 1], "optimizer.lr": [1e-3, 3e-3]}
    repeat = {"set": {"training.seed": [1, 2]}}
    path = write_sweep(tmp_path, grid=grid, choose={"over": "optimizer.lr"}, repeat=repeat)
    sweep = Sweep.load(path)
    for cell, val_loss in zip(sweep.cells, (None, 2.0, 1.0, 1.5), strict=True):
        end(cell, val_loss=val_loss)
    (sweep.cells[0].folder / "summary.json").unlink()
    return sweep


def test_killed_cell_decides_nothing(with_killed_cell):
    choices, _ = choices_and_repetitions(with_killed_cell, with_killed_cell.cells)
    assert choices.loc[choices["is_best"], "optimizer.lr"].tolist() == [1e-3]


def test_seeds_of_the_grid_are_not_repeated(with_killed_cell):
    _, repetitions = choices_and_repetitions(with_killed_cell, with_killed_cell.cells)
    assert [cell.config.training.seed for cell in repetitions] == [2]


@pytest.fixture
def diverged(tmp_path):
    """A sweep whose rates have all diverged, shown once more."""
    grid = {"pipeline.stages": [4], "optimizer.lr": [1e29, 1e30]}
    repeat = {"set": {"training.seed": [1]}}
    path = write_sweep(tmp_path, grid=grid, choose={"over": "optimizer.lr"}, repeat=repeat)
    for cell in Sweep.load(path).cells:
        end(cell, val_loss=None)
    assert main(["sweep", str(path), "--jobs", "2"]) == 1
    return tmp_path / "cells"


def test_no_rate_is_chosen_where_all_diverge(diverged):
    assert "p4,1e+29,failed,," in (diverged / "choice-sweep.csv").read_text()


def test_nothing_is_repeated_where_all_rates_diverge(diverged):
    assert not list(diverged.glob("*-s1--*"))


@pytest.mark.parametrize(
    ("num_gpus", "devices", "jobs", "expected"),
    [
        (4, 2, None, ["0,1", "2,3"]),
        (3, 2, 2, ["0,1", "0,1"]),
        (1, 1, 2, ["0", "0"]),
        (0, 2, 2, [None, None]),
    ],
)
def test_cells_get_whole_groups_of_gpus(num_gpus, devices, jobs, expected, started):
    environments = started(num_gpus, jobs, devices)
    assert [environment.get("CUDA_VISIBLE_DEVICES") for environment in environments] == expected


@pytest.fixture
def started(tmp_path, monkeypatch):
    """Fills a launcher on a machine of 8 cores with cells, and gives their environments."""
    environments = []

    def start(folder, lock_descriptor, environment):
        environments.append(environment)
        return Mock()

    def fill(num_gpus, *arguments):
        monkeypatch.setattr(launchers.torch.cuda, "device_count", lambda: num_gpus)
        launcher = LocalLauncher(*arguments)
        for cell in Sweep.load(write_sweep(tmp_path)).cells[: launcher.num_jobs]:
            assert launcher.start(cell)
        for job in launcher.jobs:
            job.resources.close()
        return environments

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(launchers, "num_cores", lambda: 8)
    monkeypatch.setattr(launchers, "start_process", start)
    return fill


@pytest.mark.parametrize("jobs", [1, 2, 4])
def test_cells_share_all_cores(jobs, started):
    """Whatever devices a cell has: its ranks divide its threads among themselves."""
    threads = [environment["OMP_NUM_THREADS"] for environment in started(0, jobs, 2)]
    assert threads == [str(8 // jobs)] * jobs


def test_rank_of_the_sweep_reaches_no_cell(started, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    assert not any("RANK" in environment for environment in started(0, 2, 1))


def test_gpus_are_no_limit_on_the_cpu(monkeypatch):
    monkeypatch.setattr(launchers.torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(launchers, "num_cores", lambda: 8)
    assert LocalLauncher(None, 2, on_gpus=False).num_jobs == 4


FOLDER = PRESETS / "sweeps" / "paper"
MAIN = {"pipedream", "pipedream-lr", "nesterov", "basis-rotation"}
METHOD = "optimizer.method"
STAGES = "pipeline.stages"
STASH = "pipeline.stash"
LR = "optimizer.lr"
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


@pytest.fixture(params=sorted(file.stem for file in FOLDER.glob("*.yaml")))
def papers(request):
    """One of the paper's sweeps: what is expected, and the settings of its cells."""
    cells = Sweep.load(FOLDER / f"{request.param}.yaml").cells
    return USUAL | SWEEPS.get(request.param, {}), [cell.config for cell in cells]


def test_sweep_has_the_papers_settings(papers):
    expected, configs = papers
    contents = [config.model_dump(mode="json") for config in configs]
    for keys, together in expected.items():
        wanted = together if isinstance(keys, tuple) else {(value,) for value in together}
        keys = keys if isinstance(keys, tuple) else (keys,)
        assert {tuple(value_at(content, key) for key in keys) for content in contents} == wanted


def test_rates_are_the_same_for_every_method(papers):
    expected, configs = papers
    tried = defaultdict(set)
    for config in configs:
        tried[config.optimizer.method, config.pipeline.stages].add(config.optimizer.lr)
    assert all(rates == expected[LR] for rates in tried.values())


def test_optimizers_have_the_papers_options(papers):
    _, configs = papers
    for optimizer in (config.optimizer for config in configs):
        if optimizer.method != "scion":  # it bounds the weights instead
            assert optimizer.weight_decay == 0.01
        if optimizer.method in (*MAIN, "delay-compensation"):
            beta1 = 0.99 if optimizer.method == "nesterov" else 0.9
            assert (optimizer.beta1, optimizer.beta2) == (beta1, 0.999)


def test_stages_have_equally_many_blocks(papers):
    _, configs = papers
    assert all(config.model.blocks % config.pipeline.stages == 0 for config in configs)


@pytest.fixture
def done(tmp_path):
    """A cell that is done."""
    cell = Sweep.load(write_sweep(tmp_path)).cells[0]
    end(cell)
    return cell


def test_configuration_of_a_cell_is_parsed_once(done, monkeypatch):
    parsed = Mock(side_effect=spec.load_config)
    monkeypatch.setattr(spec, "load_config", parsed)
    assert [spec.state_of(done), spec.state_of(done)] == [spec.State.DONE] * 2
    parsed.assert_called_once()


def test_changed_configuration_of_a_cell_is_seen(done):
    spec.state_of(done)
    config = done.folder / "config.yaml"
    config.write_text(config.read_text().replace("seed: 0", "seed: 1"))
    with pytest.raises(UserError, match="differs from what the sweep asks for"):
        spec.state_of(done)
