"""Multiplies the training loss's Hessian with vectors, in the weights' or in rotated coordinates.
The Hessian itself is never built.

H z is the gradient of g . z, where g is the gradient: reverse mode over reverse mode. Forward mode
over reverse mode takes more time and memory here, because the forward-mode rules of layer norm and
GELU are not fused (benchmarks/hessian.py).

Basis rotation's coordinates W~ are given by W = U W~ V^T for each rotated matrix; all other
parameters keep theirs. With w = Q w~, the Hessian in these coordinates is Q^T H Q: multiply by Q,
then by H, then by Q^T.

Shape legend: B examples, S positions."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

from brx.errors import RunError
from brx.model.stage import Stage
from brx.optim.eigenbasis import exact_eigenbasis, exact_factor_eigenbasis
from brx.pipeline.engine import MicroBatch

Source = Literal["2nd", "1st"]
Geometry = Literal["bilateral", "unilateral"]

Vectors = dict[str, Tensor]  # one tensor per parameter, by its name and in its shape

# By device: a batch with more tokens is split, because attention that can be differentiated twice
# keeps its (S, S) matrices.
TOKENS_PER_PASS = {"cpu": 512, "cuda": 2**15}
# A pass over fewer elements of the residual stream spends its time on the overhead of many small
# operations.
WORTH_A_PASS = 2**14


def training_loss(model: Stage, parameters: Vectors, batch: MicroBatch) -> Tensor:
    """The loss that training minimises: mean cross-entropy in nats plus the mixtures' auxiliary
    losses."""
    output = functional_call(model, parameters, batch)
    loss: Tensor = output.loss
    if output.auxiliary_loss is not None:
        loss = loss + output.auxiliary_loss
    return loss


def _leaves(parameters: Vectors) -> Vectors:
    """The same numbers as leaves of a new graph."""
    return {name: parameter.detach().requires_grad_() for name, parameter in parameters.items()}


def gradient(model: Stage, parameters: Vectors, batch: MicroBatch) -> Vectors:
    """The gradient of `training_loss` on one batch, in the parameters' shapes and dtype."""
    leaves = _leaves(parameters)
    gradients = torch.autograd.grad(training_loss(model, leaves, batch), list(leaves.values()))
    return dict(zip(leaves, gradients, strict=True))


def hessian_vector_product(
    model: Stage, parameters: Vectors, batch: MicroBatch, vector: Vectors
) -> Vectors:
    """H z for `training_loss` on one batch, in the parameters' dtype.

    Args:
        model: the whole model, in one stage.
        parameters: its weights, where the Hessian is taken.
        batch: token ids and next tokens, each (B, S).
        vector: z, in the parameters' shapes.
    """
    total = {name: torch.zeros_like(parameter) for name, parameter in parameters.items()}
    for part in _parts(model, batch):
        leaves = _leaves(parameters)
        weights = list(leaves.values())
        cotangents = [vector[name] for name in leaves]
        with sdpa_kernel(SDPBackend.MATH):  # the fused kernels have no second derivative
            loss = training_loss(model, leaves, part)
            gradients = torch.autograd.grad(loss, weights, create_graph=True)
            product = torch.autograd.grad(gradients, weights, cotangents, materialize_grads=True)
        share = len(part[0]) / len(batch[0])  # of the batch's examples
        torch._foreach_add_(list(total.values()), product, alpha=share)
    return total


def mean_product(
    model: Stage,
    parameters: Vectors,
    batches: Iterable[tuple[int, MicroBatch]],
    vector: Vectors,
    where: str,
) -> Vectors:
    """H z for the mean of `training_loss` over several batches, in the parameters' dtype.

    Args:
        model: the whole model, in one stage.
        parameters: its weights, where the Hessian is taken.
        batches: batches of one size, each with its number.
        vector: z, in the parameters' shapes.
        where: the checkpoint and what is computed there, for the message.

    Raises:
        RunError: a product is not finite; the message names its batches.
    """
    total = {name: torch.zeros_like(parameter) for name, parameter in parameters.items()}
    num_batches = 0
    for numbers, batch in _joined(model, batches):
        product = list(hessian_vector_product(model, parameters, batch, vector).values())
        largest = torch.stack([part.abs().max() for part in product])
        if not largest.isfinite().all():
            which = f"batch {numbers[0]}"
            if len(numbers) > 1:
                which = f"batches {numbers[0]} to {numbers[-1]}"
            raise RunError(f"{where}: the Hessian-vector product of {which} is not finite")
        torch._foreach_add_(list(total.values()), product, alpha=len(numbers))
        num_batches += len(numbers)
    torch._foreach_div_(list(total.values()), num_batches)
    return total


