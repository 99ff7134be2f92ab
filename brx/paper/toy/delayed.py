"""Descent of a function of a few variables with delayed gradients."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.optim import Optimizer

Loss = Callable[[Tensor], Tensor]


class DelayedDescent:
    """Update t takes the gradient at the point before update t - delay: w(t) = w(t-1) - update(grad f(w(t-1-delay))).

    Args:
        loss: the function, of a vector.
        start: w(0); float64 is best.
        optimizer: makes the optimizer of the point.
        delay: tau, in updates; the first tau updates take the gradient at the start.

    Attributes:
        path: all points so far, w(0) first.
    """

    def __init__(
        self, loss: Loss, start: Tensor, optimizer: Callable[[list[Tensor]], Optimizer], delay: int = 0
    ) -> None:
        self.loss = loss
        self.delay = delay
        self.point = torch.nn.Parameter(start.clone())
        self.path = [start.clone()]
        self._optimizer = optimizer([self.point])

    def update(self) -> Tensor:
        """Make one update; returns the new point."""
        stale = self.path[max(0, len(self.path) - 1 - self.delay)].clone().requires_grad_()
        (self.point.grad,) = torch.autograd.grad(self.loss(stale), stale)
        self._optimizer.step()
        self.path.append(self.point.detach().clone())
        return self.path[-1]

    def until(self, reached: Callable[[Tensor], bool], most: int) -> int | None:
        """Update until a point satisfies `reached`; how many updates that took, None if more than `most`."""
        for count in range(1, most + 1):
            if reached(self.update()):
                return count
        return None
