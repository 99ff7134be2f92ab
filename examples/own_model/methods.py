"""AdamW, Muon and basis rotation on a model of your own, a residual MLP on scikit-learn's digits,
at P = 1 and 16.

python methods.py [ITERATIONS] writes runs/methods: three learning rates and two seeds of each.
"""

import sys
from itertools import product

import torch
from sklearn.datasets import load_digits
from torch import nn

from brx import delayed, record
from brx.cli.main import main
from brx.optim import BasisRotation

iterations = int(sys.argv[1]) if len(sys.argv) > 1 else 300
images, labels = (torch.tensor(array) for array in load_digits(return_X_y=True))
images = images.float() / 16 - 0.5
METHODS = {"adamw": torch.optim.AdamW, "muon": torch.optim.Muon, "basis-rotation": BasisRotation}


class Block(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + super().forward(x)


for method, stages, lr, seed in product(METHODS, (1, 16), (3e-4, 1e-3, 3e-3), (0, 1)):
    torch.manual_seed(seed)
    layers = [
        Block(nn.LayerNorm(64), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)) for _ in range(16)
    ]
    model = nn.Sequential(*layers, nn.LayerNorm(64), nn.Linear(64, 10))
    matrices = [weight for weight in nn.Sequential(*layers).parameters() if weight.ndim == 2]
    rest = [
        weight for weight in model.parameters() if all(weight is not matrix for matrix in matrices)
    ]
    settings = {"adjust_lr_fn": "match_rms_adamw"} if method == "muon" else {}
    optimizers = METHODS[method](matrices, lr=lr, **settings), torch.optim.AdamW(rest, lr=lr)
    pipeline, name = (
        delayed(model, optimizers, stages),
        f"runs/methods/{method}-p{stages}-lr{lr}-s{seed}",
    )
    task = {"task": "residual MLP on digits", "iterations": iterations}
    with record(name, method, pipeline=pipeline, lr=lr, seed=seed, **task) as run:
        for t in range(1, iterations + 1):
            chosen = torch.randint(
                len(images), (64,), generator=torch.Generator().manual_seed(seed * 10**6 + t)
            )
            (loss := nn.functional.cross_entropy(model(images[chosen]), labels[chosen])).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            run.log(t, loss)
main(["slowdown", "runs/methods"])
