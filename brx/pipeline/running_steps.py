"""Which optimizers are in the middle of a step. Needs torch alone."""

from torch.optim import Optimizer

from brx.pipeline.hooks import STEP, num_running


class RunningSteps:
    """Counts the steps that have begun and not ended yet, by the hooks before and after a step.

    Steps nest: an optimizer's `step` may call `super().step()`, which has the same hooks, or the
    `step` of another optimizer.
    """

    def __init__(self) -> None:
        self._depths: dict[Optimizer, int] = {}  # of the optimizers in a step: how deep they nest

    @property
    def has_any(self) -> bool:
        """Whether any optimizer is in a step now (it may be calling a closure)."""
        return bool(self._depths)

    def is_running(self, optimizer: Optimizer) -> bool:
        return optimizer in self._depths

    def begin(self, optimizer: Optimizer) -> None:
        self._depths[optimizer] = self._depths.get(optimizer, 0) + 1

    def end(self, optimizer: Optimizer) -> None:
        depth = self._depths.pop(optimizer, 1) - 1
        if depth:
            self._depths[optimizer] = depth

    def forget_failed(self, starting: Optimizer | None = None) -> None:
        """Forget steps that an exception has broken off, which no hook sees.

        Args:
            starting: the optimizer whose step begins now, so that it is on the stack already.
        """
        for optimizer in list(self._depths):
            num_on_stack = num_running(STEP, optimizer)
            if optimizer is starting:
                num_on_stack -= 1
            if num_on_stack <= 0:
                del self._depths[optimizer]
