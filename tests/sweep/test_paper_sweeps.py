"""The sweeps at the paper's scale, against what its text and appendix say."""

from collections import defaultdict

import pytest

from brx.config.loading import PRESETS
from brx.sweep.spec import Sweep, identity, value_at

FOLDER = PRESETS / "sweeps" / "paper"
MAIN = {"pipedream", "pipedream-lr", "nesterov", "basis-rotation"}
METHOD, STAGES, STASH, LR = "optimizer.method", "pipeline.stages", "pipeline.stash", "optimizer.lr"
SIZE = ("model.blocks", "model.width")
STRATEGY = ("optimizer.source", "optimizer.geometry")
ROTATED = {METHOD: {"basis-rotation"}}
ALL_STAGES = {1, 2, 4, 8, 16, 32}
# Appendix "Experimental Details": of cells where nothing else is said below. A tuple of keys has values together.
USUAL = {METHOD: MAIN, STAGES: {32}, STASH: {"exact"}, LR: {1e-4, 3e-4, 1e-3}, "training.seed": {0}}
SWEEPS = {
    "1b": {STAGES: {24}, LR: {1e-4}, (*SIZE, "model.heads"): {(24, 1728, 27)}},
    "3b": {LR: {1e-4, 3e-5}, SIZE: {(32, 2688)}},  # appendix "Results on 3B Model"
    "block-scaling": {STAGES: {4, 8, 16}, SIZE: {(4, 384), (8, 384), (16, 384)}},
    "curvature": {METHOD: {"pipedream", "basis-rotation"}, STAGES: {1, 32}},
    "delay-compensation": {
        METHOD: {"delay-compensation"}, STAGES: {8, 16, 32}, "optimizer.compensation": {0.04, 0.1, 0.5, 1.0},
    },
    "frequency": ROTATED | {"optimizer.frequency": {1, 100}},
    "main": {STAGES: ALL_STAGES, (*STRATEGY, "optimizer.frequency"): {(None, None, None), ("2nd", "bilateral", 10)}},
    "moe": {("model.moe.experts", "model.moe.top_k"): {(8, 2)}},
    "prediction": {STASH: {"predict"}},
    "preconditioned": {METHOD: {"soap", "muon", "scion"}, STAGES: {1, 32}},
    "stage-aware": ROTATED | {"optimizer.refresh_schedule": {"stage-aware", "reversed"}},
    "stage-aware-exact": ROTATED | {"optimizer.refresh_schedule": {"stage-aware-exact", "reversed-exact"}},
    "stashing": {STASH: {"none"}},
    "strategies": ROTATED | {  # the three others
        STAGES: ALL_STAGES, STRATEGY: {("2nd", "unilateral"), ("1st", "bilateral"), ("1st", "unilateral")},
    },
    "width": {STAGES: {24}, SIZE: {(24, 384)}},
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(file.stem for file in FOLDER.glob("*.yaml")))
def test_a_sweep_is_the_papers_experiment(name):
    cells = Sweep.load(FOLDER / f"{name}.yaml").cells
    contents = [cell.config.model_dump(mode="json") for cell in cells]
    expected = USUAL | SWEEPS.get(name, {})
    for keys, together in expected.items():
        wanted = together if isinstance(keys, tuple) else {(value,) for value in together}
        keys = keys if isinstance(keys, tuple) else (keys,)
        assert {tuple(value_at(content, key) for key in keys) for content in contents} == wanted
    # The same rates for every method and P.
    rates = defaultdict(set)
    for config in (cell.config for cell in cells):
        rates[config.optimizer.method, config.pipeline.stages].add(config.optimizer.lr)
        check_common(config, {"3b": 82_000}.get(name, 250_000))
    assert all(tried == expected[LR] for tried in rates.values())


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
