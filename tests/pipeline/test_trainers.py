"""`delayed` in others' loops: accelerate, the Hugging Face Trainer, Lightning; against a plain loop."""

import pytest
import torch
from torch import nn

from tests.pipeline import test_anywhere

M = 2


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x, labels=None):
        for block in self.blocks:
            x = x + block(x).tanh()
        return {"loss": (x - labels).square().mean()}


def batches(count=8 * M):
    generator = torch.Generator().manual_seed(1)
    return [{"x": torch.randn(3, 4, generator=generator), "labels": torch.zeros(3, 4)} for _ in range(count)]


def start(stages=4):
    torch.manual_seed(0)
    return test_anywhere.start(Net(), stages)


def plain(stages):
    net, optimizer, _ = start(stages)
    for number, batch in enumerate(batches(), start=1):
        (net(**batch)["loss"] / M).backward()
        if number % M == 0:
            optimizer.step()
            optimizer.zero_grad()
    return net.state_dict()


def assert_plain(net):
    expected, without = plain(stages=4), plain(stages=1)
    for name, weight in net.state_dict().items():
        torch.testing.assert_close(weight, expected[name], rtol=0, atol=1e-6)
    assert any((weight - without[name]).abs().max() > 1e-4 for name, weight in net.state_dict().items())


@pytest.mark.parametrize("is_early", [True, False])
def test_accelerate(is_early):
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=M)
    net, optimizer, pipeline = start()
    if not is_early:
        pipeline.remove()
    net, optimizer = accelerator.prepare(net, optimizer)
    if not is_early:
        test_anywhere.delayed(net, optimizer, 4)
    for batch in batches():
        with accelerator.accumulate(net):
            accelerator.backward(net(**batch)["loss"])
            optimizer.step()
            optimizer.zero_grad()
    assert_plain(accelerator.unwrap_model(net))


def test_hugging_face_trainer(tmp_path):
    transformers = pytest.importorskip("transformers")
    net, optimizer, pipeline = start()
    arguments = transformers.TrainingArguments(
        str(tmp_path), max_steps=8, gradient_accumulation_steps=M, per_device_train_batch_size=1,
        max_grad_norm=0, save_strategy="no", report_to="none", use_cpu=True, disable_tqdm=True,
    )  # fmt: skip

    class InOrder(transformers.Trainer):
        def _get_train_sampler(self, dataset=None):
            return torch.utils.data.SequentialSampler(self.train_dataset)

    constant = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: 1.0)
    trainer = InOrder(
        net, arguments, train_dataset=batches(), optimizers=(optimizer, constant), data_collator=lambda found: found[0]
    )
    trainer.train()
    assert pipeline.updates == 8
    assert_plain(net)


def test_lightning(tmp_path):
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
        accelerator="cpu", max_epochs=1, accumulate_grad_batches=M, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=tmp_path,
    )  # fmt: skip
    trainer.fit(module, torch.utils.data.DataLoader(batches(), batch_size=None))
    assert module.pipeline.updates == 8
    assert_plain(module.net)