def _joined(
    model: Stage, batches: Iterable[tuple[int, MicroBatch]]
) -> Iterator[tuple[list[int], MicroBatch]]:
    """Batches with their numbers; small batches are joined, so that each pass has enough work."""
    numbered = iter(batches)
    for number, first in numbered:
        count = 1
        # An auxiliary loss is not a mean over examples, so such batches cannot be joined.
        if not model.has_auxiliary_loss:
            count = max(1, _examples_per_pass(model, first).least // len(first[0]))
        group = [(number, first), *itertools.islice(numbered, count - 1)]
        inputs = torch.cat([inputs for _, (inputs, _) in group])
        targets = torch.cat([targets for _, (_, targets) in group])
        yield [number for number, _ in group], (inputs, targets)


def _parts(model: Stage, batch: MicroBatch) -> list[MicroBatch]:
    """The batch in parts that fit into memory.

    The batch's loss is the mean of the parts' losses, weighted by their numbers of examples."""
    if model.has_auxiliary_loss:  # it is not a mean over examples
        return [batch]
    inputs, targets = batch
    # A pass keeps about five times as much memory as a gradient of the same tokens. If the batch is
    # halved, that is less than three times as much as the gradient of the whole batch.
    half = math.ceil(len(inputs) / 2)
    per_pass = _examples_per_pass(model, batch)
    examples = min(per_pass.most, max(per_pass.least, half))
    return list(zip(torch.split(inputs, examples), torch.split(targets, examples), strict=True))


class _ExamplesPerPass(NamedTuple):
    least: int  # fewer are not worth a pass
    most: int  # more do not fit into memory


def _examples_per_pass(model: Stage, batch: MicroBatch) -> _ExamplesPerPass:
    assert model.embedding is not None, "products need the whole model"
    tokens = batch[0]  # (B, S)
    sequence_length = tokens.shape[1]
    most = max(1, TOKENS_PER_PASS.get(tokens.device.type, 512) // sequence_length)
    elements = sequence_length * model.width  # an example's residual stream
    return _ExamplesPerPass(least=min(most, math.ceil(WORTH_A_PASS / elements)), most=most)


@dataclass(frozen=True)
class Basis:
    """Orthogonal bases of a matrix (m, n), or of each matrix of a stack (*, m, n); None for the
    identity."""

    left: Tensor | None  # U (*, m, m)
    right: Tensor | None  # V (*, n, n)

    @property
    def transposed(self) -> Basis:
        """U^T and V^T."""
        return Basis(
            left=None if self.left is None else self.left.mT,
            right=None if self.right is None else self.right.mT,
        )


Bases = dict[str, Basis]  # by parameter name; a parameter that is absent is not rotated


def to_weights(bases: Bases, vectors: Vectors) -> Vectors:
    """From rotated coordinates to the weights': Q z, which is U A V^T for each rotated matrix A."""
    turned = dict(vectors)
    for name, basis in bases.items():
        matrix = turned[name]  # A (*, m, n)
        if basis.left is not None:
            matrix = basis.left @ matrix
        if basis.right is not None:
            matrix = matrix @ basis.right.mT
        turned[name] = matrix
    return turned


def from_weights(bases: Bases, vectors: Vectors) -> Vectors:
    """From the weights' coordinates to rotated ones: Q^T z, which is U^T A V for each rotated
    matrix A."""
    return to_weights({name: basis.transposed for name, basis in bases.items()}, vectors)


def estimate_bases(
    matrices: Collection[str],
    parameters: Vectors,
    gradients: Iterable[Vectors],
    source: Source = "2nd",
    geometry: Geometry = "bilateral",
) -> Bases:
    """A strategy's exact bases at fixed weights, as theorem 3.1 defines them.

    `2nd`: eigenvectors of E[G G^T] and E[G^T G]. `1st`: of E[G] E[G]^T and E[G]^T E[G].

    Args:
        matrices: names of the parameters to rotate.
        parameters: all parameters, for their shapes.
        gradients: gradients G of different batches at the same weights.
        source: which matrices' eigenvectors to take.
        geometry: both sides, or the smaller one, as in the optimizer.
    """
    rotated = [name for name in parameters if name in matrices]
    sums: dict[str, list[Tensor]] = {}
    for gradient in gradients:
        for name in rotated:
            G = gradient[name]  # (*, m, n)
            terms = [G, G.mT] if source == "1st" else [G @ G.mT, G.mT @ G]
            known = sums.setdefault(name, [torch.zeros_like(term) for term in terms])
            for total, term in zip(known, terms, strict=True):
                total += term

    # A sum has the same eigenvectors as the mean.
    bases = {}
    for name, (left, right) in sums.items():
        m, n = parameters[name].shape[-2:]
        is_wide = m < n
        rotates_left = geometry == "bilateral" or is_wide
        rotates_right = geometry == "bilateral" or not is_wide
        bases[name] = Basis(
            left=_exact_basis(left, source) if rotates_left else None,
            right=_exact_basis(right, source) if rotates_right else None,
        )
    return bases


def _exact_basis(total: Tensor, source: Source) -> Tensor:
    """Eigenvectors (*, m, m) of a covariance (*, m, m), or (`1st`) of A A^T for a factor A
    (*, m, n)."""
    exact = exact_factor_eigenbasis if source == "1st" else exact_eigenbasis
    m = total.shape[-2]
    stack = total.reshape(-1, *total.shape[-2:])  # (k, m, m) or (k, m, n)
    return exact(stack).basis.to(total).view(*total.shape[:-2], m, m)
