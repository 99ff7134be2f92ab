"""The paper's presets: their sizes, their cuts into stages and devices, and their twins of reduced
width at work."""

import json
import math

import pytest
import torch

from brx.config.loading import apply_overrides, load_config
from brx.model.stage import make_stages, partition, whole_model
from brx.train.loop import train
from tests.train.helpers import steps_of, tiny_config

# Parameters, P, stop_after and lr of the paper; the mixture's size is ours, the paper says 100 M.
PAPER = {
    "paper-95m": (95_590_993, 32, None, 3e-4),
    "paper-1b": (1_035_004_753, 24, None, 1e-4),
    "paper-3b": (3_047_005_777, 32, 82_000, 1e-4),
    "paper-moe-100m": (98_266_897, 32, None, 3e-4),
}


@pytest.fixture(scope="module", params=PAPER)
def preset(request):
    """The name of a preset, and its configuration."""
    return request.param, load_config(request.param)


def test_batch_is_the_papers(preset):
    _, config = preset
    assert (config.training.batch_size, config.model.sequence_length) == (8, 512)


def test_schedule_is_the_papers(preset):
    training = preset[1].training
    assert (training.warmup_fraction, training.iterations) == (0.012, 250_000)


def test_regularization_is_the_papers(preset):
    _, config = preset
    assert (config.optimizer.weight_decay, config.training.clip) == (0.01, 1.0)


def test_precision_is_the_papers(preset):
    assert preset[1].runtime.precision == "bf16"


def test_settings_that_depend_on_the_size(preset):
    name, config = preset
    _, *expected = PAPER[name]
    assert [config.pipeline.stages, config.training.stop_after, config.optimizer.lr] == expected


def test_data_are_the_papers(preset):
    data = preset[1].data
    assert (data.source, data.tokens) == ("openwebtext", 10**9)


def test_sample_has_a_billion_training_tokens(preset):
    data = preset[1].data
    # "1B tokens randomly selected": a share of all 9.04 B, with a little to spare for chance.
    num_billions = 9.04 * data.sample_fraction * (1 - data.validation_fraction)
    assert 1.005 < num_billions < 1.03


def test_data_suffice_for_the_run(preset):
    _, config = preset
    training = config.training
    needed = training.last_iteration * training.batch_size * config.model.sequence_length
    assert needed <= config.data.max_epochs * config.data.tokens


@pytest.fixture(scope="module")
def stages(preset):
    """The stages of a preset on the meta device."""
    _, config = preset
    block_ranges = partition(config.model.blocks, config.pipeline.stages)
    return make_stages(config.model, 50257, block_ranges, seed=None)


def test_number_of_parameters_is_the_papers(preset, stages):
    count = sum(parameter.numel() for stage in stages for parameter in stage.parameters())
    assert count == PAPER[preset[0]][0]


def test_stages_have_the_models_parameters(preset, stages):
    whole = whole_model(preset[1].model, 50257, seed=None)
    names = {name for stage in stages for name, _ in stage.named_parameters()}
    assert names == {name for name, _ in whole.named_parameters()}


def test_only_the_first_stage_has_the_embedding(stages):
    assert [k for k, stage in enumerate(stages) if stage.embedding is not None] == [0]


def test_only_the_last_stage_has_the_head(stages):
    last = len(stages) - 1
    assert [k for k, stage in enumerate(stages) if stage.head is not None] == [last]


SMALL = [
    "model.width=8",
    "model.heads=2",
    "model.sequence_length=16",
    "data.tokenizer=bytes",
    "data.tokens=null",
    "data.validation_fraction=0.3",
    "data.sample_fraction=1.0",
    "training.iterations=6",
    "training.stop_after=4",
    "training.batch_size=2",
    "training.validation_examples=2",
    "runtime.device=cpu",
    "runtime.threads=1",
    "runtime.compile=false",
]


def twin(preset, folder, *overrides):
    """The preset with few heads, bytes, a short sequence and a few iterations. Its blocks, stages
    and code path stay."""
    data = tiny_config(folder).data
    places = [
        f"data.source={json.dumps(data.source)}",
        f"data.directory={json.dumps(data.directory)}",
    ]
    content = load_config(preset).model_dump()
    return apply_overrides(content, [*SMALL, *places, *overrides], preset)


TWINS = {
    "paper-95m": ["pipeline.stash=predict", "optimizer.method=basis-rotation"],
    "paper-1b": ["pipeline.recompute=true", "runtime.deterministic=true"],
    "paper-3b": ["optimizer={method: basis-rotation, source: 1st, geometry: unilateral}"],
    "paper-moe-100m": ["optimizer.method=basis-rotation", "pipeline.stash=none"],
}


@pytest.fixture(scope="module", params=TWINS)
def trained(request, tmp_path_factory):
    """The name of a preset, the configuration of its twin, and the records of the twin's run."""
    folder = tmp_path_factory.mktemp("twin")
    config = twin(request.param, folder, *TWINS[request.param])
    assert train(config, folder / "run") == "finished"
    torch.use_deterministic_algorithms(False)
    return request.param, config, steps_of(folder / "run")


def test_twin_has_the_presets_depth(trained):
    name, config, _ = trained
    full = load_config(name)
    assert config.model.blocks == full.model.blocks
    assert config.pipeline.stages == full.pipeline.stages


def test_twin_trains_every_iteration(trained):
    assert [step["iteration"] for step in trained[2]] == [1, 2, 3, 4]


def test_untrained_twin_guesses_among_bytes(trained):
    assert trained[2][0]["train_loss"] == pytest.approx(math.log(256), rel=0.05)


def test_twin_has_finite_losses(trained):
    assert all(math.isfinite(step["train_loss"]) for step in trained[2])


def test_twin_has_gradients(trained):
    assert all(step["grad_norm"] > 0 for step in trained[2])
