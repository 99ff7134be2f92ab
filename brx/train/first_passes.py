"""Looks at the first passes of a user's own model on the real device.

The check before training runs on the meta device (`brx.model.checks`). A model with a branch for
that device may do there what it never does in training.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from brx.errors import UserError
from brx.model.checks import Buffers, buffers_of, check_buffers
from brx.pipeline.versions import StageVersions
from brx.train.device import generator_states


class FirstPasses:
    """Refuses a model whose passes draw random numbers or change a buffer, before the first update
    of a session. The engine shows it its passes and updates (`brx.pipeline.engine.Watcher`).

    Args:
        where: the model's key and name, for messages.
        stages: the stages of this device.
        others_draw: whether others than the model may draw random numbers between the first forward
            pass and the first step of the optimizer: a compiler, or a gradient rule.
    """

    def __init__(self, where: str, stages: Sequence[StageVersions], *, others_draw: bool) -> None:
        self._where = where
        self._others_draw = others_draw
        self._stages = list(stages)
        self._device = stages[0].device
        self._is_over = False
        # Before the first forward pass; empty until then.
        self._generators: dict[str, Tensor] = {}
        self._buffers: list[Buffers] = []  # by stage

    def before_forward(self, micro_batch: int) -> None:
        """Note the state before the first forward pass."""
        if not self._generators:
            self._generators = generator_states(self._device)
            self._buffers = [buffers_of(stage.module) for stage in self._stages]

    def before_step(self, t: int) -> None:
        """Compare the state with the one before the first forward pass.

        Raises:
            UserError: the passes draw random numbers, or change a buffer.
        """
        if self._is_over:
            return
        self._is_over = True
        for generator, state in generator_states(self._device).items():
            is_drawn_from = not torch.equal(state, self._generators[generator])
            if is_drawn_from and not self._others_draw:
                raise UserError(
                    f"{self._where}: its passes draw random numbers (dropout, perhaps), which would"
                    " depend on the number of devices; leave them out"
                )
        for stage, buffers in zip(self._stages, self._buffers, strict=True):
            check_buffers(stage.module, buffers, f"{self._where}: ")
        self._buffers = []

    def after_step(self, t: int) -> None:
        """Nothing is left to look at."""
