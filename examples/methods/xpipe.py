"""AdamW whose passes use the weights that Adam's next steps will probably reach (XPipe, Guan et al.
2019, arXiv:1911.04610).

    brx train quick --set pipeline.stages=8 optimizer.method=examples/methods/xpipe.py:XPipe
"""

from torch import Tensor
from torch.optim import Optimizer

from brx.methods.groups import stage_groups
from brx.methods.method import Method, Stages


class XPipe(Method):
    """Both passes use w - strength tau lr m^ / (sqrt(v^) + eps), with the moments and the learning
    rate of the last update."""

    summary = "AdamW at predicted weights: tau of Adam's last steps ahead"

    def __init__(self, strength: float = 1.0) -> None:
        self.strength = strength

    def optimizers(self, stages: Stages) -> list[Optimizer]:
        self.adam = self.adamw(stage_groups(stages))
        return [self.adam]

    def forecast(
        self, newest: list[Tensor], update: list[Tensor], tau_updates: float, state: list[dict]
    ) -> list[Tensor]:
        group = self.adam.param_groups[0]  # the learning rate is the same for all stages
        beta1, beta2 = group["betas"]
        predicted = []
        for weight in newest:
            moments = self.adam.state[weight]
            step = moments["step"].item()
            mean = moments["exp_avg"] / (1 - beta1**step)  # m^
            root = (moments["exp_avg_sq"] / (1 - beta2**step)).sqrt()  # sqrt(v^)
            distance = self.strength * tau_updates * group["lr"]
            predicted.append(weight - distance * mean / (root + group["eps"]))
        return predicted
