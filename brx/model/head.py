"""The head of a model and its loss.

All logits at once would be the largest tensor of training, so the loss is computed in chunks if
there are many.

Shape legend: B examples, S positions, N = B S tokens, D width, V vocabulary.
"""

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

# Logits in a chunk of the loss: 128 MiB in fp32, and still hundreds of tokens per matrix product.
CHUNK_LOGITS = 2**25


class Head(nn.Module):
    """Final norm and language-model head: (B, S, D) to logits (B, S, V).

    Its method `loss` never holds more logits than one chunk's. `loss_of` uses it where it is the
    loss of what `forward` returns (`has_own_loss`).
    """

    def __init__(self, norm: nn.Module, linear: nn.Linear) -> None:
        super().__init__()
        self.norm = norm
        self.linear = linear

    def forward(
        self,
        x: Tensor,  # (B, S, D)
    ) -> Tensor:
        """The logits, (B, S, V)."""
        return self.linear(self.norm(x))  # type: ignore[no-any-return]

    def loss(
        self,
        x: Tensor,  # (B, S, D)
        targets: Tensor,  # (B, S)
    ) -> Tensor:
        """The mean cross-entropy of the targets in nats, computed in fp32 (float64 for a float64
        model)."""
        tokens = self.norm(x).flatten(0, 1)  # (N, D)
        return head_loss(tokens, self.linear.weight, self.linear.bias, targets.flatten())


def loss_of(
    head: nn.Module,
    x: Tensor,  # (B, S, D)
    targets: Tensor,  # (B, S)
    vocabulary_size: int,
) -> Tensor:
    """The mean cross-entropy, in nats, of the logits (B, S, V) that a head makes of the stream.

    A head without a loss of its own (`has_own_loss`), with more than `CHUNK_LOGITS` logits,
    computes a few examples at a time, and computes them again in the backward pass. So only one
    chunk's logits exist at any time.
    """
    if has_own_loss(head):
        return head.loss(x, targets)  # type: ignore[no-any-return, operator]
    num_examples = max(1, CHUNK_LOGITS // (targets.shape[1] * vocabulary_size))
    if num_examples >= len(x):
        return _sum_of_losses(head(x), targets) / targets.numel()
    # The weights are arguments, because the head may hold others by the time of the backward pass.
    own = dict(head.named_parameters())
    names, weights = list(own), list(own.values())

    def chunk_loss(chunk: Tensor, chunk_targets: Tensor, *bound: Tensor) -> Tensor:
        logits = functional_call(head, dict(zip(names, bound, strict=True)), (chunk,))
        return _sum_of_losses(logits, chunk_targets)

    losses = []
    parts = zip(torch.split(x, num_examples), torch.split(targets, num_examples), strict=True)
    for chunk, chunk_targets in parts:
        loss = checkpoint(chunk_loss, chunk, chunk_targets, *weights, use_reentrant=False)
        losses.append(loss)
    return torch.stack(losses).sum() / targets.numel()


def has_own_loss(head: nn.Module) -> bool:
    """Whether a head's method `loss` is the loss of its logits.

    `Head.loss` computes with the weights of the norm and the linear map, and never calls `forward`.
    So it does not see a `forward` that somebody has changed, in a subclass or by a hook.
    """
    if not isinstance(head, Head):
        return False
    if getattr(head.loss, "__func__", None) is not Head.loss:
        return True  # who writes a loss means it
    return _is_as_defined(head, Head) and _is_as_defined(head.linear, nn.Linear)


def _is_as_defined(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether a module computes what its class `kind` does."""
    has_hooks = bool(module._forward_hooks or module._forward_pre_hooks)
    return getattr(type(module), "forward", None) is kind.forward and not has_hooks


def _sum_of_losses(
    logits: Tensor,  # (B, S, V)
    targets: Tensor,  # (B, S)
) -> Tensor:
    logits = logits.to(at_least_fp32(logits.dtype))
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")


def head_loss(
    x: Tensor,  # (N, D)
    weight: Tensor,  # (V, D)
    bias: Tensor | None,  # (V,)
    targets: Tensor,  # (N,)
) -> Tensor:
    """The mean cross-entropy, in nats, of the logits x W^T + b.

    The matrix products run in autocast's dtype if it is on, everything after them in fp32 (float64
    for float64).

    The logits of a GPT-2 vocabulary are the largest tensor of training by far (8 x 512 tokens: 0.8
    GB in fp32). If there are more than `CHUNK_LOGITS`, the tokens are divided into chunks, and the
    logits, loss and gradients of a chunk are computed together, so that only one chunk's logits
    exist.
    """
    if len(x) * len(weight) <= CHUNK_LOGITS:
        return _plain_loss(x, weight, bias, targets)
    with_gradients = torch.is_grad_enabled()
    loss = _ChunkedLoss.apply(x, weight, bias, targets, with_gradients)  # type: ignore[no-untyped-call]
    return cast(Tensor, loss)


def _plain_loss(x: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor) -> Tensor:
    """`head_loss`, from all logits at once."""
    logits = F.linear(x, weight, bias)
    return F.cross_entropy(logits.to(at_least_fp32(logits.dtype)), targets)


class _ChunkedLoss(torch.autograd.Function):
    """`head_loss`, chunk by chunk. The forward pass already computes the gradients; the backward
    pass only scales them."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,  # (N, D)
        weight: Tensor,  # (V, D)
        bias: Tensor | None,  # (V,)
        targets: Tensor,  # (N,)
        with_gradients: bool,
    ) -> Tensor:
        device_type = x.device.type
        autocasts = torch.is_autocast_enabled(device_type)
        dtype = torch.get_autocast_dtype(device_type) if autocasts else weight.dtype
        inputs = (x, weight) if bias is None else (x, weight, bias)
        with torch.autocast(device_type, enabled=False):
            cast = [tensor.to(dtype) for tensor in inputs]
            loss, gradients = _by_chunks(cast, targets, with_gradients)
        if with_gradients:
            ctx.save_for_backward(targets, *inputs)
            ctx.gradients = [
                gradient.to(like.dtype) for gradient, like in zip(gradients, inputs, strict=True)
            ]
            ctx.autocast = {
                "device_type": device_type,
                "dtype": dtype if autocasts else None,
                "enabled": autocasts,
            }
        return loss

    @staticmethod
    def backward(
        ctx: Any,
        upstream: Tensor,  # a scalar
    ) -> tuple[Tensor | None, ...]:
        if ctx.gradients is not None and not torch.is_grad_enabled():
            gradients = ctx.gradients
            ctx.gradients = None  # scaled in place, so usable only once
            scaled = [gradient.mul_(upstream) for gradient in gradients]
            return *_three(scaled), None, None
        # Either the gradient itself is being differentiated (for the Hessian), or this is the
        # second backward pass. Both differentiate the plain loss.
        targets, *inputs = ctx.saved_tensors
        x, weight, bias = _three(inputs)
        with torch.enable_grad(), torch.autocast(**ctx.autocast):
            again = _plain_loss(x, weight, bias, targets)
        needed = ctx.needs_input_grad[:3]
        sources = [tensor for tensor, is_needed in zip(inputs, needed, strict=False) if is_needed]
        create_graph = torch.is_grad_enabled()
        gradients = torch.autograd.grad(again, sources, upstream, create_graph=create_graph)
        remaining = iter(gradients)
        by_input: list[Tensor | None] = [None, None, None]
        for index, is_needed in enumerate(needed):
            if is_needed:
                by_input[index] = next(remaining)
        return *by_input, None, None


