"""One optimizer for a whole model in the training loops of others: HF Trainer, Lightning, ZeRO,
DDP, our example."""

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


def make():
    torch.manual_seed(0)
    model = Model()
    return model, BasisRotation(param_groups(model), lr=1e-2)


def test_example_of_the_documentation():
    example = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "optimizer.py"))
    first, last = example["train"](
        lambda model: BasisRotation(param_groups(model), lr=1e-2), num_steps=60
    )
    assert last < first / 5


@pytest.fixture(scope="module")
def hf(tmp_path_factory):
    """Two models of transformers' Trainer, the second resumed in the middle, and the optimizer that
    the Trainer made for it."""
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=2, n_embd=16, n_head=2, n_positions=16, vocab_size=11)
    rows = [
        {"input_ids": torch.arange(k, k + 8) % 11, "labels": torch.arange(k, k + 8) % 11}
        for k in range(16)
    ]
    folder = tmp_path_factory.mktemp("hf")
    arguments = transformers.TrainingArguments(
        str(folder), max_steps=12, weight_decay=0.1, save_steps=6, report_to=[], use_cpu=True
    )
    choice = (BasisRotation, {"lr": 1e-2, "rest_lr": 3e-3})
    models = []
    for checkpoint in (None, str(folder / "checkpoint-6")):
        torch.manual_seed(0)
        models.append(transformers.GPT2LMHeadModel(config))  # tied, and as wide as it has positions
        trainer = transformers.Trainer(
            models[-1], arguments, train_dataset=rows, optimizer_cls_and_kwargs=choice
        )
        with pytest.warns(UserWarning, match="parameters have no side to rotate"):
            trainer.train(resume_from_checkpoint=checkpoint)
    return models, trainer.optimizer


def test_hf_trainer_resumes(hf):
    (straight, resumed), _ = hf
    torch.testing.assert_close(list(resumed.parameters()), list(straight.parameters()))


def test_hf_trainer_groups_by_weight_decay(hf):
    _, optimizer = hf
    groups = [(group["weight_decay"], group["initial_lr"]) for group in optimizer.param_groups]
    assert groups == [(0.1, 1e-2), (0.0, 1e-2)]
    assert optimizer.param_groups[1]["rest_factor"] == pytest.approx(0.3)


def test_roles_of_a_hf_model_are_found(hf):
    (model, _), _ = hf
    found = {row.name: row for row in BasisRotation(param_groups(model)).summary()}
    assert found["transformer.h.1.mlp.c_proj.weight"].sides == ("left", "right")
    assert found["transformer.h.0.attn.c_attn.weight"].matrices == (3, 16, 16)
    tables = {name for name, row in found.items() if len(row.shape) == 2 and not row.sides}
    assert tables == {"transformer.wte.weight", "transformer.wpe.weight"}


def test_lightning_trains_as_a_plain_loop(tmp_path):
    lightning = pytest.importorskip("pytorch_lightning")

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model, self.optimizer = make()

        def training_step(self, batch, _):
            return self.model(**batch)["loss"]

        def configure_optimizers(self):
            return self.optimizer

    def batches():
        return torch.utils.data.DataLoader(data(), batch_size=16)

    module = Module()
    quiet = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False}
    trainer = lightning.Trainer(max_epochs=3, accelerator="cpu", default_root_dir=tmp_path, **quiet)
    trainer.fit(module, batches())
    model, optimizer = make()
    for _ in range(3):
        for batch in batches():
            optimizer.zero_grad()
            model(**batch)["loss"].backward()
            optimizer.step()
    trained, expected = list(module.model.parameters()), list(model.parameters())
    torch.testing.assert_close(trained, expected, rtol=0, atol=0)


def test_ddp_with_zero_trains_as_a_plain_loop(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        from torch.distributed.optim import ZeroRedundancyOptimizer

        (model, _), (twin, plain) = make(), make()
        matrices = [
            p for group in param_groups(model) if group["rotate"] for _, p in group["params"]
        ]
        zero = ZeroRedundancyOptimizer(matrices, BasisRotation, lr=1e-2)
        for group in plain.param_groups:
            group["lr"] = 1e-2 if group["rotate"] else 0.0
        parallel = nn.parallel.DistributedDataParallel(model)
        for _ in range(3):
            for one, optimizer in ((parallel, zero), (twin, plain)):
                one.zero_grad()
                one(**torch.utils.data.default_collate(data()))["loss"].backward()
                optimizer.step()
        torch.testing.assert_close(list(model.parameters()), list(twin.parameters()))
        # A reducer that outlives its group may wait for good (pytorch/pytorch#56297).
        del parallel
    finally:
        dist.destroy_process_group()
