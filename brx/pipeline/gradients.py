"""The gradients of all stages of a device: they move from the weights in use to the newest weights,
are averaged over the micro-batches of an update, and clipped.

One operation moves or scales the gradients of all stages, where possible. The gradients of an
update always lie at the same addresses.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain

import torch
from torch import Tensor, nn

from brx.pipeline.slots import FlatTensors
from brx.pipeline.versions import StageVersions

EPSILON = 1e-6  # added to a norm before dividing by it, as in torch.nn.utils.clip_grad_norm_


@dataclass
class _Alike:
    """Weights of all stages whose gradients one operation can move, because they have the same
    device and data types. The three lists have the same order."""

    newest: list[nn.Parameter] = field(default_factory=list)
    in_use: list[nn.Parameter] = field(default_factory=list)
    # The update's gradients, at fixed addresses.
    gradients: list[Tensor] = field(default_factory=list)

    @property
    def is_cast(self) -> bool:
        """Whether gradients arrive in another data type than the newest weights have."""
        return self.newest[0].dtype != self.in_use[0].dtype


class Gradients:
    """The gradients of the stages of one device.

    After the backward pass of each micro-batch, `hand_over` moves its gradients to the newest
    weights. There a method may correct them. Then `accumulate` adds them to the update's gradients.
    After the last of M micro-batches, the newest weights have the mean of M gradients, and `clip`
    scales it.

    Args:
        stages: all stages of the device.
    """

    def __init__(self, stages: Sequence[StageVersions]) -> None:
        self._stages = list(stages)
        self._accumulation = stages[0].delay.accumulation
        self._flat: list[FlatTensors] = [stage.layout.like_weights() for stage in stages]
        alike: dict[object, _Alike] = {}
        for stage, flat in zip(self._stages, self._flat, strict=True):
            columns = zip(stage.newest.values(), stage.in_use, flat.views, strict=True)
            for newest, in_use, gradient in columns:
                kind = (newest.device, newest.dtype, in_use.dtype)
                group = alike.setdefault(kind, _Alike())
                group.newest.append(newest)
                group.in_use.append(in_use)
                group.gradients.append(gradient)
        self._alike = list(alike.values())
        # By weight: whether a micro-batch of the next update has given it a gradient.
        self._is_in_sum: list[list[bool]] = []

    @torch.no_grad()
    def hand_over(self, micro_batch: int) -> None:
        """Move the gradients of a micro-batch (from 1) from the weights in use to the newest
        weights, cast to the data type of the newest weights."""
        if self._is_first(micro_batch):
            for alike in self._alike:
                _hand_over(alike, alike.gradients)
            if self._accumulation > 1:
                self._is_in_sum = self._with_gradients()
            return
        # Gradients of a later micro-batch live until they have been added to the sum.
        for alike in self._alike:
            if alike.is_cast:
                _hand_over(alike, [torch.empty_like(gradient) for gradient in alike.gradients])
            else:
                _hand_over_as_they_are(alike)

    @torch.no_grad()
    def accumulate(self, micro_batch: int) -> None:
        """Add the newest weights' gradients to those of the update. With the update's last
        micro-batch, the newest weights have the mean."""
        if self._accumulation == 1:
            return
        # The sum begins with the first micro-batch and goes on in order: it rounds in the same way
        # on any number of devices.
        if not self._is_first(micro_batch):
            self._add()
        if not self._ends_update(micro_batch):
            # Without delay, autograd would add the next micro-batch's gradients to these.
            self.drop()
            return
        for buffers in self._buffers_by_dtype():
            torch._foreach_div_(buffers, self._accumulation)
        for alike, is_in_sum in zip(self._alike, self._is_in_sum, strict=True):
            columns = zip(alike.newest, alike.gradients, is_in_sum, strict=True)
            for weight, gradient, has_gradient in columns:
                weight.grad = gradient if has_gradient else None

    def _with_gradients(self) -> list[list[bool]]:
        """Which of the newest weights have a gradient, in the order of `_alike`."""
        return [[weight.grad is not None for weight in alike.newest] for alike in self._alike]

    def _add(self) -> None:
        """Add the newest weights' gradients to those of the update. A weight that took no part in
        a micro-batch's loss (of a user's own model: an expert without tokens) adds nothing."""
        for alike, is_in_sum in zip(self._alike, self._is_in_sum, strict=True):
            sums: list[Tensor] = []
            added: list[Tensor] = []
            for index, weight in enumerate(alike.newest):
                if weight.grad is None:
                    continue
                if not is_in_sum[index]:
                    alike.gradients[index].zero_()  # it has a former update's gradient
                    is_in_sum[index] = True
                sums.append(alike.gradients[index])
                added.append(weight.grad)
            if added:
                torch._foreach_add_(sums, added)

    @torch.no_grad()
    def clip(self, max_norm: float) -> Tensor:
        """Scale each stage's gradients by min(1, max_norm / norm). Each stage has its own norm,
        because an asynchronous stage never sees the others' gradients.

        The numbers are those of `torch.nn.utils.clip_grad_norm_`, stage by stage.

        Args:
            max_norm: the largest gradient norm of a stage.

        Returns:
            The norms before clipping, (stages,).
        """
        stage_gradients: list[list[Tensor]] = []
        for stage in self._stages:
            gradients = [weight.grad for weight in stage.newest.values()]
            stage_gradients.append([gradient for gradient in gradients if gradient is not None])
        all_gradients = list(chain.from_iterable(stage_gradients))
        if not all_gradients:  # torch takes no empty list
            return torch.zeros(len(self._stages), device=self._stages[0].device)
        weight_norms = torch.stack(torch._foreach_norm(all_gradients))  # (weights,)
        num_weights = [len(gradients) for gradients in stage_gradients]  # by stage
        # The norm of a stage is the norm of its weights' norms.
        by_stage = torch.split(weight_norms, num_weights)
        norms = torch.stack(torch._foreach_norm(list(by_stage)))  # (stages,)
        scales = torch.clamp(max_norm / (norms + EPSILON), max=1.0)
        buffers: list[Tensor] = []
        scale_of_buffer: list[Tensor] = []
        for flat, scale in zip(self._flat, scales.unbind(), strict=True):
            buffers += flat.buffers
            scale_of_buffer += [scale] * len(flat.buffers)
        torch._foreach_mul_(buffers, scale_of_buffer)
        return norms

    def drop(self) -> None:
        """Leave the newest weights without gradients."""
        for alike in self._alike:
            for weight in alike.newest:
                weight.grad = None

    @property
    def nbytes(self) -> int:
        """Bytes of the gradients of an update."""
        return sum(flat.nbytes for flat in self._flat)

    def _is_first(self, micro_batch: int) -> bool:
        return (micro_batch - 1) % self._accumulation == 0

    def _ends_update(self, micro_batch: int) -> bool:
        return micro_batch % self._accumulation == 0

    def _buffers_by_dtype(self) -> list[list[Tensor]]:
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for flat in self._flat:
            for buffer in flat.buffers:
                by_dtype.setdefault(buffer.dtype, []).append(buffer)
        return list(by_dtype.values())


def _hand_over(alike: _Alike, targets: list[Tensor]) -> None:
    """Copy the gradients at the weights in use into `targets`, which become the gradients of the
    newest weights. A weight that took no part in the loss has no gradient afterwards either."""
    filled: list[Tensor] = []
    arrived: list[Tensor] = []
    for newest, in_use, target in zip(alike.newest, alike.in_use, targets, strict=True):
        gradient = in_use.grad
        in_use.grad = None
        if gradient is None:
            newest.grad = None
        else:
            newest.grad = target
            filled.append(target)
            arrived.append(gradient)
    if filled:
        torch._foreach_copy_(filled, arrived)


def _hand_over_as_they_are(alike: _Alike) -> None:
    """Give the gradients themselves to the newest weights, without a copy."""
    for newest, in_use in zip(alike.newest, alike.in_use, strict=True):
        # Without delay, both are the same parameter: the order of the two assignments matters.
        gradient = in_use.grad
        in_use.grad = None
        newest.grad = gradient
