r"""AdamW at a learning rate divided by the delay (staleness-aware SGD, Zhang et al. 2016,
arXiv:1511.05950).

    brx train quick --set pipeline.stages=8 \
        optimizer.method=examples/methods/staleness_aware_rate.py:StalenessAware
"""

from brx.methods.method import Method


class StalenessAware(Method):
    """lr / tau_updates ** power; a stage without delay keeps its rate."""

    summary = "AdamW at lr / tau^power"

    def __init__(self, power: float = 1.0) -> None:
        self.power = power

    def lr_divisor(self, tau_updates: float, t: int, T: int) -> float:
        return max(1.0, tau_updates) ** self.power
