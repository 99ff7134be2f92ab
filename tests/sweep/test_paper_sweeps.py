"""The sweeps at the paper's scale, against what its text and appendix say."""

from collections import defaultdict

import pytest

from brx.config.loading import PRESETS
from brx.sweep.spec import Sweep, identity, value_at

FOLDER = PRESETS / "sweeps" / "paper"
BASELINES = {"pipedream", "pipedream-lr", "nesterov"}
MAIN = {*BASELINES, "basis-rotation"}
# Appendix "Experimental Details", except for the 3B model: appendix "Results on 3B Model".
RATES = {"1b": {1e-4}, "3b": {1e-4, 3e-5}}
OTHER_METHODS = {
    "curvature": {"pipedream", "basis-rotation"},
    "delay-compensation": {"delay-compensation"},
    "frequency": {"basis-rotation"},
    "preconditioned": {"soap", "muon", "scion"},
    "stage-aware": {"basis-rotation"},
    "stage-aware-exact": {"basis-rotation"},
    "strategies": {"basis-rotation"},
}
STAGES = {
    "curvature": {1, 32},
    "main": {1, 2, 4, 8, 16, 32},
    "strategies": {1, 2, 4, 8, 16, 32},
    "block-scaling": {4, 8, 16},
    "delay-compensation": {8, 16, 32},
    "preconditioned": {1, 32},
    "1b": {24},
    "width": {24},
}
STASHES = {"stashing": {"none"}, "prediction": {"predict"}}
SIZE = ("model.blocks", "model.width")
STRATEGY = ("optimizer.source", "optimizer.geometry")
VARIED = {
    "main": ((*STRATEGY, "optimizer.frequency"), {(None, None, None), ("2nd", "bilateral", 10)}),
    "strategies": (STRATEGY, {("2nd", "unilateral"), ("1st", "bilateral"), ("1st", "unilateral")}),  # the three others
    "block-scaling": (SIZE, {(4, 384), (8, 384), (16, 384)}),
    "delay-compensation": (("optimizer.compensation",), {(0.04,), (0.1,), (0.5,), (1.0,)}),
    "frequency": (("optimizer.frequency",), {(1,), (100,)}),
    "stage-aware": (("optimizer.refresh_schedule",), {("stage-aware",), ("reversed",)}),
    "stage-aware-exact": (("optimizer.refresh_schedule",), {("stage-aware-exact",), ("reversed-exact",)}),
    "width": (SIZE, {(24, 384)}),
    "1b": ((*SIZE, "model.heads"), {(24, 1728, 27)}),
    "3b": (SIZE, {(32, 2688)}),
    "moe": (("model.moe.experts", "model.moe.top_k"), {(8, 2)}),
}
"""By sweep: keys, and the values that they have together in its cells."""


def values(sweep, *keys):
    contents = [cell.config.model_dump(mode="json") for cell in sweep.cells]
    return {tuple(value_at(content, key) for key in keys) for content in contents}


@pytest.mark.parametrize("name", sorted(file.stem for file in FOLDER.glob("*.yaml")))
def test_a_sweep_is_the_papers_experiment(name):
    sweep = Sweep.load(FOLDER / f"{name}.yaml")
    keys, together = VARIED.get(name, ((), {()}))
    assert values(sweep, *keys) == together
    for key, expected in (
        ("optimizer.method", OTHER_METHODS.get(name, MAIN)),
        ("pipeline.stages", STAGES.get(name, {32})),
        ("pipeline.stash", STASHES.get(name, {"exact"})),
        ("training.seed", {0}),
    ):
        assert values(sweep, key) == {(value,) for value in expected}
    # The same rates for every method and P.
    rates = defaultdict(set)
    for config in (cell.config for cell in sweep.cells):
        rates[config.optimizer.method, config.pipeline.stages].add(config.optimizer.lr)
    assert all(tried == RATES.get(name, {1e-4, 3e-4, 1e-3}) for tried in rates.values())
    for cell in sweep.cells:
        check_common(cell.config, {"3b": 82_000}.get(name, 250_000))


def check_common(config, last_iteration):
    optimizer, training = config.optimizer, config.training
    assert (training.iterations, training.last_iteration) == (250_000, last_iteration)
    assert (training.batch_size, config.model.sequence_length, training.clip) == (8, 512, 1.0)
    assert (training.warmup_fraction, training.validation_every, training.validation_examples) == (0.012, 1000, 200)
    if optimizer.method != "scion":  # it bounds the weights instead
        assert optimizer.weight_decay == 0.01
    if optimizer.method in (*MAIN, "delay-compensation"):
        assert (optimizer.beta1, optimizer.beta2) == (0.99 if optimizer.method == "nesterov" else 0.9, 0.999)
    assert config.model.blocks % config.pipeline.stages == 0  # as many blocks in each stage


def test_the_runs_whose_curvature_is_measured_are_those_of_main_with_a_checkpoint_midway():
    cells = {cell.name: cell.config for cell in Sweep.load(FOLDER / "curvature.yaml").cells}
    of_main = {cell.name: cell.config for cell in Sweep.load(FOLDER / "main.yaml").cells}
    for name, config in cells.items():
        assert identity(config) == identity(of_main[name])
        assert config.training.keep_at == [125_000]
