"""An MLP on scikit-learn's digits, without delay and in a pipeline of 8 stages: `python mlp.py
[ITERATIONS]`."""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn

from brx import delayed, record
from brx.cli.main import main

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("iterations", nargs="?", type=int, default=400, help="default: 400")
iterations = parser.parse_args().iterations
images, labels = (torch.tensor(array) for array in load_digits(return_X_y=True))
images = images.float() / 16 - 0.5

for stages in (1, 8):
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.ReLU()) for _ in range(8)]
    model = nn.Sequential(*blocks, nn.Linear(64, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    pipeline = delayed(model, optimizer, stages)
    with record(
        f"runs/mlp/p{stages}", "adamw", pipeline=pipeline, lr=3e-4, iterations=iterations
    ) as run:
        for t in range(1, iterations + 1):
            chosen = torch.randint(len(images), (64,), generator=torch.Generator().manual_seed(t))
            loss = nn.functional.cross_entropy(model(images[chosen]), labels[chosen])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            run.log(t, loss)

main(["slowdown", "runs/mlp"])