def _three(tensors: Any) -> Any:
    """x, weight and bias; None stands for a bias that is missing."""
    return (*tensors, None)[:3]


def _by_chunks(
    inputs: list[Tensor], targets: Tensor, with_gradients: bool
) -> tuple[Tensor, list[Tensor]]:
    """The mean loss, chunk by chunk.

    Args:
        inputs: x (N, D), weight (V, D) and, if there is one, bias (V,), in one dtype.
        targets: (N,).
        with_gradients: compute the gradients, too.

    Returns:
        The loss; and its gradients with respect to the inputs, in the dtype of x for x and in fp32
        at least for the others.
    """
    x, weight, bias = _three(inputs)
    precision = at_least_fp32(x.dtype)
    total = x.new_zeros((), dtype=precision)
    gradients = []
    if with_gradients:
        gradients = [
            torch.empty_like(x),
            *(torch.zeros_like(tensor, dtype=precision) for tensor in inputs[1:]),
        ]
    length = max(1, CHUNK_LOGITS // len(weight))  # tokens in a chunk
    for start in range(0, len(x), length):
        tokens = slice(start, start + length)
        chunk = x[tokens]
        # The logits have no name here, so that they are freed as soon as they are overwritten.
        chunk_loss, d_logits = _softmax_loss(F.linear(chunk, weight, bias), targets[tokens, None])
        total += chunk_loss
        if with_gradients:
            d_logits.div_(len(x))  # the gradient of the mean, no longer of the sum
            if bias is not None:
                gradients[2] += d_logits.sum(dim=0)
            d_logits = d_logits.to(x.dtype)
            torch.mm(d_logits, weight, out=gradients[0][tokens])
            gradients[1] += d_logits.T @ chunk
        del d_logits  # before the next chunk has its own
    return total / len(x), gradients


def _softmax_loss(
    logits: Tensor,  # (N, V), overwritten
    targets: Tensor,  # (N, 1)
) -> tuple[Tensor, Tensor]:
    """The sum of the losses, and its gradient with respect to the logits (N, V): softmax minus
    one-hot."""
    logits = logits.to(at_least_fp32(logits.dtype))
    target_logits = logits.gather(1, targets)  # (N, 1)
    largest = logits.amax(dim=1, keepdim=True)  # (N, 1)
    # In place: torch's logsumexp alone would take twice the memory of the logits in addition.
    exponentials = logits.sub_(largest).exp_()
    normalizer = exponentials.sum(dim=1, keepdim=True)  # (N, 1)
    # -log softmax(logits)[target] = log(sum exp(logits - largest)) + largest - logits[target]
    loss = (normalizer.log() + largest - target_logits).sum()
    d_logits = exponentials.div_(normalizer)  # softmax
    d_logits.scatter_add_(1, targets, d_logits.new_full((1, 1), -1.0).expand_as(targets))
    return loss, d_logits


def at_least_fp32(dtype: torch.dtype) -> torch.dtype:
    """fp32 for half precisions, and the same dtype for fp32 and float64."""
    return torch.promote_types(dtype, torch.float32)
