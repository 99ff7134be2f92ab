"""Models other than GPT through the whole of training (several devices: tests/distributed)."""

import json
import math
import re
from pathlib import Path

import pytest
import torch
import yaml

from brx.cli.main import main
from brx.config.loading import config_of, dump_config, load_config
from brx.config.schema import OwnModelConfig
from brx.config.user_code import allowed
from brx.curvature.checkpoints import load_checkpoint
from brx.errors import RunError, UserError
from brx.model.models import MODELS as built_in
from brx.model.sizes import count_parameters
from brx.model.stage import make_stage
from brx.train.build import build_stages
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


def test_every_built_in_model_is_trained():
    assert built_in.keys() - {"gpt"} <= MODELS.keys()  # all other tests of brx train gpt


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


MODEL = """
import itertools, torch
from torch import nn

class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.passes = itertools.count(1)

    def forward(self, x):
        number = next(self.passes)
        FORWARD

class Mine(nn.Module):
    has_auxiliary_loss = True

    def __init__(self, vocabulary_size, sequence_length, blocks, width, extra=None):
        super().__init__()
        self.embed = nn.Embedding(vocabulary_size, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.head = nn.Linear(width, vocabulary_size)
        self.head.bias.data.fill_(extra or 0.0)
        MODEL
"""


def written(folder, forward="return x + self.linear(x)", model="pass"):
    text = MODEL.replace("FORWARD", forward).replace("MODEL", model)
    (folder / "mine.py").write_text(text)
    return f"model.class={folder / 'mine.py'}:Mine"


def test_what_a_models_file_raises_fails_the_run_in_one_line(tmp_path):
    forward = "if number == 4: raise KeyError('no')\n        return x + self.linear(x)"
    config = tiny_config(tmp_path, written(tmp_path, forward))
    message = r"\Amodel\.class [^\n]*: after iteration 3: [^\n]*mine\.py:13: KeyError: 'no'\Z"
    with pytest.raises(RunError, match=message):
        train(config, tmp_path / "run")
    assert len(steps_of(tmp_path / "run")) == 3


def test_block_that_recomputes_something_else_fails_the_run_in_one_line(tmp_path):
    forward = "y = self.linear(x)\n        return x + (y.exp() if number == 7 else y)"
    config = tiny_config(tmp_path, written(tmp_path, forward), "pipeline.recompute=true")
    message = r"\Amodel\.class [^\n]*: after iteration 3: [^\n]*CheckpointError: [^\n]*\Z"
    with pytest.raises(RunError, match=message):
        train(config, tmp_path / "run")


def test_exit_of_a_models_file_fails_the_run(tmp_path):
    forward = "if number == 4: raise SystemExit(0)\n        return x + self.linear(x)"
    config = tiny_config(tmp_path, written(tmp_path, forward))
    with pytest.raises(RunError, match=r"after iteration 3: .*mine\.py:13: SystemExit: 0"):
        train(config, tmp_path / "run")


def test_constant_auxiliary_loss_is_recorded(tmp_path):
    forward = "return x + self.linear(x), x.new_full((), 0.5)"
    train(tiny_config(tmp_path, written(tmp_path, forward), *SHORT), tmp_path / "run")
    assert [step["auxiliary_loss"] for step in steps_of(tmp_path / "run")] == [2.0] * 8


def test_infinite_option_is_kept_for_a_resumed_run(tmp_path):
    own = written(tmp_path)
    config = tiny_config(tmp_path, own, "model.extra=-.inf")
    again = config_of(yaml.safe_load(dump_config(config)), "here")
    assert again.model.options()["extra"] == -math.inf


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (".nan", "extra must be a number, got nan"),
        ("{a: [.nan]}", "extra.a must be a number, got nan"),
        ("!!timestamp 2001-01-01", "or a mapping, got date"),
        ("{1: 2}", "1 as a key must be a text"),
    ],
)
def test_option_that_its_file_would_not_give_back_is_refused(value, message, tmp_path):
    with pytest.raises(UserError, match=re.escape(message)):
        tiny_config(tmp_path, written(tmp_path), f"model.extra={value}")


