"""Memory of the schedules against the plan that they are derived from."""

import pytest

from brx.config.loading import load_config
from brx.errors import UserError
from brx.planning.plan import plan_memory
from brx.planning.schedule_memory import memory_by_schedule, micro_batch_config


def test_one_micro_batch_is_the_plan_itself():
    config = load_config("paper-95m", ["pipeline.stages=8", "pipeline.devices=8"])
    ranks = plan_memory(config, "cuda")
    assert memory_by_schedule(config, 8, 1)["asynchronous"] == max(rank.peak for rank in ranks)


def test_versions_and_activations_in_flight():
    config = load_config("paper-95m")
    memory = memory_by_schedule(config, 8, 8)
    ranks = plan_memory(micro_batch_config(config, 8, 8), "cuda")
    first = ranks[0]
    # GPipe: the 8 micro-batches that the plan's first rank has in flight, too, and no rings.
    assert memory["GPipe"] >= first.peak - first.rings
    assert memory["1F1B"] <= memory["GPipe"]
    # Delays of up to 7 micro-batches are one update: two versions where M = 1 keeps eight.
    assert first.peak - first.rings < memory["asynchronous"] < first.peak - first.rings / 2


@pytest.mark.parametrize(
    ("stages", "micro_batches", "message"),
    [(8, 3, "--micro-batches 3: training.batch_size 8 is no multiple"), (64, 8, "--stages 64: the model has only 32")],
)
def test_impossible_splits(stages, micro_batches, message):
    with pytest.raises(UserError, match=message):
        memory_by_schedule(load_config("paper-95m"), stages, micro_batches)
