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


@pytest.mark.parametrize("preset", PAPER)
def test_preset_is_the_papers_and_has_its_size_cut_into_stages(preset):
    config = load_config(preset)
    training, (num_parameters, num_stages, *_) = config.training, PAPER[preset]
    assert (training.batch_size, config.model.sequence_length, training.clip) == (8, 512, 1.0)
    assert (training.warmup_fraction, training.iterations) == (0.012, 250_000)
    assert (config.optimizer.weight_decay, config.runtime.precision) == (0.01, "bf16")
    assert (config.data.source, config.data.tokens) == ("openwebtext", 10**9)
    # "1B tokens randomly selected": a share of all 9.04 B, with a little to spare for chance.
    assert 1.005 < 9.04 * config.data.sample_fraction * (1 - config.data.validation_fraction) < 1.03
    assert (config.pipeline.stages, training.stop_after, config.optimizer.lr) == PAPER[preset][1:]
    # The data that the preset asks for suffice for the run that it asks for.
    needed = training.last_iteration * training.batch_size * config.model.sequence_length
    assert needed <= config.data.max_epochs * config.data.tokens
    names = set(dict(whole_model(config.model, 50257, seed=None).named_parameters()))
    stages = make_stages(config.model, 50257, partition(config.model.blocks, num_stages), seed=None)
    assert (
        sum(parameter.numel() for stage in stages for parameter in stage.parameters())
        == num_parameters
    )
    assert {name for stage in stages for name, _ in stage.named_parameters()} == names
    assert [stage.embedding is not None for stage in stages] == [True, *[False] * (num_stages - 1)]
    assert [stage.head is not None for stage in stages] == [*[False] * (num_stages - 1), True]


def twin(preset, folder, *overrides):
    """The preset with few heads, bytes, a short sequence and a few iterations; blocks, stages and
    code path stay."""
    small = tiny_config(folder).data
    reduced = ["model.width=8", "model.heads=2", "model.sequence_length=16"]
    reduced += [
        f"data.source={json.dumps(small.source)}",
        f"data.directory={json.dumps(small.directory)}",
    ]
    reduced += [
        "data.tokenizer=bytes",
        "data.tokens=null",
        "data.validation_fraction=0.3",
        "data.sample_fraction=1.0",
    ]
    reduced += ["training.iterations=6", "training.stop_after=4", "training.batch_size=2"]
    reduced += [
        "training.validation_examples=2",
        "runtime.device=cpu",
        "runtime.threads=1",
        "runtime.compile=false",
    ]
    return apply_overrides(load_config(preset).model_dump(), [*reduced, *overrides], preset)


@pytest.mark.parametrize(
    ("preset", "overrides"),
    [
        ("paper-95m", ["pipeline.stash=predict", "optimizer.method=basis-rotation"]),
        ("paper-1b", ["pipeline.recompute=true", "runtime.deterministic=true"]),
        ("paper-3b", ["optimizer={method: basis-rotation, source: 1st, geometry: unilateral}"]),
        ("paper-moe-100m", ["optimizer.method=basis-rotation", "pipeline.stash=none"]),
    ],
)
def test_twin_trains(preset, overrides, tmp_path):
    config = twin(preset, tmp_path, *overrides)
    assert (config.model.blocks, config.pipeline.stages) == (
        load_config(preset).model.blocks,
        PAPER[preset][1],
    )
    assert config.runtime.precision == "bf16"
    assert train(config, tmp_path / "run") == "finished"
    torch.use_deterministic_algorithms(False)
    steps = steps_of(tmp_path / "run")
    assert [step["iteration"] for step in steps] == [1, 2, 3, 4]
    # Untrained: the loss of guessing among 256 bytes.
    assert steps[0]["train_loss"] == pytest.approx(math.log(256), rel=0.05)
    assert all(math.isfinite(step["train_loss"]) and step["grad_norm"] > 0 for step in steps)
