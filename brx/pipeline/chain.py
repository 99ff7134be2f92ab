"""The forward pass of a micro-batch through a device's stages, one after another.

Shape legend: B examples, S positions, D width.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.profiler import record_function


class ChainOutput(NamedTuple):
    """The output of the last stage of a device, and the auxiliary losses of all its stages."""

    stream: Tensor  # (B, S, D)
    loss: Tensor | None  # (), mean cross-entropy in nats; None on all devices but the last
    auxiliary_losses: Tensor | None  # (stages with a mixture of experts,); None if there is none


class Chain:
    """Stages that compute one after another.

    Args:
        modules: the stages' modules, in the order of the model.
        first: the index of the first stage.
        autocast: makes the context in which a forward pass runs.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        first: int = 0,
        autocast: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        self._autocast = autocast
        self._run = _in_order(list(modules), first)

    def compile(self) -> None:
        """Let `torch.compile` make one graph of all stages, instead of one per block.

        Each shape of micro-batch gets a graph of its own, so that a resumed run computes with the
        same ones."""
        self._run = torch.compile(self._run, dynamic=False)

    def __call__(
        self,
        x: Tensor,  # token ids (B, S) on the first device, else the residual stream (B, S, D)
        targets: Tensor | None,  # (B, S); only the last device needs them
    ) -> ChainOutput:
        """Run the stages."""
        with self._autocast():
            return self._run(x, targets)


def _in_order(
    modules: list[nn.Module], first: int
) -> Callable[[Tensor, Tensor | None], ChainOutput]:
    """A function that runs the modules in turn. It depends on nothing else, so that `torch.compile`
    can make one graph of it."""

    def run(x: Tensor, targets: Tensor | None) -> ChainOutput:
        auxiliary_losses = []
        loss = None
        for index, module in enumerate(modules, first):
            with _named(index):
                x, loss, auxiliary_loss = module(x, targets)
            if auxiliary_loss is not None:
                auxiliary_losses.append(auxiliary_loss)
        return ChainOutput(x, loss, torch.stack(auxiliary_losses) if auxiliary_losses else None)

    return run


def _named(stage: int) -> AbstractContextManager[object]:
    """The stage's name in a profile. A compiled graph has none."""
    if torch.compiler.is_compiling():
        return nullcontext()
    return record_function(f"stage {stage}")
