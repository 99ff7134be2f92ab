"""Models other than GPT through the whole of training (several devices: tests/distributed)."""

import json
from pathlib import Path

import pytest

from brx.cli.main import main
from brx.config.loading import load_config
from brx.config.schema import OwnModelConfig
from brx.config.user_code import allowed
from brx.errors import UserError
from brx.model.sizes import count_parameters
from brx.train.loop import train
from tests.train.helpers import losses, steps_of, tiny_config

CONV_MIXER = f"{Path(__file__).parents[2] / 'examples/models/conv_mixer.py'}:ConvMixer"
MODELS = {
    "llama": ["model.class=llama", "model.kv_heads=1", "model.moe={experts: 4}"],
    "own": [f"model.class={CONV_MIXER}", "model.kernel=3"],
}
SHORT = [
    "training.iterations=8",
    "training.checkpoint_every=3",
    "training.keep_at=[4]",
    "optimizer={method: basis-rotation, frequency: 2}",
]


@pytest.fixture(scope="module", params=MODELS)
def trained(request, tmp_path_factory):
    folder, overrides = tmp_path_factory.mktemp("models"), [*MODELS[request.param], *SHORT]
    train(tiny_config(folder, *overrides), folder / "straight")
    return folder, overrides


def test_resumed_run_is_the_uninterrupted_one(trained):
    folder, overrides = trained
    train(tiny_config(folder, *overrides, "training.stop_after=5"), folder / "resumed")
    train(tiny_config(folder, *overrides), folder / "resumed", resume=True)
    assert steps_of(folder / "resumed") == steps_of(folder / "straight")


def test_recomputed_activations_change_nothing(trained):
    folder, overrides = trained
    train(tiny_config(folder, *overrides, "pipeline.recompute=true"), folder / "recomputed")
    assert losses(folder / "recomputed") == losses(folder / "straight")


def test_hessian_norm_counts_every_parameter(trained):
    run = trained[0] / "straight"
    sample = ["--vectors", "3", "--batches-per-vector", "2"]
    assert main(["--run-code", "hessian-norm", str(run), *sample, "--original"]) == 0
    (result,) = (run / "analysis").glob("hessian-norm-original-*.json")
    config = load_config(run)
    with allowed():
        expected, _ = count_parameters(config.model, config.data.vocabulary_size)
    assert sum(json.loads(result.read_text())["blocks"]["num_rows"]) == expected


def test_oscillation_is_measured_on_every_model(trained):
    run = trained[0] / "straight"
    settings = ["--iterations", "2", "--batches", "1", "--power-iterations", "2"]
    assert main(["--run-code", "oscillation", str(run), *settings]) == 0
    assert list((run / "analysis").glob("oscillation-*.json"))


def test_run_notes_its_numbers_of_parameters(tmp_path):
    config = tiny_config(tmp_path, *MODELS["own"], "training.iterations=1")
    train(config, tmp_path / "run")
    model = load_config(tmp_path / "run").model
    assert isinstance(model, OwnModelConfig)
    # Per block: two norms, two and eight squares with biases, a convolution of 3 with biases.
    in_block = 2 * 8 + 2 * (64 + 8) + (256 + 32) + (256 + 8) + 8 * 3 + 8
    rest = 256 * 8 + 8 + 8 * 256 + 256
    assert model.facts.num_in_blocks == 4 * in_block
    assert model.facts.num_parameters == 4 * in_block + rest


def test_own_model_is_refused_before_data_are_prepared(tmp_path):
    config = tiny_config(tmp_path, f"model.class={CONV_MIXER}", "model.kernels=3")
    with pytest.raises(UserError, match="takes no option 'kernels', did you mean 'kernel'"):
        train(config, tmp_path / "run")
    assert not (tmp_path / "data").exists()


def test_stale_copies_of_own_weights_are_refused(tmp_path):
    settings = ["pipeline.stash=none", "runtime.precision=bf16"]
    config = tiny_config(tmp_path, f"model.class={CONV_MIXER}", *settings)
    with pytest.raises(UserError, match=r"with a model of your own needs runtime\.precision: fp32"):
        train(config, tmp_path / "run")


def test_tied_llama_needs_one_stage(tmp_path):
    with pytest.raises(UserError, match=r"tied needs pipeline\.stages 1"):
        tiny_config(tmp_path, "model.class=llama", "model.tied=true")
