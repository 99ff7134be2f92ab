"""A tiny GPT-2 in Hugging Face's Trainer, on the bytes of Python's manual, at P = 1 and 4: `python
gpt2.py [ITERATIONS]`."""

import argparse
from pydoc_data import topics

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

from brx import delayed, record
from brx.cli.main import main

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("iterations", nargs="?", type=int, default=400, help="default: 400")
iterations = parser.parse_args().iterations
manual = "".join(topics.topics.values())
tokens = torch.frombuffer(bytearray(manual.encode()), dtype=torch.uint8).long()
parts = tokens.split(64)[:-1]  # without the last one, which is shorter
examples = [{"input_ids": part, "labels": part} for part in parts]
SIZES = {"vocab_size": 256, "n_positions": 64, "n_embd": 64, "n_layer": 4, "n_head": 2}


class Log(TrainerCallback):
    """Hands every loss that the Trainer logs to the recorded run."""

    def __init__(self, run):
        self.run = run

    def on_log(self, args, state, control, logs, **_):
        if "loss" in logs:
            self.run.log(state.global_step, logs["loss"])


for stages in (1, 4):
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(**SIZES, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    pipeline = delayed(model, optimizer, stages)
    print(pipeline)
    options = {
        "max_steps": iterations,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
    }
    arguments = TrainingArguments(
        "runs/gpt2-trainer", per_device_train_batch_size=8, disable_tqdm=True, **options
    )
    task = {"task": "GPT-2 on the manual", "iterations": iterations}
    with record(f"runs/gpt2/p{stages}", method="adamw", pipeline=pipeline, lr=1e-3, **task) as run:
        Trainer(
            model,
            arguments,
            train_dataset=examples,
            optimizers=(optimizer, None),
            callbacks=[Log(run)],
        ).train()
main(["slowdown", "runs/gpt2"])
