"""The measured times of stages tell them apart."""

import torch

from brx.planning.stage_times import measure_stage_costs
from tests.train.helpers import tiny_config


def test_measured_costs_see_the_head(tmp_path):
    config = tiny_config(tmp_path, "data.tokenizer=gpt2", "model.width=32", "training.batch_size=4")
    costs = measure_stage_costs(config, torch.device("cpu"))
    assert len(costs) == 4
    assert min(costs) > 0
    assert costs[3] > 3 * costs[1]
