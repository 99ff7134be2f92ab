"""The update under way in a user's loop: how many of its micro-batches have been made. Needs torch
alone.

An update ends with the optimizer's step. A loop may also skip a step (after an infinite gradient,
for example): it clears the gradients, and the next micro-batch is the first one again. No hook sees
gradients being cleared, so `UpdateUnderWay` looks at them. With M = 2 micro-batches per update:

    what the loop does                          num_windows  num_backward  num_cleared
    micro-batch 1: forward and backward pass    1            1             0
    micro-batch 2: forward and backward pass    2            2             0
    zero_grad() instead of a step               2            2             0
    the next forward pass begins                1            0             2
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from brx.errors import UserError
from brx.pipeline.hooks import has_nonzero


@dataclass
class UpdateUnderWay:
    """Counts the micro-batches of one update."""

    parameters: Sequence[Tensor]
    """Those that train."""
    accumulation: int
    """M, the micro-batches per update."""
    num_windows: int = 0
    """The micro-batches whose forward pass has begun."""
    num_backward: int = 0
    """The micro-batches whose backward pass has ended."""
    num_cleared: int = 0
    """The backward passes before these whose gradients the loop has cleared."""
    gradients_left: list[tuple[int, int]] | None = None
    """`_marks_of` the parameters when the last backward pass ended; None if that is not known."""
    are_gradients_elsewhere: bool = False
    """Whether the last backward pass left its gradients elsewhere than at the parameters. FSDP2
    keeps them until a micro-batch with gradient synchronization."""

    @property
    def has_all_backward(self) -> bool:
        """Whether the M backward passes have been made, so that a step may follow."""
        return self.num_backward >= self.accumulation

    @property
    def may_be_over(self) -> bool:
        """Whether a step may have ended the update: the M backward passes have been made, or fewer
        (the last ones of an epoch), whose gradients have been cleared since."""
        if self.has_all_backward:
            return True
        return self.num_backward > 0 and self._are_gradients_gone()

    def begin_window(self) -> int:
        """Count a micro-batch that begins. Returns j, its number within the update, at most M."""
        if self.num_backward and self._are_gradients_gone():
            # A step was skipped: count from 0 again.
            self.num_cleared += self.num_backward
            self.num_windows = 0
            self.num_backward = 0
        self.num_windows += 1
        return min(self.num_windows, self.accumulation)

    def restart_if_cleared(self) -> None:
        """Notice, at the begin of a backward pass, that a loop that skips a step has cleared its
        gradients only after the forward pass.

        That micro-batch is then the first of its update. With M = 1, its forward pass has used the
        right version even so. With a larger M it has not: UserError."""
        if not self.num_backward or not self._are_gradients_gone():
            return
        self.num_backward = 0
        if self.accumulation > 1:
            raise UserError(
                "delayed: gradients of a skipped step were cleared between a forward pass and its "
                f"backward pass, with accumulation={self.accumulation}; call zero_grad() before "
                "the forward pass"
            )

    def end_backward(self, *, has_gradients: bool) -> None:
        """Count a micro-batch whose backward pass has ended.

        Args:
            has_gradients: whether gradients of its passes have arrived at parameters.
        """
        self.num_backward += 1
        if self.accumulation > 1:
            self.gradients_left = _marks_of(self.parameters)
            self.are_gradients_elsewhere = not self.gradients_left and not has_gradients

    def _are_gradients_gone(self) -> bool:
        """Whether the gradients of the backward passes so far have been cleared, to None or to
        zero."""
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        if not self.has_all_backward:
            if self.are_gradients_elsewhere:
                return False
            # Between two micro-batches the gradients are usually left as they were. To see that, no
            # host needs to wait for the device, as it does in the search for nonzeros below.
            is_untouched = self.gradients_left == _marks_of(self.parameters)
            if gradients and is_untouched:
                return False
        return not any(has_nonzero(gradient) for gradient in gradients)


def _marks_of(parameters: Sequence[Tensor]) -> list[tuple[int, int]]:
    """The id and the version counter of each parameter's gradient, in order. They change when a
    gradient is replaced or written."""
    marks = []
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is not None:
            # Tensors that were made in inference mode do not count their versions.
            counter = 0 if gradient.is_inference() else gradient._version
            marks.append((id(gradient), counter))
    return marks
