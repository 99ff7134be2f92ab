"""Copies of a user's model, and its state dict, have the newest weights, even if they are made in
the middle of a window. Needs torch alone."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn

from brx.errors import UserError
from brx.pipeline.history import contents
from brx.pipeline.hooks import STATE_DICT, num_running
from brx.pipeline.windows import Window, Windows


class CopyHooks:
    """Each hook shows the newest weights before a copy, and the window's contents again after it.

    Args:
        windows: the windows of the model.
        parameters: the parameters that train.
        is_in_evaluation: whether an evaluation is running: a call of the model that is no training
            pass.
        running_elsewhere: which pass of the model is running in another thread ("forward" or
            "backward"); None if there is none.
    """

    def __init__(
        self,
        windows: Windows,
        parameters: Sequence[Tensor],
        is_in_evaluation: Callable[[], bool],
        running_elsewhere: Callable[[], str | None],
    ) -> None:
        self._windows = windows
        self._parameters = list(parameters)
        self._is_in_evaluation = is_in_evaluation
        self._running_elsewhere = running_elsewhere
        # The module whose state dict is being made. Within it, torch makes those of its children.
        self._saving: nn.Module | None = None

    # `copy.deepcopy(model)`, and pickle

    def before_copy(self, memo: dict[int, Any]) -> Callable[[], None] | None:
        """Show the newest weights to a copy that is about to be made or saved.

        Args:
            memo: by the id of what has been copied already: its copy.

        Returns:
            A function for the end of the copy; None if no window is open.
        """
        self._refuse_other_threads("copied or saved")
        window = self._windows.current
        if window is None or self._windows.is_peeking:
            return None
        self._windows.peek()
        for parameter in self._parameters:
            copied = memo.get(id(parameter))  # this parameter was copied with its old version
            if isinstance(copied, Tensor):
                contents(copied).copy_(contents(parameter))
        return partial(self._after_copy, window)

    def _after_copy(self, window: Window) -> None:
        if self._windows.current is not window:
            # Something has kept the copy's memo alive, and the loop has gone on.
            return
        # An evaluation or a state dict that runs now needs the newest weights for itself. A
        # training pass that has made the copy goes on with the window's contents.
        if not self._is_in_evaluation() and not self._is_saving():
            self._windows.end_peek()

    # `model.load_state_dict()`

    def before_load(self, module: nn.Module, *args: Any) -> None:
        """Close the window, so that the state goes into the newest weights."""
        self._refuse_other_threads("loaded")
        self._windows.close()

    # `model.state_dict()`

    def before_state_dict(self, module: nn.Module, *args: Any) -> None:
        """Show the newest weights to the outermost module of those whose state dicts are made."""
        self._refuse_other_threads("saved")
        # No module is within itself: where it comes again, its last state dict has failed.
        is_outermost = module is self._saving or not self._is_saving()
        is_in_window = self._windows.current is not None
        holds_older = is_in_window and self._windows.versions.history is not None
        if is_outermost and holds_older:
            self._saving = module
            self._windows.peek()

    def _is_saving(self) -> bool:
        """Whether a state dict is being made at the moment."""
        if self._saving is not None and not num_running(STATE_DICT, self._saving):
            self._saving = None  # it failed, which no hook sees
        return self._saving is not None

    def after_state_dict(self, module: nn.Module, state: dict[str, Any], *args: Any) -> None:
        """Replace the state's tensors by copies of the newest weights. The tensors themselves are
        about to hold the window's contents again."""
        if module is not self._saving:
            return
        self._saving = None
        if not self._windows.is_peeking:
            raise UserError(
                "delayed: a pass of the model began in another thread while the model was saved; "
                "take a lock around both"
            )
        held = {_storage(parameter) for parameter in self._parameters}
        for key, value in state.items():
            if isinstance(value, Tensor) and _storage(value) in held:
                state[key] = value.clone()
        # An evaluation that runs now needs the newest weights until it ends.
        if not self._is_in_evaluation():
            self._windows.end_peek()

    def _refuse_other_threads(self, action: str) -> None:
        """UserError while another thread is in a pass: the newest weights would be shown in the
        middle of it."""
        running = self._running_elsewhere()
        if running is not None:
            raise UserError(
                f"delayed: the model is {action} while its {running} pass runs in another thread; "
                "take a lock around both"
            )


def _storage(tensor: Tensor) -> int:
    return contents(tensor).untyped_storage().data_ptr()
