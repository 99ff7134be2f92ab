"""Error feedback under a delay of one update (arXiv:2606.30634): each update also makes up for the
error of the one before.

With a delay of one update, the update u(t) is computed from a gradient at w(t - 2), the weights to
which update t - 1 was added. So u(t) is what update t - 1 should have been, and u(t) - u(t - 1) is
the error of update t - 1. Error feedback adds it to update t:

    w(t) = w(t - 1) + u(t) + c (u(t) - u(t - 1)),    from t = 2 on.

u(t) is the whole update that the method makes of its gradient, with learning rate and weight decay
and without this correction. So any optimizer can be corrected.

Needs torch alone.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from brx.pipeline.slots import FlatLayout, FlatTensors, copy_tensors


class ErrorFeedback:
    """Corrects the updates of one stage.

    Args:
        layout: the layout of the weights.
        newest: version 0 of the weights.
        coefficient: c.
    """

    def __init__(self, layout: FlatLayout, newest: FlatTensors, coefficient: float) -> None:
        self._coefficient = coefficient
        self._before = layout.like_weights()  # w(t - 1)
        self._last = layout.like_weights()  # u(t - 1)
        self._has_last = False
        copy_tensors(self._before, newest)

    @torch.no_grad()
    def correct(self, newest: FlatTensors) -> None:
        """After update t: change w(t - 1) + u(t) to w(t), in place."""
        # `before` changes from w(t - 1) to u(t).
        torch._foreach_sub_(self._before.buffers, newest.buffers)
        torch._foreach_neg_(self._before.buffers)
        if self._has_last:
            error = torch._foreach_sub(self._before.buffers, self._last.buffers)
            torch._foreach_add_(newest.buffers, error, alpha=self._coefficient)
        self._before, self._last = self._last, self._before
        self._has_last = True
        copy_tensors(self._before, newest)

    def state(self) -> list[Tensor]:
        """The last update of each weight, for a checkpoint (no copies); empty before the first."""
        return self._last.views if self._has_last else []

    def load(self, state: Sequence[Tensor], newest: FlatTensors) -> None:
        """Continue with a saved `state`, after the weights that belong to it have been loaded."""
        self._has_last = bool(state)
        if state:
            copy_tensors(self._last, state)
        copy_tensors(self._before, newest)
