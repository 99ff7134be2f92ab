"""Products of the training loss's Hessian with vectors, without the Hessian, in the weights' or
rotated coordinates.

H z is the gradient of g . z, where g is the gradient: reverse mode over reverse mode. Forward over
reverse takes longer and more memory here, as the forward-mode rules of layer norm and GELU are not
fused (benchmarks/hessian.py).

Basis rotation's coordinates are W = U W~ V^T for each rotated matrix, the identity for all else.
With w = Q w~, the Hessian there is Q^T H Q: multiply by Q, then by H, then by Q^T."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

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

# A batch of more tokens is split: attention that can be differentiated twice keeps its (S, S)
#     matrices.
TOKENS_PER_PASS = {"cpu": 512, "cuda": 2**15}
# Elements of the residual stream: a pass of fewer spends its time on the overhead of its many small
#     operations.
WORTH_A_PASS = 2**14


def training_loss(model: Stage, parameters: Vectors, batch: MicroBatch) -> Tensor:
    """What training minimises: mean cross-entropy in nats plus the mixtures' auxiliary losses."""
    output = functional_call(model, parameters, batch)
    total: Tensor = (
        output.loss if output.auxiliary_loss is None else output.loss + output.auxiliary_loss
    )
    return total


def _leaves(parameters: Vectors) -> Vectors:
    return {name: parameter.detach().requires_grad_() for name, parameter in parameters.items()}


def gradient(model: Stage, parameters: Vectors, batch: MicroBatch) -> Vectors:
    leaves = _leaves(parameters)
    gradients = torch.autograd.grad(training_loss(model, leaves, batch), list(leaves.values()))
    return dict(zip(leaves, gradients, strict=True))


def hessian_vector_product(
    model: Stage, parameters: Vectors, batch: MicroBatch, vector: Vectors
) -> Vectors:
    """H z for the training loss on one batch, token ids and next tokens, each (B, S); in the
    parameters' dtype."""
    total = {name: torch.zeros_like(parameter) for name, parameter in parameters.items()}
    for part in _parts(model, batch):
        leaves = _leaves(parameters)
        weights, cotangents = list(leaves.values()), [vector[name] for name in leaves]
        with sdpa_kernel(SDPBackend.MATH):  # the fused kernels have no second derivative
            gradients = torch.autograd.grad(
                training_loss(model, leaves, part), weights, create_graph=True
            )
            product = torch.autograd.grad(gradients, weights, cotangents, materialize_grads=True)
        torch._foreach_add_(list(total.values()), product, alpha=len(part[0]) / len(batch[0]))
    return total


def mean_product(
    model: Stage,
    parameters: Vectors,
    batches: Iterable[tuple[int, MicroBatch]],
    vector: Vectors,
    where: str,
) -> Vectors:
    """H z for the mean loss over numbered batches of one size; RunError where it is not finite says
    `where`."""
    total = {name: torch.zeros_like(parameter) for name, parameter in parameters.items()}
    num_batches = 0
    for numbers, batch in _joined(model, batches):
        product = list(hessian_vector_product(model, parameters, batch, vector).values())
        if not torch.stack([part.abs().max() for part in product]).isfinite().all():
            which = (
                f"batch {numbers[0]}"
                if len(numbers) == 1
                else f"batches {numbers[0]} to {numbers[-1]}"
            )
            raise RunError(f"{where}: the Hessian-vector product of {which} is not finite")
        torch._foreach_add_(list(total.values()), product, alpha=len(numbers))
        num_batches += len(numbers)
    torch._foreach_div_(list(total.values()), num_batches)
    return total


