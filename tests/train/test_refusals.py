"""Requests that cannot be carried out: one line, at once, and nothing half-written."""

import pytest
import torch

from brx.errors import UserError
from brx.train.build import build_stages, check_head
from brx.train.loop import train
from tests.train.helpers import tiny_config


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
    # Nothing comes through a head of zeros.
    has_gradient = [name for name, weight in stage.newest.items() if weight.grad.abs().max() > 0]
    assert has_gradient == ["head.linear.weight", "head.linear.bias"]
