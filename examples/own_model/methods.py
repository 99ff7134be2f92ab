"""AdamW, Muon and basis rotation on a model of your own, a residual MLP on scikit-learn's digits,
at P = 1 and 16.

`python methods.py [ITERATIONS]` writes runs/methods: each method with three learning rates and two
seeds.
"""

import argparse
from itertools import product

import torch
from sklearn.datasets import load_digits
from torch import nn

from brx import delayed, record
from brx.cli.main import main
from brx.optim import BasisRotation

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("iterations", nargs="?", type=int, default=300, help="default: 300")
iterations = parser.parse_args().iterations
images, labels = (torch.tensor(array) for array in load_digits(return_X_y=True))
images = images.float() / 16 - 0.5
METHODS = {"adamw": torch.optim.AdamW, "muon": torch.optim.Muon, "basis-rotation": BasisRotation}


class Residual(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + super().forward(x)


def block() -> nn.Module:
    return Residual(nn.LayerNorm(64), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))


for method, stages, lr, seed in product(METHODS, (1, 16), (3e-4, 1e-3, 3e-3), (0, 1)):
    torch.manual_seed(seed)
    blocks = nn.Sequential(*(block() for _ in range(16)))
    model = nn.Sequential(*blocks, nn.LayerNorm(64), nn.Linear(64, 10))
    # The matrices inside the network get the method, everything else gets AdamW.
    matrices = [weight for weight in blocks.parameters() if weight.ndim == 2]
    in_matrices = {id(matrix) for matrix in matrices}
    rest = [weight for weight in model.parameters() if id(weight) not in in_matrices]
    settings = {"adjust_lr_fn": "match_rms_adamw"} if method == "muon" else {}
    optimizers = METHODS[method](matrices, lr=lr, **settings), torch.optim.AdamW(rest, lr=lr)
    pipeline = delayed(model, optimizers, stages)
    folder = f"runs/methods/{method}-p{stages}-lr{lr}-s{seed}"
    task = {"task": "residual MLP on digits", "iterations": iterations}
    with record(folder, method, pipeline=pipeline, lr=lr, seed=seed, **task) as run:
        for t in range(1, iterations + 1):
            # The batches depend on the seed and t alone: they are the same for every method and P.
            generator = torch.Generator().manual_seed(seed * 10**6 + t)
            chosen = torch.randint(len(images), (64,), generator=generator)
            loss = nn.functional.cross_entropy(model(images[chosen]), labels[chosen])
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            run.log(t, loss)

main(["slowdown", "runs/methods"])