def _joined(
    model: Stage, batches: Iterable[tuple[int, MicroBatch]]
) -> Iterator[tuple[list[int], MicroBatch]]:
    """Batches with their numbers; small ones are joined, so that a pass is worth it."""
    numbered = iter(batches)
    for number, first in numbered:
        count = (
            1
            if model.has_auxiliary_loss
            else max(1, _examples_per_pass(model, first)[0] // len(first[0]))
        )
        group = [(number, first), *itertools.islice(numbered, count - 1)]
        inputs, targets = (torch.cat([batch[side] for _, batch in group]) for side in (0, 1))
        yield [number for number, _ in group], (inputs, targets)


def _parts(model: Stage, batch: MicroBatch) -> list[MicroBatch]:
    """The batch in parts, whose mean loss, weighted by examples, is the batch's."""
    if model.has_auxiliary_loss:  # which is no mean over examples
        return [batch]
    least, most = _examples_per_pass(model, batch)
    # A pass keeps about five times what a gradient of its tokens keeps: in halves, less than three
    #     times the batch's.
    examples = min(most, max(least, math.ceil(len(batch[0]) / 2)))
    return list(zip(*(torch.split(side, examples) for side in batch), strict=True))


def _examples_per_pass(model: Stage, batch: MicroBatch) -> tuple[int, int]:
    """Fewer examples than the first number are not worth a pass, more than the second do not
    fit."""
    assert model.embedding is not None, "products are of the whole model"
    tokens = batch[0]  # (B, S)
    most = max(1, TOKENS_PER_PASS.get(tokens.device.type, 512) // tokens.shape[1])
    elements = tokens.shape[1] * model.width  # an example's residual stream
    return min(most, math.ceil(WORTH_A_PASS / elements)), most


@dataclass(frozen=True)
class Basis:
    """Orthogonal bases of a matrix (m, n), or of each matrix of a stack (*, m, n); None for the
    identity."""

    left: Tensor | None  # U (*, m, m)
    right: Tensor | None  # V (*, n, n)

    @property
    def transposed(self) -> Basis:
        return Basis(*(None if side is None else side.mT for side in (self.left, self.right)))


Bases = dict[str, Basis]  # by parameter name; a parameter that is absent is not rotated


def to_weights(bases: Bases, vectors: Vectors) -> Vectors:
    """Rotated vectors in the weights' coordinates: Q z, for each rotated matrix U A V^T."""
    turned = dict(vectors)
    for name, basis in bases.items():
        product = turned[name] if basis.left is None else basis.left @ turned[name]
        turned[name] = product if basis.right is None else product @ basis.right.mT
    return turned


def from_weights(bases: Bases, vectors: Vectors) -> Vectors:
    """Vectors in rotated coordinates: Q^T z, for each rotated matrix U^T A V."""
    return to_weights({name: basis.transposed for name, basis in bases.items()}, vectors)


def estimate_bases(
    matrices: Collection[str],
    parameters: Vectors,
    gradients: Iterable[Vectors],
    source: Source = "2nd",
    geometry: Geometry = "bilateral",
) -> Bases:
    """A strategy's exact bases of the parameters named in `matrices` at fixed weights, as theorem
    3.1 has them, from gradients G of different batches.

    They are eigenvectors of the means of G G^T and G^T G (`2nd`), or of the mean of G times its
    transpose (`1st`)."""
    sums: dict[str, list[Tensor]] = {}
    for gradient in gradients:
        for name in parameters:
            if name not in matrices:
                continue
            G = gradient[name]  # (*, m, n)
            terms = [G, G.mT] if source == "1st" else [G @ G.mT, G.mT @ G]
            known = sums.setdefault(name, [torch.zeros_like(term) for term in terms])
            for total, term in zip(known, terms, strict=True):
                total += term
    # Eigenvectors do not see that these are sums in place of means.
    exact = exact_factor_eigenbasis if source == "1st" else exact_eigenbasis
    bases = {}
    for name, totals in sums.items():
        m, n = parameters[name].shape[-2:]
        sides: list[Tensor | None] = []
        for total, size, is_smaller in zip(totals, (m, n), (m < n, m >= n), strict=True):
            # (k, size, size); of `1st` E[G] or its transpose
            stack = total.reshape(-1, *total.shape[-2:])
            # Unilateral: the smaller side, as in the optimizer
            is_rotated = geometry == "bilateral" or is_smaller
            sides.append(
                exact(stack).basis.to(total).view(*total.shape[:-2], size, size)
                if is_rotated
                else None
            )
        bases[name] = Basis(*sides)
    return bases
