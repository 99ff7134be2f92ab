"""Memory of the schedules: against the plan of the run that the verdict is about, and against measured peaks."""

from dataclasses import replace

import pytest
import torch

from benchmarks.memory import peak_during
from brx.config.loading import load_config
from brx.errors import UserError
from brx.model.stage import Stage, partition
from brx.planning.idle import SYNCHRONOUS
from brx.planning.plan import plan_memory
from brx.planning.schedule_memory import Fitting, memory_by_schedule
from brx.planning.verdict import Question
from brx.train.build import assemble
from tests.planning.test_plan import FirstOfFour, small

# What decides how many weights an asynchronous stage keeps, and no synchronous one does.
ASYNCHRONOUS_SETTINGS = [
    ["pipeline.stash=none"],
    ["pipeline.stash=predict"],
    ["pipeline.rings=host"],
    ["pipeline.forecast=average-update"],
    ["pipeline.forecast=last-update"],
    ["optimizer.method=examples/methods/xpipe.py:XPipe"],
]
SETTINGS = [[], *ASYNCHRONOUS_SETTINGS, ["runtime.precision=fp32"], ["optimizer.method=delay-compensation"]]


@pytest.mark.parametrize("settings", SETTINGS, ids=" ".join)
@pytest.mark.parametrize("micro_batches", [1, 2, 8])
def test_asynchronous_memory_is_the_plan_of_that_run(settings, micro_batches):
    run = ["pipeline.stages=8", "pipeline.devices=8", f"pipeline.accumulation={micro_batches}"]
    asked = load_config("paper-95m", [*settings, *run, f"training.batch_size={8 // micro_batches}"])
    memory = memory_by_schedule(load_config("paper-95m", settings), 8, micro_batches)
    assert memory["asynchronous"] == max(rank.peak for rank in plan_memory(asked, "cuda"))


@pytest.mark.parametrize("settings", [[], *ASYNCHRONOUS_SETTINGS], ids=" ".join)
def test_asynchronous_memory_is_the_measured_one(settings):
    batch, width = ["pipeline.accumulation=4", "training.batch_size=2"], ["model.width=96", "model.blocks=8"]
    config = small(*settings, *batch, *width, "runtime.device=cpu", "training.log_every=1", "pipeline.devices=4")
    tokens = torch.zeros(2, 64, dtype=torch.int64)

    def train_first_rank():
        engine = assemble(config, lambda t: (tokens, tokens), world=FirstOfFour()).engine
        for _ in engine.run(1, lambda: 3):
            pass

    measured = peak_during(train_first_rank, torch.device("cpu"))  # the busiest: its delay is the longest
    assert memory_by_schedule(config, 4, 4)["asynchronous"] == pytest.approx(measured, rel=0.1)


@pytest.mark.parametrize("settings", ASYNCHRONOUS_SETTINGS, ids=" ".join)
def test_synchronous_memory_depends_on_nothing_that_is_for_delays(settings):
    plain = memory_by_schedule(load_config("paper-95m"), 8, 8)
    memory = memory_by_schedule(load_config("paper-95m", settings), 8, 8)
    assert {name: memory[name] for name in SYNCHRONOUS} == {name: plain[name] for name in SYNCHRONOUS}


# Mostly activations, or mostly weights.
@pytest.mark.parametrize(
    ("name", "precision", "width", "batch"),
    [("GPipe", "fp32", 64, 8), ("GPipe", "bf16", 128, 2), ("1F1B", "bf16", 64, 8), ("1F1B", "fp32", 128, 2)],
)
def test_synchronous_memory_is_that_of_a_naive_pipeline(name, precision, width, batch):
    settings = [f"model.width={width}", "model.blocks=16", f"runtime.precision={precision}"]
    settings += ["runtime.device=cpu", "logging.update_norms=false"]
    planned = memory_by_schedule(small(*settings, f"training.batch_size={8 * batch}"), 4, 8)[name]
    config = small(*settings, f"training.batch_size={batch}")
    peaks = [peak_during(lambda rank=rank: train_naively(config, rank, name), torch.device("cpu")) for rank in range(4)]
    assert planned == pytest.approx(max(peaks), rel=0.1)


def train_naively(config, rank, name):
    """Two updates of 8 micro-batches on one of 4 ranks: nothing of brx but the stage and the order of passes."""
    stage = Stage(config.model, config.data.vocabulary_size, partition(config.model.blocks, 4)[rank])
    weights = list(stage.parameters())
    optimizer = torch.optim.AdamW(weights)
    tokens = torch.zeros(config.training.batch_size, config.model.sequence_length, dtype=torch.int64)
    dtype = torch.bfloat16 if config.runtime.precision == "bf16" else torch.float32
    outputs, gradients = {}, None
    with torch.autocast("cpu", torch.bfloat16, enabled=config.runtime.precision == "bf16"):
        for action in SYNCHRONOUS[name](rank, 4, 8, 2):
            if action.kind == "F":
                received = torch.zeros(*tokens.shape, config.model.width, dtype=dtype, requires_grad=True)
                output = stage(tokens if rank == 0 else received, tokens if rank == 3 else None)
                outputs[action.number] = output.loss if rank == 3 else output.stream
                del received, output
            elif action.kind == "B":
                output = outputs.pop(action.number)
                own = torch.autograd.grad(output, weights, torch.zeros_like(output))
                if gradients is None:
                    gradients = own
                else:
                    torch._foreach_add_(gradients, own)
                del output, own
            else:
                for weight, gradient in zip(weights, gradients, strict=True):
                    weight.grad = gradient
                gradients = None
                optimizer.step()
                optimizer.zero_grad()
                torch.clear_autocast_cache()


def test_every_cell_of_the_figure_has_its_own_transfers_and_memory():
    config = load_config("paper-95m")
    fitting = Fitting(config, device_memory=1e9, bandwidth=5e9, throughput=1e14)
    asked = fitting.fitted(Question(2.12, 32, 8))
    for stages, micro_batches, expected in ((4, 8, 5), (16, 8, 0), (16, 1, 1)):
        cell = fitting.fitted_if_possible(replace(asked, num_stages=stages, num_micro_batches=micro_batches))
        # A transfer is as long whatever P is; its micro-batch's forward pass is P times as short.
        assert cell.transfer_time == pytest.approx(asked.transfer_time * stages / 32)
        memory = memory_by_schedule(config, stages, micro_batches)
        assert set(cell.excluded) == {name for name, needed in memory.items() if needed > 1e9}
        assert len(cell.excluded) == expected
    assert fitting.fitted_if_possible(replace(asked, num_stages=33)) is None
    assert fitting.fitted_if_possible(replace(asked, num_micro_batches=16)) is None
    with pytest.raises(UserError, match="--stages 33: the model has only 32"):
        fitting.fitted(replace(asked, num_stages=33))


@pytest.mark.parametrize(
    ("stages", "micro_batches", "message"),
    [(8, 3, "--micro-batches 3: training.batch_size 8 is no multiple"), (64, 8, "--stages 64: the model has only 32")],
)
def test_impossible_splits(stages, micro_batches, message):
    with pytest.raises(UserError, match=message):
        memory_by_schedule(load_config("paper-95m"), stages, micro_batches)
