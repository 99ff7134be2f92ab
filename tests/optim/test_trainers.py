"""One optimizer for a whole model in the training loops of others: HF Trainer, Lightning, ZeRO, DDP, our example."""

import runpy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from brx.optim import BasisRotation, param_groups


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.body = nn.Sequential(nn.Linear(24, 16), nn.GELU(), nn.Linear(16, 8))
        self.head = nn.Linear(8, 11)

    def forward(self, inputs, labels=None):
        logits = self.head(self.body(self.embedding(inputs).flatten(1)))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def data():
    inputs = torch.randint(11, (64, 3), generator=torch.Generator().manual_seed(0))
    return [{"inputs": row, "labels": row[0]} for row in inputs]


def loss_of(model):
    return model(**torch.utils.data.default_collate(data()))["loss"]


def make():
    torch.manual_seed(0)
    model = Model()
    return model, BasisRotation(param_groups(model), lr=1e-2)


def test_example_of_the_documentation():
    example = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "optimizer.py"))
    first, last = example["train"](lambda model: BasisRotation(param_groups(model), lr=1e-2), num_steps=60)
    assert last < first / 5


def test_hf_trainer(tmp_path):
    transformers = pytest.importorskip("transformers")
    model, optimizer = make()
    before = loss_of(model).item()
    arguments = transformers.TrainingArguments(
        str(tmp_path), max_steps=12, per_device_train_batch_size=16, save_steps=6, report_to=[], use_cpu=True
    )
    trainer = transformers.Trainer(model, arguments, train_dataset=data(), optimizers=(optimizer, None))
    trainer.train()
    assert loss_of(model).item() < before
    again, fresh = make()
    resumed = transformers.Trainer(again, arguments, train_dataset=data(), optimizers=(fresh, None))
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-6"))
    torch.testing.assert_close(list(model.parameters()), list(again.parameters()))


def test_hf_trainer_makes_the_optimizer_and_its_groups(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=2, n_embd=16, n_head=2, n_positions=16, vocab_size=11)
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(config)  # tied, and as wide as it has positions
    rows = [{"input_ids": torch.arange(k, k + 8) % 11, "labels": torch.arange(k, k + 8) % 11} for k in range(16)]
    arguments = transformers.TrainingArguments(
        str(tmp_path), max_steps=12, weight_decay=0.1, save_strategy="no", report_to=[], use_cpu=True
    )
    choice = (BasisRotation, {"lr": 1e-2, "rest_lr": 3e-3})
    trainer = transformers.Trainer(model, arguments, train_dataset=rows, optimizer_cls_and_kwargs=choice)
    with pytest.warns(UserWarning, match="parameters have no side to rotate"):
        trainer.train()
    groups = [(g["rotate"], g["weight_decay"], g["initial_lr"]) for g in trainer.optimizer.param_groups]
    assert groups == [(True, 0.1, 1e-2), (False, 0.0, 3e-3)]
    assert trainer.state.log_history[-1]["train_loss"] < 2.5
    found = {row.name: row for row in BasisRotation(param_groups(model)).summary()}
    assert found["transformer.h.1.mlp.c_proj.weight"].sides == ("left", "right")
    assert found["transformer.h.0.attn.c_attn.weight"].matrices == (3, 16, 16)
    assert {name for name, row in found.items() if len(row.shape) == 2 and not row.sides} == {
        "transformer.wte.weight",
        "transformer.wpe.weight",
    }


def test_lightning(tmp_path):
    lightning = pytest.importorskip("pytorch_lightning")

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = make()[0]

        def training_step(self, batch, _):
            return self.model(**batch)["loss"]

        def configure_optimizers(self):
            return BasisRotation(param_groups(self.model), lr=1e-2)

    module = Module()
    before = loss_of(module.model).item()
    options = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "default_root_dir": tmp_path}
    trainer = lightning.Trainer(max_epochs=3, **options)
    trainer.fit(module, torch.utils.data.DataLoader(data(), batch_size=16))
    assert loss_of(module.model).item() < before


def test_ddp_and_zero(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        from torch.distributed.optim import ZeroRedundancyOptimizer

        (model, _), (twin, plain) = make(), make()
        matrices = [p for group in param_groups(model) if group["rotate"] for _, p in group["params"]]
        zero = ZeroRedundancyOptimizer(matrices, BasisRotation, lr=1e-2)
        for group in plain.param_groups:
            group["lr"] = 1e-2 if group["rotate"] else 0.0
        parallel = nn.parallel.DistributedDataParallel(model)
        for _ in range(3):
            for one, optimizer in ((parallel, zero), (twin, plain)):
                one.zero_grad()
                loss_of(one).backward()
                optimizer.step()
        torch.testing.assert_close(list(model.parameters()), list(twin.parameters()))
    finally:
        dist.destroy_process_group()
