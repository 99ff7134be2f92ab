"""torch's own synchronous pipeline as a peer: without delay, the engine trains as it does."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from brx.model.stage import whole_model
from brx.train.build import assemble
from tests.pipeline.test_engine import VOCABULARY, make_config, micro_batch

UPDATES, MICRO_BATCHES = 6, 4


class Logits(nn.Module):
    """A model in the form that torch's pipeline takes: token ids (B, S) to logits (B, S, V)."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, tokens):
        x = self.model.embedding(tokens)
        for block in self.model.blocks.values():
            x = block(x)
        return self.model.head(x)


def loss_of(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


@pytest.fixture
def alone(tmp_path):
    """A process group of one."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def train_by_torch(config, kind):
    """Losses of updates, and the weights by name."""
    model = whole_model(config.model, VOCABULARY, config.training.seed)
    stage = PipelineStage(Logits(model), 0, 1, torch.device("cpu"))
    schedule = kind(stage, MICRO_BATCHES, loss_fn=loss_of)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.01, fused=True)
    lr = assemble(config, micro_batch).updater.lr
    losses = []
    for t in range(1, UPDATES + 1):
        first = (t - 1) * MICRO_BATCHES + 1
        batches = [micro_batch(n) for n in range(first, first + MICRO_BATCHES)]
        inputs, targets = (torch.cat(column) for column in zip(*batches, strict=True))
        optimizer.param_groups[0]["lr"] = lr(t)
        optimizer.zero_grad()
        found = []
        schedule.step(inputs, target=targets, losses=found)
        optimizer.step()
        losses.append(torch.stack(found).mean().item())
    return losses, dict(model.named_parameters())


@pytest.mark.usefixtures("alone")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", [ScheduleGPipe, Schedule1F1B])
def test_engine_without_delay_equals_torchs_pipeline(kind):
    settings = ["pipeline.delay=0", f"pipeline.accumulation={MICRO_BATCHES}", "training.clip=1e9"]
    config = make_config("pipedream", 3, "exact", UPDATES, *settings)
    expected, weights = train_by_torch(config, kind)
    assembly = assemble(config, micro_batch)
    losses = [result.loss.item() for result in assembly.engine.run(1, lambda: UPDATES)]
    assert losses == pytest.approx(expected, rel=1e-5)
    for stage in assembly.stages:
        for name, weight in stage.newest.items():
            torch.testing.assert_close(weight, weights[name], rtol=1e-4, atol=1e-5)
