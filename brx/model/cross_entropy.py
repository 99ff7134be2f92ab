"""Cross-entropy of a language-model head that never holds all logits at once.

The logits of a GPT-2 vocabulary are the largest tensor of training by far (8 x 512 tokens: 0.8 GB in fp32, and a plain
cross-entropy keeps them, their log-softmax and its gradient). Here each chunk of tokens has its logits, its loss and
its gradients computed at once, so that only one chunk's logits exist; the multiplications are the same in number.

Shape legend: N tokens, D width, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK_LOGITS = 2**25
"""Logits in a chunk: 128 MiB in fp32, and still hundreds of tokens, which keeps the matrix products efficient."""


def head_loss(x: Tensor, weight: Tensor, bias: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy in nats of the logits x W^T + b, in chunks if there are more than `CHUNK_LOGITS` logits.

    The matrix products run in autocast's dtype where it is on, everything after them in fp32 (float64 for float64).

    Args:
        x: (N, D).
        weight: (V, D).
        bias: (V,).
        targets: (N,), int64.
    """
    if len(x) * len(weight) <= CHUNK_LOGITS:
        return _plain_loss(x, weight, bias, targets)
    loss: Tensor = _ChunkedLoss.apply(x, weight, bias, targets, torch.is_grad_enabled())  # type: ignore[no-untyped-call]
    return loss


def chunk_length(vocabulary_size: int) -> int:
    """Tokens in a chunk."""
    return max(1, CHUNK_LOGITS // vocabulary_size)


def _plain_loss(x: Tensor, weight: Tensor, bias: Tensor, targets: Tensor) -> Tensor:
    logits = F.linear(x, weight, bias)
    return F.cross_entropy(logits.to(_at_least_fp32(logits.dtype)), targets)


class _ChunkedLoss(torch.autograd.Function):
    """The loss, with its gradients made on the way: the backward pass only scales them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, targets: Tensor, with_gradients: bool) -> Tensor:
        device_type = x.device.type
        autocasts = torch.is_autocast_enabled(device_type)
        dtype = torch.get_autocast_dtype(device_type) if autocasts else weight.dtype
        with torch.autocast(device_type, enabled=False):
            loss, gradients = _by_chunks(x.to(dtype), weight.to(dtype), bias.to(dtype), targets, with_gradients)
        if with_gradients:
            ctx.save_for_backward(x, weight, bias, targets)
            inputs = (x, weight, bias)
            ctx.gradients = [gradient.to(like.dtype) for gradient, like in zip(gradients, inputs, strict=True)]
            ctx.autocast = {"device_type": device_type, "dtype": dtype if autocasts else None, "enabled": autocasts}
        return loss

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.gradients is not None and not torch.is_grad_enabled():
            gradients, ctx.gradients = ctx.gradients, None  # scaled in place, so good for once
            return *(gradient.mul_(upstream) for gradient in gradients), None, None
        # Differentiated twice (the Hessian), or called a second time: by way of the plain loss.
        inputs, targets = ctx.saved_tensors[:3], ctx.saved_tensors[3]
        with torch.enable_grad(), torch.autocast(**ctx.autocast):
            again = _plain_loss(inputs[0], inputs[1], inputs[2], targets)
        wanted = [tensor for tensor, needed in zip(inputs, ctx.needs_input_grad[:3], strict=True) if needed]
        gradients = iter(torch.autograd.grad(again, wanted, upstream, create_graph=torch.is_grad_enabled()))
        return *(next(gradients) if needed else None for needed in ctx.needs_input_grad[:3]), None, None


def _by_chunks(
    x: Tensor, weight: Tensor, bias: Tensor, targets: Tensor, with_gradients: bool
) -> tuple[Tensor, list[Tensor]]:
    """The mean loss and, if wanted, its gradients with respect to x (as x), weight and bias (at least fp32)."""
    precision = _at_least_fp32(x.dtype)
    total = x.new_zeros((), dtype=precision)
    gradients = []
    if with_gradients:
        gradients = [torch.empty_like(x), *(torch.zeros_like(tensor, dtype=precision) for tensor in (weight, bias))]
    length = chunk_length(len(weight))
    for start in range(0, len(x), length):
        chunk = x[start : start + length]
        chunk_loss, by_logits = _softmax_loss(F.linear(chunk, weight, bias), targets[start : start + length, None])
        total += chunk_loss
        if with_gradients:
            by_logits.div_(len(x))  # of the mean
            gradients[2] += by_logits.sum(dim=0)
            by_logits = by_logits.to(x.dtype)
            torch.mm(by_logits, weight, out=gradients[0][start : start + length])
            gradients[1] += by_logits.T @ chunk
        del by_logits  # before there is another one
    return total / len(x), gradients


def _softmax_loss(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The sum of the losses, and its gradient with respect to the logits (N, V): softmax minus one-hot.

    Works in the logits' own memory, if they are in fp32: torch's logsumexp alone would take twice as much again.
    """
    logits = logits.to(_at_least_fp32(logits.dtype))
    wanted = logits.gather(1, targets)
    largest = logits.amax(dim=1, keepdim=True)
    exponentials = logits.sub_(largest).exp_()
    normalizer = exponentials.sum(dim=1, keepdim=True)
    by_logits = exponentials.div_(normalizer)
    by_logits.scatter_add_(1, targets, by_logits.new_full((1, 1), -1.0).expand_as(targets))
    return (normalizer.log() + largest - wanted).sum(), by_logits


def _at_least_fp32(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
