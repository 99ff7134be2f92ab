"""Products of the training loss's Hessian with vectors, without the Hessian.

H z is the gradient of g . z, where g is the gradient: reverse mode over reverse mode. Forward over reverse, that is
`torch.func.jvp` of `torch.func.grad`, gives the same numbers but takes longer and more memory here, because the
forward-mode rules of layer norm and GELU are not fused (benchmarks/hessian.py measures both).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

from brx.errors import RunError
from brx.model.stage import Stage
from brx.model.transformer import Mixture
from brx.pipeline.engine import MicroBatch

Vectors = dict[str, Tensor]
"""One tensor for each parameter, by its name and in its shape."""

TOKENS_PER_PASS = {"cpu": 512, "cuda": 2**15}
"""A batch of more tokens is split: attention that can be differentiated twice keeps its (S, S) matrices."""

WORTH_A_PASS = 2**14
"""Elements of the residual stream: a pass of fewer spends its time on the overhead of its many small operations."""


def training_loss(model: Stage, parameters: Vectors, batch: MicroBatch) -> Tensor:
    """What training minimises: mean cross-entropy in nats plus the auxiliary losses of the mixtures of experts."""
    output = functional_call(model, parameters, batch)
    total: Tensor = output.loss if output.auxiliary_loss is None else output.loss + output.auxiliary_loss
    return total


def gradient(model: Stage, parameters: Vectors, batch: MicroBatch) -> Vectors:
    """The gradient of the training loss at `parameters`."""
    leaves = {name: parameter.detach().requires_grad_() for name, parameter in parameters.items()}
    gradients = torch.autograd.grad(training_loss(model, leaves, batch), list(leaves.values()))
    return dict(zip(leaves, gradients, strict=True))


def _product(model: Stage, parameters: Vectors, batch: MicroBatch, vector: Vectors) -> list[Tensor]:
    leaves = {name: parameter.detach().requires_grad_() for name, parameter in parameters.items()}
    with sdpa_kernel(SDPBackend.MATH):  # the fused kernels have no second derivative
        loss = training_loss(model, leaves, batch)
        gradients = torch.autograd.grad(loss, list(leaves.values()), create_graph=True)
        cotangents = [vector[name] for name in leaves]
        return list(torch.autograd.grad(gradients, list(leaves.values()), cotangents, materialize_grads=True))


def hessian_vector_product(model: Stage, parameters: Vectors, batch: MicroBatch, vector: Vectors) -> Vectors:
    """H z for the training loss on one batch, token ids and next tokens, each (B, S); in the parameters' dtype."""
    num_examples = len(batch[0])
    total = {name: torch.zeros_like(parameter) for name, parameter in parameters.items()}
    for part in _parts(model, batch):
        product = _product(model, parameters, part, vector)
        torch._foreach_add_(list(total.values()), product, alpha=len(part[0]) / num_examples)
    return total


def mean_product(
    model: Stage, parameters: Vectors, batches: Iterable[tuple[int, MicroBatch]], vector: Vectors, where: str
) -> Vectors:
    """H z for the mean of the training loss over batches of one size, each with its number.

    Raises:
        RunError: a product is not finite; names the checkpoint (`where`) and the batch.
    """
    total = {name: torch.zeros_like(parameter) for name, parameter in parameters.items()}
    num_batches = 0
    for numbers, batch in _joined(model, batches):
        product = list(hessian_vector_product(model, parameters, batch, vector).values())
        if not torch.stack([part.abs().max() for part in product]).isfinite().all():
            which = f"batch {numbers[0]}" if len(numbers) == 1 else f"batches {numbers[0]} to {numbers[-1]}"
            raise RunError(f"{where}: the Hessian-vector product of {which} is not finite; try --precision fp64")
        torch._foreach_add_(list(total.values()), product, alpha=len(numbers))
        num_batches += len(numbers)
    torch._foreach_div_(list(total.values()), num_batches)
    return total


def _joined(model: Stage, batches: Iterable[tuple[int, MicroBatch]]) -> Iterator[tuple[list[int], MicroBatch]]:
    """The batches with their numbers, as many as make a pass worth it in one: its loss is the mean of theirs."""
    numbered = iter(batches)
    for number, first in numbered:
        count = 1 if _has_mixture(model) else max(1, _examples_worth_a_pass(model, first) // len(first[0]))
        group = [(number, first), *itertools.islice(numbered, count - 1)]
        inputs, targets = (torch.cat([batch[side] for _, batch in group]) for side in (0, 1))
        yield [number for number, _ in group], (inputs, targets)


def _parts(model: Stage, batch: MicroBatch) -> list[MicroBatch]:
    """The batch in parts, whose mean loss, weighted by examples, is the batch's.

    A pass keeps about five times what a gradient of the same tokens keeps; in two parts, a product stays below three
    times a gradient of the batch.
    """
    if _has_mixture(model):
        return [batch]
    inputs, targets = batch
    examples = min(_fitting_examples(batch), max(_examples_worth_a_pass(model, batch), math.ceil(len(inputs) / 2)))
    return list(zip(torch.split(inputs, examples), torch.split(targets, examples), strict=True))


def _has_mixture(model: Stage) -> bool:
    """Whether the loss has parts that are not means over examples: the auxiliary losses of a mixture."""
    return any(isinstance(module, Mixture) for module in model.modules())


def _fitting_examples(batch: MicroBatch) -> int:
    return max(1, TOKENS_PER_PASS.get(batch[0].device.type, 512) // batch[0].shape[1])


def _examples_worth_a_pass(model: Stage, batch: MicroBatch) -> int:
    assert model.embedding is not None, "products are of the whole model"
    elements = batch[0].shape[1] * model.embedding.tokens.embedding_dim
    return min(_fitting_examples(batch), math.ceil(WORTH_A_PASS / elements))