@pytest.mark.parametrize(
    ("model", "missing"),
    [
        ("self.matrices = lambda: []", "have no matrix"),
        (
            "self.matrices = lambda: [name for name, _ in self.named_parameters()];"
            " self.head = nn.Linear(width, vocabulary_size, bias=False);"
            " self.blocks = nn.ModuleList(nn.Linear(width, width, bias=False)"
            " for _ in self.blocks)",
            "have no weight that is no matrix",
        ),
    ],
)
def test_method_for_matrices_and_others_needs_both(model, missing, tmp_path):
    model = model.replace("self.head = ", "del self.head; self.head = ")
    config = tiny_config(tmp_path, written(tmp_path, model=model), *SHORT)
    with pytest.raises(UserError, match=rf"\Aoptimizer\.method basis-rotation: [^\n]* {missing}"):
        train(config, tmp_path / "run")


def test_stale_copies_of_own_weights_are_refused(tmp_path):
    settings = ["pipeline.stash=none", "runtime.precision=bf16"]
    config = tiny_config(tmp_path, f"model.class={CONV_MIXER}", *settings)
    with pytest.raises(UserError, match=r"with a model of your own needs runtime\.precision: fp32"):
        train(config, tmp_path / "run")


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        (torch.float32, [torch.float32, torch.float64, torch.complex64, torch.int64]),
        (torch.float64, [torch.float64, torch.float64, torch.complex128, torch.int64]),
    ],
)
def test_buffers_keep_their_kind_of_numbers(dtype, expected, tmp_path):
    dtypes = ["float32", "float64", "complex64", "int64"]
    model = "; ".join(
        f"self.embed.register_buffer('in_{name}', torch.ones(2, dtype=torch.{name}))"
        for name in dtypes
    )
    config = tiny_config(tmp_path, written(tmp_path, model=model))
    with allowed():
        stage, *_ = build_stages(config, torch.device("cpu"), range(4), dtype=dtype)
    assert [buffer.dtype for buffer in stage.module.buffers()] == expected
    assert {weight.dtype for weight in stage.in_use} == {dtype}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("x = nn.functional.dropout(x, 0.1)", "its passes draw random numbers"),
        ("self.load += 1", r"blocks\.0\.load is changed by the forward pass"),
    ],
)
def test_what_a_branch_for_the_meta_device_hides_is_refused(change, message, tmp_path):
    forward = (
        "return_value = x + self.linear(x)\n"
        "        if not x.is_meta:\n"
        f"            {change}\n"
        "        return return_value"
    )
    model = "[block.register_buffer('load', torch.zeros(())) for block in self.blocks]"
    config = tiny_config(tmp_path, written(tmp_path, forward, model), *SHORT)
    with pytest.raises(UserError, match=rf"\Amodel\.class [^\n]*{message}[^\n]*\Z"):
        train(config, tmp_path / "run")


def test_part_in_fp32_trains_under_delay_in_bf16(tmp_path):
    forward = "return x + torch.autocast(x.device.type, enabled=False)(self.linear)(x.float())"
    settings = ["runtime.precision=bf16", "training.iterations=6"]
    config = tiny_config(tmp_path, written(tmp_path, forward), *settings)
    train(config, tmp_path / "run")
    assert len(steps_of(tmp_path / "run")) == 6


def test_measurements_have_the_runs_random_buffers(tmp_path):
    model = "self.head.register_buffer('fixed', nn.Linear(3, 3).weight.data)"
    forward = "return x + self.linear(x), x.new_full((), 0.5)"
    config = tiny_config(tmp_path, written(tmp_path, forward, model), "training.seed=5", *SHORT)
    train(config, tmp_path / "run")
    with allowed():
        head = make_stage(config.model, 256, range(4), seed=5).head
        again = load_checkpoint(tmp_path / "run").model.head
    assert torch.equal(again.fixed, head.fixed)


def test_tied_llama_needs_one_stage(tmp_path):
    with pytest.raises(UserError, match=r"tied needs pipeline\.stages 1"):
        tiny_config(tmp_path, "model.class=llama", "model.tied=true")
