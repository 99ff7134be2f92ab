"""torch's Muon, which on a CPU orthogonalizes the matrices of one shape together.

torch.optim.Muon takes one matrix after another, with some twenty small operations each. For the
small models that a CPU trains, these take longer than both passes of the model. A batch of matrices
is the same arithmetic in fewer operations.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, cast

import torch
from torch import Tensor

from brx.methods.bf16_products import (
    cpu_multiplies_bf16,
    fast_bf16_products,
    step_without_hooks,
)
from brx.optim.options import Group

LARGEST_BATCH = 2**19
"""The most entries that the matrices of a batch have together: more outgrow the caches. A larger
matrix is a batch by itself."""

SMALLEST_SIDE = 17
"""Matrices with a shorter side are not batched. Their products are too small for oneDNN, and may be
rounded differently in a batch: a trajectory would depend on the stages that a device has."""


@dataclass
class _Member:
    """A matrix to be updated."""

    parameter: Tensor  # (m, n)
    direction: Tensor  # (m, n): its momentum, or Nesterov's
    group: Group

    @property
    def kind(self) -> tuple[Any, ...]:
        """What the matrices of a batch have in common."""
        group = self.group
        coefficients = tuple(group["ns_coefficients"])  # a list, from a file
        return self.parameter.shape, coefficients, group["ns_steps"], group["eps"]


class BatchedMuon(torch.optim.Muon):
    """`torch.optim.Muon`, with its arguments, its state and its numbers. On a CPU that does not
    multiply bf16 matrices, sums of products have another order (`brx.methods.bf16_products`).

    It makes batches where `makes_batches` says so, and takes torch's step elsewhere.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make an update, as `torch.optim.Muon.step` does."""
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        with fast_bf16_products(parameters):
            if all(makes_batches(parameter.device) for parameter in parameters):
                return self._step_in_batches(closure)
            return step_without_hooks(torch.optim.Muon)(self, closure)

    def _step_in_batches(self, closure: Callable[[], Any] | None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        by_kind: dict[tuple[Any, ...], list[_Member]] = {}
        for group in self.param_groups:
            for member in self._members(group):
                by_kind.setdefault(member.kind, []).append(member)
        for members in by_kind.values():
            for batch in _batches(members):
                _update(batch)
        return loss

    def _members(self, group: Group) -> Iterator[_Member]:
        """The matrices of a group that have gradients, after their momenta have taken these."""
        parameters: list[Tensor] = []
        gradients: list[Tensor] = []
        momenta: list[Tensor] = []
        self._init_group(group, parameters, gradients, momenta)
        if not parameters:
            return
        torch._foreach_lerp_(momenta, gradients, 1 - group["momentum"])
        directions: Sequence[Tensor] = momenta
        if group["nesterov"]:
            directions = torch._foreach_lerp(gradients, momenta, group["momentum"])
        for parameter, direction in zip(parameters, directions, strict=True):
            yield _Member(parameter, direction, group)


def makes_batches(device: torch.device) -> bool:
    """Whether matrices on a device may be batched: where oneDNN multiplies them in bf16 with
    AVX-512, or MKL in fp32 with AVX2 (see `bf16_products`), with one thread.

    Then a matrix has the same products alone and in any batch, bit for bit (a test). Several
    threads divide the sums of a large product among them, differently in a batch."""
    if device.type != "cpu" or torch.get_num_threads() > 1:
        return False
    capability = torch.backends.cpu.get_cpu_capability()
    if cpu_multiplies_bf16():
        return capability == "AVX512"
    return capability == "AVX2" and torch.backends.mkl.is_available()  # type: ignore[no-untyped-call]


def _batches(members: Sequence[_Member]) -> Iterator[list[_Member]]:
    """Matrices of one kind in batches of at most `LARGEST_BATCH` entries."""
    matrix = members[0].parameter
    is_small = min(matrix.shape) < SMALLEST_SIDE
    size = 1 if is_small else max(1, LARGEST_BATCH // matrix.numel())
    remaining = iter(members)
    while batch := list(islice(remaining, size)):
        yield batch


def _update(batch: Sequence[_Member]) -> None:
    """W <- (1 - lr wd) W - lr' O, with O the orthogonalized direction."""
    _, coefficients, num_steps, eps = batch[0].kind
    # In bf16 before they are stacked: the stack takes half the memory.
    directions = [member.direction.bfloat16() for member in batch]
    if len(directions) == 1:
        updates = [newton_schulz(directions[0], coefficients, num_steps, eps)]
    else:
        stacked = torch.stack(directions)
        updates = list(newton_schulz(stacked, coefficients, num_steps, eps).unbind())
    for member, update in zip(batch, updates, strict=True):
        lr = float(member.group["lr"])
        adjusted = lr * _lr_ratio(member.parameter.shape, member.group["adjust_lr_fn"])
        member.parameter.mul_(1 - lr * member.group["weight_decay"])
        member.parameter.add_(update, alpha=-adjusted)


def newton_schulz(
    matrices: Tensor,  # (m, n), or a batch of them (b, m, n)
    coefficients: tuple[float, float, float],
    num_steps: int,
    eps: float,
) -> Tensor:
    """Orthogonalize matrices U S V^T approximately: U f(S) V^T with singular values f(S) near 1, in
    the same shape and in bf16.

    Each step is X <- a X + (b A + c A^2) X with A = X X^T, from X = G / max(|G|, eps). X is
    transposed if that makes A smaller.
    """
    a, b, c = coefficients
    is_tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.bfloat16()
    if is_tall:
        x = x.mT
    x = x / _norms(x).clamp(min=eps)
    add_product = torch.addmm if x.ndim == 2 else torch.baddbmm
    for _ in range(num_steps):
        gram = x @ x.mT
        polynomial = add_product(gram, gram, gram, beta=b, alpha=c)
        x = add_product(x, polynomial, x, beta=a)
    return x.mT if is_tall else x


def _norms(
    x: Tensor,  # (m, n) or (b, m, n)
) -> Tensor:
    """The Frobenius norms, () or (b, 1, 1). They are taken one by one, because in a batch their
    sums would be rounded differently."""
    if x.ndim == 2:
        return cast(Tensor, x.norm())
    return torch.stack([matrix.norm() for matrix in x])[:, None, None]


def _lr_ratio(shape: torch.Size, adjust_lr_fn: str | None) -> float:
    """The factor on the learning rate for a matrix of this shape (torch.optim.Muon's rules)."""
    m, n = shape
    if adjust_lr_fn == "match_rms_adamw":
        return 0.2 * math.sqrt(max(m, n))
    return math.sqrt(max(1.0, m / n))  # "original", the default
