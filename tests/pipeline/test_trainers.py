"""`delayed` in others' loops: accelerate, the Hugging Face Trainer, Lightning; against a plain loop."""

import pytest
import torch
from torch import nn

from brx import delayed


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x, labels=None):
        for block in self.blocks:
            x = x + block(x).tanh()
        return {"loss": (x - labels).square().mean()}


def batches(count):
    generator = torch.Generator().manual_seed(1)
    return [{"x": torch.randn(3, 4, generator=generator), "labels": torch.zeros(3, 4)} for _ in range(count)]


def start(stages=4, **settings):
    torch.manual_seed(0)
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    return net, optimizer, delayed(net, optimizer, stages, **settings)


def plain(count, accumulation, stages=4):
    net, optimizer, _ = start(stages)
    for number, batch in enumerate(batches(count * accumulation), start=1):
        (net(**batch)["loss"] / accumulation).backward()
        if number % accumulation == 0:
            optimizer.step()
            optimizer.zero_grad()
    return net.state_dict()


def assert_plain(net, count, accumulation):
    expected, without = plain(count, accumulation), plain(count, accumulation, stages=1)
    for name, weight in net.state_dict().items():
        torch.testing.assert_close(weight, expected[name], rtol=0, atol=1e-6)
    assert any((weight - without[name]).abs().max() > 1e-4 for name, weight in net.state_dict().items())


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_accelerate(accumulation, early):
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=accumulation)
    torch.manual_seed(0)
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    if early:
        delayed(net, optimizer, 4)
    net, optimizer = accelerator.prepare(net, optimizer)
    if not early:
        delayed(net, optimizer, 4)
    for batch in batches(8 * accumulation):
        with accelerator.accumulate(net):
            accelerator.backward(net(**batch)["loss"])
            optimizer.step()
            optimizer.zero_grad()
    assert_plain(accelerator.unwrap_model(net), 8, accumulation)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_hugging_face_trainer(accumulation, tmp_path):
    transformers = pytest.importorskip("transformers")
    net, optimizer, pipeline = start()
    arguments = transformers.TrainingArguments(
        str(tmp_path), max_steps=8, gradient_accumulation_steps=accumulation, per_device_train_batch_size=1,
        max_grad_norm=0, save_strategy="no", report_to="none", use_cpu=True, disable_tqdm=True,
    )  # fmt: skip

    class InOrder(transformers.Trainer):
        def _get_train_sampler(self, dataset=None):
            return torch.utils.data.SequentialSampler(self.train_dataset)

    constant = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: 1.0)
    trainer = InOrder(
        net, arguments, train_dataset=batches(8 * accumulation), optimizers=(optimizer, constant),
        data_collator=lambda examples: examples[0],
    )  # fmt: skip
    trainer.train()
    assert pipeline.updates == 8
    assert_plain(net, 8, accumulation)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_lightning(accumulation, tmp_path):
    lightning = pytest.importorskip("lightning")

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net, self.own, self.pipeline = start()

        def training_step(self, batch):
            return self.net(**batch)["loss"]

        def configure_optimizers(self):
            return self.own

    module = Module()
    trainer = lightning.Trainer(
        accelerator="cpu", max_epochs=1, accumulate_grad_batches=accumulation, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=tmp_path,
    )  # fmt: skip
    trainer.fit(module, torch.utils.data.DataLoader(batches(8 * accumulation), batch_size=None))
    assert module.pipeline.updates == 8
    assert_plain(module.net, 8, accumulation)
