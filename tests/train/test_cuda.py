"""What only a GPU can show; everything else about the same code is tested on the CPU."""

import math

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.memory import measured_peak
from brx.config.loading import apply_overrides
from brx.model.gpt import Attention
from brx.pipeline.delay import StageDelay
from brx.pipeline.graphs import NUM_WARM_UPS, GraphedPasses, PassResults
from brx.pipeline.versions import StageVersions
from brx.planning.plan import plan_memory
from brx.train.build import assemble
from brx.train.loop import train
from tests.pipeline.loops import STASHES
from tests.train.helpers import losses, steps_of, tiny_config

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")

MIDDLE = {
    "model": {"blocks": 8, "width": 256, "heads": 4, "sequence_length": 256},
    "data": {"tokenizer": "gpt2"},
    "pipeline": {"stages": 8},
    "training": {"batch_size": 8, "iterations": 1000},
    "runtime": {"device": "cuda", "precision": "bf16"},
}


@pytest.mark.parametrize("method", ["pipedream", "basis-rotation"])
def test_losses_are_those_of_the_cpu(method, tmp_path):
    for device in ("cpu", "cuda"):
        train(
            tiny_config(tmp_path, f"optimizer.method={method}", f"runtime.device={device}"),
            tmp_path / device,
        )
    on_cpu, on_cuda = (losses(tmp_path / device)[-1]["val_loss"] for device in ("cpu", "cuda"))
    assert on_cuda == pytest.approx(on_cpu, rel=0.01)


@pytest.mark.parametrize("rings", ["device", "host"])
@pytest.mark.parametrize("stash", STASHES)
def test_compiled_bf16_trains(stash, rings, tmp_path):
    overrides = ["runtime.device=cuda", "runtime.precision=bf16", "runtime.compile=true"]
    train(
        tiny_config(tmp_path, *overrides, f"pipeline.stash={stash}", f"pipeline.rings={rings}"),
        tmp_path / "run",
    )
    found = losses(tmp_path / "run")
    assert found[-1]["val_loss"] < found[0]["train_loss"] - 1
    assert all(math.isfinite(record.get("train_loss", 0.0)) for record in found)


NOISY = """
import torch

class Noisy(torch.optim.SGD):
    def step(self, closure=None):
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    weight.grad.add_(torch.randn_like(weight))
        return super().step(closure)
"""


def test_resumed_run_draws_the_numbers_of_an_uninterrupted_one(tmp_path):
    (tmp_path / "noisy.py").write_text(NOISY)
    method = f"optimizer={{method: '{tmp_path}/noisy.py:Noisy', lr: 0.01}}"
    settings = [method, "runtime.device=cuda", "training.validation_every=30"]
    train(tiny_config(tmp_path, *settings), tmp_path / "straight")
    train(tiny_config(tmp_path, *settings, "training.stop_after=15"), tmp_path / "run")
    train(tiny_config(tmp_path, *settings), tmp_path / "run", resume=True)
    resumed, straight = (steps_of(tmp_path / name)[-1] for name in ("run", "straight"))
    assert resumed["train_loss"] == pytest.approx(straight["train_loss"], rel=1e-4)


def test_attention_is_flash_attention():
    attention = Attention(256, 4).cuda()
    x = torch.randn(2, 512, 256, device="cuda", requires_grad=True)
    # Raises if the fused kernel does not take these tensors.
    with torch.autocast("cuda", torch.bfloat16), sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        attention(x).float().sum().backward()
    assert x.grad.isfinite().all()


@pytest.mark.parametrize("method", ["pipedream", "basis-rotation"])
def test_iterations_do_not_wait_for_the_gpu(method):  # with norms of the updates at each one
    config = apply_overrides(
        MIDDLE, ["training.log_every=1", f"optimizer.method={method}"], "middle"
    )
    tokens = torch.randint(50257, (8, 257), device="cuda")
    engine = assemble(
        config, lambda t: (tokens[:, :-1], tokens[:, 1:].contiguous()), device=tokens.device
    ).engine
    list(engine.run(1, lambda: 3))
    try:
        torch.cuda.set_sync_debug_mode("error")
        list(engine.run(4, lambda: 6))
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(
    "overrides", [[], ["pipeline.stages=1"], ["optimizer.method=basis-rotation"]]
)
def test_peak_is_within_fifteen_percent_of_the_plan(overrides):
    config = apply_overrides(MIDDLE, overrides, "middle")
    assert plan_memory(config, "cuda")[0].peak == pytest.approx(
        measured_peak(config, torch.device("cuda")), rel=0.15
    )


@pytest.mark.parametrize("method", ["pipedream", "basis-rotation"])
@pytest.mark.parametrize("rings", ["device", "host"])
def test_graphs_train_as_eager_iterations(method, rings, tmp_path):
    settings = [f"optimizer.method={method}", f"pipeline.rings={rings}", "runtime.device=cuda"]
    if method == "basis-rotation":
        settings.append("optimizer.frequency=3")
    for graphs in ("false", "true"):
        config = tiny_config(tmp_path, *settings, f"runtime.graphs={graphs}")
        train(config, tmp_path / graphs)
    eager, replayed = (losses(tmp_path / graphs) for graphs in ("false", "true"))
    assert replayed[-1]["val_loss"] == pytest.approx(eager[-1]["val_loss"], rel=1e-4)


def test_graph_draws_new_dropout_masks():
    """A replay moves the device's generator on."""
    stage = StageVersions(torch.nn.Linear(64, 1).cuda(), 0, StageDelay(1))

    def passes(n, inputs, targets):
        dropped = torch.nn.functional.dropout(inputs, 0.5)
        loss = stage.module(dropped).mean()
        loss.backward()
        stage.in_use[0].grad = stage.in_use[1].grad = None
        return PassResults(loss.detach(), None, None)

    graphed = GraphedPasses([stage], passes)
    ones = torch.ones(8, 64, device="cuda")
    seen = {graphed.run(n, ones, ones).loss.item() for n in range(1, NUM_WARM_UPS + 5)}
    assert len(seen) == NUM_WARM_UPS + 4
