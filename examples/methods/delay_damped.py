r"""SGD with gradients that are damped by their stage's delay.

A torch optimizer is enough for a rule that needs the delay alone: each parameter group has the keys
`stage` and `delay`. Adam divides each gradient by its own running size, so it would ignore a factor
that never changes; a smaller learning rate (`staleness_aware_rate.py`) slows Adam down.

    brx train quick --set pipeline.stages=8 optimizer.lr=0.1 \
        optimizer.method=examples/methods/delay_damped.py:Damped \
        optimizer.arguments='{momentum: 0.9}'
"""

import torch


class Damped(torch.optim.SGD):
    """g <- g / (1 + tau), with the stage's delay tau in updates; then SGD."""

    def step(self, closure=None):
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    weight.grad.div_(1 + group["delay"])
        return super().step(closure)
