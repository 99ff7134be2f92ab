"""A small convolutional network with skip connections on scikit-learn's digits, at P = 1 and 4:
`python vision.py [ITERATIONS]`."""

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
images = images.float().view(-1, 1, 8, 8) / 16 - 0.5


class Block(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(4, width)
        self.convolution = nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.convolution(self.norm(x).relu())


for stages in (1, 4):
    torch.manual_seed(0)
    blocks = nn.Sequential(*(Block() for _ in range(8)))
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), blocks, nn.Flatten(), nn.Linear(16 * 64, 10)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    pipeline = delayed(model, optimizer, stages)
    with record(
        f"runs/vision/p{stages}", "adamw", pipeline=pipeline, lr=1e-3, iterations=iterations
    ) as run:
        for t in range(1, iterations + 1):
            chosen = torch.randint(len(images), (32,), generator=torch.Generator().manual_seed(t))
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images[chosen]), labels[chosen])
            loss.backward()
            optimizer.step()
            run.log(t, loss)

main(["slowdown", "runs/vision"])
