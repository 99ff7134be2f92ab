r"""Lion (Chen et al. 2023, arXiv:2302.06675) on the matrices of attention and MLPs, AdamW on
everything else.

    brx train quick --set pipeline.stages=8 \
        optimizer.method=examples/methods/lion_on_matrices.py:LionOnMatrices
"""

import torch
from torch.optim import Optimizer

from brx.methods.method import Group, Method


class Lion(Optimizer):
    """w <- (1 - lr wd) w - lr sign(beta1 m + (1 - beta1) g); m <- beta2 m + (1 - beta2) g."""

    def __init__(self, params, lr, betas=(0.9, 0.99), weight_decay=0.1):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for weight in group["params"]:
                average = self.state[weight].setdefault("exp_avg", torch.zeros_like(weight))
                # torch.lerp(g, m, beta1) = (1 - beta1) g + beta1 m
                direction = torch.lerp(weight.grad, average, beta1).sign()
                weight.mul_(1 - group["lr"] * group["weight_decay"])
                weight.sub_(direction, alpha=group["lr"])
                average.lerp_(weight.grad, 1 - beta2)


class LionOnMatrices(Method):
    """Every entry of a Lion update has the size lr, which is more than in most AdamW updates. So
    Lion needs a smaller learning rate."""

    summary = "Lion on the matrices, AdamW on the rest"

    def __init__(self, relative_lr: float = 0.2) -> None:
        self.relative_lr = relative_lr

    def matrices(self, groups: list[Group]) -> Optimizer:
        return Lion(groups, lr=self.lr * self.relative_lr)
