"""AdaSGD (Wang & Wiens 2020, arXiv:2006.16541): Adam with one adaptive step size for all parameters."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.optim.optimizer import Optimizer, ParamsT


class AdaSGD(Optimizer):
    """SGD with momentum, divided by the root of a running average of the mean squared gradient.

        m <- beta1 m + (1 - beta1) g
        v <- beta2 v + (1 - beta2) mean(g^2)          the mean is over all coordinates of all parameters of the group
        w <- w - lr m^ / (sqrt(v^) + eps)             with Adam's bias corrections

    So it has Adam's step size, but no way to tell coordinates apart.
    """

    def __init__(
        self, params: ParamsT, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8
    ) -> None:
        """
        Raises:
            ValueError: a value is out of range.
        """
        if not lr >= 0.0:
            raise ValueError(f"Invalid {lr=}. Must be >= 0")
        if not all(0.0 <= beta < 1.0 for beta in betas):
            raise ValueError(f"Invalid {betas=}. Must be in [0, 1)")
        if not eps >= 0.0:
            raise ValueError(f"Invalid {eps=}. Must be >= 0")
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "step": 0, "mean_square": 0.0})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Make one update of all parameters that have a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            if not parameters:
                continue
            beta1, beta2 = group["betas"]
            group["step"] += 1
            squares = sum(parameter.grad.square().sum() for parameter in parameters)
            mean = squares / sum(parameter.numel() for parameter in parameters)
            group["mean_square"] = beta2 * group["mean_square"] + (1.0 - beta2) * mean
            root = torch.sqrt(group["mean_square"] / (1.0 - beta2 ** group["step"])) + group["eps"]
            for parameter in parameters:
                average = self.state[parameter].setdefault("exp_avg", torch.zeros_like(parameter))
                average.lerp_(parameter.grad, 1.0 - beta1)
                parameter.sub_(group["lr"] * average / (1.0 - beta1 ** group["step"]) / root)
        return loss
