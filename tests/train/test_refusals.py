"""Requests that cannot be carried out: one line, at once, and nothing half-written."""

import pytest
import torch

from brx.cli.main import main
from brx.config.loading import dump_config
from brx.errors import UserError
from brx.train.build import build_stages, check_head
from brx.train.loop import train
from tests.train.helpers import tiny_config


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("training.validation_examples=99999999999", "training.validation_examples: must be at most"),
        ("optimizer.eps=.inf", "optimizer.eps: input should be a finite number, got inf"),
        ("training.seed=99999999999999999999", "training.seed: input should be less than"),
        ("model=" + "[" * 10_000, "not valid YAML: nested more than 50 levels deep"),
        ("a file:", "is empty"),
        ("a file:model: &a [*a]", "tiny.yaml"),
    ],
)
def test_absurd_settings_are_one_line(setting, expected, tmp_path, capsys):
    path, in_file = tmp_path / "tiny.yaml", setting.startswith("a file:")
    path.write_text(setting.removeprefix("a file:") if in_file else dump_config(tiny_config(tmp_path)))
    settings = [] if in_file else ["--set", setting]
    assert main(["train", str(path), "--out", str(tmp_path / "run"), *settings]) == 2
    assert not (tmp_path / "run").exists()
    (line,) = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("prepared")]
    assert expected in line
    assert len(line) < 600


@pytest.mark.parametrize(
    ("stash", "settings", "needs"),
    [
        ("none", ["runtime.precision=bf16"], "runtime.precision: fp32"),
        ("predict", ["data.tokenizer=gpt2", "training.batch_size=50"], "at most 33,554,432 logits per micro-batch"),
    ],
)
def test_a_head_that_would_not_see_its_overwritten_weights_is_refused(stash, settings, needs, tmp_path):
    stash, delay = f"pipeline.stash={stash}", "pipeline.delay=3"
    with pytest.raises(UserError, match=f"with a delay of 3 at the last stage needs {needs}"):
        train(tiny_config(tmp_path, stash, delay, *settings), tmp_path / "run")
    assert not (tmp_path / "data").exists()
    check_head(tiny_config(tmp_path, stash, *settings))  # a pipeline's last stage has no delay
    check_head(tiny_config(tmp_path, delay, *settings))  # exact
    check_head(tiny_config(tmp_path, stash, delay))


def test_a_delayed_head_sees_its_overwritten_weights(tmp_path):
    config = tiny_config(tmp_path, "pipeline.stash=none", "pipeline.delay=3", "pipeline.stages=1")
    (stage,) = build_stages(config, torch.device("cpu"), range(1))
    tokens = torch.arange(32).view(2, 16)
    stage.bind(1)
    loss = stage.module(tokens, tokens).loss
    with torch.no_grad():
        stage.newest["head.linear.weight"].zero_()
    stage.prepare_backward(1)
    loss.backward()
    stage.collect_gradients(1)
    # Nothing comes through a head of zeros.
    has_gradient = [name for name, weight in stage.newest.items() if weight.grad.abs().max() > 0]
    assert has_gradient == ["head.linear.weight", "head.linear.bias"]
