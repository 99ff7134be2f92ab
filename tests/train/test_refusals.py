"""Requests that cannot be carried out: one line, at once, and nothing half-written."""

import pytest

from brx.errors import UserError
from brx.train.build import check_head
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
