"""The paper's sweeps against its text."""

from collections import defaultdict

import pytest

from brx.config.loading import PRESETS
from brx.sweep.conditions import value_at
from brx.sweep.spec import Sweep

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
